"""The four clocks of a request.

Values only: whoever waits (a thread, a task) applies them and raises the exception named after the clock.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, fields


@dataclass(frozen=True, slots=True)
class Timeout:
    """Seconds, each above 0; None switches a clock off.

    `connect`: until a new connection answers. `first_token`: from sending to the first response (queue and prefill).
    `idle`: each further wait for a response; it runs only while the caller waits. These begin anew with each attempt,
    where a request is asked again or a cut answer is taken up. `total`: the whole answer, connecting, pauses and all
    attempts included; what is left of it is also told to the server, as the longest wait for a seat there.
    """

    connect: float | None = 5.0
    first_token: float | None = 120.0
    idle: float | None = 30.0
    total: float | None = None

    def __post_init__(self) -> None:
        """Refuse a clock that could never be met: ValueError naming it."""
        for clock in fields(self):
            value = getattr(self, clock.name)
            if value is not None and not (value > 0 and math.isfinite(value)):
                raise ValueError(f"timeout {clock.name} must be above 0 seconds (None: no limit), got {value}")

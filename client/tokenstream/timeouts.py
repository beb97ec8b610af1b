"""The four clocks of a request.

Values only: whoever waits (a thread, a task) applies them and raises the exception named after the clock.
"""

from __future__ import annotations

from dataclasses import dataclass, fields

_MOST = 1e9  # seconds


@dataclass(frozen=True, slots=True)
class Timeout:
    """Seconds, each above 0 and at most 1e9; None switches a clock off.

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
        """Refuse a clock that could never be met: ValueError naming it, TypeError for what is no number."""
        for clock in fields(self):
            value = getattr(self, clock.name)
            if value is None:
                continue
            check_number(f"timeout {clock.name}", value)
            if not 0 < value <= _MOST:
                limits = f"above 0 seconds and at most {_MOST:g} (None: no limit)"
                raise ValueError(f"timeout {clock.name} must be {limits}, got {value}")


def read_timeout(given: float | Timeout) -> Timeout:
    """The clocks that are meant: a number is the total. TypeError or ValueError for what cannot be meant."""
    if isinstance(given, Timeout):
        return given
    check_number("timeout", given, "or a Timeout")
    return Timeout(total=given)


def check_number(name: str, value: object, alternative: str = "") -> None:
    """TypeError naming what should be a number and is none; a truth value is none."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        expected = f"a number {alternative}".rstrip()
        raise TypeError(f"{name} must be {expected}, got {type(value).__name__}")


def in_words(seconds: float) -> str:
    """Seconds as a text holds them: without the noise of their last digits."""
    return f"{seconds:.3g} s" if seconds < 1000 else f"{seconds:.0f} s"

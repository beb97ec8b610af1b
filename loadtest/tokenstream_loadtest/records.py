"""What happened to one request, as its caller saw it, and the times that follow from that.

Times are seconds of `time.perf_counter` in the process that asked. TTFT, latency and goodput count from the moment when
the request should have been sent: an open loop that waits for a slow server would else hide the wait ("coordinated
omission"). It does not know how answers are transported, nor how records are summed up.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, get_args

Outcome = Literal[
    "ok", "abandoned", "overloaded", "invalid", "timeout", "connection", "incomplete", "unauthorized", "internal"
]
OUTCOMES: tuple[Outcome, ...] = get_args(Outcome)
PLANNED: tuple[Outcome, ...] = ("ok", "abandoned")  # all others are errors


@dataclass(frozen=True, slots=True)
class Record:
    """One request that has ended.

    `scheduled_at`: when it should have been sent; `sent_at`: when it was. `times` and `tokens`: when each response with
    tokens was read, and how many it held. The server's own words are None where it does not say: `input_tokens`,
    `cached_tokens` (of them, found in its prefix cache), `queue` (seconds), `preemptions`. `output_tokens`: by the
    server's count if it gives one, else the sum of `tokens`. `error`: one line, "" without one.
    """

    id: str
    kind: str
    scheduled_at: float
    sent_at: float
    ended_at: float
    outcome: Outcome
    times: Sequence[float] = ()
    tokens: Sequence[int] = ()
    output_tokens: int = 0
    input_tokens: int | None = None
    cached_tokens: int | None = None
    queue: float | None = None
    preemptions: int | None = None
    priority: int | None = None
    resumes: int = 0
    error: str = ""

    @property
    def lag(self) -> float:
        """How late the generator was: seconds from schedule to sending."""
        return self.sent_at - self.scheduled_at

    @property
    def ttft(self) -> float | None:
        """Time to first token: from the schedule to the first response with tokens."""
        return self.times[0] - self.scheduled_at if self.times else None

    @property
    def ttft_sent(self) -> float | None:
        """The same from sending: what a server can be held to."""
        return self.times[0] - self.sent_at if self.times else None

    @property
    def gaps(self) -> list[float]:
        """Inter-token latencies: between responses with tokens, so 0 for tokens that came in one."""
        return [after - before for before, after in zip(self.times, self.times[1:], strict=False)]

    @property
    def tpot(self) -> float | None:
        """Time per output token behind the first response; None for answers of one response."""
        later = sum(self.tokens[1:])
        return (self.times[-1] - self.times[0]) / later if later else None

    @property
    def latency(self) -> float:
        """End to end: from the schedule to the end."""
        return self.ended_at - self.scheduled_at

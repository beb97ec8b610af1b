"""Sends the requests of one stage and keeps what became of each: closed and open loops, on exact clocks.

In a closed loop each of some callers asks again once it has been answered: its load falls when the server slows down.
In an open loop every request is sent when its time has come, however many are still under way, and its times count from
then. It does not know protocols, nor what is made of the records.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass

from .arrivals import schedule
from .pulse import Pulse
from .records import PLANNED, Outcome, Record
from .requests import Request
from .results import Stage, Stall
from .slo import Objective, good
from .tally import Tally
from .targets import Failed, Seen, Target

CEILING = 300.0  # seconds that one request may take
MOST_LIVE = 4096  # requests of an open loop under way
_HEARD_EVERY = 0.25  # seconds
_BREATH = 0.1  # seconds from sending after which a caller of a closed loop asks again if it was turned away at once


@dataclass(frozen=True, slots=True)
class Counts:
    """How a stage stands `seconds` after it began."""

    seconds: float
    sent: int
    ended: int
    errors: int
    live: int
    tokens: int


@dataclass(frozen=True, slots=True)
class Measured:
    """What a stage came to. `seconds`: from `began` (of `time.perf_counter`) to the end of its last request.

    `capped`: a request had to wait because the most were live. `interrupted`: it was cancelled; what was under way then
    is not counted.
    """

    began: float
    started_at: float  # of the epoch
    seconds: float
    tally: Tally
    stalls: tuple[Stall, ...] = ()
    capped: bool = False
    interrupted: bool = False


async def run_stage(
    target: Target,
    requests: Iterator[Request],
    stage: Stage,
    seed: int,
    objectives: Sequence[Objective],
    hear: Callable[[Counts], None],
    *,
    name: str = "load",
    ceiling: float = CEILING,
    most_live: int = MOST_LIVE,
) -> Measured:
    """Put the load of `stage` on the target, of `requests` in turn; `seed` is that of the arrivals.

    `name` begins all request ids. No request takes longer than `ceiling` seconds. Cancelling the task that waits here
    ends all streams, and what was measured is returned. `hear` is told a few times a second how it stands.
    """
    run = _Stage(target, requests, stage, objectives, name, ceiling)
    teller = asyncio.create_task(_tell(run, hear))
    interrupted = False
    try:
        async with asyncio.TaskGroup() as group:
            if stage.arrivals == "closed":
                run.call(group)
            else:
                await run.send(group, schedule(stage, seed), most_live)
    except asyncio.CancelledError:
        interrupted = True
        if (task := asyncio.current_task()) is not None:
            task.uncancel()
    finally:
        teller.cancel()
        with suppress(asyncio.CancelledError):
            await teller
    hear(run.counts())
    return run.measured(interrupted=interrupted)


async def ask(
    target: Target,
    request: Request,
    request_id: str,
    *,
    scheduled_at: float,
    ceiling: float = CEILING,
    pulse: Pulse | None = None,
) -> Record:
    """Send one request now, and what became of it. `scheduled_at` is in the clock of `time.perf_counter`."""
    seen = Seen(request, pulse)
    outcome: Outcome = "ok"
    error = ""
    if pulse is not None:
        pulse.wait()
    sent_at = time.perf_counter()
    try:
        async with asyncio.timeout(ceiling):
            await target.ask(request, request_id, seen)
        outcome = "abandoned" if seen.unwanted else "ok"
    except Failed as failed:
        outcome, error = failed.outcome, failed.line
    except TimeoutError:
        outcome, error = "timeout", f"it had not ended after {ceiling:g} s"
    finally:
        if pulse is not None:
            pulse.rest()
    return Record(
        id=request_id,
        kind=request.kind,
        scheduled_at=scheduled_at,
        sent_at=sent_at,
        ended_at=time.perf_counter(),
        outcome=outcome,
        times=seen.times,
        tokens=seen.tokens,
        output_tokens=sum(seen.tokens) if seen.output_tokens is None else seen.output_tokens,
        input_tokens=seen.input_tokens,
        cached_tokens=seen.cached_tokens,
        queue=seen.queue,
        preemptions=seen.preemptions,
        priority=request.priority,
        resumes=seen.resumes,
        error=error,
    )


class _Stage:
    """One stage as it runs."""

    def __init__(
        self,
        target: Target,
        requests: Iterator[Request],
        stage: Stage,
        objectives: Sequence[Objective],
        name: str,
        ceiling: float,
    ) -> None:
        self._target = target
        self._requests = requests
        self._stage = stage
        self._objectives = objectives
        self._name = name
        self._ceiling = ceiling
        self._started_at = time.time()
        self._began = self._ended = time.perf_counter()
        self._pulse = Pulse(self._began)
        self._tally = Tally()
        self._sent = 0
        self._live = 0
        self._capped = False

    def call(self, group: asyncio.TaskGroup) -> None:
        """Closed loop: start all callers."""
        for _ in range(self._stage.concurrency or 1):
            group.create_task(self._caller())

    async def send(self, group: asyncio.TaskGroup, offsets: Iterator[float], most_live: int) -> None:
        """Open loop: start each request at its time; return when the last one was sent."""
        seats = asyncio.Semaphore(most_live)
        for offset in offsets:
            request = next(self._requests)  # before its time has come: drawing one may take a while
            due = self._began + offset
            if (left := due - time.perf_counter()) > 0:
                await asyncio.sleep(left)
            self._capped = self._capped or seats.locked()
            await seats.acquire()
            group.create_task(self._one(request, due)).add_done_callback(lambda _: seats.release())

    def counts(self) -> Counts:
        """How it stands."""
        seconds = time.perf_counter() - self._began
        told = self._tally.all
        return Counts(seconds, self._sent, told.requests, told.errors, self._live, self._pulse.tokens)

    def measured(self, *, interrupted: bool) -> Measured:
        """What it came to."""
        end = time.perf_counter() if interrupted else self._ended
        stalls = self._pulse.stalls(self._tally.all.histograms["itl"].percentile(50))
        # A stage of no time at all has asked nothing; rates per second want a time.
        seconds = max(end - self._began, 1e-6)
        return Measured(self._began, self._started_at, seconds, self._tally, stalls, self._capped, interrupted)

    async def _caller(self) -> None:
        due = time.perf_counter()  # when it is ready: that callers begin one after another is no lag
        while not self._over():
            record = await self._one(next(self._requests), due)
            due = record.ended_at
            if record.outcome not in PLANNED and record.ended_at - record.sent_at < _BREATH:
                await asyncio.sleep(_BREATH)
                due = time.perf_counter()

    def _over(self) -> bool:
        requests, seconds = self._stage.requests, self._stage.seconds
        if requests is not None and self._sent >= requests:
            return True
        return seconds is not None and time.perf_counter() - self._began >= seconds

    async def _one(self, request: Request, due: float) -> Record:
        self._sent += 1
        self._live += 1
        name = f"{self._name}-{self._sent}"
        try:
            record = await ask(self._target, request, name, scheduled_at=due, ceiling=self._ceiling, pulse=self._pulse)
        finally:
            self._live -= 1
        self._ended = max(self._ended, record.ended_at)
        self._tally.add(record, began=self._began, good=good(record, self._objectives))
        return record


async def _tell(run: _Stage, hear: Callable[[Counts], None]) -> None:
    while True:
        hear(run.counts())
        await asyncio.sleep(_HEARD_EVERY)

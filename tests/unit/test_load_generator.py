"""Closed and open loops against a server that is a function: what is sent when, and what is seen when it stalls."""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import Awaitable, Callable, Iterator
from typing import Any

import pytest

from tokenstream_loadtest.generator import Counts, Measured, ask, run_stage
from tokenstream_loadtest.pulse import Pulse
from tokenstream_loadtest.records import Record
from tokenstream_loadtest.requests import Request
from tokenstream_loadtest.results import Stage
from tokenstream_loadtest.slo import Objective
from tokenstream_loadtest.targets import Failed, Seen

FREEZE = 2.0  # seconds
Answer = Callable[[Request, str, Seen], Awaitable[None]]


class Scripted:
    """A target whose answers are a function's; keeps the ids that it was asked with and how many it answers at once."""

    def __init__(self, answer: Answer) -> None:
        self._answer = answer
        self.ids: list[str] = []
        self.live = self.most_live = 0

    async def ask(self, request: Request, request_id: str, seen: Seen) -> None:
        self.ids.append(request_id)
        self.live += 1
        self.most_live = max(self.most_live, self.live)
        try:
            await self._answer(request, request_id, seen)
        finally:
            self.live -= 1


class Freezing(Scripted):
    """Answers with two tokens a millisecond apart, and with none at all for a while once it has been asked so often."""

    def __init__(self, at: int) -> None:
        super().__init__(self._tokens)
        self._at = at
        self._until = 0.0

    async def _tokens(self, request: Request, request_id: str, seen: Seen) -> None:
        if len(self.ids) == self._at:
            self._until = time.perf_counter() + FREEZE
        for _ in range(2):
            await asyncio.sleep(max(0.001, self._until - time.perf_counter()))
            seen.note(1)


async def two_tokens(request: Request, request_id: str, seen: Seen) -> None:
    seen.note(1)
    await asyncio.sleep(0)
    seen.note(1)


async def never(request: Request, request_id: str, seen: Seen) -> None:
    await asyncio.Event().wait()


def requests() -> Iterator[Request]:
    return (Request("chat" if at % 2 else "code", 2, prompt=str(at)) for at in itertools.count())


def run(target: Any, stage: Stage, *objectives: str, hear: Any = lambda counts: None, **options: Any) -> Measured:
    limits = [Objective.parse(text) for text in objectives]
    return asyncio.run(run_stage(target, requests(), stage, 1, limits, hear, **options))


def test_a_closed_loop_sends_exactly_its_requests_from_exactly_its_callers():
    target = Scripted(two_tokens)
    measured = run(target, Stage(concurrency=3, requests=20))
    assert measured.tally.all.outcomes == {"ok": 20}
    assert measured.tally.all.output_tokens == measured.tally.all.responses == 40
    assert target.most_live == 3
    assert len(set(target.ids)) == 20
    assert {name: group.requests for name, group in measured.tally.groups.items()} == {
        "all": 20,
        "kind=code": 10,
        "kind=chat": 10,
    }


def test_a_closed_loop_finishes_what_is_under_way_when_its_time_is_over():
    async def slow(request: Request, request_id: str, seen: Seen) -> None:
        await asyncio.sleep(0.3)
        seen.note(1)

    measured = run(Scripted(slow), Stage(concurrency=2, seconds=0.1))
    assert measured.tally.all.outcomes == {"ok": 2}
    assert measured.seconds >= 0.3


def test_a_caller_asks_again_at_the_moment_when_it_was_answered():
    begins: list[float] = []

    async def noting(request: Request, request_id: str, seen: Seen) -> None:
        begins.append(time.perf_counter())
        await two_tokens(request, request_id, seen)

    measured = run(Scripted(noting), Stage(concurrency=1, requests=5))
    end = measured.began + measured.seconds
    times = measured.tally.all.histograms
    first_due = begins[0] - times["lag"].highest  # at the earliest
    assert end - begins[0] <= times["e2e"].total <= end - first_due + times["lag"].highest + 1e-4


def test_that_callers_begin_one_after_another_is_no_lag():
    async def busy(request: Request, request_id: str, seen: Seen) -> None:
        time.sleep(0.05)  # as a client that is slow to send holds up all others
        seen.note(1)

    measured = run(Scripted(busy), Stage(concurrency=8, requests=8))
    assert measured.seconds >= 0.4
    assert measured.tally.all.histograms["lag"].highest < 0.2


def test_callers_that_are_turned_away_at_once_take_a_breath():
    async def refuse(request: Request, request_id: str, seen: Seen) -> None:
        raise Failed("overloaded", "full")

    measured = run(Scripted(refuse), Stage(concurrency=2, seconds=0.5))
    assert 2 <= measured.tally.all.outcomes["overloaded"] <= 12
    assert measured.tally.all.examples == {"overloaded": ["full"]}


def test_an_open_loop_sends_on_while_nothing_is_answered():
    answered = asyncio.Event()

    async def late(request: Request, request_id: str, seen: Seen) -> None:
        if len(target.ids) == 30:
            answered.set()
        await answered.wait()
        seen.note(1)

    target = Scripted(late)
    measured = run(target, Stage("constant", rate=100.0, requests=30))
    assert target.most_live == 30
    assert measured.tally.all.outcomes == {"ok": 30}
    assert not measured.capped
    assert measured.seconds >= 0.3


def test_a_capped_open_loop_says_so_and_counts_the_wait_for_a_place():
    async def slow(request: Request, request_id: str, seen: Seen) -> None:
        await asyncio.sleep(0.1)
        seen.note(1)

    target = Scripted(slow)
    measured = run(target, Stage("bursts", rate=1000.0, burst=4, requests=4), most_live=2)
    assert measured.capped
    assert target.most_live == 2
    histograms = measured.tally.all.histograms
    assert histograms["lag"].highest >= 0.09
    assert histograms["ttft"].highest >= 0.19 > histograms["ttft_sent"].percentile(25)


def test_a_stall_shows_in_an_open_loop_and_hides_in_a_closed_one():
    opened = run(Freezing(at=20), Stage("constant", rate=40.0, requests=80))
    closed = run(Freezing(at=150), Stage(concurrency=1, requests=300))
    seen, hidden = (one.tally.all.histograms["ttft"].percentile(99) for one in (opened, closed))
    assert seen is not None
    assert hidden is not None
    assert seen >= 1.5
    assert hidden < seen / 2
    for measured in (opened, closed):
        (stall,) = measured.stalls
        assert FREEZE - 0.5 <= stall.seconds <= FREEZE + 1
        assert 0 < stall.at < measured.seconds - stall.seconds


def test_a_reader_that_pauses_itself_is_no_stall():
    async def slow_reader(request: Request, request_id: str, seen: Seen) -> None:
        seen.note(1)
        await seen.pause()
        seen.note(1)

    async def main() -> None:
        pulse = Pulse(time.perf_counter())
        request = Request("slow", 2, prompt="x", pause=1.3)
        record = await ask(Scripted(slow_reader), request, "r", scheduled_at=0.0, pulse=pulse)  # type: ignore[arg-type]
        assert record.gaps[0] >= 1.3
        assert pulse.stalls(0.01) == ()

    asyncio.run(main())


def test_silence_while_nobody_waits_is_no_stall():
    pulse = Pulse(time.perf_counter() - 5)
    pulse.wait()
    pulse.hear(1, time.perf_counter())
    pulse.rest()
    assert pulse.stalls(0.01) == ()


def test_silence_up_to_an_end_without_tokens_is_a_stall_unless_gaps_are_usually_so_long():
    pulse = Pulse(time.perf_counter() - 5)
    pulse.wait()
    pulse.hear(1, time.perf_counter() + 3)
    assert [round(stall.seconds) for stall in pulse.stalls(0.1)] == [3]
    assert pulse.stalls(0.2) == ()
    pulse = Pulse(0.0)
    pulse.wait()
    pulse._silent_since -= 4
    pulse.rest()
    assert [round(stall.seconds) for stall in pulse.stalls(None)] == [4]


def test_no_request_hangs_for_ever():
    measured = run(Scripted(never), Stage(concurrency=2, requests=2), ceiling=0.2)
    assert measured.tally.all.outcomes == {"timeout": 2}
    assert measured.tally.all.examples == {"timeout": ["it had not ended after 0.2 s"]}


@pytest.mark.parametrize("stage", [Stage(concurrency=3, requests=99), Stage("constant", rate=200.0, requests=5000)])
def test_an_interrupted_stage_ends_its_streams_and_keeps_what_it_has(stage):
    async def main() -> tuple[Measured, int]:
        hanging = asyncio.Event()

        async def answer(request: Request, request_id: str, seen: Seen) -> None:
            if len(target.ids) > 10:
                hanging.set()
                await never(request, request_id, seen)
            await two_tokens(request, request_id, seen)

        target = Scripted(answer)
        task = asyncio.create_task(run_stage(target, requests(), stage, 1, (), lambda counts: None))  # type: ignore[arg-type]
        await hanging.wait()
        task.cancel()
        measured = await task
        assert not task.cancelling()
        return measured, target.live

    measured, live = asyncio.run(main())
    assert measured.interrupted
    assert live == 0
    assert measured.tally.all.outcomes == {"ok": 10}


def test_progress_ends_with_what_was_measured():
    told: list[Counts] = []
    measured = run(Scripted(two_tokens), Stage(concurrency=2, requests=8), hear=told.append)
    last = told[-1]
    assert (last.sent, last.ended, last.errors, last.live, last.tokens) == (8, 8, 0, 0, 16)
    assert measured.tally.all.requests == 8


def test_goodput_counts_the_requests_that_met_every_limit():
    async def every_other_late(request: Request, request_id: str, seen: Seen) -> None:
        if request.kind == "chat":
            await asyncio.sleep(0.6)
        seen.note(1)

    measured = run(Scripted(every_other_late), Stage("constant", rate=100.0, requests=10), "ttft_p95=500ms")
    assert measured.tally.all.good == 5
    assert measured.tally.all.outcomes == {"ok": 10}


def test_what_the_server_says_is_in_the_record():
    async def answer(request: Request, request_id: str, seen: Seen) -> None:
        seen.note(2)
        seen.input_tokens, seen.cached_tokens, seen.queue, seen.preemptions, seen.resumes = 7, 3, 0.5, 1, 2

    async def main() -> Record:
        request = Request("k", 2, prompt="x", priority=2)
        return await ask(Scripted(answer), request, "name", scheduled_at=time.perf_counter())  # type: ignore[arg-type]

    record = asyncio.run(main())
    assert (record.id, record.kind, record.outcome, record.priority) == ("name", "k", "ok", 2)
    assert (record.output_tokens, record.input_tokens, record.cached_tokens) == (2, 7, 3)
    assert (record.queue, record.preemptions, record.resumes) == (0.5, 1, 2)

"""Preemption, ends and progress: whatever comes, every request ends and leaves nothing behind."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from llm_engine.blocks import BlockPool
from llm_engine.request import Request, Status
from llm_engine.scheduler import OVERTAKEN_LIMIT, PREEMPTIONS_LIMIT, Chunk, Scheduler
from unit.scheduler_machine import Machine, machine, names, request

# Preemption


def crowded(*, overlap: bool = False) -> tuple[Machine, list[Request]]:
    """Three running requests that hold two blocks each of six, and want a third at the same time."""
    m = machine(blocks=6, block_size=4, overlap=overlap, prefix_cache=False)
    requests = [request(name, 3, answer=9) for name in "abc"]
    m.add(*requests)
    for _ in range(20):
        if m.scheduler.pool.free == 0 and not any(one.computed % 4 for one in requests):
            return m, requests
        m.step()
    raise AssertionError("the requests never fill the pool")


def test_the_newest_is_preempted_when_blocks_run_out() -> None:
    m, (a, b, c) = crowded()
    plan = m.step()
    assert plan.preempted == (c,)
    assert names([chunk.request for chunk in plan.chunks]) == ["a", "b"]
    assert (c.status, c.computed, c.blocks, c.seat, c.preemptions) == (Status.WAITING, 0, [], -1, 1)
    assert (a.preemptions, b.preemptions) == (0, 0)


def test_the_lowest_priority_is_preempted_before_the_newest() -> None:
    m = machine(blocks=6, prefix_cache=False)
    m.add(low := request("low", 3, answer=9, priority=3))
    m.step()
    m.add(request("middle", 3, answer=9), request("high", 3, answer=9, priority=1))
    preempted: list[Request] = []
    m.run(each=lambda plan: preempted.extend(plan.preempted))
    assert preempted
    assert set(preempted) == {low}


def test_a_request_twice_preempted_is_spared_while_another_can_go() -> None:
    m = machine(blocks=6, prefix_cache=False)
    first, spared = request("first", 3, answer=17, priority=1), request("spared", 3, answer=17, priority=3)
    spared.preemptions = PREEMPTIONS_LIMIT
    m.add(first, spared)
    gone: list[Request] = []
    m.run(each=lambda plan: gone.extend(plan.preempted))
    assert gone
    assert spared not in gone
    assert spared.preemptions == PREEMPTIONS_LIMIT


def test_a_preempted_request_goes_to_the_head_of_its_priority() -> None:
    m, (_, _, c) = crowded()
    m.add(request("later"), request("high", priority=1))
    m.step()
    assert names(m.scheduler.waiting) == ["high", "c", "later"]
    assert c.preemptions == 1


def test_nobody_is_admitted_in_a_step_that_preempts() -> None:
    m, _ = crowded()
    m.add(request("tiny", 1, answer=1, priority=1))
    plan = m.step()
    assert plan.preempted
    assert plan.admitted == ()


def test_a_preempted_request_is_recomputed_answer_and_all() -> None:
    m, (_, _, c) = crowded()
    m.step()
    known = len(c.tokens)
    assert known > c.prompt_len
    chunks: list[Chunk] = []
    m.run(each=lambda plan: chunks.extend(chunk for chunk in plan.chunks if chunk.request is c))
    assert (chunks[0].start, chunks[0].count) == (0, known)
    assert len(c.tokens) == c.max_total


def test_a_preempted_request_finds_its_own_blocks_and_reports_its_first_admission() -> None:
    times = iter((1.0, 2.0, 3.0))
    m = Machine(Scheduler(BlockPool(5, 4), max_sequences=2, max_step_tokens=8, clock=lambda: next(times)))
    m.add(a := request("a", 4, answer=10), b := request("b", 4, answer=10))
    assert any(m.step().preempted for _ in range(20))
    m.scheduler.finish(a)
    assert m.step().chunks == (Chunk(b, 8, 1, samples=True),)
    assert (b.preemptions, b.cached_tokens, b.admitted_at) == (1, 0, 2.0)


def test_a_request_preempted_with_its_token_in_flight_keeps_the_token() -> None:
    m, (_, _, c) = crowded(overlap=True)
    known = len(c.tokens)
    assert c.in_flight == 1
    m.step()
    assert (c.status, c.in_flight, len(c.tokens)) == (Status.WAITING, 0, known + 1)
    m.run()
    m.assert_nothing_is_left()


def test_a_request_is_not_admitted_while_its_token_is_in_flight() -> None:
    m, (a, b, c) = crowded(overlap=True)
    m.scheduler.plan()
    assert c.status is Status.WAITING
    m.scheduler.finish(a)
    m.scheduler.finish(b)
    assert m.scheduler.plan().admitted == ()
    c.tokens.append(1)
    c.in_flight -= 1
    assert m.scheduler.plan().admitted == (c,)


def test_a_pool_that_holds_one_request_serves_many() -> None:
    for overlap in (False, True):
        m = machine(blocks=3, block_size=4, max_sequences=4, overlap=overlap)
        m.add(*(request(str(number), 1 + number % 7, answer=5) for number in range(12)))
        m.run()
        m.assert_nothing_is_left()


# Ends


def test_finishing_frees_seat_and_blocks_at_once_in_any_state_and_twice() -> None:
    m = machine(max_sequences=1)
    a, b = request("a"), request("b")
    m.add(a, b)
    m.step()
    for one in (b, a, a, b):
        m.scheduler.finish(one)
    m.assert_nothing_is_left()
    assert not m.scheduler.has_work


@pytest.mark.parametrize("overlap", [False, True])
def test_a_cancelled_request_frees_its_blocks_whenever_it_is_cancelled(overlap: bool) -> None:
    for steps in range(8):
        m = machine(max_step_tokens=4, overlap=overlap)
        m.add(a := request("a", 10, answer=6), request("b", 3))
        for _ in range(steps):
            m.step()
        m.scheduler.finish(a)
        assert a.blocks == []
        m.check()
        m.run()
        m.assert_nothing_is_left()


def test_a_request_that_ends_with_a_token_in_flight_leaves_nothing() -> None:
    m = machine(overlap=True)
    m.add(a := request("a", 4, answer=20))
    m.ends_at["a"] = 6
    m.run()
    m.assert_nothing_is_left()
    assert len(a.tokens) == 6
    assert a.in_flight == 1  # of a step nobody will look at
    m.step()
    assert a.in_flight == 0


# Progress


def test_every_request_ends_under_endless_higher_priority_load() -> None:
    m = machine(blocks=6, max_sequences=2)
    m.add(low := request("low", 6, answer=10, priority=3))
    steps = 0
    while low.status is not Status.FINISHED:
        while len(m.scheduler.waiting) < 3:
            m.add(request(f"high {len(m.added)}", 5, answer=6, priority=1))
        m.step()
        steps += 1
        assert steps < 500
    assert low.overtaken <= OVERTAKEN_LIMIT


def test_a_request_is_overtaken_a_bounded_number_of_times() -> None:
    m = machine(max_sequences=1)
    low = request("low", priority=3)
    m.add(request("first", priority=1), low)
    admitted: list[str] = []
    while low.status is Status.WAITING:
        m.add(request(f"high {len(m.added)}", 1, answer=1, priority=1))
        admitted += names(m.step().admitted)
        assert len(admitted) < 100
    assert admitted.index("low") == 1 + OVERTAKEN_LIMIT


@dataclass(frozen=True)
class Script:
    """One request of a random run: what it asks for, when it comes, and how it ends if not by its length."""

    prompt: tuple[int, ...]
    answer: int
    priority: int
    salt: str
    arrives: int
    cancelled: int | None
    ends_after: int | None


scripts = st.builds(
    Script,
    prompt=st.lists(st.integers(0, 1), min_size=1, max_size=12).map(tuple),
    answer=st.integers(1, 10),
    priority=st.integers(1, 3),
    salt=st.sampled_from(["", "", "tenant"]),
    arrives=st.integers(0, 12),
    cancelled=st.none() | st.integers(0, 20),
    ends_after=st.none() | st.integers(1, 8),
)


def play(m: Machine, plays: Sequence[Script], *, limit: int = 3000) -> None:
    """Run all scripts to their end, checking every invariant after every step."""
    requests = {
        number: request(str(number), play.prompt, play.answer, priority=play.priority, cache_salt=play.salt)
        for number, play in enumerate(plays)
    }
    for number, play in enumerate(plays):
        if play.ends_after:
            m.ends_at[str(number)] = len(play.prompt) + play.ends_after
    last = max(play.arrives for play in plays)
    for step in range(limit):
        for number, play in enumerate(plays):
            if play.arrives == step:
                m.add(requests[number])
            if play.cancelled is not None and play.arrives + play.cancelled == step:
                m.scheduler.finish(requests[number])
        m.check()
        if step > last and not m.scheduler.has_work:
            break
        m.step()
    m.assert_nothing_is_left()


@given(
    plays=st.lists(scripts, min_size=1, max_size=10),
    block_size=st.sampled_from([1, 2, 4]),
    spare_blocks=st.integers(0, 8),
    max_sequences=st.integers(1, 5),
    extra_budget=st.integers(0, 12),
    overlap=st.booleans(),
    prefix_cache=st.booleans(),
)
@settings(max_examples=300, deadline=None)
def test_whatever_comes_everybody_ends_and_nothing_is_left(
    plays: list[Script],
    block_size: int,
    spare_blocks: int,
    max_sequences: int,
    extra_budget: int,
    overlap: bool,
    prefix_cache: bool,
) -> None:
    largest = max(len(play.prompt) + play.answer - 1 for play in plays)
    m = machine(
        -(-largest // block_size) + spare_blocks,
        block_size,
        max_sequences=max_sequences,
        max_step_tokens=max_sequences + extra_budget,
        overlap=overlap,
        prefix_cache=prefix_cache,
    )
    play(m, plays)


@given(plays=st.lists(scripts, min_size=1, max_size=6), overlap=st.booleans())
@settings(max_examples=60, deadline=None)
def test_answers_do_not_depend_on_the_schedule(plays: list[Script], overlap: bool) -> None:
    plays = [replace(one, cancelled=None) for one in plays]
    alone = machine(64, 4, max_sequences=1, prefix_cache=False)
    together = machine(6, 4, max_sequences=4, max_step_tokens=6, overlap=overlap)
    play(alone, plays)
    play(together, plays)
    assert {one.id: one.tokens for one in alone.added} == {one.id: one.tokens for one in together.added}


def test_ten_thousand_requests_leave_nothing_behind() -> None:
    pool = BlockPool(40, 4)
    scheduler = Scheduler(pool, max_sequences=16, max_step_tokens=64)
    living: list[Request] = []
    started = 0
    for step in range(20_000):
        while started < 10_000 and len(living) < 16:
            started += 1
            one = request(str(started), range(started % 5, 5 + started % 11), 1 + started % 3, priority=1 + started % 3)
            living.append(one)
            scheduler.add(one)
        for chunk in scheduler.plan().chunks:
            one = chunk.request
            scheduler.confirm(chunk)
            if chunk.samples:
                one.in_flight -= 1
                one.tokens.append(1)
                if len(one.tokens) == one.max_total or (step + one.turn) % 50 == 0:
                    scheduler.finish(one)
        living = [one for one in living if one.status is not Status.FINISHED]
        pool.check([one.blocks for one in living])
        if started == 10_000 and not living:
            break
    assert started == 10_000
    assert not scheduler.has_work
    assert pool.free == pool.blocks
    last = [request(f"last {number}", 1, answer=1) for number in range(16)]
    for one in last:
        scheduler.add(one)
    scheduler.plan()
    assert [one.seat for one in last] == list(range(16))

"""The scheduler admits and serves in order of rank, within its budget, and shares what is cached."""

from __future__ import annotations

import pytest

from llm_engine.request import Status
from llm_engine.scheduler import Chunk, Plan
from unit.scheduler_machine import counts, machine, names, request

# Chunks


def test_a_prompt_that_fits_the_budget_is_one_chunk_and_samples() -> None:
    m, a = machine(), request("a", 10)
    m.add(a)
    plan = m.scheduler.plan()
    assert plan.chunks == (Chunk(a, 0, 10, samples=True),)
    assert plan.admitted == (a,)
    assert (a.computed, a.in_flight, a.seat, a.admitted_at) == (10, 1, 0, 7.0)


def test_a_long_prompt_is_cut_and_only_its_last_chunk_samples() -> None:
    m, a = machine(max_step_tokens=8), request("a", 20)
    m.add(a)
    chunks = [m.step().chunks[0] for _ in range(4)]
    assert [(c.start, c.count, c.samples) for c in chunks] == [
        (0, 8, False),
        (8, 8, False),
        (16, 4, True),
        (20, 1, True),
    ]


def test_a_decoding_row_is_planned_before_its_token_is_seen() -> None:
    m, a = machine(), request("a", 4, answer=3)
    m.add(a)
    m.scheduler.plan()
    assert m.scheduler.plan().chunks == (Chunk(a, 4, 1, samples=True),)
    assert a.in_flight == 2


def test_a_request_whose_end_is_in_flight_is_not_planned_again() -> None:
    m, a = machine(), request("a", 4, answer=1)
    m.add(a)
    assert len(m.scheduler.plan().chunks) == 1
    assert m.scheduler.plan() == Plan()
    assert m.scheduler.running == [a]


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("prompt", [1, 3, 4, 5, 8])
@pytest.mark.parametrize("answer", [1, 4, 5])
def test_an_answer_takes_one_step_per_token(prompt: int, answer: int, overlap: bool) -> None:
    m, a = machine(overlap=overlap), request("a", prompt, answer)
    m.add(a)
    plans: list[Plan] = []
    m.run(each=plans.append)
    assert len(a.tokens) == a.max_total
    assert len([plan for plan in plans if plan.chunks]) == answer
    m.assert_nothing_is_left()


# Fairness within a step


def test_decoding_rows_come_before_prompts_and_always_fit() -> None:
    m = machine(max_step_tokens=8)
    m.add(*(request(name, 2, answer=30) for name in "abc"))
    m.step()
    m.add(request("long", 40))
    for _ in range(8):
        plan = m.step()
        assert names([chunk.request for chunk in plan.chunks]) == ["a", "b", "c", "long"]
        assert [chunk.count for chunk in plan.chunks] == [1, 1, 1, 5]


def test_every_prompt_advances_by_a_block_and_the_shortest_ends_first() -> None:
    m = machine(max_step_tokens=30)
    m.add(request("long", 40), request("short", 5), request("longer", 60))
    assert counts(m.step()) == {"short": 5, "long": 21, "longer": 4}


def test_a_newcomer_takes_its_share_from_a_prompt_in_progress() -> None:
    m = machine(max_step_tokens=16)
    m.add(request("first", 60))
    assert counts(m.step()) == {"first": 16}
    m.add(request("second", 8))
    assert counts(m.step()) == {"second": 8, "first": 8}


def test_every_prompt_gets_a_block_of_the_budget_or_waits() -> None:
    m = machine(max_step_tokens=11, block_size=4)
    m.add(*(request(name, 20) for name in "abc"))
    assert counts(m.step()) == {"a": 7, "b": 4}
    assert names(m.scheduler.waiting) == ["c"]


def test_prompts_shorter_than_a_block_claim_only_what_they_want() -> None:
    m = machine(max_step_tokens=8, block_size=4)
    m.add(*(request(name, 2) for name in "abcd"))
    assert counts(m.step()) == {"a": 2, "b": 2, "c": 2, "d": 2}


def test_a_budget_smaller_than_a_block_still_serves_a_prompt() -> None:
    m = machine(max_step_tokens=2, max_sequences=2)
    m.add(request("a", 5), request("b", 5))
    m.run()
    m.assert_nothing_is_left()


# Admission


def test_admission_is_by_priority_then_arrival() -> None:
    m = machine(max_sequences=1)
    m.add(request("low", priority=3), request("b"), request("a"), request("high", priority=1))
    order: list[str] = []
    m.run(each=lambda plan: order.extend(names(plan.admitted)))
    assert order == ["high", "b", "a", "low"]


def test_priority_does_not_take_a_seat_from_a_running_request() -> None:
    m = machine(max_sequences=1)
    m.add(low := request("low", priority=3))
    m.step()
    m.add(request("high", priority=1))
    assert m.step().preempted == ()
    assert m.scheduler.running == [low]


def test_the_lowest_free_seat_is_given_first() -> None:
    m = machine(max_sequences=3)
    a, b, c, d, e = (request(name, answer=20) for name in "abcde")
    m.add(a, b, c)
    m.step()
    assert [a.seat, b.seat, c.seat] == [0, 1, 2]
    m.scheduler.finish(b)
    m.scheduler.finish(a)
    m.add(d, e)
    m.step()
    assert [d.seat, e.seat, c.seat] == [0, 1, 2]


def test_a_prompt_is_admitted_only_if_it_fits_whole_beside_a_spare_block_per_row() -> None:
    m = machine(blocks=8, max_step_tokens=8)
    m.add(request("a", 4, answer=8))
    m.step()  # a holds 1 or 2 of 8
    m.add(b := request("b", 24, answer=2))
    m.step()
    assert b.status is Status.WAITING
    m.scheduler.finish(b)
    m.add(c := request("c", 20, answer=2))
    m.step()
    assert c.status is Status.RUNNING
    assert len(c.blocks) == 5


def test_nobody_is_admitted_past_the_first_that_waits() -> None:
    m = machine(blocks=8)
    m.add(request("a", 12, answer=8))
    m.step()
    m.add(request("large", 24, answer=2), request("small", 1, answer=2))
    m.step()
    assert names(m.scheduler.waiting) == ["large", "small"]


@pytest.mark.parametrize(("prompt", "answer", "fault"), [(0, 4, "0 tokens"), (4, 0, "4 tokens"), (4, 30, "never fit")])
def test_a_request_that_could_never_run_is_refused(prompt: int, answer: int, fault: str) -> None:
    m = machine(blocks=8, block_size=4)
    with pytest.raises(ValueError, match=fault):
        m.scheduler.add(request("a", prompt, answer))
    assert not m.scheduler.has_work


def test_a_request_as_large_as_the_pool_runs() -> None:
    m = machine(blocks=8, block_size=4)
    m.add(request("a", 31, answer=2), request("b", 1, answer=32))
    m.run()
    m.assert_nothing_is_left()


def test_a_budget_below_the_number_of_seats_is_refused() -> None:
    with pytest.raises(ValueError, match="max_step_tokens"):
        machine(max_sequences=8, max_step_tokens=7)


# Prefix cache


def test_a_repeated_prompt_computes_only_what_is_not_cached() -> None:
    m = machine()
    prompt = list(range(10))
    m.add(a := request("a", prompt))
    m.run()
    m.add(b := request("b", prompt))
    assert m.step().chunks == (Chunk(b, 8, 2, samples=True),)
    assert (a.cached_tokens, b.cached_tokens) == (0, 8)


def test_a_prompt_cached_but_for_its_last_token_is_one_row() -> None:
    m = machine()
    m.add(request("a", list(range(8))))
    m.run()
    m.add(b := request("b", list(range(9))))
    assert m.step().chunks == (Chunk(b, 8, 1, samples=True),)
    m.run()
    assert m.scheduler.pool.free == m.scheduler.pool.blocks


def test_a_prompt_that_exactly_fills_its_blocks_computes_the_last_one_again() -> None:
    m = machine()
    m.add(request("a", list(range(8))))
    m.run()
    m.add(b := request("b", list(range(8))))
    assert m.step().chunks == (Chunk(b, 4, 4, samples=True),)


def test_an_answer_is_cached_for_the_next_turn_of_the_conversation() -> None:
    m = machine()
    m.add(a := request("a", 6, answer=7))
    m.run()
    m.add(b := request("b", [*a.tokens, 1, 2, 3]))
    m.step()
    assert b.cached_tokens == 12


def test_requests_with_different_salts_share_no_block() -> None:
    m = machine()
    prompt = list(range(12))
    a, b, c = (request(name, prompt, cache_salt=salt) for name, salt in (("a", "x"), ("b", "y"), ("c", "x")))
    m.add(a)
    m.step()
    m.add(b, c)
    m.step()
    assert not set(a.blocks) & set(b.blocks)
    assert set(a.blocks) & set(c.blocks)
    assert (b.cached_tokens, c.cached_tokens) == (0, 8)


def test_an_unconfirmed_chunk_is_never_shared() -> None:
    m = machine()
    prompt = list(range(9))
    m.add(a := request("a", prompt))
    m.scheduler.plan()
    m.scheduler.finish(a)  # the step failed
    m.add(b := request("b", prompt))
    m.step()
    assert b.cached_tokens == 0


def test_a_late_confirmation_does_not_register_blocks_given_to_others() -> None:
    m = machine(blocks=3, max_sequences=2)
    m.add(a := request("a", 9, answer=1))
    late = m.scheduler.plan()
    m.scheduler.finish(a)
    b = request("b", 9, answer=1)
    m.add(b)
    m.scheduler.plan()
    m.scheduler.confirm(late.chunks[0])
    assert len(b.blocks) == 3
    m.scheduler.finish(b)
    m.add(c := request("c", [*a.tokens, 1], answer=1))
    m.scheduler.plan()
    assert c.cached_tokens == 0

"""Long work: the shortest goes first, the longest is not starved, and what waits is bounded."""

from __future__ import annotations

import os
import random
import threading
from collections.abc import Iterable

import pytest

from llm_engine.request import Code, RequestError
from preparer import MOST_BYTES, Preparer


def order(sizes: Iterable[int]) -> list[int]:
    """The order in which jobs that wait already are done, by their arrival."""
    preparer, done = Preparer(), []
    for index, size in enumerate(sizes):
        preparer.put(size, lambda index=index: done.append(index))
    preparer.start()
    preparer.stop()
    return done


def test_the_shortest_goes_first_and_among_equals_the_one_that_came_first() -> None:
    assert order([1_000_000] * 30 + [10_000, 9_000, 10_000])[:4] == [31, 30, 32, 0]
    assert order([5, 5, 5]) == [0, 1, 2]


def test_a_newcomer_does_not_wait_for_long_ones_that_wait_already() -> None:
    preparer, done = Preparer(), []
    for index in range(30):
        preparer.put(1_000_000, lambda index=index: done.append(index))

    def third() -> None:  # while it is done, an ordinary prompt comes
        done.append(-1)
        preparer.put(10_000, lambda: done.append(99))

    preparer.put(1_000_000, third)
    preparer.start()
    preparer.stop()
    assert done[done.index(-1) + 1 :] == [99]
    preparer = Preparer()
    done.clear()
    preparer.put(900_000, third)
    for index in range(30):
        preparer.put(1_000_000, lambda index=index: done.append(index))
    preparer.start()
    preparer.stop()
    assert done[:3] == [-1, 99, 0]


@pytest.mark.parametrize("seed", range(20))
def test_nobody_waits_for_more_than_twice_the_bytes_that_came_before(seed: int) -> None:
    draws = random.Random(seed)
    sizes = [draws.choice([8, 100, 1000]) for _ in range(300)]
    done = order(sizes)
    assert sorted(done) == list(range(300))
    waited = 0
    for index in done:
        assert waited <= 2 * sum(sizes[: index + 1])
        waited += sizes[index]


def test_a_long_job_is_done_though_short_ones_never_end() -> None:
    done = order([1000, *[100] * 50])
    assert done.index(0) == 10


def test_a_job_that_fails_leaves_the_others_and_its_bytes_are_free() -> None:
    preparer, done = Preparer(), []
    preparer.put(MOST_BYTES, lambda: 1 // 0)
    preparer.put(1, lambda: done.append(1))
    with pytest.raises(RequestError, match="bytes are being prepared already") as refused:
        preparer.check(1)
    assert refused.value.code is Code.UNAVAILABLE
    preparer.start()
    preparer.stop()
    assert done == [1]
    preparer.check(MOST_BYTES)


@pytest.mark.skipif(not hasattr(os, "sched_getscheduler"), reason="a thread has a policy of its own on Linux alone")
def test_long_work_runs_only_where_no_thread_of_the_engine_wants_the_core() -> None:
    preparer, policies = Preparer(), []
    preparer.put(1, lambda: policies.append(os.sched_getscheduler(threading.get_native_id())))
    preparer.start()
    preparer.stop()
    assert policies == [os.SCHED_IDLE]
    assert os.sched_getscheduler(threading.get_native_id()) == os.SCHED_OTHER

"""When requests of an open loop are due: the right load, from a seed alone."""

from __future__ import annotations

import itertools
import statistics

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tokenstream_loadtest.arrivals import schedule
from tokenstream_loadtest.results import Stage

OPEN = ("poisson", "constant", "gamma", "bursts")


def gaps(stage: Stage, seed: int = 1, count: int = 20_000) -> list[float]:
    offsets = list(itertools.islice(schedule(stage, seed), count))
    return [after - before for before, after in itertools.pairwise([0.0, *offsets])]


def variation(values: list[float]) -> float:
    """The coefficient of variation."""
    return statistics.pstdev(values) / statistics.fmean(values)


@pytest.mark.parametrize("arrivals", OPEN)
@given(seed=st.integers(0, 2**32), rate=st.floats(0.01, 1000), requests=st.integers(1, 300))
def test_the_last_of_n_requests_is_due_at_exactly_n_over_the_rate(arrivals, seed, rate, requests):
    stage = Stage(arrivals, rate=rate, requests=requests, burst=4, burstiness=0.5)
    offsets = list(schedule(stage, seed))
    assert len(offsets) == requests
    assert offsets[-1] == requests / rate
    assert offsets == sorted(offsets)
    assert offsets == list(schedule(stage, seed))


@pytest.mark.parametrize("arrivals", OPEN)
@given(seed=st.integers(0, 2**32))
def test_all_requests_are_due_before_the_stage_ends(arrivals, seed):
    offsets = list(schedule(Stage(arrivals, rate=50.0, seconds=3.0, burst=3), seed))
    assert all(0 <= offset < 3.0 for offset in offsets)
    both = list(schedule(Stage(arrivals, rate=50.0, seconds=1.0, requests=400, burst=3), seed))
    assert len(both) < 400
    assert all(offset < 1.0 for offset in both)


@pytest.mark.parametrize("arrivals", OPEN)
def test_the_mean_gap_is_one_over_the_rate(arrivals):
    assert statistics.fmean(gaps(Stage(arrivals, rate=8.0, burst=5, burstiness=0.7))) == pytest.approx(1 / 8, rel=0.05)


def test_burstiness_is_the_shape_of_the_gaps():
    assert variation(gaps(Stage("poisson", rate=8.0))) == pytest.approx(1, rel=0.05)
    assert variation(gaps(Stage("gamma", rate=8.0, burstiness=1.0))) == pytest.approx(1, rel=0.05)
    assert variation(gaps(Stage("gamma", rate=8.0, burstiness=0.25))) == pytest.approx(2, rel=0.05)
    assert variation(gaps(Stage("gamma", rate=8.0, burstiness=4.0))) == pytest.approx(0.5, rel=0.05)
    assert set(gaps(Stage("constant", rate=8.0), count=100)) == {0.125}


def test_the_requests_of_a_burst_are_due_together_and_bursts_apart():
    found = gaps(Stage("bursts", rate=8.0, burst=4), count=4000)
    assert all((gap > 0) == (at % 4 == 0) for at, gap in enumerate(found))
    assert variation([gap for gap in found if gap]) == pytest.approx(1, rel=0.1)


@pytest.mark.parametrize("arrivals", ["poisson", "gamma", "bursts"])
def test_another_seed_is_another_schedule(arrivals):
    stage = Stage(arrivals, rate=8.0, requests=20)
    assert list(schedule(stage, 1)) != list(schedule(stage, 2))


@pytest.mark.parametrize(
    "stage",
    [
        Stage("closed", concurrency=4),
        Stage("closed", concurrency=4, rate=1.0),
        Stage("poisson"),
        Stage("poisson", rate=0.0),
        Stage("gamma", rate=1.0, burstiness=0.0),
        Stage("bursts", rate=1.0, burst=0),
    ],
)
def test_what_has_no_schedule_is_refused(stage):
    with pytest.raises(ValueError, match=r"open loop|closed loop"):
        next(schedule(stage, 0))

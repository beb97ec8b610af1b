"""The shapes of a Locust test as functions of time."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tokenstream_loadtest.under_locust.shapes import Ramp, Shape, Soak, Spike, Steps


def course(shape: Shape, seconds: int) -> list[int | None]:
    return [shape.users(float(at)) for at in range(seconds)]


@given(peak=st.integers(1, 500), count=st.integers(1, 20))
def test_steps_rise_to_the_peak_and_end(peak, count):
    users = course(Steps(peak, 100.0, count), 101)
    assert users[-1] is None
    rising = [each for each in users if each is not None]
    assert len(rising) == 100
    assert all(before <= after for before, after in pairwise(rising))
    assert rising[-1] == peak
    assert len(set(rising)) == min(count, peak)


def test_steps_are_equal():
    assert course(Steps(10, 10.0, 5), 11) == [2, 2, 4, 4, 6, 6, 8, 8, 10, 10, None]


def test_a_spike_is_the_middle_third():
    assert course(Spike(16, 9.0), 10) == [2, 2, 2, 16, 16, 16, 2, 2, 2, None]


def test_a_spike_of_one_user_is_none():
    assert course(Spike(1, 3.0), 4) == [1, 1, 1, None]


def test_a_soak_does_not_change():
    assert course(Soak(7, 3.0), 4) == [7, 7, 7, None]


def ramp(verdicts: list[bool | None], peak: int = 64) -> tuple[Ramp, list[int | None]]:
    begun: list[int] = []
    shape = Ramp(peak, 2.0, lambda: begun.append(1), lambda: verdicts.pop(0))
    users: list[int | None] = []
    for at in range(40):
        users.append(shape.users(float(at)))
        if users[-1] is None:
            break
    return shape, users


def test_a_ramp_doubles_until_a_step_goes_badly():
    shape, users = ramp([True, True, False])
    assert users == [1, 1, 2, 2, 4, 4, None]
    assert shape.best == 2
    assert shape.ended_by_objective


def test_a_ramp_ends_when_its_time_is_up():
    shape = Ramp(64, 2.0, lambda: None, lambda: True, 5.0)
    assert course(shape, 7) == [1, 1, 2, 2, 4, None, None]
    assert (shape.best, shape.ended_by_time, shape.ended_by_objective) == (2, True, False)


def test_a_ramp_ends_at_its_peak():
    shape, users = ramp([True] * 4, peak=6)
    assert users == [1, 1, 2, 2, 4, 4, 6, 6, None]
    assert shape.best == 6
    assert not shape.ended_by_objective


def test_a_ramp_waits_for_a_step_in_which_nothing_ended():
    _, users = ramp([None, True, False])
    assert users == [1, 1, 1, 1, 2, 2, None]


@pytest.mark.parametrize("verdicts", [[False]])
def test_a_ramp_whose_first_step_goes_badly_has_no_best(verdicts):
    shape, _ = ramp(verdicts)
    assert shape.best == 0

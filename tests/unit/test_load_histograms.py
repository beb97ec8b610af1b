"""Histograms lose at most 0.1 % of a value and nothing at all when they are merged, written and read."""

from __future__ import annotations

import math
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tokenstream_loadtest.histograms import Histogram

SECONDS = st.floats(1e-6, 3600.0)


def nearest_rank(share: float, count: int) -> int:
    """The place from 1 on of the value that `share` percent do not exceed."""
    return max(math.ceil(share / 100 * count - 1e-9), 1)


def histogram(values: list[float]) -> Histogram:
    made = Histogram()
    made.extend(values)
    return made


@settings(deadline=None, max_examples=40)
@given(st.lists(SECONDS, min_size=1, max_size=60), st.floats(0, 100))
def test_a_percentile_is_off_by_a_thousandth_at_most(values: list[float], share: float):
    exact = sorted(values)[nearest_rank(share, len(values)) - 1]
    told = histogram(values).percentile(share)
    assert told == pytest.approx(exact, rel=1.001e-3, abs=1e-6)


def test_percentiles_of_many_values_are_those_of_the_sorted_list():
    draw = random.Random(5)
    values = [draw.lognormvariate(-3, 1.2) for _ in range(20_000)]
    told = histogram(values)
    for share in (1, 50, 90, 95, 99, 99.9):
        exact = sorted(values)[nearest_rank(share, len(values)) - 1]
        assert told.percentile(share) == pytest.approx(exact, rel=1e-3)
    assert told.highest == pytest.approx(max(values), rel=1e-3)
    assert told.mean == pytest.approx(math.fsum(values) / len(values), rel=1e-9, abs=1e-9)


@settings(deadline=None, max_examples=40)
@given(st.lists(SECONDS, max_size=40), st.randoms(use_true_random=False))
def test_any_split_merges_to_the_same_text(values: list[float], draw: random.Random):
    parts = [Histogram() for _ in range(3)]
    for value in values:
        draw.choice(parts).add(value)
    merged = Histogram()
    for part in parts:
        merged.merge(part)
    assert merged.encode() == histogram(values).encode()


@settings(deadline=None, max_examples=40)
@given(st.lists(SECONDS, max_size=40))
def test_what_was_written_is_read_back_exactly(values: list[float]):
    made = histogram(values)
    read = Histogram.decode(made.encode())
    assert read.encode() == made.encode()
    assert (len(read), read.mean, read.highest) == (len(made), made.mean, made.highest)
    assert list(read.buckets()) == list(made.buckets())


@settings(deadline=None, max_examples=40)
@given(st.text(max_size=60))
def test_any_other_text_is_an_error_in_one_line(text: str):
    with pytest.raises(ValueError, match="no encoded histogram"):
        Histogram.decode(text)


def test_a_text_that_was_cut_is_an_error():
    text = histogram([0.1, 0.2]).encode()
    for cut in (text[:20], text.split()[0], text.replace(" ", " x")):
        with pytest.raises(ValueError, match="no encoded histogram"):
            Histogram.decode(cut)


def test_buckets_hold_every_value_once_ascending():
    buckets = list(histogram([0.5, 0.1, 0.1, 2.0]).buckets())
    assert [count for _, count in buckets] == [2, 1, 1]
    assert [value for value, _ in buckets] == pytest.approx([0.1, 0.5, 2.0], rel=1e-3)


def test_nothing_has_no_numbers():
    nothing = Histogram()
    assert (len(nothing), nothing.mean, nothing.highest, nothing.percentile(50)) == (0, None, None, None)
    assert list(nothing.buckets()) == []


def test_values_beyond_the_range_are_counted_at_its_ends():
    ends = histogram([0.0, -1.0, 1e9])
    assert len(ends) == 3
    assert ends.percentile(0) == pytest.approx(1e-6)
    assert ends.highest == pytest.approx(3600, rel=1e-3)

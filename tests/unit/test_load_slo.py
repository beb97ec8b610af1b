"""Objectives are read as they are typed, hold for percentiles, and ask the same of a single request."""

from __future__ import annotations

import pytest

from tokenstream_loadtest.slo import Objective, good
from unit.invented_runs import measurement_of, record, tally_of


@pytest.mark.parametrize(
    ("text", "metric", "point", "limit"),
    [
        ("ttft_p95=500ms", "ttft", "p95", 0.5),
        (" itl_p99.9 = 60 ms ", "itl", "p99.9", 0.06),
        ("tpot_mean=40ms", "tpot", "mean", 0.04),
        ("e2e_max=2s", "e2e", "max", 2.0),
        ("queue_p50=250us", "queue", "p50", 0.00025),
        ("errors=1%", "errors", "", 0.01),
        ("errors=0%", "errors", "", 0.0),
    ],
)
def test_an_objective_is_read(text: str, metric: str, point: str, limit: float):
    read = Objective.parse(text)
    assert (read.metric, read.point) == (metric, point)
    assert read.limit == pytest.approx(limit)
    assert Objective.parse(str(read)) == read


@pytest.mark.parametrize(
    "text",
    [
        "",
        "ttft",
        "ttft=500ms",
        "ttft_p95=500",
        "ttft_p95=1%",
        "ttft_p100=1s",
        "tftt_p95=1s",
        "errors=1s",
        "errors_p95=1%",
        "ttft_p95=-1s",
        "ttft_p95=1s itl_p95=1s",
        "ttft_p95<1s",
        "lag_p99=1ms",
    ],
)
def test_anything_else_is_refused_with_an_example(text: str):
    with pytest.raises(ValueError, match=r"like ttft_p95=500ms .* or errors=1%") as caught:
        Objective.parse(text)
    assert repr(text) in str(caught.value)


def test_a_percentile_at_its_limit_meets_it_and_above_misses_it():
    group = tally_of([record([0.1 * n]) for n in range(1, 11)]).all
    assert Objective.parse("ttft_p50=501ms").met(group)
    assert not Objective.parse("ttft_p50=499ms").met(group)
    assert Objective.parse("ttft_mean=551ms").met(group)
    assert Objective.parse("ttft_max=999ms").measured(group) == pytest.approx(1.0, rel=1e-3)


def test_what_was_not_measured_is_not_met():
    nothing = tally_of([]).all
    assert not Objective.parse("ttft_p95=1s").met(nothing)
    assert not Objective.parse("errors=100%").met(nothing)
    assert not Objective.parse("queue_p95=1s").met(tally_of([record([0.1])]).all)


def test_errors_are_a_share_of_all_requests():
    group = tally_of([record([0.1]), record([0.1], outcome="abandoned"), record(outcome="internal", error="x")]).all
    assert Objective.parse("errors=1%").measured(group) == pytest.approx(1 / 3)
    assert Objective.parse("errors=34%").met(group)


def test_a_request_is_good_if_it_was_answered_within_every_limit():
    objectives = [Objective.parse(text) for text in ("ttft_p95=500ms", "itl_p99=150ms", "e2e_p50=1s", "errors=1%")]
    assert good(record([0.4, 0.5, 0.6]), objectives)
    assert not good(record([0.6, 0.7]), objectives)
    assert not good(record([0.4, 0.6]), objectives)
    assert not good(record([0.4, 0.5], ended=1.1), objectives)
    assert not good(record([0.4, 0.5], outcome="abandoned"), objectives)


def test_the_percentile_of_an_itl_is_asked_of_the_requests_own_gaps():
    one_slow_gap_in_four = record([0.1, 0.2, 0.3, 0.4, 0.9])
    assert good(one_slow_gap_in_four, [Objective.parse("itl_p75=150ms")])
    assert not good(one_slow_gap_in_four, [Objective.parse("itl_p99=150ms")])
    assert good(one_slow_gap_in_four, [Objective.parse("itl_mean=210ms")])


def test_what_a_request_has_no_value_for_it_keeps_to():
    assert good(record([0.1]), [Objective.parse("itl_p99=1ms"), Objective.parse("queue_p95=1ms")])
    assert not good(record([0.1], queue=0.2), [Objective.parse("queue_p95=1ms")])


def test_goodput_is_the_good_ones_over_the_time():
    measured = measurement_of([record([0.1]), record([0.2]), record([0.9])], 4.0, objectives=["ttft_p95=500ms"])
    assert (measured.goodput, measured.requests_per_second) == (0.5, 0.75)


def test_no_more_than_all_requests_can_fail():
    assert Objective.parse("errors=100%").limit == 1.0
    with pytest.raises(ValueError, match="not more than 100%"):
        Objective.parse("errors=200%")

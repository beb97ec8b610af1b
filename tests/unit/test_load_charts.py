"""Axes have round ticks and put values where they belong; charts hold a mark for everything that was measured."""

from __future__ import annotations

import math
import re
from xml.etree import ElementTree

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tokenstream_loadtest.figures import Level, levels, number
from tokenstream_loadtest.report import charts, plots, timeline
from tokenstream_loadtest.report.markup import Markup
from tokenstream_loadtest.results import Sample, Stage, Stall
from tokenstream_loadtest.slo import Objective
from unit.invented_runs import measurement_of, paper_records, record, run_of

POSITIVE = st.floats(1e-6, 1e5)


def marks(figure: Markup | None, name: str) -> list[ElementTree.Element]:
    """The elements of a class in a figure, which has to be well-formed."""
    assert figure is not None
    return [one for one in ElementTree.fromstring(figure).iter() if name in one.get("class", "").split()]


def tips(figure: Markup | None, name: str) -> list[str]:
    return [tip for one in marks(figure, name) if (tip := one.findtext("title"))]


@pytest.fixture(scope="module")
def two_loads() -> list[Level]:
    made = [
        measurement_of(paper_records(rate, 10.0, seed), 11.0, Stage("poisson", rate=rate, seconds=10.0), repeat=repeat)
        for repeat, seed in enumerate((1, 2))
        for rate in (2.0, 6.0)
    ]
    return levels(run_of(made))


@settings(deadline=None)
@given(st.lists(POSITIVE, min_size=1, max_size=8))
def test_a_linear_axis_begins_at_zero_and_ends_above_all_values_at_a_round_number(values: list[float]):
    axis = charts.linear(values, 0, 100)
    assert (axis.low, axis.at(0.0)) == (0.0, 0.0)
    assert axis.high >= max(values) * (1 - 1e-9)
    assert 2 <= len(axis.ticks) <= 7
    step = axis.ticks[1][0]
    assert step / 10 ** math.floor(math.log10(step) + 1e-9) == pytest.approx(1) or re.match(r"2|5", f"{step:e}")


@settings(deadline=None)
@given(st.lists(POSITIVE, min_size=1, max_size=8))
def test_a_logarithmic_axis_holds_all_values_in_their_order(values: list[float]):
    axis = charts.logarithmic(values, 0, 100, number)
    assert axis.low <= min(values)
    assert axis.high >= max(values)
    places = [axis.at(value) for value in sorted(values)]
    assert places == sorted(places)
    assert len(axis.ticks) >= 1


def test_a_decade_has_the_same_length_everywhere_on_a_logarithmic_axis():
    axis = charts.logarithmic([0.001, 1000.0], 0, 600, number)
    assert axis.at(10) - axis.at(1) == pytest.approx(100)
    assert axis.at(0.1) - axis.at(0.01) == pytest.approx(100)


def test_every_further_nine_is_as_far_again():
    axis = charts.nines(10_000, 0, 400)
    assert [axis.at(charts.nine(share)) for share in (0.0, 0.9, 0.99, 0.999, 0.9999)] == pytest.approx(
        [0, 100, 200, 300, 400]
    )
    assert [text for _, text in axis.ticks] == ["0 %", "50 %", "90 %", "99 %", "99.9 %", "99.99 %"]


@pytest.mark.parametrize("values", [[], [0.0], [math.nan], [math.inf]])
def test_an_axis_of_nothing_is_still_an_axis(values: list[float]):
    assert charts.linear(values, 0, 100).high > 0
    assert charts.logarithmic(values, 0, 100, number).low > 0


def test_labels_never_lie_over_each_other():
    drawn = charts.labels([(200.0, 100.0, "one load") for _ in range(9)])
    places = re.findall(r'x="([\d.]+)" y="([\d.]+)"', drawn)
    assert 1 <= len(places) == len(set(places)) < 9


def test_throughput_has_a_point_for_each_load_and_a_lighter_one_for_each_repeat(two_loads: list[Level]):
    figure = plots.throughput(two_loads, [Objective.parse("ttft_p95=150ms")], "ttft")
    assert len(marks(figure, "pt")) == 2 + 4
    assert len(marks(figure, "light")) == 4
    assert len(marks(figure, "limit")) == 1
    assert tips(figure, "light")[0].startswith("2/s poisson, repeat 1: ")


def test_more_load_is_further_right(two_loads: list[Level]):
    points = [one for one in marks(plots.throughput(two_loads, [], "itl"), "pt") if "light" not in one.get("class", "")]
    slow, fast = (float(one.get("cx", "nan")) for one in points)
    assert slow < fast


def test_percentiles_have_a_rising_line_for_each_load(two_loads: list[Level]):
    for metric in ("ttft", "itl"):
        lines = marks(plots.percentiles(two_loads, metric), "line")
        assert len(lines) == 2
        for line in lines:
            points = [tuple(map(float, pair.split(","))) for pair in line.get("points", "").split()]
            assert len(points) > 20
            assert points == sorted(points, key=lambda point: (point[0], -point[1]))


def test_the_percentile_line_tells_what_the_histogram_tells(two_loads: list[Level]):
    histogram = two_loads[0].group.histograms["itl"]
    told = tips(plots.percentiles(two_loads[:1], "itl"), "pt")
    p99 = histogram.percentile(99)
    assert p99 is not None
    assert f"2/s poisson: 99 % within {number(p99 * 1e3)} ms" in told


def test_the_percentile_line_ends_at_the_highest_value():
    found = levels(run_of([measurement_of([record([0.1 * n]) for n in range(1, 8)], 1.0)]))
    (line,) = marks(plots.percentiles(found, "ttft"), "line")
    heights = [float(pair.split(",")[1]) for pair in line.get("points", "").split()]
    bottom, top = charts.linear([0.7], 218, 26).at(0.1), charts.linear([0.7], 218, 26).at(0.7)
    assert (heights[0], heights[-1]) == pytest.approx((bottom, top), abs=0.3)


def test_distributions_count_every_value_once(two_loads: list[Level]):
    told = tips(plots.distribution(two_loads, "itl"), "bar")
    counted = sum(int(re.search(r": ([\d,]+) from", tip)[1].replace(",", "")) for tip in told)  # type: ignore[index]
    assert counted == sum(len(level.group.histograms["itl"]) for level in two_loads)


def test_goodput_parts_good_slow_and_failed():
    records = [record([0.1]), record([0.9]), record(outcome="internal", error="x")]
    found = levels(run_of([measurement_of(records, 2.0, objectives=["ttft_p95=500ms"])]))
    told = tips(plots.goodput(found, [Objective.parse("ttft_p95=500ms")]), "bar")
    assert told == [f"1 at once: 0.5/s {name}" for name in ("good", "too slow", "failed")]


def test_a_timeline_shows_samples_stalls_and_errors():
    samples = tuple(Sample(at, at, 2, 0.5, 10.0, 20.0, None) for at in range(4))
    records = [record([0.5, 2.5]), record(sent=2.2, outcome="internal", error="x")]
    found = levels(run_of([measurement_of(records, 4.0, samples=samples, stalls=(Stall(0.5, 2.0),))]))
    figure = timeline.timeline(found[0], found[0].measurements[0])
    assert len(marks(figure, "steps")) == 5
    assert tips(figure, "stall") == ["stall: no response for 2 s"]
    assert tips(figure, "failed") == ["2 s: 1 failed"]
    assert tips(figure, "strip")[2].startswith("2 s: 2 running; 2 waiting; 50 % KV cache in use")


def test_a_timeline_without_samples_counts_what_the_client_saw():
    records = [record([0.5, 3.5], tokens=[1, 4]), record([1.5], sent=1.0)]
    found = levels(run_of([measurement_of(records, 4.0)]))
    figure = timeline.timeline(found[0], found[0].measurements[0])
    assert len(marks(figure, "steps")) == 2
    assert tips(figure, "strip") == [
        "0 s: 1 under way, by the client; 1 tokens/s received by the client",
        "1 s: 2 under way, by the client; 1 tokens/s received by the client",
        "2 s: 1 under way, by the client; 0 tokens/s received by the client",
        "3 s: 1 under way, by the client; 4 tokens/s received by the client",
    ]


def test_nothing_measured_is_no_chart():
    found = levels(run_of([measurement_of([], 0.0)]))
    assert [plots.throughput(found, [], "ttft"), plots.percentiles(found, "itl")] == [None, None]
    assert [plots.distribution(found, "itl"), plots.goodput(found, [])] == [None, None]
    assert timeline.timeline(found[0], found[0].measurements[0]) is None

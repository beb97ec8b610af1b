"""A comparison calls better or worse only what its interval shows, and says what else is different."""

from __future__ import annotations

import json
import math
import random
import statistics
from collections.abc import Sequence
from dataclasses import replace

import pytest

from tokenstream_loadtest import student
from tokenstream_loadtest.compare import Change, Comparison, compare, dump_comparison, lines
from tokenstream_loadtest.results import Machine, Run, Stage
from unit.invented_runs import MACHINE, measurement_of, record, run_of

STAGE = Stage(concurrency=4, requests=10)


def run_with(ttfts: Sequence[float], *, stage: Stage = STAGE, failed: Sequence[int] = (), **more: object) -> Run:
    """A run whose repeats each have ten answers with that TTFT, three tokens each, in ten seconds; `failed` beside."""
    made = [
        measurement_of(
            [record([ttft, ttft * 1.5, ttft * 2])] * 10
            + [record(outcome="internal", error="x")] * (failed[repeat] if failed else 0),
            10.0,
            stage,
            repeat=repeat,
        )
        for repeat, ttft in enumerate(ttfts)
    ]
    return run_of(made, **more)


def change(comparison: Comparison, figure: str) -> Change:
    (load,) = comparison.loads
    return next(one for one in load.changes if one.figure == figure)


def test_paired_repeats_give_the_t_interval_of_the_logarithms():
    a, b = [0.100, 0.200, 0.400], [0.090, 0.170, 0.380]
    found = change(compare([run_with(a)], [run_with(b)]), "ttft_p50")
    logs = [math.log(y / x) for x, y in zip(a, b, strict=True)]
    half = 4.303 * statistics.stdev(logs) / math.sqrt(3)
    expected = [math.exp(statistics.fmean(logs) + side * half) for side in (0, -1, 1)]
    assert [found.change, found.low, found.high] == pytest.approx(expected, rel=2e-3)
    assert found.a == pytest.approx(statistics.geometric_mean(a), rel=1e-3)
    assert found.b is not None
    assert found.b / (found.a or 0) == pytest.approx(found.change)


def test_pairing_shows_a_difference_that_the_spread_between_repeats_would_hide():
    a, b = run_with([0.1, 0.2, 0.4]), run_with([0.09, 0.179, 0.361])
    assert change(compare([a], [b]), "ttft_p50").verdict == "better"
    assert change(compare([a], [replace(b, seed=8)]), "ttft_p50").verdict == "no difference shown"


@pytest.mark.parametrize("factor", [0.5, 2.0])
def test_lower_is_better_for_times(factor: float):
    found = compare([run_with([0.1, 0.11, 0.1])], [run_with([factor * ttft for ttft in (0.1, 0.11, 0.102)])])
    for figure in ("ttft_p50", "ttft_p95", "itl_p50", "itl_p99", "tpot_p50"):
        assert change(found, figure).verdict == ("better" if factor < 1 else "worse")
        assert change(found, figure).change == pytest.approx(factor, rel=0.02)


def test_higher_is_better_for_rates():
    slow = run_with([0.1, 0.1, 0.1])
    fast = replace(slow, measurements=tuple(replace(m, seconds=5.0 + m.repeat / 100) for m in slow.measurements))
    for figure in ("tokens_per_second", "requests_per_second", "goodput"):
        assert change(compare([slow], [fast]), figure).verdict == "better"
        assert change(compare([fast], [slow]), figure).verdict == "worse"


def test_the_same_run_shows_no_difference():
    run = run_with([0.1, 0.2, 0.15])
    (load,) = compare([run], [run]).loads
    assert load.paired
    assert {one.verdict for one in load.changes} == {"no difference shown"}
    assert compare([run], [run]).warnings == ()


def test_errors_are_compared_by_their_difference_and_may_be_none():
    none, some = run_with([0.1] * 3), run_with([0.1] * 3, failed=[10, 11, 10])
    found = change(compare([none], [some]), "errors_share")
    assert found.verdict == "worse"
    assert found.change == pytest.approx(0.508, abs=0.001)
    assert change(compare([none], [none]), "errors_share").verdict == "no difference shown"


def test_one_repeat_has_no_interval_and_no_verdict():
    found = compare([run_with([0.1])], [run_with([0.2])])
    one = change(found, "ttft_p50")
    assert (one.low, one.high, one.verdict) == (None, None, "one repeat: no interval")
    assert one.change == pytest.approx(2.0, rel=2e-3)
    assert any("at least two repeats" in line for line in lines(found))


def test_what_is_zero_or_missing_has_no_ratio():
    dead = run_of([measurement_of([record(outcome="internal", error="x")], 1.0, STAGE, repeat=n) for n in range(2)])
    found = compare([dead], [run_with([0.1, 0.1])])
    assert change(found, "goodput").verdict == "no ratio: a value is 0"
    assert change(found, "ttft_p50").verdict == "not measured"


def test_several_runs_on_a_side_are_further_repeats():
    runs = [run_with([0.1]), run_with([0.12], seed=8)]
    (load,) = compare(runs, runs).loads
    assert (load.repeats, load.paired) == ((2, 2), True)
    with pytest.raises(ValueError, match="each side"):
        compare([], runs)


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"scenario": "other"}, "scenarios"),
        ({"workload": "other"}, "workloads"),
        ({"seed": 8}, "seeds"),
        ({"server": {"model": "other"}}, "models"),
        ({"objectives": ("ttft_p95=1s",)}, "objectives"),
        ({"machine": replace(MACHINE, processor="other")}, "machines"),
        ({"machine": replace(MACHINE, local=False)}, "places of the server"),
    ],
)
def test_other_conditions_are_told(changed: dict[str, str | Machine], words: str):
    run = run_with([0.1, 0.1])
    (warning,) = compare([run], [replace(run, **changed)]).warnings  # type: ignore[arg-type]
    assert warning.startswith(f"the {words} differ: ")


def test_other_requests_are_no_pairs():
    run = run_with([0.1, 0.2])
    for changed in (replace(run, workload="other"), run_with([0.1, 0.2], stage=replace(STAGE, requests=20))):
        (load,) = compare([run], [changed]).loads
        assert not load.paired


def test_flaws_and_loads_of_one_side_are_told():
    flawed = run_with([0.1, 0.1])
    flawed = replace(flawed, measurements=tuple(replace(m, flaws=("late",)) for m in flawed.measurements))
    further = run_with([0.1], stage=Stage(concurrency=8, requests=10))
    both = replace(flawed, measurements=(*flawed.measurements, *further.measurements))
    found = compare([run_with([0.1, 0.1])], [both])
    assert found.warnings == ("only in b: 8 at once", "4 at once in b is not to be trusted: late")
    assert not found.loads[0].valid


def test_nothing_in_common_is_said():
    found = compare([run_with([0.1])], [run_with([0.1], stage=Stage(concurrency=8))])
    assert lines(found)[-1] == "no load was measured on both sides"


def test_lines_and_json_tell_the_same():
    found = compare([run_with([0.1, 0.11])], [run_with([0.2, 0.21])])
    told = next(line for line in lines(found) if line.startswith("  TTFT p50"))
    assert told.split()[2:6] == ["105", "ms", "205", "ms"]
    assert told.endswith("worse")
    written = json.loads(dump_comparison(found))
    ttft = next(one for one in written["loads"][0]["changes"] if one["figure"] == "ttft_p50")
    assert ttft["verdict"] == "worse"
    assert f"{ttft['change']:.3f}" in told


@pytest.mark.parametrize(("freedom", "value"), [(1, 12.706), (2, 4.303), (10, 2.228), (30, 2.042)])
def test_quantiles_are_those_of_the_tables(freedom: int, value: float):
    assert student.quantile(freedom) == value


@pytest.mark.parametrize(("freedom", "value"), [(31, 2.0395), (40, 2.0211), (60, 2.0003), (120, 1.9799), (10**9, 1.96)])
def test_quantiles_beyond_the_table_are_right_to_three_digits(freedom: int, value: float):
    assert student.quantile(freedom) == pytest.approx(value, abs=1e-4)


def test_an_interval_holds_the_truth_about_as_often_as_it_says():
    draw = random.Random(11)
    held = 0
    for _ in range(2000):
        values = [draw.gauss(1.0, 0.3) for _ in range(4)]
        held += abs(statistics.fmean(values) - 1.0) <= (student.half_width(values) or 0.0)
    assert 0.93 < held / 2000 < 0.97


def test_welch_takes_samples_of_different_spread():
    a, b = [27.5, 21.0, 19.0, 23.6, 17.0, 17.9], [27.1, 22.0, 20.8, 23.4, 23.4, 23.5, 25.8, 22.0]
    half = student.half_width_apart(a, b)
    parts = statistics.variance(a) / 6, statistics.variance(b) / 8
    freedom = sum(parts) ** 2 / (parts[0] ** 2 / 5 + parts[1] ** 2 / 7)
    assert half == pytest.approx(student.quantile(int(freedom)) * math.sqrt(sum(parts)))
    assert student.half_width_apart([1.0], b) is None
    assert student.half_width([1.0]) is None

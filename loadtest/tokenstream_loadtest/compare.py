"""Two runs, or two groups of runs, load by load: is b faster than a, by how much, and is that more than chance?

For each number the ratio b/a is given with its interval of 95 % over the repeats: a t-interval of the logarithms, by
pairs of repeats where both sides asked the same requests, else Welch's. It tells what was measured, never why.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import compress
from typing import Literal

from pydantic import TypeAdapter

from . import figures
from .figures import NOTHING, Figure, latency, levels
from .results import Measurement, Run, Stage
from .sayings import joined
from .student import half_width, half_width_apart

Verdict = Literal[
    "better", "worse", "no difference shown", "one repeat: no interval", "no ratio: a value is 0", "not measured"
]
FIGURES: tuple[Figure, ...] = (
    figures.TOKENS_PER_SECOND,
    figures.REQUESTS_PER_SECOND,
    figures.GOODPUT,
    *(latency("ttft", point) for point in ("p50", "p95")),
    *(latency("itl", point) for point in ("p50", "p95", "p99")),
    latency("tpot", "p50"),
    figures.ERROR_SHARE,
)
_BY_KEY = {figure.key: figure for figure in FIGURES}
_MEANS = "a and b: means of repeats, geometric ones where there is a ratio, so that b/a is theirs"
_FEWEST = "interval needs at least two repeats on both sides"
_CHANCE = "of equals, one number in twenty shows a difference by chance"


# What should be the same on both sides.
_CONDITIONS: tuple[tuple[str, Callable[[Run], str]], ...] = (
    ("scenarios", lambda run: run.scenario),
    ("workloads", lambda run: run.workload),
    ("seeds", lambda run: str(run.seed)),
    ("objectives", lambda run: " ".join(run.objectives) or "none"),
    ("models", lambda run: run.server.get("model") or run.server.get("id") or "unknown"),
    ("machines", lambda run: f"{run.machine.processor}, {run.machine.cores} cores, {run.machine.system}"),
    ("places of the server", lambda run: "this machine" if run.machine.local else "another machine"),
)


@dataclass(frozen=True, slots=True)
class Change:
    """One number of one load: `a` and `b` are means over repeats, in seconds, shares or per second.

    They are geometric, and `change` is b/a. Of errors, whose share is often 0, and where a value is 0 they are
    arithmetic; `change` of errors is b - a. `low` and `high`: its interval; None where repeats are too few.
    """

    figure: str
    a: float | None
    b: float | None
    change: float | None
    low: float | None
    high: float | None
    verdict: Verdict


@dataclass(frozen=True, slots=True)
class Compared:
    """One load that both have, with its `repeats` on each side. `paired`: both asked the same requests."""

    load: str
    repeats: tuple[int, int]
    paired: bool
    valid: bool
    changes: tuple[Change, ...]


@dataclass(frozen=True, slots=True)
class Comparison:
    """Load by load. `warnings`: what else is different between both, and which measurements are not to be trusted."""

    a: str
    b: str
    loads: tuple[Compared, ...]
    warnings: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class _Side:
    """The measurements of one load on one side, each with the seed and repeat that its requests were drawn from."""

    drawn: tuple[tuple[int, int], ...]
    measurements: tuple[Measurement, ...]


def compare(a: Sequence[Run], b: Sequence[Run]) -> Comparison:
    """Compare b with a; several runs on a side count as further repeats. ValueError if a side has no run."""
    if not a or not b:
        raise ValueError("a comparison needs a run on each side")
    before, after = _sides(a), _sides(b)
    alike = {(run.scenario, run.workload) for run in a} == {(run.scenario, run.workload) for run in b}
    loads = tuple(_compared(name, before[name], after[name], alike) for name in before if name in after)
    return Comparison(_named(a), _named(b), loads, tuple(_warnings(a, b, before, after)))


def dump_comparison(comparison: Comparison) -> bytes:
    """As JSON."""
    return TypeAdapter(Comparison).dump_json(comparison, indent=1)


def lines(comparison: Comparison) -> list[str]:
    """As text for people, without colours."""
    found = [f"a: {comparison.a}", f"b: {comparison.b}"]
    found += [f"warning: {warning}" for warning in comparison.warnings]
    if not comparison.loads:
        return [*found, "no load was measured on both sides"]
    for load in comparison.loads:
        how = "paired by repeat" if load.paired else "not paired"
        trust = "" if load.valid else ", not to be trusted"
        repeats = f"{load.repeats[0]} and {load.repeats[1]} repeats"
        rows = [("", "a", "b", "b/a", "95 % interval", ""), *(_row(change) for change in load.changes)]
        widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
        found += ["", f"{load.load} ({repeats}, {how}{trust})"]
        for name, *cells, verdict in rows:
            middle = "  ".join(cell.rjust(width) for cell, width in zip(cells, widths[1:-1], strict=True))
            found.append(f"  {name.ljust(widths[0])}  {middle}  {verdict}".rstrip())
    few = any(min(load.repeats) < 2 for load in comparison.loads)
    return [*found, "", _MEANS, _FEWEST if few else _CHANCE]


def _named(runs: Sequence[Run]) -> str:
    return " + ".join(dict.fromkeys(f"{run.scenario} on {run.target} at {run.url}" for run in runs))


def _row(change: Change) -> tuple[str, ...]:
    figure = _BY_KEY[change.figure]
    unit = " ms" if figure.unit == "ms" else " %" if figure.unit == "%" else ""
    a, b = (f"{figure.text(value)}{unit}" if value is not None else NOTHING for value in (change.a, change.b))
    if figure is figures.ERROR_SHARE:
        text = [
            NOTHING if value is None else f"{value * 100:+.2f} pp" for value in (change.change, change.low, change.high)
        ]
    else:
        text = [NOTHING if value is None else f"{value:.3f}" for value in (change.change, change.low, change.high)]
    interval = NOTHING if change.low is None else f"{text[1]} to {text[2]}"
    return figure.title, a, b, text[0], interval, change.verdict


def _sides(runs: Sequence[Run]) -> dict[str, _Side]:
    found: dict[str, list[tuple[tuple[int, int], Measurement]]] = {}
    for run in runs:
        for level in levels(run):
            found.setdefault(level.name, []).extend(((run.seed, each.repeat), each) for each in level.measurements)
    sides = {name: sorted(each, key=lambda pair: pair[0]) for name, each in found.items()}
    return {name: _Side(tuple(d for d, _ in each), tuple(m for _, m in each)) for name, each in sides.items()}


def _compared(name: str, a: _Side, b: _Side, alike: bool) -> Compared:
    paired = alike and a.drawn == b.drawn and _asked(a) == _asked(b)
    valid = all(measurement.valid for measurement in (*a.measurements, *b.measurements))
    changes = tuple(_change(figure, a.measurements, b.measurements, paired) for figure in FIGURES)
    return Compared(name, (len(a.measurements), len(b.measurements)), paired, valid, changes)


def _asked(side: _Side) -> set[Stage]:
    return {measurement.stage for measurement in side.measurements}


def _change(figure: Figure, a: Sequence[Measurement], b: Sequence[Measurement], paired: bool) -> Change:
    """Both sides with the values that they have; a pair is only one with both."""
    before, after = [figure.of(each) for each in a], [figure.of(each) for each in b]
    if paired:
        whole = [x is not None and y is not None for x, y in zip(before, after, strict=True)]
        before, after = list(compress(before, whole)), list(compress(after, whole))
    left, right = ([value for value in values if value is not None] for values in (before, after))
    share = figure is figures.ERROR_SHARE
    mean = statistics.fmean if share or min([*left, *right, 1.0]) <= 0 else statistics.geometric_mean
    x, y = (mean(values) if values else None for values in (left, right))
    if not left or not right:
        return Change(figure.key, x, y, None, None, None, "not measured")
    if share:
        middle, half = _apart(left, right, paired)
        change, low, high = middle, *_interval(middle, half)
    elif min(*left, *right) > 0:
        middle, half = _apart([math.log(value) for value in left], [math.log(value) for value in right], paired)
        change = math.exp(middle)
        low, high = (None if end is None else math.exp(end) for end in _interval(middle, half))
    else:
        return Change(figure.key, x, y, None, None, None, "no ratio: a value is 0")
    equal = 0.0 if share else 1.0
    return Change(figure.key, x, y, change, low, high, _verdict(figure, low, high, equal))


def _apart(left: Sequence[float], right: Sequence[float], paired: bool) -> tuple[float, float | None]:
    """How far the mean of `right` is above that of `left`, and half of the interval around that."""
    differences = [y - x for x, y in zip(left, right, strict=True)] if paired else []
    half = half_width(differences) if paired else half_width_apart(left, right)
    return statistics.fmean(right) - statistics.fmean(left), half


def _interval(middle: float, half: float | None) -> tuple[float | None, float | None]:
    return (None, None) if half is None else (middle - half, middle + half)


def _verdict(figure: Figure, low: float | None, high: float | None, equal: float) -> Verdict:
    if low is None or high is None:
        return "one repeat: no interval"
    if low <= equal <= high:
        return "no difference shown"
    return "better" if (low > equal) == (figure.better == "higher") else "worse"


def _warnings(a: Sequence[Run], b: Sequence[Run], before: dict[str, _Side], after: dict[str, _Side]) -> Iterator[str]:
    for name, of in _CONDITIONS:
        left, right = (sorted({of(run) for run in runs}) for runs in (a, b))
        if left != right:
            yield f"the {name} differ: {' and '.join(left)} in a, {' and '.join(right)} in b"
    for name in before:
        if name in after and _asked(before[name]) != _asked(after[name]):
            yield f"the load {name} was asked for differently: its length, burstiness or bursts"
    for one, other, side in ((before, after, "a"), (after, before, "b")):
        alone = [name for name in one if name not in other]
        if alone:
            yield f"only in {side}: {', '.join(alone)}"
        for name, measured in one.items():
            if name in other:
                for flaw, _ in joined([each.flaws for each in measured.measurements]):
                    yield f"{name} in {side} is not to be trusted: {flaw}"

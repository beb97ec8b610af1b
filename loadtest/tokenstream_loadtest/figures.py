"""The numbers that are shown of a run, each under one name with one unit, and what the run comes to by them.

A `Level` is one load with all its repeats, and has one value for each name: counts are summed, latencies and shares are
those of all requests together, rates are medians; the range over repeats stands beside. It does not know how numbers
are laid out or drawn.
"""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Literal

from .results import Measurement, Run, Stage
from .slo import Objective
from .tally import Group

Text = Callable[[float], str]
Better = Literal["higher", "lower", ""]
Unit = Literal["", "1/s", "ms", "%", "us", "cores"]
_SCALES: dict[Unit, float] = {"%": 1e2, "us": 1e6}
OVER_REPEATS = "Over repeats counts are summed, latencies are of all requests together, rates are medians."
NOTHING = "–"  # noqa: RUF001 - a dash, as people print it for "none"


@dataclass(frozen=True, slots=True)
class Figure:
    """One number of a measurement: `of` gives it in seconds, cores, a share or a count; None if it was not measured.

    `unit` is what people read it in. Over repeats it is what `together` gives of all requests, or else the sum if it is
    `summed`, or else the median.
    """

    key: str
    title: str
    unit: Unit
    better: Better
    of: Callable[[Measurement], float | None]
    together: Callable[[Group], float | None] | None = None
    summed: bool = False

    def text(self, value: float | None) -> str:
        """The value in `unit`, without it."""
        if self.unit == "ms":
            return milliseconds(value)
        return number(None if value is None else value * _SCALES.get(self.unit, 1.0))


@dataclass(frozen=True, slots=True)
class Spread:
    """A figure over repeats: its one value, and the lowest and highest of a repeat. Of sums there is no such range."""

    value: float
    low: float
    high: float
    count: int


@dataclass(frozen=True, slots=True)
class Level:
    """One load with its measurements, one for each repeat. `group`: all their requests together."""

    name: str
    stage: Stage
    measurements: tuple[Measurement, ...]
    group: Group

    def spread(self, figure: Figure) -> Spread | None:
        """The figure over the repeats that have it."""
        values = [figure.of(measurement) for measurement in self.measurements]
        found = spread(values)
        if found is None:
            return None
        if figure.summed:
            total = sum(value for value in values if value is not None)
            return Spread(total, total, total, found.count)
        whole = figure.together(self.group) if figure.together else None
        return found if whole is None else replace(found, value=whole)

    def named(self, measurement: Measurement) -> str:
        """One of its measurements for people, who count repeats from 1."""
        return f"{self.name}, repeat {measurement.repeat + 1}" if len(self.measurements) > 1 else self.name

    @property
    def valid(self) -> bool:
        """Whether every repeat can be trusted."""
        return all(measurement.valid for measurement in self.measurements)


@dataclass(frozen=True, slots=True)
class Judged:
    """One objective at one level: `ok` if all its requests together met it. `met`: in so many repeats by themselves."""

    objective: Objective
    level: Level
    values: Spread | None
    ok: bool
    met: int


def spread(values: Iterable[float | None]) -> Spread | None:
    """Median, lowest and highest of the values that there are; None of none."""
    there = sorted(value for value in values if value is not None)
    return Spread(statistics.median(there), there[0], there[-1], len(there)) if there else None


def levels(run: Run) -> list[Level]:
    """The loads of a run in the order of their first measurement.

    A load that comes again within one repeat, as behind a spike, is a level of its own: "2/s poisson (2)". So is each
    trial of a search: of two at the same load the first was flawed.
    """
    found: dict[str, list[Measurement]] = {}
    times: Counter[tuple[int, str]] = Counter()
    for measurement in run.measurements:
        label = measurement.stage.label
        repeat = 0 if run.found is not None else measurement.repeat
        times[repeat, label] += 1
        count = times[repeat, label]
        found.setdefault(label if count == 1 else f"{label} ({count})", []).append(measurement)
    return [Level(name, each[0].stage, tuple(each), together(each, "all")) for name, each in found.items()]


def together(measurements: Iterable[Measurement], group: str) -> Group:
    """All requests of one group of several measurements."""
    merged = Group()
    for measurement in measurements:
        if group in measurement.tally.groups:
            merged.merge(measurement.tally.groups[group])
    return merged


def judge(run: Run, of: Iterable[Level]) -> Iterator[Judged]:
    """Every objective of the run at every level. ValueError if the run holds an objective that is none."""
    objectives = [Objective.parse(text) for text in run.objectives]
    for level in of:
        groups = [measurement.all for measurement in level.measurements]
        for objective in objectives:
            values = spread(objective.measured(group) for group in groups)
            whole = objective.measured(level.group)
            values = replace(values, value=whole) if values is not None and whole is not None else None
            met = sum(objective.met(group) for group in groups)
            yield Judged(objective, level, values, objective.met(level.group), met)


def found_level(run: Run) -> Level | None:
    """The one trial that a search found; None if it found none, or the run was no search."""
    stage = run.found.stage if run.found is not None else None
    fit = [level for level in levels(run) if level.valid and level.stage == stage]
    return fit[-1] if fit else None


def decisive(run: Run, of: Iterable[Level]) -> list[Judged]:
    """What decides whether the objectives were met: each at every level, or of a search at what it found alone."""
    if run.found is None:
        return list(judge(run, of))
    found = found_level(run)
    return list(judge(run, [found])) if found is not None else []


def met(run: Run) -> bool:
    """Whether every objective was met, or was at the load that was searched for."""
    if run.found is not None:
        return run.found.stage is not None
    return all(judged.ok for judged in judge(run, levels(run)))


def highest_kept(run: Run) -> float:
    """The highest load of which a measurement without a flaw met every objective; 0 without one."""
    objectives = [Objective.parse(text) for text in run.objectives]
    fit = [m for m in run.measurements if m.valid and all(objective.met(m.all) for objective in objectives)]
    return max((measurement.stage.load for measurement in fit), default=0.0)


def trusted(run: Run) -> bool:
    """Whether nothing is wrong with it: all was measured, without a flaw. A search makes flawed trials again: one
    without a flaw is enough."""
    there = [measurement.valid for measurement in run.measurements]
    return not run.interrupted and (any(there) if run.found is not None else bool(there) and all(there))


def best_level(run: Run, of: Iterable[Level]) -> Level | None:
    """The level of the highest goodput among those that can be trusted and met every objective; None without one."""
    if run.found is not None:
        return found_level(run)
    there = list(of)
    missed = {judged.level.name for judged in judge(run, there) if not judged.ok}
    fit = [level for level in there if level.valid and level.name not in missed]
    rates = [(found.value, level) for level in fit if (found := level.spread(GOODPUT)) is not None]
    return max(rates, key=lambda pair: pair[0], default=(0.0, None))[1]


def overhead(measurement: Measurement) -> float | None:
    """Seconds of CPU that the generator used for each token; None if it is not known."""
    tokens = measurement.all.output_tokens
    return measurement.cores.generator * measurement.seconds / tokens if measurement.cores and tokens else None


def number(value: float | None) -> str:
    """Three digits or all before the point, with thousands apart."""
    if value is None:
        return NOTHING
    size = abs(value)
    if size >= 99.95 or value == int(value):
        return f"{value:,.0f}"
    return f"{value:.1f}" if size >= 9.995 else f"{value:.2f}" if size >= 0.9995 else f"{value:.3g}"


def milliseconds(seconds: float | None) -> str:
    """Without the unit; a microsecond is the least that histograms tell, so it is nothing."""
    return number(None if seconds is None else 0.0 if seconds <= 1e-6 else seconds * 1e3)


def duration(seconds: float | None) -> str:
    """Seconds in the unit that suits them."""
    if seconds is None:
        return NOTHING
    if seconds >= 1:
        return f"{number(seconds)} s"
    return f"{number(seconds * 1e3)} ms" if seconds >= 1e-3 else f"{number(seconds * 1e6)} µs"


def latency(metric: str, point: str) -> Figure:
    """The figure of a histogram of `tally.METRICS` at "mean", "max" or "p95"."""

    def of(group: Group) -> float | None:
        histogram = group.histograms[metric]
        if point == "mean":
            return histogram.mean
        return histogram.highest if point == "max" else histogram.percentile(float(point[1:]))

    title = metric.replace("_", " ") if metric in {"queue", "lag", "e2e"} else metric.upper().replace("_", " ")
    return _of_group(f"{metric}_{point}", f"{title} {point}", "ms", "lower", of)


def _of_group(key: str, title: str, unit: Unit, better: Better, of: Callable[[Group], float | None]) -> Figure:
    return Figure(key, title, unit, better, lambda measurement: of(measurement.all), of)


def _sum(key: str, title: str, of: Callable[[Measurement], float | None], better: Better = "") -> Figure:
    return Figure(key, title, "", better, of, summed=True)


def _rate(of: Callable[[Measurement], float]) -> Callable[[Measurement], float | None]:
    return lambda measurement: of(measurement) if measurement.seconds > 0 else None


def _error_share(group: Group) -> float | None:
    return group.errors / group.requests if group.requests else None


REQUESTS = _sum("requests", "requests", lambda measurement: measurement.all.requests)
OK = _sum("ok", "ok", lambda measurement: measurement.all.outcomes.get("ok", 0))
ERRORS = _sum("errors", "errors", lambda measurement: measurement.all.errors, "lower")
ERROR_SHARE = _of_group("errors_share", "errors", "%", "lower", _error_share)
ABANDONED = _sum("abandoned", "abandoned", lambda measurement: measurement.all.outcomes.get("abandoned", 0))
STALLS = _sum("stalls", "stalls", lambda measurement: len(measurement.stalls), "lower")
SECONDS = _sum("seconds", "seconds", lambda measurement: measurement.seconds)
TOKENS_PER_SECOND = Figure("tokens_per_second", "tokens/s", "1/s", "higher", _rate(lambda m: m.tokens_per_second))
REQUESTS_PER_SECOND = Figure(
    "requests_per_second", "requests/s", "1/s", "higher", _rate(lambda m: m.requests_per_second)
)
GOODPUT = Figure("goodput", "goodput/s", "1/s", "higher", _rate(lambda m: m.goodput))
TOO_SLOW = Figure("slow", "too slow/s", "1/s", "lower", _rate(lambda m: max(m.requests_per_second - m.goodput, 0.0)))
FAILED = Figure("failed", "failed/s", "1/s", "lower", _rate(lambda m: m.all.errors / m.seconds))
OVERHEAD = Figure("overhead_per_token", "generator CPU per token", "us", "lower", overhead)

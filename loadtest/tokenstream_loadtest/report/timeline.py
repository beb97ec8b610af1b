"""What happened when in one measurement: a chart by the second.

Rows from the server's metrics where there are any, else from what the client saw; stalls are shaded over all of them
and errors marked below. It does not know of other measurements.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from ..figures import Level, duration, number
from ..results import Measurement, Sample
from . import charts
from .charts import LEFT, RIGHT, WIDTH, Axis
from .markup import Markup
from .plots import figure_of, key_of

_END = WIDTH - RIGHT
_MOST_STEPS = 120
_CEILING, _ROW, _TALL = 16.0, 72.0, 46.0


@dataclass(frozen=True, slots=True)
class _Lane:
    """One row of a timeline: areas that keep their values for a while, of (class, name, values by seconds, last)."""

    title: str
    unit: str
    series: tuple[tuple[str, str, tuple[tuple[float, float], ...]], ...]
    scale: float = 1.0

    def value(self, values: Sequence[tuple[float, float]], at: float) -> float | None:
        """The value that holds at a time."""
        return next((value for time, value in reversed(values) if time <= at), None)


def timeline(level: Level, measurement: Measurement) -> Markup | None:
    """One measurement by the second: who was served and who waited, the KV cache, tokens, errors, stalls."""
    seconds = measurement.tally.seconds
    length = max(
        [measurement.seconds, *(at + 1.0 for at in seconds), *(sample.at for sample in measurement.samples)],
        default=0.0,
    )
    if length <= 0 or not (seconds or measurement.samples):
        return None
    width = max(1, math.ceil(length / _MOST_STEPS))
    lanes = _lanes(measurement, width)
    axis = charts.linear([length], LEFT, _END, most=6)
    axis = Axis(0.0, length, LEFT, _END, tuple(tick for tick in axis.ticks if tick[0] <= length))
    base = _floor(len(lanes) - 1) + 4
    drawn = [*_areas(lanes, axis), *_stalls(measurement, axis, base), *_failures(measurement, axis, base)]
    drawn += _tips(lanes, axis, length, width, base)
    where = level.named(measurement)
    title = f"Timeline of {where}"
    told = f"{number(length)} s, {len(measurement.stalls)} stalls, {measurement.all.errors} errors"
    chart = charts.svg(
        title, told, base + charts.BOTTOM, charts.across(axis, "seconds since the load began", _CEILING, base), *drawn
    )
    shown = {name: class_ for lane in lanes for class_, name, _ in lane.series}
    shown |= ({"stall": "stall"} if measurement.stalls else {}) | (
        {"error": "failed"} if measurement.all.errors else {}
    )
    return figure_of(where, chart, key=key_of((class_, name) for name, class_ in shown.items()))


def _floor(row: int) -> float:
    """The pixel of 0 in a row."""
    return _CEILING + _TALL + row * _ROW


def _areas(lanes: Sequence[_Lane], axis: Axis) -> Iterable[Markup]:
    for row, lane in enumerate(lanes):
        floor = _floor(row)
        values = (value * lane.scale for *_, series in lane.series for _, value in series)
        y_axis = charts.linear(values, floor, floor - _TALL, most=2)
        yield charts.down(y_axis, lane.title)
        for class_, _, series in lane.series:
            pixels = [(axis.at(time), y_axis.at(value * lane.scale)) for time, value in series]
            yield charts.steps(pixels, _END, floor, class_)


def _stalls(measurement: Measurement, axis: Axis, base: float) -> Iterable[Markup]:
    for stall in measurement.stalls:
        left, right = axis.at(stall.at), axis.at(stall.at + stall.seconds)
        tip = f"stall: no response for {duration(stall.seconds)}"
        yield charts.bar(left, _CEILING, right - left, base - _CEILING, tip, "stall")


def _failures(measurement: Measurement, axis: Axis, base: float) -> Iterable[Markup]:
    """A mark for each step with errors, as many of them as there is room for."""
    step = max(1, math.ceil(axis.high / _MOST_STEPS))
    failed: dict[int, int] = {}
    for at, second in measurement.tally.seconds.items():
        if second.errors:
            failed[at // step * step] = failed.get(at // step * step, 0) + second.errors
    for at, count in sorted(failed.items()):
        yield charts.point(axis.at(at + step / 2), base, f"{at} s: {count} failed", "failed", 3)


def _lanes(measurement: Measurement, width: int) -> list[_Lane]:
    samples, tokens = measurement.samples, _received(measurement, width)
    if not samples:
        live = _Lane("requests under way", "", (("c0", "under way, by the client", _under_way(measurement, width)),))
        return [live, _Lane("tokens/s", " tokens/s", (("c2", "received by the client", tokens),))]
    thinned = samples[:: max(1, math.ceil(len(samples) / _MOST_STEPS))]

    def taken(of: str) -> tuple[tuple[float, float], ...]:
        values = ((sample.at, _finite(sample, of)) for sample in thinned)
        return tuple((at, value) for at, value in values if value is not None)

    return [
        _Lane("requests", "", (("c0", "running", taken("running")), ("c1", "waiting", taken("waiting")))),
        _Lane("KV cache, %", " %", (("c3", "KV cache in use", taken("kv_usage")),), 100.0),
        _Lane(
            "tokens/s",
            " tokens/s",
            (
                ("c2", "received by the client", tokens),
                ("c4 edge", "by the server", taken("generation_tokens_per_second")),
            ),
        ),
    ]


def _finite(sample: Sample, name: str) -> float | None:
    value = float(getattr(sample, name))
    return value if math.isfinite(value) else None


def _received(measurement: Measurement, width: int) -> tuple[tuple[float, float], ...]:
    tokens = {at: float(second.tokens) for at, second in measurement.tally.seconds.items()}
    return tuple((at, sum(tokens.get(at + each, 0.0) for each in range(width)) / width) for at in _grid(tokens, width))


def _under_way(measurement: Measurement, width: int) -> tuple[tuple[float, float], ...]:
    """Requests sent and not ended, at the highest in each step."""
    changes = {at: second.sent for at, second in measurement.tally.seconds.items()}
    live, found = 0, []
    for at in _grid(changes, width):
        most = 0
        for each in range(at, at + width):
            live += changes.get(each, 0)
            most = max(most, live)
            second = measurement.tally.seconds.get(each)
            live -= second.ended if second else 0
        found.append((float(at), float(most)))
    return tuple(found)


def _grid(seconds: Mapping[int, float], width: int) -> range:
    return range(0, max(seconds, default=-1) + 1, width)


def _tips(lanes: Sequence[_Lane], axis: Axis, length: float, width: int, base: float) -> Iterable[Markup]:
    """One strip for each step that tells all values in it."""
    for begin in range(0, math.ceil(length), width):
        told = [
            f"{number(value * lane.scale)}{lane.unit} {name}"
            for lane in lanes
            for _, name, values in lane.series
            if (value := lane.value(values, begin + width - 0.001)) is not None
        ]
        left, right = axis.at(begin), axis.at(min(begin + width, length))
        yield charts.bar(left, _CEILING, right - left, base - _CEILING, f"{begin} s: {'; '.join(told)}", "strip")

"""The charts of a run: throughput against latency, percentiles, distributions, goodput.

Each is a `<figure>` with its caption and its key, and is None where there is nothing to draw. It does not know in which
order they are shown, nor how they look.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

from ..figures import FAILED, GOODPUT, TOKENS_PER_SECOND, TOO_SLOW, Level, duration, latency, number
from ..histograms import Histogram
from ..slo import Objective
from . import charts
from .charts import LEFT, RIGHT, TOP, WIDTH, Axis, colour
from .markup import Child, Markup, join, tag

NAMES = {"ttft": "TTFT", "itl": "ITL"}
_END = WIDTH - RIGHT
_HEIGHT = 250.0
_BASE = _HEIGHT - charts.BOTTOM
_HEAD = TOP + 16  # where plots begin, below the title of the y axis
_BINS = 56  # of a distribution
_MARKED = (0.5, 0.9, 0.95, 0.99, 0.999, 0.9999)
_LOG_FROM = 12.0  # highest over lowest


def milliseconds(seconds: float) -> str:
    """For axes."""
    return charts.plain(seconds * 1e3)


def throughput(levels: Sequence[Level], objectives: Sequence[Objective], metric: str) -> Markup | None:
    """Tokens per second against the 95th percentile of a latency: one point for each load, lighter ones for repeats."""
    figure = latency(metric, "p95")
    spreads = [
        (index, level, x, y)
        for index, level in enumerate(levels)
        if (x := level.spread(TOKENS_PER_SECOND)) and (y := level.spread(figure))
    ]
    if not spreads:
        return None
    x_axis = charts.linear((x.high for *_, x, _ in spreads), LEFT, _END)
    values = [value for *_, y in spreads for value in (y.low, y.high)]
    y_axis = _latency_axis(values, _BASE, _HEAD)
    drawn = [charts.limit(y_axis, goal.limit, f"limit {goal}") for goal in objectives if goal.name == figure.key]
    drawn.append(charts.line([(x_axis.at(x.value), y_axis.at(y.value)) for *_, x, y in spreads], "path"))
    places: list[tuple[float, float, str]] = []
    words: list[str] = []
    for index, level, x, y in spreads:
        for measurement in level.measurements if len(level.measurements) > 1 else ():
            speed, value = TOKENS_PER_SECOND.of(measurement), figure.of(measurement)
            if speed is not None and value is not None:
                tip = f"{level.named(measurement)}: {number(speed)} tokens/s, {duration(value)}"
                drawn.append(charts.point(x_axis.at(speed), y_axis.at(value), tip, f"light {colour(index)}", 3))
        said = f"{level.name}: {number(x.value)} tokens/s, {duration(y.value)}"
        words.append(said)
        drawn.append(charts.point(x_axis.at(x.value), y_axis.at(y.value), said, colour(index), 5))
        places.append((x_axis.at(x.value), y_axis.at(y.value), _short(level)))
    title = f"Throughput against {NAMES[metric]} p95"
    chart = charts.svg(
        title,
        "; ".join(words),
        _HEIGHT,
        charts.down(y_axis, _axis_title(f"{NAMES[metric]} p95, ms", y_axis)),
        charts.across(x_axis, "output tokens/s", _HEAD, _BASE),
        *drawn,
        charts.labels(places),
    )
    return figure_of(title, chart, note="Right and down is better.")


def percentiles(levels: Sequence[Level], metric: str) -> Markup | None:
    """How high a latency is at each share of the requests or tokens, with every further nine as far again."""
    there = [(index, level, level.group.histograms[metric]) for index, level in enumerate(levels)]
    there = [(index, level, histogram) for index, level, histogram in there if len(histogram)]
    if not there:
        return None
    x_axis = charts.nines(max(2 * len(histogram) for *_, histogram in there), LEFT, _END - 10)
    curves = {index: _curve(histogram) for index, _, histogram in there}
    values = [value for curve in curves.values() for _, value in curve]
    y_axis = _latency_axis(values, _BASE, _HEAD)
    drawn: list[Markup] = []
    words: list[str] = []
    for index, level, histogram in there:
        pixels = [(x_axis.at(charts.nine(share)), y_axis.at(value)) for share, value in curves[index]]
        drawn.append(charts.line(pixels, colour(index)))
        marked = [(share, histogram.percentile(share * 100) or 0.0) for share in _MARKED if _tells(histogram, share)]
        for share, value in marked:
            tip = f"{level.name}: {share * 100:g} % within {duration(value)}"
            drawn.append(charts.point(x_axis.at(charts.nine(share)), y_axis.at(value), tip, colour(index), 3))
        words.append(
            f"{level.name}: {', '.join(f'{share * 100:g} % within {duration(value)}' for share, value in marked)}"
        )
    title = f"{NAMES[metric]} by percentile"
    chart = charts.svg(
        title,
        "; ".join(words),
        _HEIGHT,
        charts.down(y_axis, _axis_title(f"{NAMES[metric]}, ms", y_axis)),
        charts.across(x_axis, "share that was as fast or faster", _HEAD, _BASE),
        *drawn,
    )
    return figure_of(title, chart, key=key_of((colour(index), level.name) for index, level, _ in there))


def distribution(levels: Sequence[Level], metric: str) -> Markup | None:
    """How often each latency came: a row of bars, as wide as each other by their logarithm, for every load."""
    there = [(index, level, level.group.histograms[metric]) for index, level in enumerate(levels)]
    there = [(index, level, histogram) for index, level, histogram in there if len(histogram)]
    if not there:
        return None
    values = [value for *_, histogram in there for value in (histogram.percentile(0.0), histogram.highest) if value]
    axis = charts.logarithmic(values, 4, _END, milliseconds)
    row, tall = 44.0, 26.0
    base = row * len(there)
    rows: list[Markup] = []
    words: list[str] = []
    for at, (index, level, histogram) in enumerate(there):
        floor = row * (at + 1)
        p50, p95 = (histogram.percentile(share) or 0.0 for share in (50, 95))
        words.append(f"{level.name}: p50 {duration(p50)}, p95 {duration(p95)}")
        rows += _bars(histogram, axis, floor, tall, level.name, colour(index))
        rows += [
            tag("line", class_="mark", x1=axis.at(p), x2=axis.at(p), y1=floor - tall, y2=floor + 3) for p in (p50, p95)
        ]
        rows.append(tag("text", words[-1], class_="label", x=axis.begin, y=floor - tall - 5))
        rows.append(tag("line", class_="floor", x1=axis.begin, x2=_END, y1=floor, y2=floor))
    title = f"{NAMES[metric]} distribution"
    below = charts.across(axis, f"{NAMES[metric]}, ms, log scale", row - tall, base)
    chart = charts.svg(title, "; ".join(words), base + charts.BOTTOM, below, *rows)
    return figure_of(title, chart, note="Each row is scaled to its own highest bar; the lines are p50 and p95.")


def goodput(levels: Sequence[Level], objectives: Sequence[Objective]) -> Markup | None:
    """Requests per second at each load: those within every objective, the other answers, errors."""
    rates = []
    for level in levels:
        good, slow, failed = (level.spread(figure) for figure in (GOODPUT, TOO_SLOW, FAILED))
        if good and slow and failed:
            rates.append((level, good.value, slow.value, failed.value))
    if not rates:
        return None
    row = 36.0
    base = row * len(rates)
    axis = charts.linear((sum(of) for _, *of in rates), 4, _END)
    drawn: list[Markup] = []
    words: list[str] = []
    parts = (("good", "good"), ("too slow", "slow"), ("failed", "failed"))
    for at, (level, *of) in enumerate(rates):
        y = row * at
        x = axis.begin
        for rate, (name, class_) in zip(of, parts, strict=True):
            if rate:
                width = axis.at(rate) - axis.begin
                drawn.append(charts.bar(x, y + 17, width, 12, f"{level.name}: {number(rate)}/s {name}", class_))
                x = round(x + width, 2)
        said = f"{level.name}: {number(of[0])} good requests/s"
        words.append(said)
        drawn.append(tag("text", said, class_="label", x=axis.begin, y=y + 12))
    title = "Requests per second at each load"
    chart = charts.svg(
        title, "; ".join(words), base + charts.BOTTOM, charts.across(axis, "requests/s", 12, base), *drawn
    )
    name = "within every objective" if objectives else "answered"
    shown = [("good", name), *([("slow", "answered, but too slow")] if objectives else []), ("failed", "failed")]
    return figure_of(title, chart, key=key_of(shown))


def _curve(histogram: Histogram) -> list[tuple[float, float]]:
    """Shares with the values that they do not exceed, evenly along the axis, up to the highest value."""
    last = math.log10(2 * len(histogram))
    count = math.ceil(last / 0.05) + 2
    shares = [1 - 10 ** -(last * at / (count - 1)) for at in range(count)]
    found: list[tuple[float, float]] = []
    below = 0
    for value, many in histogram.buckets():
        below += many
        while len(found) < count and below >= max(shares[len(found)] * len(histogram) - 1e-9, 1):
            found.append((shares[len(found)], value))
    return found


def _short(level: Level) -> str:
    """Its load and nothing else, for a place in a chart: "16", "4/s"."""
    return f"{level.stage.load:g}" if level.stage.arrivals == "closed" else f"{level.stage.load:g}/s"


def _tells(histogram: Histogram, share: float) -> bool:
    """Whether there are values enough for half a one to lie beyond that share."""
    return len(histogram) * (1 - share) >= 0.5 - 1e-9


def _bars(histogram: Histogram, axis: Axis, floor: float, tall: float, name: str, class_: str) -> Iterable[Markup]:
    """Bars on `floor`, the highest of them `tall`."""
    counts = _binned(histogram, axis)
    most, width = max(counts.values()), (axis.end - axis.begin) / _BINS
    for place, count in sorted(counts.items()):
        low, high = (axis.low * (axis.high / axis.low) ** ((place + side) / _BINS) for side in (0, 1))
        share = f"{100 * count / len(histogram):.1f} %"
        tip = f"{name}: {count:,} from {duration(low)} to {duration(high)} ({share})"
        x, height = round(axis.begin + place * width, 2), tall * count / most
        yield charts.bar(x, round(floor - height, 2), width - 0.8, height, tip, class_)


def _binned(histogram: Histogram, axis: Axis) -> dict[int, int]:
    counts: dict[int, int] = {}
    for value, count in histogram.buckets():
        share = math.log(value / axis.low) / math.log(axis.high / axis.low)
        place = min(max(int(share * _BINS), 0), _BINS - 1)
        counts[place] = counts.get(place, 0) + count
    return counts


def _latency_axis(values: Sequence[float], begin: float, end: float) -> Axis:
    positive = [value for value in values if value > 0]
    if positive and max(positive) / min(positive) > _LOG_FROM:
        return charts.logarithmic(positive, begin, end, milliseconds)
    axis = charts.linear((value * 1e3 for value in values), begin, end)
    return Axis(axis.low / 1e3, axis.high / 1e3, begin, end, tuple((value / 1e3, text) for value, text in axis.ticks))


def _axis_title(title: str, axis: Axis) -> str:
    return f"{title}, log scale" if axis.log else title


def key_of(entries: Iterable[tuple[str, str]]) -> Markup:
    """The key of a chart: classes with what they stand for."""
    return tag(
        "ul", *(tag("li", tag("span", class_=f"swatch {class_}"), name) for class_, name in entries), class_="key"
    )


def figure_of(title: str, chart: Markup, key: Child = None, note: str | None = None) -> Markup:
    """A chart with its caption."""
    caption = tag("figcaption", tag("b", title), tag("span", note) if note else None)
    return tag("figure", join(caption, key), chart)

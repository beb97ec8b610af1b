"""Charts as inline SVG: axes with round ticks, lines, points and bars, in colours that the page's style names.

Every chart is 400 units wide, so that its text can be read on a phone, and says in words what it shows. A colour is the
class "c0" to "c7"; a `<title>` is what a pointer is told. It does not know what is drawn.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from ..figures import Text
from .markup import Markup, join, tag

WIDTH, LEFT, RIGHT, TOP, BOTTOM = 400.0, 44.0, 10.0, 10.0, 32.0
COLOURS = 8
_LETTER = 6.0  # about the width of one in a label


@dataclass(frozen=True, slots=True)
class Axis:
    """Values from `low` to `high` on pixels from `begin` to `end`; beyond is drawn at the edge.

    `ticks`: values with their texts.
    """

    low: float
    high: float
    begin: float
    end: float
    ticks: tuple[tuple[float, str], ...]
    log: bool = False

    def at(self, value: float) -> float:
        """The pixel of a value."""
        low, high = (math.log(self.low), math.log(self.high)) if self.log else (self.low, self.high)
        place = math.log(max(value, self.low)) if self.log else value
        share = min(max((place - low) / (high - low), 0.0), 1.0)
        return round(self.begin + share * (self.end - self.begin), 2)


def linear(values: Iterable[float], begin: float, end: float, most: int = 5) -> Axis:
    """From 0 to the round number above all values, with about `most` ticks."""
    high = max((value for value in values if math.isfinite(value)), default=0.0)
    high = high if high > 0 else 1.0
    step = _round_up(high / most)
    count = math.ceil(high / step - 1e-9)
    return Axis(0.0, count * step, begin, end, tuple((at * step, plain(at * step)) for at in range(count + 1)))


def logarithmic(values: Iterable[float], begin: float, end: float, text: Text, most: int = 7) -> Axis:
    """From the round number (1, 2 or 5 in each decade) below all positive values to the one above them."""
    positive = [value for value in values if 0 < value < math.inf] or [1.0]
    rounds = [digit * 10.0**power for power in range(-9, 12) for digit in (1, 2, 5)]
    first = max((at for at, value in enumerate(rounds) if value <= min(positive)), default=0)
    last = min((at for at, value in enumerate(rounds) if value >= max(positive)), default=len(rounds) - 1)
    shown = rounds[first : max(last, first + 1) + 1]
    ticks = shown if len(shown) <= most else [value for value in shown if f"{value:e}".startswith("1.")]
    return Axis(shown[0], shown[-1], begin, end, tuple((value, text(value)) for value in ticks), log=True)


def nines(most: int, begin: float, end: float) -> Axis:
    """Shares below 1, as their distance to 1 shrinks by tens: each further nine is as far again (HdrHistogram's axis).

    It reaches as far as `most` values can tell. Places are `nine(share)`.
    """
    high = max(2.0, math.log10(max(most, 1)))
    shares = [0.0, 0.5, 0.9, 0.99, 0.999, 0.9999, 0.99999, 0.999999]
    ticks = tuple((nine(share), f"{share * 100:.6g} %") for share in shares if nine(share) <= high + 1e-9)
    return Axis(0.0, high, begin, end, ticks)


def nine(share: float) -> float:
    """How many nines a share has: 0.9 is one, 0.99 are two."""
    return -math.log10(1 - share) if share < 1 else math.inf


def svg(title: str, description: str, height: float, *children: Markup) -> Markup:
    """One chart, with its name, which no other chart of the page has, and its words for who cannot see it."""
    name = f"chart{zlib.crc32(title.encode()):x}"
    return tag(
        "svg",
        tag("title", title, id=f"{name}t"),
        tag("desc", description, id=f"{name}d"),
        *children,
        viewBox=f"0 0 {WIDTH:g} {height:g}",
        role="img",
        aria_labelledby=f"{name}t {name}d",
    )


def down(axis: Axis, title: str, right: float = WIDTH - RIGHT) -> Markup:
    """A y axis: its ticks with lines across, its title above."""
    marks = [
        join(
            tag("line", class_="grid", x1=LEFT, x2=right, y1=axis.at(value), y2=axis.at(value)),
            tag("text", text, class_="tick end", x=LEFT - 5, y=axis.at(value) + 3.5),
        )
        for value, text in axis.ticks
    ]
    return join(*marks, tag("text", title, class_="axis", x=0, y=min(axis.begin, axis.end) - 9))


def across(axis: Axis, title: str, top: float, bottom: float) -> Markup:
    """An x axis at `bottom`: its ticks with lines up to `top`, its title below."""
    marks: list[Markup] = []
    free = -math.inf
    for value, text in axis.ticks:
        place, half = axis.at(value), len(text) * _LETTER / 2
        marks.append(tag("line", class_="grid", x1=place, x2=place, y1=top, y2=bottom))
        if place - half >= free:
            marks.append(tag("text", text, class_="tick middle", x=min(place, WIDTH - half), y=bottom + 13))
            free = place + half + 4
    return join(*marks, tag("text", title, class_="axis end", x=axis.end, y=bottom + 27))


def line(points: Sequence[tuple[float, float]], class_: str) -> Markup:
    """A line through pixels."""
    return tag("polyline", points=" ".join(f"{x:g},{y:g}" for x, y in points), class_=f"line {class_}")


def steps(points: Sequence[tuple[float, float]], end: float, bottom: float, class_: str) -> Markup:
    """An area under a line that keeps each value until the next, the last one until `end`."""
    if not points:
        return Markup()
    path = [f"M{points[0][0]:g},{bottom:g}V{points[0][1]:g}"]
    path += [f"H{x:g}V{y:g}" for x, y in points[1:]]
    return tag("path", class_=f"steps {class_}", d="".join(path) + f"H{end:g}V{bottom:g}Z")


def point(x: float, y: float, tip: str, class_: str, radius: float = 4) -> Markup:
    """A point that says what it is."""
    return tag("circle", tag("title", tip), class_=f"pt {class_}", cx=x, cy=y, r=radius)


def bar(x: float, y: float, width: float, height: float, tip: str, class_: str) -> Markup:
    """A bar that says what it is; less than half a pixel is drawn as that."""
    shown = tag("title", tip) if tip else None
    return tag(
        "rect",
        shown,
        class_=f"bar {class_}",
        x=x,
        y=y,
        width=round(max(width, 0.5), 2),
        height=round(max(height, 0.5), 2),
    )


def labels(places: Sequence[tuple[float, float, str]]) -> Markup:
    """Texts beside points, where there is room: what would lie over another label is left out."""
    taken = [(x - 4, y - 4, x + 4, y + 4) for x, y, _ in places]
    shown: list[Markup] = []
    for x, y, text in places:
        width = len(text) * _LETTER
        for left, base in ((x - width / 2, y - 9), (x - width / 2, y + 17), (x + 8, y + 4), (x - 8 - width, y + 4)):
            box = (left, base - 10, left + width, base + 2)
            inside = box[0] >= LEFT and box[2] <= WIDTH and box[1] >= 0
            clear = all(box[2] < a or box[0] > c or box[3] < b or box[1] > d for a, b, c, d in taken)
            if inside and clear:
                taken.append(box)
                shown.append(tag("text", text, class_="label", x=left, y=base))
                break
    return join(*shown)


def limit(axis: Axis, value: float, text: str, right: float = WIDTH - RIGHT) -> Markup:
    """A dashed line across for an objective, if the axis reaches there."""
    if not axis.low <= value <= axis.high:
        return Markup()
    y = axis.at(value)
    return join(
        tag("line", class_="limit", x1=LEFT, x2=right, y1=y, y2=y),
        tag("text", text, class_="limit-name end", x=right, y=y - 3),
    )


def colour(index: int) -> str:
    """The class of the colour of the series `index`; after COLOURS they come again, dashed."""
    return f"c{index % COLOURS}" + (" again" if index >= COLOURS else "")


def plain(value: float) -> str:
    """A round number for a tick."""
    return f"{value:,.6g}"


def _round_up(value: float) -> float:
    """The next of 1, 2, 2.5 or 5 in any decade."""
    decade = 10.0 ** math.floor(math.log10(value))
    return next(digit * decade for digit in (1, 2, 2.5, 5, 10) if digit * decade >= value * (1 - 1e-9))

"""The plot of a comparison as one SVG file: tokens/s, TTFT and ITL against callers at once, a line for each server.

It holds its own colours for light and dark, and text of the reader's fonts, for it is shown as a picture. It does not
know which server is whose.
"""

from __future__ import annotations

from collections.abc import Sequence

from ..figures import TOKENS_PER_SECOND, Figure, latency, number
from ..report import charts
from ..report.charts import LEFT, RIGHT, WIDTH, Axis
from ..report.markup import Markup, join, tag
from .standings import Standing

_HEIGHT, _HEAD, _KEY, _EDGE = 244.0, 32.0, 34.0, 8.0
_BASE = _HEIGHT - charts.BOTTOM
_STYLE = """
svg { --ink: #1f2328; --soft: #59636e; --rule: #d1d9e0; --paper: #ffffff;
  --c0: #0a64b0; --c1: #cc5500; --c2: #00835f; --c3: #b0467f;
  --c4: #9a6a00; --c5: #2e8fc4; --c6: #6d4fb3; --c7: #59636e }
@media (prefers-color-scheme: dark) {
  svg { --ink: #f0f6fc; --soft: #9198a1; --rule: #3d444d; --paper: #0d1117;
    --c0: #63b3f5; --c1: #ff9550; --c2: #3fd1a3; --c3: #ec94c4;
    --c4: #e5bb4f; --c5: #8fd6ff; --c6: #b8a1f5; --c7: #b4bcc6 }
}
.paper { fill: var(--paper) }
text { font: 12px system-ui, "Segoe UI", "Noto Sans", Helvetica, Arial, sans-serif; fill: var(--soft) }
text.axis, text.key { fill: var(--ink); font-size: 13px }
.end { text-anchor: end } .middle { text-anchor: middle }
.grid { stroke: var(--rule); stroke-width: 1 }
.line { fill: none; stroke-width: 2.2; stroke-linejoin: round }
"""
_COLOURS = "\n".join(f".line.c{at} {{ stroke: var(--c{at}) }} .pt.c{at} {{ fill: var(--c{at}) }}" for at in range(8))
_PANELS: tuple[tuple[Figure, str], ...] = (
    (TOKENS_PER_SECOND, "output tokens/s, prompts included (more is better)"),
    (latency("ttft", "p50"), "TTFT p50, ms (less is better)"),
    (latency("itl", "p95"), "ITL p95, ms (less is better)"),
)


def draw(found: Sequence[Standing]) -> str:
    """The SVG file's text. `found` must not be empty."""
    width, height = WIDTH * len(_PANELS), _HEIGHT + _KEY
    callers = sorted({at for standing in found for at in standing.levels})
    panels = [
        tag("g", _panel(found, callers, figure, title), transform=f"translate({WIDTH * at:g} {_KEY:g})")
        for at, (figure, title) in enumerate(_PANELS)
    ]
    said = "; ".join(f"{standing.title}: {_words(standing, callers)}" for standing in found)
    file = tag(
        "svg",
        tag("title", "Servers compared: tokens per second, TTFT and ITL against callers at once"),
        tag("desc", said),
        tag("style", Markup(_STYLE + _COLOURS)),
        tag("rect", class_="paper", x=-_EDGE, width=width + 2 * _EDGE, height=height),
        _key(found),
        *panels,
        xmlns="http://www.w3.org/2000/svg",
        viewBox=f"{-_EDGE:g} 0 {width + 2 * _EDGE:g} {height:g}",
        role="img",
    )
    return f"{file}\n"


def _panel(found: Sequence[Standing], callers: Sequence[int], figure: Figure, title: str) -> Markup:
    low, high = callers[0] / 1.2, callers[-1] * 1.2
    x = Axis(low, high, LEFT + 6, WIDTH - RIGHT, tuple((float(at), str(at)) for at in callers), log=True)
    spreads = [
        [(at, value) for at in callers if (value := standing.value(at, figure)) is not None] for standing in found
    ]
    values = [value.value for each in spreads for _, value in each]
    if figure.unit == "ms":
        y = charts.logarithmic(values, _BASE, _HEAD, lambda value: number(value * 1e3))
    else:
        y = charts.linear(values, _BASE, _HEAD)
    drawn = []
    for index, (standing, each) in enumerate(zip(found, spreads, strict=True)):
        colour = charts.colour(index)
        drawn.append(charts.line([(x.at(at), y.at(value.value)) for at, value in each], colour))
        drawn += [
            charts.point(
                x.at(at), y.at(value.value), f"{standing.title}, {at} at once: {figure.text(value.value)}", colour
            )
            for at, value in each
        ]
    return join(charts.down(y, title), charts.across(x, "callers at once", _HEAD, _BASE), *drawn)


def _key(found: Sequence[Standing]) -> Markup:
    entries: list[Markup] = []
    left = 0.0
    for index, standing in enumerate(found):
        entries.append(tag("circle", class_=f"pt {charts.colour(index)}", cx=left + 5, cy=16, r=5))
        entries.append(tag("text", standing.title, class_="key", x=left + 15, y=20.5))
        left += 15 + len(standing.title) * 7.2 + 24
    return join(*entries)


def _words(standing: Standing, callers: Sequence[int]) -> str:
    rates = ((at, standing.value(at, TOKENS_PER_SECOND)) for at in callers)
    return ", ".join(f"{number(rate.value)} tokens/s at {at}" for at, rate in rates if rate is not None)

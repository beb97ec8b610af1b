"""Draws an interval: a panel per model instance, with its rows, rates and percentiles.

Values in, rich's renderables or text out. It does not know where the values come from.
"""

from __future__ import annotations

import io
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from rich import box
from rich.console import Console, Group
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from .display import printable

if TYPE_CHECKING:
    from .intervals import InstanceInterval, Key, Percentiles
    from .scraping import Interval

_TEXT_WIDTH = 100
_BAR = 20
_TREND = 40
_LEVELS = "▁▂▃▄▅▆▇█"


def screen(url: str, interval: Interval | None, trend: Callable[[Key], Sequence[float]], trouble: str | None) -> Group:
    """The whole screen: what is watched, what is wrong with it, and a panel per instance.

    `interval` may be older than `trouble`: the last that was seen. `trend` gives an instance's tokens per second.
    """
    title = Text(printable(url), style="bold", no_wrap=True)
    title.append("   q leaves", style="dim")
    parts: list[Text | Panel] = [title]
    if trouble is not None:
        parts.append(Text(printable(trouble), style="bold red"))
    if interval is None:
        return Group(*parts, *([] if trouble else [Text("looking ...", style="dim")]))
    style = "dim" if trouble else ""
    return Group(*parts, *(_panel(one, trend(one.key), style) for one in interval.instances))


def interval_text(interval: Interval) -> str:
    """The panels as plain text."""
    console = Console(file=io.StringIO(), width=_TEXT_WIDTH, color_system=None)
    with console.capture() as capture:
        for one in interval.instances:
            console.print(_panel(one, (), ""))
    return capture.get()


def sparkline(values: Sequence[float]) -> str:
    """The values as a row of bars, the highest of them as tall as a line."""
    most = max(values, default=0.0)
    steps = len(_LEVELS) - 1
    return "".join(_LEVELS[round(steps * value / most) if most > 0 else 0] for value in values)


def bar(share: float, width: int = _BAR) -> str:
    """A share from 0 to 1 as a bar; what is more than nothing shows."""
    full = min(width, max(round(share * width), 1 if share > 0 else 0))
    return "█" * full + "░" * (width - full)


def _panel(one: InstanceInterval, trend: Sequence[float], style: str) -> Panel:
    rows = Table.grid(padding=(0, 2))
    rows.add_column(style="bold", no_wrap=True)
    rows.add_column(no_wrap=True)
    rows.add_row("rows", f"{one.running} running, {one.waiting} waiting")
    rows.add_row("KV cache", f"{bar(one.kv_usage)} {one.kv_usage:.1%}")
    rows.add_row("tokens/s", _tokens(one, trend))
    rows.add_row("requests/s", _requests(one))
    rows.add_row("step", _step(one))
    hits = "nothing looked up" if one.prefix_hits is None else f"{one.prefix_hits:.1%} hit"
    rows.add_row("prefix cache", f"{hits}; {one.preemptions_per_second:.1f} preemptions/s")
    title = Text(printable(f"{one.model} {one.version}, {one.instance}"))
    return Panel(Group(rows, _latencies(one)), title=title, title_align="left", box=box.ROUNDED, style=style)


def _tokens(one: InstanceInterval, trend: Sequence[float]) -> str:
    rates = f"{one.prompt_tokens_per_second:.1f} prompt, {one.generation_tokens_per_second:.1f} generated"
    return f"{rates}  {sparkline(trend[-_TREND:])}".rstrip()


def _requests(one: InstanceInterval) -> str:
    ended = [f"{rate:.1f} {outcome}" for outcome, rate in one.requests_per_second.items() if rate > 0]
    return ", ".join(ended) or "none ended"


def _step(one: InstanceInterval) -> str:
    if one.step_seconds is None or one.rows_per_step is None:
        return "none"
    return f"{_ms(one.step_seconds)} ms, {one.rows_per_step:.1f} rows (means)"


def _latencies(one: InstanceInterval) -> Table:
    table = Table(box=None, padding=(0, 2, 0, 0), show_header=True, header_style="dim")
    for name in ("milliseconds", "p50", "p95", "p99"):
        table.add_column(name, justify="left" if name == "milliseconds" else "right", min_width=9, no_wrap=True)
    for name, percentiles in (("TTFT", one.ttft), ("ITL", one.itl), ("queue", one.queue)):
        table.add_row(name, *_cells(percentiles))
    return table


def _cells(percentiles: Percentiles | None) -> tuple[str, str, str]:
    if percentiles is None:
        return "-", "-", "-"
    return _ms(percentiles.p50), _ms(percentiles.p95), _ms(percentiles.p99)


def _ms(seconds: float) -> str:
    value = seconds * 1000
    return f"{value:.2f}" if value < 10 else f"{value:.1f}" if value < 1000 else f"{value:.0f}"

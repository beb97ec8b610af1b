"""Draws what a load test says: its progress on standard error, and its summary, lists and comparisons as text.

Values in, text out, but for `LoadProgress`. Times are seconds in messages and milliseconds in tables. It does not know
where messages come from.
"""

from __future__ import annotations

import io
import time
from collections.abc import Mapping, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

from .display import printable

if TYPE_CHECKING:
    from rich.progress import Progress, TaskID
    from rich.table import Table

_WIDTH = 120
_LINE_SECONDS = 5.0  # between two lines about one stage, where nothing can be drawn
_LATENCIES = ("ttft", "itl")
_POINTS = ("p50", "p95", "p99")
_NOTHING = "-"

Message = Mapping[str, Any]


class LoadProgress:
    """Draws each stage as a line on standard error: load, sent, ended, errors, tokens/s, time left.

    Where standard error is no terminal a line is written every few seconds instead; nothing unless `shown`.
    """

    def __init__(self, *, shown: bool) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, Progress, TextColumn

        self._shown = shown
        self._console = Console(stderr=True)
        columns = (
            TextColumn("{task.description}", markup=False),
            BarColumn(bar_width=20),
            TextColumn("{task.fields[told]}", markup=False),
        )
        self._progress: Progress = Progress(*columns, console=self._console, transient=True)
        self._tasks: dict[str, TaskID] = {}
        self._last: tuple[str, float] = ("", 0.0)

    def __enter__(self) -> Self:
        """Begin to draw."""
        if self._shown and self._console.is_terminal:
            self._progress.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """Clear what was drawn."""
        if self._shown and self._console.is_terminal:
            self._progress.stop()

    def hear(self, message: Message) -> None:
        """Show a message of "progress", "trial" or "note"; others are none of its business."""
        if not self._shown:
            return
        event = message.get("event")
        if event == "progress":
            self._tell(message)
        elif event == "trial":
            self._print(_judged(message))
        elif event == "note":
            self._print(str(message["note"]))

    def _tell(self, message: Message) -> None:
        name, told = printable(_stage(message)), printable(_counts(message))
        if not self._console.is_terminal:
            now = time.monotonic()
            if self._last[0] != name or now >= self._last[1] + _LINE_SECONDS:
                self._last = name, now
                self._print(f"{name}: {told}")
            return
        if name not in self._tasks:
            for task in self._tasks.values():  # those before are over, and said their last a moment before
                self._progress.update(task, completed=1.0)
            self._tasks[name] = self._progress.add_task(name, total=1.0, told=told)
        seconds, left = message["seconds"], message["left"]
        share = 0.0 if left is None else seconds / (seconds + left) if seconds + left > 0 else 1.0
        self._progress.update(self._tasks[name], completed=share, told=told)

    def _print(self, text: str) -> None:
        self._console.print(printable(text), markup=False, highlight=False, soft_wrap=True)


def summary_text(summary: Message) -> str:
    """What came out of a run: a row for each load, then each objective, what was wrong, and where the files are."""
    lines = [_table_text(_levels_table(summary["levels"]))]
    if reading := summary["reading"]:
        lines.append(reading)
    lines += [_verdict(one) for one in summary["objectives"]]
    if found := summary.get("search"):
        lines.append(_found(found))
    lines += [f"{one['count']} {one['kind']}: {one['example']}" for one in summary["errors"]]
    lines += [_stalled(one) for one in summary["stalls"]]
    lines += [f"not valid: {flaw}" for flaw in summary["flaws"]]
    lines += [f"note: {note}" for note in summary["notes"]]
    if busiest := _busiest(summary["levels"]):
        lines.append(_overhead(busiest))
    if clocks := summary["clocks"]:
        lines.append(_agreement(clocks))
    lines.append("valid" if summary["valid"] else "NOT VALID: the numbers above cannot be trusted as they stand")
    lines += [f"{kind:6}  {path}" for kind, path in summary["files"].items()]
    return _printable(lines)


def list_text(found: Sequence[Message]) -> str:
    """The scenarios, then the workloads, each with its one line."""
    from rich import box
    from rich.table import Table

    parts: list[str] = []
    for event in ("scenario", "workload"):
        table = Table(box=box.SIMPLE_HEAD)
        table.add_column(event, no_wrap=True)
        table.add_column("what it is for")
        for one in found:
            if one.get("event") == event:
                table.add_row(*(_cell(one[key]) for key in ("name", "about")))
        parts.append(_table_text(table))
    return _printable(parts)


def comparison_text(compared: Message) -> str:
    """A comparison as the load tests' package puts it in words."""
    return _printable([str(line) for line in compared.get("lines", ())])


def _stage(message: Message) -> str:
    many = message["repeats"] > 1
    repeat = f" (repeat {message['repeat'] + 1} of {message['repeats']})" if many else ""
    place = f"{message['stage_index'] + 1}/{message['stages']} " if message["stages"] > 1 else ""
    trial = f"trial {message['trial']}: " if message.get("trial") else ""
    return f"{trial}{place}{message['stage_label']}{repeat}"


def _counts(message: Message) -> str:
    rate = message["tokens"] / message["seconds"] if message["seconds"] else 0.0
    left = "" if message["left"] is None else f", {message['left']:.0f} s left"
    parts = f"{message['sent']} sent, {message['ended']} ended, {message['errors']} errors"
    return f"{parts}, {rate:.0f} tokens/s{left}"


def _judged(trial: Message) -> str:
    verdict = "holds" if trial["held"] else "does not hold"
    if trial["flaws"]:
        verdict = f"flawed ({trial['flaws'][0]})"
    return f"{trial['load']}: {verdict}, {_number(trial['goodput'])} good requests/s"


def _levels_table(levels: Sequence[Message]) -> Table:
    from rich import box
    from rich.table import Table

    table = Table(box=box.SIMPLE_HEAD)
    table.add_column("load", no_wrap=True, vertical="bottom")
    heads = ["ok", "errors", "tokens/s", "goodput/s"]
    heads += [
        f"{name.upper()} ms\n{point}" if point == "p50" else f"\n{point}" for name in _LATENCIES for point in _POINTS
    ]
    for head in (*heads, "lag ms\np99"):
        table.add_column(head, justify="right", no_wrap=True, vertical="bottom")
    for level in levels:
        repeats = f" x{level['repeats']}" if level["repeats"] > 1 else ""
        times = [level[f"{name}_{point}"] for name in _LATENCIES for point in _POINTS]
        table.add_row(
            _cell(f"{level['load']}{repeats}{'' if level['valid'] else ' !'}"),
            *(_number(level[key]) for key in ("ok", "errors", "tokens_per_second", "goodput")),
            *(_milliseconds(seconds) for seconds in (*times, level["lag_p99"])),
        )
    return table


def _verdict(one: Message) -> str:
    word = "met   " if one["met"] else "MISSED"
    said = "nothing was measured" if one["value"] is None else _value(one["name"], one["value"])
    return f"{word}  {one['name']} at {one['load']}: {said}, limit {_value(one['name'], one['limit'])}"


def _value(name: str, value: float) -> str:
    if name == "errors":
        return f"{value:.2%}"
    return f"{value:.2f} s" if value >= 1 else f"{value * 1e3:.3g} ms"


def _stalled(one: Message) -> str:
    many = "1 stall" if one["count"] == 1 else f"{one['count']} stalls"
    return f"{many}, the longest {one['longest']:.1f} s, at {one['load']}"


def _found(found: Message) -> str:
    if found["load"] is None:
        return "no load was found at which every objective holds"
    return f"every objective holds up to {found['load']}: {_number(found['goodput'])} good requests/s"


def _busiest(levels: Sequence[Message]) -> Message | None:
    known = [level for level in levels if level["generator_cores"] is not None]
    return max(known, key=lambda level: float(level["generator_cores"]), default=None)


def _overhead(level: Message) -> str:
    parts = [f"{level['generator_cores']:.2f} cores at {level['load']}"]
    if level["overhead_per_token"] is not None:
        parts.append(f"{level['overhead_per_token'] * 1e6:.0f} us per token")
    if level["server_cores"] and level["overhead_per_token"] is not None:  # else a share of doing nothing
        parts.append(f"{level['generator_cores'] / level['server_cores']:.0%} of the server's CPU")
    return f"generator: {', '.join(parts)}"


def _agreement(clocks: Message) -> str:
    ttft = f"mean TTFT {clocks['ttft_seconds'] * 1e3:+.1f} ms ({clocks['ttft_share']:+.1%})"
    itl = "" if clocks["itl_share"] is None else f", mean ITL {clocks['itl_share']:+.1%}"
    return f"beside the server's own clocks: {ttft}{itl} at {clocks['load']}"


def _number(value: float | None) -> str:
    if value is None:
        return _NOTHING
    return f"{value:.0f}" if value >= 100 or value == int(value) else f"{value:.2f}"


def _milliseconds(seconds: float | None) -> str:
    if seconds is None:
        return _NOTHING
    return f"{seconds * 1e3:.0f}" if seconds >= 0.1 else f"{seconds * 1e3:.3g}"


def _cell(text: object) -> str:
    from rich.markup import escape

    return escape(printable(str(text)))


def _table_text(table: Table) -> str:
    from rich.console import Console

    console = Console(file=io.StringIO(), width=_WIDTH, color_system=None)
    with console.capture() as capture:
        console.print(table)
    return "\n".join(line.rstrip() for line in capture.get().splitlines() if line.strip())


def _printable(lines: Sequence[str]) -> str:
    return "".join(f"{printable(line)}\n" for line in lines)

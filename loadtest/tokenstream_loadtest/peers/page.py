"""The comparison as Markdown: a short table for the README, the whole of it for docs/peers.md.

Rates and ratios are medians over rounds, latencies those of all rounds together, ranges in parentheses; a value that is
marked * has flaws, which the page names. It does not know how anything was measured beyond what the runs say.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from ..figures import NOTHING, TOKENS_PER_SECOND, Figure, Spread, latency, number
from .contestants import OURS
from .limits import Limits
from .rounds import Left, Settings
from .standings import Standing, measurements, ratio

BEGIN, END = "<!-- peers:begin -->", "<!-- peers:end -->"
TTFT50, TTFT95, ITL50, ITL95, ITL_MOST, TPOT50 = (
    latency(metric, point)
    for metric, point in (
        ("ttft", "p50"),
        ("ttft", "p95"),
        ("itl", "p50"),
        ("itl", "p95"),
        ("itl", "max"),
        ("tpot", "p50"),
    )
)
_COMPARED = (TOKENS_PER_SECOND, TTFT50, TTFT95, ITL50, ITL95)


@dataclass(frozen=True, slots=True)
class Comparison:
    """All that is shown. `answer_tokens`: of every answer. `began`: date and time (UTC). `limits`: None if unknown."""

    settings: Settings
    began: str
    command: str
    found: Sequence[Standing]
    left: Sequence[Left]
    limits: Limits | None
    quick: bool

    @property
    def ours(self) -> Standing | None:
        """Our own server, if it was measured."""
        return next((standing for standing in self.found if standing.name == OURS), None)

    @property
    def others(self) -> list[Standing]:
        """All but ours."""
        return [standing for standing in self.found if standing.name != OURS]

    @property
    def rounds(self) -> int:
        """How many were measured, of the server with the most."""
        return max(len({m.repeat for m in measurements(standing)}) for standing in self.found)

    def bound(self, callers: int) -> float | None:
        """The most tokens per second by the machine's limits; None if prompts or limits are not known."""
        known = self.ours or self.found[0]
        if self.limits is None or known.prompt_tokens is None or callers not in known.levels:
            return None
        group = known.levels[callers].group
        answered = group.outcomes.get("ok", 0)
        if not answered:
            return None
        return self.limits.tokens_per_second(callers, known.prompt_tokens, group.output_tokens / answered)


def short(comparison: Comparison, link: str, picture: str) -> str:
    """The part of a README: tokens/s, then first and next tokens, each with the ratio of ours to theirs."""
    titles = [standing.title for standing in comparison.found]
    lines = [
        f"{_when(comparison)}, {_where(comparison)}; for all the same weights, prompts and cores, one at a time.",
        "",
        "Output tokens/s, prompts included; in parentheses ours divided by theirs:",
        "",
        *_table(
            ["at once", *titles, *(["this machine's limit"] if comparison.limits else [])],
            (_rates(comparison, callers) for callers in comparison.settings.levels),
        ),
        "",
        "TTFT p50 and ITL p95, ms:",
        "",
        *_table(
            ["at once", *titles],
            (
                [str(callers), *(_latencies(standing, callers) for standing in comparison.found)]
                for callers in comparison.settings.levels
            ),
        ),
        "",
        f"![Tokens per second, TTFT and ITL of every server against callers at once]({picture})",
        "",
        *_marks(comparison),
        *(f"Left out: {left.title}, {left.reason}." for left in comparison.left),
        f"`make bench-peers` makes this anew; ranges, versions, launch commands and limits: [{link}]({link}).",
    ]
    return "\n".join(lines) + "\n"


def full(comparison: Comparison, picture: str) -> str:
    """docs/peers.md."""
    parts = [
        ["# Compared with other servers", "", *_introduction(comparison)],
        [f"![Tokens per second, TTFT and ITL of every server against callers at once]({picture})"],
        ["## Measured", "", *_levels(comparison)],
        ["## Ours divided by theirs", "", *_ratios(comparison)],
        ["## What the machine can do", "", *_limits(comparison)],
        ["## Was it quiet", "", *_quiet(comparison)],
        ["## Versions and launch commands", "", *_launches(comparison)],
    ]
    return "\n\n".join("\n".join(part) for part in parts if len(part) != 2 or part[1]) + "\n"


def place_between_markers(readme: Path, text: str) -> bool:
    """Put `text` between the two markers of a file; whether they are there."""
    old = readme.read_text(encoding="utf-8")
    marked = re.compile(f"{re.escape(BEGIN)}.*?{re.escape(END)}", re.DOTALL)
    if not marked.search(old):
        return False
    readme.write_text(marked.sub(lambda _: f"{BEGIN}\n{text}{END}", old, count=1), encoding="utf-8")
    return True


def _introduction(comparison: Comparison) -> list[str]:
    settings = comparison.settings
    pairs = ", ".join(f"{n} at {c}" for c, n in zip(settings.levels, settings.requests, strict=True))
    lines = [
        f"{_when(comparison)}, {_where(comparison)}. Written by `{comparison.command}`.",
        "",
        f"Scenario `{settings.scenario}`: closed loop, requests per level: {pairs}; {_rounds(comparison)}, each with"
        " prompts of its own, which are the same for every server. Every answer is equally long. One server is alive at"
        " a time, with all cores, asked over its own protocol from the same machine. Each level begins with a warm-up"
        " that is not counted, once the machine was quiet, or had not become so in a minute.",
        "",
        f"Model: `{settings.model}`, in bfloat16, the same weights for all. Rates are medians over rounds, latencies"
        " those of all rounds together, in parentheses the range; TTFT and ITL as in [loadtest.md](loadtest.md).",
    ]
    if comparison.quick:
        lines += ["", "**Made with `--quick`: too few requests for conclusions.**"]
    lines += [f"\nLeft out: {left.title}. {left.reason}" for left in comparison.left]
    return lines


def _levels(comparison: Comparison) -> list[str]:
    head = ["at once", "server", "tokens/s", "of limit", "TTFT p50", "TTFT p95", "ITL p50", "ITL p95", "longest ITL"]
    rows = []
    for callers in comparison.settings.levels:
        for standing in comparison.found:
            if callers in standing.levels:
                rows.append([str(callers), standing.title, *_cells(comparison, standing, callers)])
    return [*_table([*head, "TPOT p50", "errors"], rows), "", "Times in ms.", *_marks(comparison)]


def _cells(comparison: Comparison, standing: Standing, callers: int) -> list[str]:
    rate, bound = standing.value(callers, TOKENS_PER_SECOND), comparison.bound(callers)
    share = f"{rate.value / bound:.0%}" if rate is not None and bound else NOTHING
    times = (TTFT50, TTFT95, ITL50, ITL95, ITL_MOST, TPOT50)
    errors = sum(measurement.all.errors for measurement in standing.levels[callers].measurements)
    ranged = _ranged(rate, TOKENS_PER_SECOND) + _mark(standing, callers)
    return [ranged, share, *(_ranged(standing.value(callers, time), time) for time in times), str(errors)]


def _ratios(comparison: Comparison) -> list[str]:
    ours = comparison.ours
    if ours is None or not comparison.others:
        return ["There is nothing to divide: ours or all others were not measured."]
    rows = []
    for theirs in comparison.others:
        for callers in comparison.settings.levels:
            found = [ratio(ours, theirs, callers, figure) for figure in _COMPARED]
            if any(found):
                rows.append([theirs.title, str(callers), *(_ratio(one) for one in found)])
    return [
        "Median of the rounds' own ratios, in parentheses the range: above 1 is good for tokens/s, below 1 for times.",
        "",
        *_table(["server", "at once", *(figure.title for figure in _COMPARED)], rows),
    ]


def _limits(comparison: Comparison) -> list[str]:
    limits = comparison.limits
    if limits is None:
        return ["Not measured."]
    steps = ", ".join(f"{ms:.1f} ms at {rows}" for rows, ms in sorted(limits.step_ms.items()))
    rows = [
        [str(callers), number(comparison.bound(callers))]
        for callers in comparison.settings.levels
        if comparison.bound(callers) is not None
    ]
    return [
        f"Measured beside it by `tokenstream bench engine`: memory is read at {limits.read_gb_per_second:.0f} GB/s, "
        f"bfloat16 matrices are multiplied at {limits.gflop_per_second:.0f} GFLOP/s, with {limits.cores} cores. "
        f"The weights are {limits.weight_bytes / 1e6:.0f} MB. So one decode step takes at least {steps} rows, "
        f"and a prompt {limits.prefill_ms_per_token * 1000:.0f} µs per token.",
        "",
        "Of this workload that leaves at most so many output tokens/s, if computing were all there is to do:",
        "",
        *_table(["at once", "tokens/s"], rows),
    ]


def _quiet(comparison: Comparison) -> list[str]:
    rows = []
    for standing in comparison.found:
        there = [measurement.cores for measurement in measurements(standing) if measurement.cores is not None]
        if there:
            most = (max(getattr(cores, name) for cores in there) for name in ("generator", "others", "stolen"))
            rows.append([standing.title, *(f"{value:.2f}" for value in most)])
    lines = ["The most cores used in any measurement:", ""]
    lines += _table(["server", "load generator", "anything else", "stolen by the host"], rows)
    flawed = [
        f"- {standing.title}, {measurement.stage.label}, round {measurement.repeat + 1}: {'; '.join(measurement.flaws)}"
        for standing in comparison.found
        for measurement in measurements(standing)
        if measurement.flaws
    ]
    return [*lines, "", *(["Flaws:", "", *flawed] if flawed else ["No measurement has a flaw."])]


def _launches(comparison: Comparison) -> list[str]:
    lines = []
    for standing in comparison.found:
        versions = ", ".join(f"{name} {version}" for name, version in standing.versions.items())
        lines += [f"### {standing.title}", "", f"{versions}.{f' {standing.remark}.' if standing.remark else ''}", ""]
        lines += ["```sh", standing.launch, "```", ""]
    lines += ["`$ENV` is the server's environment in the cache, `$MODEL` a folder of weights, `$TUTORIAL` a model"]
    lines += ["repository that holds this package's `peers/tutorial`; ports are chosen anew each time.", ""]
    measuring = comparison.found[0].run.versions
    lines.append(f"Load generator: {', '.join(f'{name} {version}' for name, version in measuring.items())}.")
    return lines


def _rates(comparison: Comparison, callers: int) -> list[str]:
    cells = [str(callers)]
    for standing in comparison.found:
        rate = standing.value(callers, TOKENS_PER_SECOND)
        text = number(rate.value if rate else None) + _mark(standing, callers)
        if comparison.ours is not None and standing is not comparison.ours:
            pair = ratio(comparison.ours, standing, callers, TOKENS_PER_SECOND)
            text += f" ({_times(pair.value)})" if pair else ""
        cells.append(text)
    return [*cells, number(comparison.bound(callers))] if comparison.limits else cells


def _latencies(standing: Standing, callers: int) -> str:
    found = [(standing.value(callers, figure), figure) for figure in (TTFT50, ITL95)]
    return " / ".join(figure.text(value.value if value else None) for value, figure in found)


def _ranged(value: Spread | None, figure: Figure) -> str:
    if value is None:
        return NOTHING
    middle = figure.text(value.value)
    return middle if value.count == 1 else f"{middle} ({figure.text(value.low)} to {figure.text(value.high)})"


def _ratio(value: Spread | None) -> str:
    if value is None:
        return NOTHING
    middle = _times(value.value)
    return middle if value.count == 1 else f"{middle} ({_times(value.low)} to {_times(value.high)})"


def _times(factor: float) -> str:
    return f"{factor:.2f}" if factor >= 0.1 else f"{factor:.2g}"


def _mark(standing: Standing, callers: int) -> str:
    """* beside what has flaws or errors."""
    level = standing.levels.get(callers)
    return "" if level is None or (level.valid and not level.group.errors) else " *"


def _marks(comparison: Comparison) -> list[str]:
    marked = any(_mark(standing, at) for standing in comparison.found for at in comparison.settings.levels)
    return (
        ["\\* not to be relied on: the measurement has a flaw or errors, which docs/peers.md names."] if marked else []
    )


def _when(comparison: Comparison) -> str:
    return f"{comparison.began[:10]}, {_rounds(comparison)}"


def _rounds(comparison: Comparison) -> str:
    return "one round" if comparison.rounds == 1 else f"{comparison.rounds} rounds"


def _where(comparison: Comparison) -> str:
    machine = comparison.found[0].run.machine
    return f"{comparison.settings.cores} cores of {machine.processor}, {machine.memory_bytes >> 30} GiB"


def _table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    return [_row(head), _row(["---"] * len(head)), *map(_row, rows)]


def _row(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cell.replace('|', '/') for cell in cells)} |"

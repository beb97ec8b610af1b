"""What a run came to in one message: a row of numbers for each load, each objective with its value, what was wrong.

Over repeats a number is the median, an objective's value the worst. Times are seconds. It does not know how a message
is shown.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from . import figures
from .figures import Figure, Judged, Level
from .results import Measurement, Run
from .search import Found
from .slo import Objective

_LATENCIES = ("ttft", "itl", "tpot", "e2e", "queue")
_POINTS = ("p50", "p95", "p99")
_FIGURES: tuple[Figure, ...] = (
    figures.REQUESTS,
    figures.OK,
    figures.ERRORS,
    figures.ABANDONED,
    figures.TOKENS_PER_SECOND,
    figures.REQUESTS_PER_SECOND,
    figures.GOODPUT,
    *(figures.latency(metric, point) for metric in _LATENCIES for point in _POINTS),
    figures.latency("lag", "p99"),
    figures.OVERHEAD,
)

Message = dict[str, Any]


def summarise(run: Run, found: Found | None, files: Mapping[str, Path], *, interrupted: bool) -> Message:
    """The message "summary". `found`: where the run was a search, whose trials need not all meet the objectives."""
    levels = figures.levels(run)
    judged = [_judged(one) for one in figures.judge(run, levels)] if found is None else _judged_best(run, found)
    flaws = [_told(run, m, flaw) for m in run.measurements for flaw in m.flaws]
    notes = [_told(run, m, note) for m in run.measurements for note in m.notes]
    if found is None:
        valid, met = bool(levels) and not flaws, all(one["met"] for one in judged)
    else:
        valid, met = any(m.valid for m in run.measurements), found.best is not None
        notes, flaws = [*notes, *found.notes], [] if valid else flaws
    return {
        "event": "summary",
        "scenario": run.scenario,
        "title": run.title,
        "valid": valid and not interrupted,
        "met": met,
        "interrupted": interrupted,
        "levels": [_row(level) for level in levels],
        "objectives": judged,
        "search": None if found is None else _best(found),
        "flaws": flaws,
        "notes": list(dict.fromkeys(notes)),
        "files": {kind: str(path) for kind, path in files.items()},
    }


def _row(level: Level) -> Message:
    spreads = {figure.key: level.spread(figure) for figure in _FIGURES}
    return {
        "load": level.name,
        "repeats": len(level.measurements),
        "valid": level.valid,
        **{key: spread.median if spread else None for key, spread in spreads.items()},
        "generator_cores": _median([m.cores.generator for m in level.measurements if m.cores]),
        "server_cores": _median([m.cores.server for m in level.measurements if m.cores]),
        "others_cores": _median([m.cores.others for m in level.measurements if m.cores]),
    }


def _median(values: Sequence[float | None]) -> float | None:
    found = figures.spread(values)
    return found.median if found else None


def _judged(one: Judged) -> Message:
    return _verdict(one.objective, one.level.name, one.values.high if one.values else None, met=one.ok)


def _judged_best(run: Run, found: Found) -> list[Message]:
    if found.best is None:
        return []
    group, load = found.best.all, found.best.stage.label
    objectives = [Objective.parse(text) for text in run.objectives]
    return [_verdict(one, load, one.measured(group), met=one.met(group)) for one in objectives]


def _verdict(objective: Objective, load: str, value: float | None, *, met: bool) -> Message:
    return {"name": objective.name, "load": load, "value": value, "limit": objective.limit, "met": met}


def _best(found: Found) -> Message:
    best = found.best
    return {"load": best.stage.label if best else None, "goodput": best.goodput if best else None}


def _told(run: Run, measurement: Measurement, words: str) -> str:
    """Where in the run it is so."""
    repeated = any(other.repeat != measurement.repeat for other in run.measurements)
    where = f"{measurement.stage.label}, repeat {measurement.repeat + 1}" if repeated else measurement.stage.label
    return f"{where}: {words}"

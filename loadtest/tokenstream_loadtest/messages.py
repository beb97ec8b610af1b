"""What is told of a run, in messages: how it stands, what each trial of a search came to, and at last what all did.

Over repeats a number is the median, an objective's value the worst. Times are seconds. It does not know how a message
is shown.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from . import figures
from .bench import Progress
from .figures import Figure, Judged, Level
from .results import Found, Measurement, Run

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


def progress(told: Progress) -> Message:
    """The message "progress"."""
    return {"event": "progress", **asdict(told)}


def trial(measurement: Measurement, held: bool) -> Message:
    """The message "trial"; `held`: whether it can be trusted and kept every objective."""
    stage, flaws = measurement.stage, list(measurement.flaws)
    return {"event": "trial", "load": stage.label, "held": held, "goodput": measurement.goodput, "flaws": flaws}


def summarise(run: Run, files: Mapping[str, Path]) -> Message:
    """The message "summary". Of a search the objectives are those at the load that was found."""
    levels = figures.levels(run)
    valid = figures.trusted(run)
    flaws = [_told(run, m, flaw) for m in run.measurements for flaw in m.flaws]
    notes = [_told(run, m, note) for m in run.measurements for note in m.notes]
    if run.found is not None:
        notes, flaws = [*notes, *run.found.notes], [] if valid else flaws
    return {
        "event": "summary",
        "scenario": run.scenario,
        "title": run.title,
        "valid": valid,
        "met": figures.met(run),
        "interrupted": run.interrupted,
        "levels": [_row(level) for level in levels],
        "objectives": [_judged(one) for one in figures.decisive(run, levels)],
        "search": None if run.found is None else _found(run.found),
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
    value = one.values.high if one.values else None
    objective = one.objective
    return {"name": objective.name, "load": one.level.name, "value": value, "limit": objective.limit, "met": one.ok}


def _found(found: Found) -> Message:
    load = found.stage.label if found.stage is not None else None
    return {"load": load, "goodput": found.goodput, "trials": found.trials}


def _told(run: Run, measurement: Measurement, words: str) -> str:
    """Where in the run it is so."""
    repeated = any(other.repeat != measurement.repeat for other in run.measurements)
    where = f"{measurement.stage.label}, repeat {measurement.repeat + 1}" if repeated else measurement.stage.label
    return f"{where}: {words}"

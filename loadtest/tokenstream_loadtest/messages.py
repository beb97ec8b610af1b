"""What is told of a run, in messages: how it stands, what each trial of a search came to, and at last what all did.

A number over repeats is what `figures` makes of it, the same here as in the report. Times are seconds. It does
not know how a message is shown.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from . import figures
from .bench import Progress
from .checks import comparable, far
from .figures import Figure, Judged, Level
from .results import Found, Measurement, Run
from .sayings import told
from .tally import Group

_LATENCIES = ("ttft", "itl", "tpot", "e2e", "queue")
_POINTS = ("p50", "p95", "p99")
_FIGURES: tuple[Figure, ...] = (
    figures.REQUESTS,
    figures.OK,
    figures.ERRORS,
    figures.ABANDONED,
    figures.STALLS,
    figures.TOKENS_PER_SECOND,
    figures.REQUESTS_PER_SECOND,
    figures.GOODPUT,
    *(figures.latency(metric, point) for metric in _LATENCIES for point in _POINTS),
    figures.latency("lag", "p99"),
    figures.OVERHEAD,
)

Message = dict[str, Any]


def progress(stands: Progress) -> Message:
    """The message "progress"."""
    return {"event": "progress", **asdict(stands)}


def trial(measurement: Measurement, held: bool) -> Message:
    """The message "trial"; `held`: whether it can be trusted and kept every objective."""
    stage, flaws = measurement.stage, list(measurement.flaws)
    return {"event": "trial", "load": stage.label, "held": held, "goodput": measurement.goodput, "flaws": flaws}


def summarise(run: Run, files: Mapping[str, Path]) -> Message:
    """The message "summary". Of a search the objectives are those at the load that was found."""
    levels = figures.levels(run)
    valid = figures.trusted(run)
    flaws = [line for level in levels for line in told(level, lambda each: each.flaws)]
    notes = [line for level in levels for line in told(level, lambda each: each.notes)]
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
        "errors": _errors(run),
        "stalls": _stalls(levels),
        "clocks": _clocks(levels),
        "reading": figures.OVER_REPEATS if any(len(level.measurements) > 1 for level in levels) else None,
        "flaws": flaws,
        "notes": notes,
        "files": {kind: str(path) for kind, path in files.items()},
    }


def _row(level: Level) -> Message:
    spreads = {figure.key: level.spread(figure) for figure in _FIGURES}
    return {
        "load": level.name,
        "repeats": len(level.measurements),
        "valid": level.valid,
        **{key: spread.value if spread else None for key, spread in spreads.items()},
        "generator_cores": _median([m.cores.generator for m in level.measurements if m.cores]),
        "server_cores": _median([m.cores.server for m in level.measurements if m.cores]),
        "others_cores": _median([m.cores.others for m in level.measurements if m.cores]),
    }


def _clocks(levels: Sequence[Level]) -> Message | None:
    """How far the callers' means are from the server's, of the one measurement whose TTFT is farthest.

    Seconds and shares of the server's, and of what would just be no flaw. None if nothing can be compared.
    """
    found = [_apart(level, each) for level in levels for each in level.measurements if comparable(each)]
    return max((one for one in found if one is not None), key=lambda one: float(one["of_limit"]), default=None)


def _apart(level: Level, measurement: Measurement) -> Message | None:
    told, server = measurement.all.histograms, measurement.server
    ttft, itl = told["ttft_sent"].mean, told["itl"].mean
    if server is None or ttft is None or not server.ttft:
        return None
    return {
        "load": level.named(measurement),
        "ttft_seconds": ttft - server.ttft,
        "ttft_share": ttft / server.ttft - 1,
        "itl_share": itl / server.itl - 1 if itl is not None and server.itl else None,
        "of_limit": far(ttft, server.ttft),
    }


def _median(values: Sequence[float | None]) -> float | None:
    found = figures.spread(values)
    return found.value if found else None


def _judged(one: Judged) -> Message:
    value = one.values.value if one.values else None
    objective = one.objective
    return {"name": objective.name, "load": one.level.name, "value": value, "limit": objective.limit, "met": one.ok}


def _found(found: Found) -> Message:
    load = found.stage.label if found.stage is not None else None
    return {"load": load, "goodput": found.goodput, "trials": found.trials}


def _errors(run: Run) -> list[Message]:
    """Every kind of error with how many there were and a line of one, the most frequent first."""
    total = Group()
    for measurement in run.measurements:
        total.merge(measurement.all)
    kinds = sorted(total.examples, key=lambda kind: -total.outcomes[kind])
    return [{"kind": kind, "count": total.outcomes[kind], "example": total.examples[kind][0]} for kind in kinds]


def _stalls(levels: Sequence[Level]) -> list[Message]:
    """How many there were at each load that had any, and how long the longest was."""
    found = [(level, [stall.seconds for m in level.measurements for stall in m.stalls]) for level in levels]
    return [{"load": level.name, "count": len(each), "longest": max(each)} for level, each in found if each]

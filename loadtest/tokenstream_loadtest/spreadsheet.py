"""A run as CSV, for spreadsheets and data frames: a row for each load and repeat, with every number that was measured.

Times are seconds, shares are 0 to 1, repeats count from 1, what was not measured is empty. It does not know of derived
verdicts.
"""

from __future__ import annotations

import csv
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path

from . import figures
from .figures import Figure, Level, latency, levels
from .records import OUTCOMES
from .results import Cores, Measurement, Run, ServerCounts, Stage
from .tally import METRICS

POINTS = ("mean", "p50", "p90", "p95", "p99", "p99.9", "max")
_FIGURES: tuple[Figure, ...] = (
    figures.SECONDS,
    figures.REQUESTS,
    figures.ERRORS,
    figures.ERROR_SHARE,
    figures.TOKENS_PER_SECOND,
    figures.REQUESTS_PER_SECOND,
    figures.GOODPUT,
    *(latency(metric, point) for metric in METRICS for point in POINTS),
    figures.OVERHEAD,
)
_COUNTS = ("good", "input_tokens", "cached_tokens", "output_tokens", "responses", "preemptions", "resumes")
_FORMULAS = ("=", "+", "-", "@", "\t", "\r")

Cell = str | float | None


def write_csv(run: Run, path: Path) -> None:
    """Write the table. OSError as `open` does."""
    rows = [dict(_row(run, level, measurement)) for level in levels(run) for measurement in level.measurements]
    with path.open("w", encoding="utf-8", errors="replace", newline="") as file:
        writer = csv.DictWriter(file, list(rows[0]) if rows else ["scenario"])
        writer.writeheader()
        writer.writerows({name: _safe(value) for name, value in row.items()} for row in rows)


def _row(run: Run, level: Level, measurement: Measurement) -> Iterator[tuple[str, Cell]]:
    group = measurement.all
    yield from (("scenario", run.scenario), ("workload", run.workload), ("target", run.target), ("url", run.url))
    yield from (("seed", run.seed), ("load", level.name))
    for each in fields(Stage):
        yield f"stage_{each.name}", getattr(measurement.stage, each.name)
    yield from (("repeat", measurement.repeat + 1), ("started_at", measurement.started_at))
    yield "valid", measurement.valid
    for figure in _FIGURES:
        yield figure.key, figure.of(measurement)
    for outcome in OUTCOMES:
        yield f"outcome_{outcome}", group.outcomes.get(outcome, 0)
    for name in _COUNTS:
        yield name, getattr(group, name)
    yield "stalls", len(measurement.stalls)
    yield "longest_stall", max((stall.seconds for stall in measurement.stalls), default=None)
    for prefix, of, values in (("cores", Cores, measurement.cores), ("server", ServerCounts, measurement.server)):
        for each in fields(of):
            yield f"{prefix}_{each.name}", None if values is None else getattr(values, each.name)
    yield from (("flaws", "; ".join(measurement.flaws)), ("notes", "; ".join(measurement.notes)))


def _safe(value: Cell) -> Cell:
    """A text that a spreadsheet would compute is marked as text, as OWASP advises."""
    return f"'{value}" if isinstance(value, str) and value.startswith(_FORMULAS) else value

"""What a Locust test came to: the document of the run, its exact table, and whether it passes.

Locust's own numbers are rounded and know no tokens; these are exact. It does not know how they were measured.
"""

from __future__ import annotations

import shlex
import sys
from collections.abc import Iterable
from pathlib import Path

from .. import figures
from ..checks import flaws, notes
from ..figures import Figure, duration, judge, latency, levels, number
from ..generator import Measured
from ..host import describe_machine, host_and_port, is_here, versions
from ..results import Cores, Measurement, Run, ServerCounts, Stage
from ..slo import ERRORS
from ..tally import METRICS
from .options import Choices
from .totals import Totals

_LIBRARIES = ("locust", "gevent", "grpcio", "hdrhistogram")
_POINTS = ("mean", "p50", "p95", "p99", "max")


def conclude(
    totals: Totals,
    choices: Choices,
    cores: Cores,
    counts: ServerCounts | None,
    *,
    server: dict[str, str],
    shape: str,
    told: Iterable[str] = (),
    restarted: bool = False,
) -> Run:
    """The run with its one measurement. `cores`: of all processes; `told`: notes of whoever led the test.

    `restarted`: another server than at the begin listened at its end.
    """
    host, _ = host_and_port(choices.url)
    local = is_here(host)
    stage = choices.stage or Stage(concurrency=max(totals.peak_users, 1), seconds=None)
    seconds = max(totals.seconds, 1e-6)
    stalls = tuple(stall for last in totals.lasts.values() for stall in last.stalls)
    measured = Measured(0.0, totals.started_at, seconds, totals.tally, stalls)
    # Each process has an event loop of its own: what matters is the one with the most to do.
    busiest = Cores(max((last.cores for last in totals.lasts.values()), default=0.0), None, cores.others, cores.stolen)
    measurement = Measurement(
        stage=stage,
        repeat=0,
        started_at=totals.started_at,
        seconds=seconds,
        tally=totals.tally,
        samples=tuple(totals.samples),
        stalls=stalls,
        cores=cores,
        server=counts,
        flaws=(*totals.flaws(), *flaws(measured, stage, busiest, counts, local=local, restarted=restarted)),
        notes=(*told, *notes(measured, stage, watched=choices.metrics_url, counts=counts)),
    )
    return Run(
        scenario=f"locust-{shape}" if shape else "locust",
        title=f"Locust: {choices.workload.title}",
        workload=choices.workload.name,
        target=choices.target,
        url=choices.url,
        command=shlex.join([Path(sys.argv[0]).name, *sys.argv[1:]]),
        seed=choices.seed,
        started_at=totals.started_at,
        machine=describe_machine(local=local),
        objectives=tuple(str(objective) for objective in choices.objectives),
        versions=versions(*_LIBRARIES),
        server=server,
        measurements=(measurement,),
    )


def passes(run: Run, *, ignore_flaws: bool) -> bool:
    """Whether every objective was met, and that in a run that can be trusted, unless nobody minds."""
    found = levels(run)
    return all(judged.ok for judged in judge(run, found)) and (ignore_flaws or all(level.valid for level in found))


def table(run: Run) -> str:
    """For a terminal: the exact numbers of all requests, the objectives, and what was wrong."""
    lines: list[str] = []
    for level in levels(run):
        (measurement,) = level.measurements
        told = measurement.all
        outcomes = ", ".join(f"{count} {name}" for name, count in sorted(told.outcomes.items())) or "nothing ended"
        lines += ["", f"tokenstream: {level.name}, {measurement.seconds:.1f} s: {outcomes}"]
        rates = (figures.TOKENS_PER_SECOND, figures.REQUESTS_PER_SECOND, figures.GOODPUT)
        lines.append("  ".join(f"{number(figure.of(measurement))} {figure.title}" for figure in rates))
        lines.append("".join([f"{'':10}", *(f"{point:>11}" for point in _POINTS)]))
        lines += [_row(name, measurement) for name in METRICS if len(told.histograms[name])]
        lines += [f"{name}: {line}" for name, found in sorted(told.examples.items()) for line in found]
        lines += [f"flaw: {flaw}" for flaw in measurement.flaws]
        lines += [f"note: {note}" for note in measurement.notes]
    for judged in judge(run, levels(run)):
        value = judged.values.value if judged.values else None
        errors = judged.objective.metric == ERRORS
        shown = f"{number(value * 100)} %" if errors and value is not None else duration(value)
        lines.append(f"{'met   ' if judged.ok else 'MISSED'} {judged.objective}: {shown}")
    return "\n".join(lines)


def _row(name: str, measurement: Measurement) -> str:
    columns: list[Figure] = [latency(name, point) for point in _POINTS]
    return "".join([f"{name:10}", *(f"{duration(column.of(measurement)):>11}" for column in columns)])

"""What a Locust test came to: the document of the run, what a terminal shows of it, and whether it passes.

Locust's own numbers are rounded and know no tokens; these are exact. It does not know how they were measured.
"""

from __future__ import annotations

import shlex
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path

from tokenstream.load_display import summary_text

from .. import figures
from ..checks import flaws, notes
from ..figures import Figure, duration, judge, latency, levels, number
from ..generator import Measured
from ..host import describe_machine, host_and_port, is_here, versions
from ..messages import summarise
from ..results import Cores, Measurement, Run, Stage
from ..tally import METRICS
from .options import Choices
from .totals import Totals
from .wire import Counted

_LIBRARIES = ("locust", "gevent", "grpcio", "hdrhistogram")
_POINTS = ("mean", "p50", "p95", "p99", "max")


def conclude(
    totals: Totals,
    choices: Choices,
    cores: Cores,
    counted: Counted,
    *,
    server: dict[str, str],
    shape: str,
    told: Iterable[str] = (),
    restarted: bool = False,
) -> Run:
    """The run with its one measurement. `cores`: of all processes; `told`: notes of whoever led the test.

    `restarted`: another process than at the begin listened where the server does.
    """
    host, _ = host_and_port(choices.url)
    local = is_here(host)
    stage = choices.stage or Stage(concurrency=max(totals.peak_users, 1), seconds=None)
    seconds = max(totals.seconds, 1e-6)
    stalls = tuple(stall for last in totals.lasts.values() for stall in last.stalls)
    measured = Measured(0.0, totals.started_at, seconds, totals.tally, stalls)
    # Each process has an event loop of its own: what matters is the one with the most to do.
    busiest = Cores(max((last.cores for last in totals.lasts.values()), default=0.0), None, cores.others, cores.stolen)
    gone = {"restarted": restarted or counted.restarted, "lost": counted.lost}
    found = flaws(measured, stage, busiest, counted.server, local=local, **gone)
    watched = None if counted.lost else choices.metrics_url  # what was lost is a flaw, and no note
    measurement = Measurement(
        stage=stage,
        repeat=0,
        started_at=totals.started_at,
        seconds=seconds,
        tally=totals.tally,
        samples=tuple(totals.samples),
        stalls=stalls,
        cores=cores,
        server=counted.server,
        flaws=(*totals.flaws(), *found),
        notes=(*told, *notes(measured, stage, watched=watched, counts=counted.server)),
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


def text(run: Run, files: Mapping[str, Path]) -> str:
    """For a terminal: exact numbers of all metrics, then what `tokenstream load` says of a run with these files."""
    return f"{_table(run)}\n\n{summary_text(summarise(run, files))}"


def _table(run: Run) -> str:
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
    return "\n".join(lines)


def _row(name: str, measurement: Measurement) -> str:
    columns: list[Figure] = [latency(name, point) for point in _POINTS]
    return "".join([f"{name:10}", *(f"{duration(column.of(measurement)):>11}" for column in columns)])

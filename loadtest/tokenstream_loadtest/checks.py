"""Whether a measurement can be trusted, in plain words: flaws that make it invalid, and notes for its reader.

It judges numbers that others have measured.
"""

from __future__ import annotations

from .generator import Measured
from .results import Cores, Measurement, ServerCounts, Stage
from .tally import Group

INTERRUPTED = "interrupted"
RESTARTED = "the server was started anew during the measurement"
LAG_SHARE, LAG_SECONDS = 0.1, 0.05  # of the median TTFT; at the 99th percentile, the larger of both
GENERATOR_CORES = 0.9  # of the one core that an event loop can use
OTHERS_CORES, STOLEN_CORES = 0.25, 0.1
# By which both must differ: a caller's TTFT holds the way through gRPC and the wait for this process's turn, some
# milliseconds that the server does not see.
TTFT_SHARE, TTFT_SECONDS = 0.1, 0.01
_BETWEEN = "in gRPC, Triton's front, the network or this process"


def flaws(
    measured: Measured,
    stage: Stage,
    cores: Cores,
    server: ServerCounts | None,
    *,
    local: bool,
    restarted: bool = False,
    lost: bool = False,
) -> tuple[str, ...]:
    """Why not to trust it; nothing if it can be trusted. `restarted`: the server is not the one it was.

    `lost`: its metrics page could be read when it began, and not when it had ended.
    """
    told = measured.tally.all
    found = [INTERRUPTED] if measured.interrupted else []
    if measured.capped and not _cap_was_asked_for(stage):
        found.append("requests had to wait for the generator: too many were under way at once")
    if not told.outcomes.get("ok") and not told.outcomes.get("abandoned"):
        found.append("no request was answered")
    if restarted:
        found.append(RESTARTED)
    if lost and not measured.interrupted:
        found.append("the server's metrics page could be read at the begin and not at the end: the server may be gone")
    found += _of_lag(told) + _of_cores(cores, local=local)
    if server is not None and not measured.interrupted and not restarted:
        found += _of_counts(told, server)
    return tuple(found)


def notes(measured: Measured, stage: Stage, *, watched: str | None, counts: ServerCounts | None) -> tuple[str, ...]:
    """What a reader should know."""
    told = measured.tally.all
    found = []
    if _cap_was_asked_for(stage):
        reached = "and that was reached" if measured.capped else "which was never reached"
        found.append(f"not more than {stage.concurrency} requests were under way at once, {reached}")
    if told.resumes:
        found.append(f"{told.resumes} cut streams were taken up again")
    if told.responses and told.output_tokens != told.responses:
        found.append(f"a response held {told.output_tokens / told.responses:.2f} tokens on average")
    if watched is not None and counts is None and not measured.interrupted:
        found.append(f"the server's own numbers are missing: {watched} could not be read")
    return tuple(found)


def alike(told: Group, server: ServerCounts) -> bool:
    """Whether both must have seen the same: nobody else asked, and all requests ended well, in one piece."""
    whole = told.outcomes.get("ok", 0) == told.requests and not told.resumes
    return whole and server.requests <= told.requests


def comparable(measurement: Measurement) -> bool:
    """Whether the means of callers and server are of the same requests and tokens."""
    told, server = measurement.all, measurement.server
    if server is None or {INTERRUPTED, RESTARTED} & set(measurement.flaws):
        return False
    return alike(told, server) and _same(told, server)


def _same(told: Group, server: ServerCounts) -> bool:
    return (told.requests, told.output_tokens) == (server.requests, server.output_tokens)


def far(ours: float, theirs: float) -> float:
    """How far a mean TTFT of callers is from the server's, by what would just pass: over 1 it is a flaw."""
    return abs(ours - theirs) / max(TTFT_SECONDS, TTFT_SHARE * theirs)


def _cap_was_asked_for(stage: Stage) -> bool:
    return stage.arrivals != "closed" and stage.concurrency is not None


def _of_lag(told: Group) -> list[str]:
    lag, ttft = told.histograms["lag"].percentile(99), told.histograms["ttft"].percentile(50)
    limit = max(LAG_SECONDS, LAG_SHARE * (ttft or 0.0))
    if lag is None or lag <= limit:
        return []
    return [f"the generator itself was late: by {_ms(lag)} at the 99th percentile, where {_ms(limit)} would pass"]


def _of_cores(cores: Cores, *, local: bool) -> list[str]:
    found = []
    if cores.generator > GENERATOR_CORES:
        found.append(f"the generator was at its limit: it used {cores.generator:.2f} of one core")
    if local and cores.others > OTHERS_CORES:
        found.append(f"the machine was not quiet: others used {cores.others:.2f} cores")
    if cores.stolen > STOLEN_CORES:
        found.append(f"the machine's host took {cores.stolen:.2f} cores away")
    return found


def _of_counts(told: Group, server: ServerCounts) -> list[str]:
    """Disagreements with the server, if there should be none."""
    if server.requests > told.requests:
        return [f"the server served others at the same time: {server.requests - told.requests} further requests"]
    if not alike(told, server):
        return []
    pairs = [
        ("requests", told.requests, server.requests),
        ("output tokens", told.output_tokens, server.output_tokens),
    ]
    if told.input_tokens:  # not every server says
        pairs.append(("input tokens", told.input_tokens, server.input_tokens))
    found = [
        f"the server counted {theirs} {name}, the generator {ours}" for name, ours, theirs in pairs if ours != theirs
    ]
    ours, theirs = told.histograms["ttft_sent"].mean, server.ttft
    if _same(told, server) and ours is not None and theirs is not None and far(ours, theirs) > 1:
        where = f": what lies between the two, {_BETWEEN}, is in no number of the server's" if ours > theirs else ""
        found.append(
            f"the mean TTFT from sending is {_ms(ours)} here and {_ms(theirs)} by the server's own clock{where}"
        )
    return found


def _ms(seconds: float) -> str:
    return f"{seconds * 1000:.3g} ms"

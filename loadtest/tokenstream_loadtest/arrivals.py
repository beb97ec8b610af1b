"""When requests of an open loop are sent: offsets from a stage's begin, drawn from a seed alone.

With a number of requests the gaps are scaled so that the last one is sent at exactly requests/rate: equal load for any
seed. Source: `get_request` of `vllm bench serve`, which also calls the shape of gamma gaps burstiness. It does not know
what is sent.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Iterator

from .results import Stage


def schedule(stage: Stage, seed: int) -> Iterator[float]:
    """Seconds from the stage's begin at which its requests are due, ascending.

    As many as `requests`, all before `seconds`; endless if the stage has neither. ValueError for a closed loop, which
    has no schedule, and for a rate, burstiness or burst that is not above 0.
    """
    gaps = _gaps(stage, random.Random(seed))  # noqa: S311  (arrivals are no secret)
    if stage.requests is None:
        offsets: Iterator[float] = itertools.accumulate(gaps)
    else:
        offsets = iter(_scaled(list(itertools.islice(gaps, stage.requests)), stage))
    return offsets if stage.seconds is None else itertools.takewhile(_before(stage.seconds), offsets)


def _gaps(stage: Stage, source: random.Random) -> Iterator[float]:
    """Seconds between one arrival and the next, without end."""
    rate, shape, burst = stage.rate, stage.burstiness, stage.burst
    if rate is None or rate <= 0 or shape <= 0 or burst < 1:
        raise ValueError(f"an open loop needs a rate, a burstiness and a burst above 0, got {stage}")
    if stage.arrivals == "poisson":
        return (source.expovariate(rate) for _ in itertools.count())
    if stage.arrivals == "constant":
        return itertools.repeat(1 / rate)
    if stage.arrivals == "gamma":
        return (source.gammavariate(shape, 1 / (rate * shape)) for _ in itertools.count())
    if stage.arrivals == "bursts":
        return (0.0 if at % burst else source.expovariate(rate / burst) for at in itertools.count())
    raise ValueError("a closed loop has no schedule: its callers ask again once they are answered")


def _scaled(gaps: list[float], stage: Stage) -> list[float]:
    """Offsets of which the last is requests/rate."""
    offsets = list(itertools.accumulate(gaps))
    if not offsets or offsets[-1] <= 0:
        return offsets
    last = len(offsets) / (stage.rate or 1.0)
    return [min(offset * (last / offsets[-1]), last) for offset in offsets[:-1]] + [last]  # min: rounding


def _before(seconds: float) -> Callable[[float], bool]:
    return lambda offset: offset < seconds

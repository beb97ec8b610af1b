"""Ramp to the limit: the highest load at which every objective holds, by doubling and then bisecting.

It changes the load of a stage and judges what a trial of it measured; it does not know how a trial is made, nor what
the server is.
"""

from __future__ import annotations

import math
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field, replace

from .results import Measurement, Stage
from .slo import Objective

WITHIN = 0.08  # the share of the load within which its limit is known at the end
MOST_TRIALS = 16
_LOWEST_RATE = 0.01

Trial = Callable[[Stage, int], Awaitable[Measurement | None]]  # of a load, the nth from 0; None ends the search


@dataclass(frozen=True, slots=True)
class Searched:
    """`best`: of the trials that met every objective the one with the highest goodput, None if none did.

    `trials`: all of them, in their order; of two at the same load the first one was flawed. `notes`: what a reader
    should know of the search.
    """

    best: Measurement | None
    trials: tuple[Measurement, ...]
    notes: tuple[str, ...] = ()


@dataclass(slots=True)
class _Search:
    trial: Trial
    stage: Stage
    objectives: Sequence[Objective]
    most_trials: int
    tell: Callable[[Measurement, bool], None]
    trials: list[Measurement] = field(default_factory=list)
    ended: bool = False
    held: list[Measurement] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    @property
    def over(self) -> bool:
        """Whether no further trial is allowed."""
        return self.ended or len(self.trials) >= self.most_trials

    async def holds(self, load: float) -> bool:
        """Try a load, a second time if something spoilt the first."""
        stage = at_load(self.stage, load)
        measurement = await self._measure(stage, 0)
        if measurement is not None and not measurement.valid and not self.over:
            measurement = await self._measure(stage, 1)
        if measurement is None:
            self.ended = True
            return False
        if not measurement.valid:
            why = measurement.flaws[0]
            self.notes.append(f"{stage.label} counts as failed: it could not be measured soundly ({why})")
        return bool(self.held) and self.held[-1] is measurement

    async def _measure(self, stage: Stage, nth: int) -> Measurement | None:
        measurement = await self.trial(stage, nth)
        if measurement is None:
            return None
        self.trials.append(measurement)
        held = measurement.valid and all(objective.met(measurement.all) for objective in self.objectives)
        if held:
            self.held.append(measurement)
        self.tell(measurement, held)
        return measurement


async def search(
    trial: Trial,
    stage: Stage,
    most: float,
    objectives: Sequence[Objective],
    *,
    within: float = WITHIN,
    most_trials: int = MOST_TRIALS,
    tell: Callable[[Measurement, bool], None] = lambda _measurement, _held: None,
) -> Searched:
    """The highest load from that of `stage` on, up to `most`, at which all `objectives` hold in a trial.

    The load is doubled while they do, halved while the first one does not, and then bisected until the limit is known
    within that share of it, or `most_trials` were made. `tell` hears of each trial and whether it held. A trial that is
    flawed is made again once. ValueError without an objective, or for a `most` below the start.
    """
    if not objectives:
        raise ValueError("a search needs an objective to hold: give one with --slo, such as ttft_p95=500ms")
    if not 0 < stage.load <= most:
        raise ValueError(f"a search must start above 0 and not above its most: it goes from {stage.load:g} to {most:g}")
    state = _Search(trial, stage, objectives, most_trials, tell)
    low, high = await _bracket(state, stage.load, most)
    while low is not None and high is not None and not state.over and high > low * (1 + within):
        load = at_load(stage, (low + high) / 2).load
        if not low < load < high:  # callers come in whole numbers
            break
        if await state.holds(load):
            low = load
        else:
            high = load
    if low is not None and high is None and not state.over:
        state.notes.append(f"every objective still held at {low:g}, the most that was to be tried: the limit is higher")
    if len(state.trials) >= most_trials:
        state.notes.append(f"ended after {most_trials} trials")
    best = max(state.held, key=lambda measurement: (measurement.goodput, measurement.stage.load), default=None)
    if best is not None and (higher := max(each.stage.load for each in state.held)) > best.stage.load:
        state.notes.append(f"every objective held at {higher:g} too, with less goodput")
    return Searched(best, tuple(state.trials), tuple(state.notes))


async def _bracket(state: _Search, start: float, most: float) -> tuple[float | None, float | None]:
    """The highest load that held and the lowest that did not, as far as they were found."""
    low: float | None = None
    high: float | None = None
    load = start
    while not state.over:
        if await state.holds(load):
            low = load
            if high is not None or load >= most:
                break
            load = min(2 * load, most)
        else:
            high = load
            lower = at_load(state.stage, load / 2).load
            if low is not None or not _LOWEST_RATE <= lower < load:
                break
            load = lower
    return low, high


def at_load(stage: Stage, load: float) -> Stage:
    """The stage with another load: whole callers, at least one, or a rate of three digits."""
    if stage.arrivals == "closed":
        return replace(stage, concurrency=max(1, math.floor(load + 0.5)))
    return replace(stage, rate=float(f"{load:.3g}"))

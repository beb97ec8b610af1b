"""Carries a plan out, stage by stage or as a search, and tells how it stands in messages.

Cancelling its task ends the load; what was measured until then is kept. It does not know who hears the messages, nor
what is written of a run.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

from .measure import WARM_UP, Bench, Plan, Progress
from .results import Measurement, Run, Stage
from .search import Found, search
from .shapes import Search

Tell = Callable[[dict[str, Any]], None]


@dataclass(frozen=True, slots=True)
class Done:
    """What was measured; `found` where it was searched; `interrupted`: not everything was measured."""

    run: Run
    found: Found | None
    interrupted: bool


async def carry_out(plan: Plan, wanted: Search | None, tell: Tell) -> Done:
    """Measure the plan's stages, or search in their place.

    `tell` hears {"event": "progress"} and {"event": "trial"}. `targets.Failed` if the server cannot be reached to begin
    with; ValueError for a target that cannot be.
    """
    course = _Course(plan, tell)
    async with Bench(plan, course.hear) as bench:
        if wanted is not None:
            found = await course.search(bench, wanted)
        else:
            found = None
            await course.stages(bench)
        return Done(bench.run(), found, course.interrupted)


class _Course:
    """One way through a plan; `interrupted` once its task was cancelled."""

    def __init__(self, plan: Plan, tell: Tell) -> None:
        self.interrupted = False
        self._plan = plan
        self._tell = tell
        self._stage = Stage()
        self._trial = 0

    async def stages(self, bench: Bench) -> None:
        """All stages of all repeats."""
        for repeat in range(self._plan.repeats):
            for index, stage in enumerate(self._plan.stages):
                if await self._measure(bench, stage, repeat, index) is None:
                    return

    async def search(self, bench: Bench, wanted: Search) -> Found:
        """Trials until the highest load is found."""

        async def trial(stage: Stage, nth: int) -> Measurement | None:
            self._trial += 1
            return await self._measure(bench, stage, nth, self._trial)

        start, objectives = wanted.stage(wanted.start), self._plan.objectives
        return await search(trial, start, wanted.most, objectives, within=wanted.tolerance, tell=self._judged)

    async def _measure(self, bench: Bench, stage: Stage, repeat: int, index: int) -> Measurement | None:
        """One stage; None if it was interrupted."""
        self._stage = stage
        try:
            measurement = await bench.measure(stage, repeat, index)
        except asyncio.CancelledError:
            self.interrupted = True
            return None
        self.interrupted = self.interrupted or bench.interrupted
        return None if self.interrupted else measurement

    def hear(self, progress: Progress) -> None:
        """Tell how the stage stands, and how many seconds it has left if that can be told."""
        told = {"event": "progress", **asdict(progress), "left": _left(progress, self._stage), "trial": self._trial}
        self._tell(told)

    def _judged(self, measurement: Measurement, held: bool) -> None:
        stage, flaws = measurement.stage, list(measurement.flaws)
        told = {"load": stage.label, "held": held, "goodput": measurement.goodput, "flaws": flaws}
        self._tell({"event": "trial", **told})


def _left(progress: Progress, stage: Stage) -> float | None:
    if progress.stage_label == WARM_UP:
        return None
    if stage.seconds is not None:
        return max(0.0, stage.seconds - progress.seconds)
    if stage.requests is None or not progress.ended:
        return None
    return max(0.0, progress.seconds * (stage.requests / progress.ended - 1))

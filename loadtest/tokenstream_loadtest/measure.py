"""A whole run: all stages of a plan in all its repeats, or the trials of its search.

It decides which stage comes next, and when nothing more does; it does not know how one is measured, who hears of it,
nor what is written of a run.
"""

from __future__ import annotations

from collections.abc import Callable

from .bench import Bench, Hear, Plan
from .results import Found, Measurement, Run, Stage
from .search import search
from .shapes import Search

Judged = Callable[[Measurement, bool], None]  # of each trial, and whether it kept every objective


async def measure(plan: Plan, hear: Hear, judged: Judged = lambda _measurement, _held: None) -> Run:
    """Everything that is planned. When the task is cancelled, what was measured until then: the run is `interrupted`.

    `judged` hears of each trial of a search. `targets.Failed` if the server cannot be reached to begin with; ValueError
    for a target that cannot be, or a search that makes no sense.
    """
    async with Bench(plan, hear) as bench:
        if plan.search is not None:
            return bench.run(await _search(bench, plan, plan.search, judged))
        await _stages(bench, plan)
        return bench.run()


async def _stages(bench: Bench, plan: Plan) -> None:
    for repeat in range(plan.repeats):
        for index, stage in enumerate(plan.stages):
            await bench.measure(stage, repeat, index)
            if bench.interrupted:
                return


async def _search(bench: Bench, plan: Plan, wanted: Search, judged: Judged) -> Found:
    """Trials until the highest load is found. One that was interrupted is kept, but not judged."""
    number = 0

    async def trial(stage: Stage, nth: int) -> Measurement | None:
        nonlocal number
        number += 1
        measurement = await bench.measure(stage, nth, number)
        return None if bench.interrupted else measurement

    start = wanted.stage(wanted.start)
    searched = await search(trial, start, wanted.most, plan.objectives, within=wanted.tolerance, tell=judged)
    best = searched.best
    stage, goodput = (best.stage, best.goodput) if best is not None else (None, None)
    return Found(stage, goodput, len(searched.trials), searched.notes)

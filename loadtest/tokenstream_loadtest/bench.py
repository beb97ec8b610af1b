"""What shall be measured, and the bench that measures it stage by stage, with what server and machine say meanwhile.

Each stage is warmed up by requests that do not count. The prompts of a stage depend on the seed, the stage and the
repeat alone, so that every server and every version gets the same. It does not know which stage comes next.
"""

from __future__ import annotations

import asyncio
import random
import secrets
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import AsyncExitStack
from dataclasses import dataclass, field, replace
from types import TracebackType
from typing import Protocol, Self, TypeVar

from .checks import INTERRUPTED, flaws, notes
from .generator import MOST_LIVE, Counts, Measured, run_stage
from .host import Meter, describe_machine, host_and_port, is_here, versions
from .requests import Request
from .results import Found, Machine, Measurement, Run, Stage
from .shapes import Search
from .slo import Objective
from .targets import TargetOptions, open_target
from .watch import Watch

T = TypeVar("T")
WARM_UP = "warm-up"
_INTERRUPTED_BEHIND = "the run was interrupted behind this stage"
_WARMING_CALLERS = 4  # of an open loop's warm-up, which is a closed one
_LIBRARIES = ("grpcio", "hdrhistogram", "httpx2")


class Draws(Protocol):
    """A workload: requests without end, for each seed its own."""

    @property
    def name(self) -> str:
        """By which it was asked for."""

    def draw(self, seed: int) -> Iterator[Request]:
        """The requests of a seed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """What shall be measured. `target`, `url`, `model` and `options` are `open_target`'s.

    `metrics_url`: Triton's metrics page, None without one. `warmup`: requests before each stage. `search`: for the
    highest load, in place of stages and repeats. `command`: how the run was started.
    """

    scenario: str
    title: str
    workload: Draws
    stages: tuple[Stage, ...]
    url: str
    target: str = "tokenstream"
    model: str = "llm"
    options: TargetOptions = field(default_factory=TargetOptions)
    metrics_url: str | None = None
    repeats: int = 1
    warmup: int = 0
    seed: int = 0
    objectives: tuple[Objective, ...] = ()
    search: Search | None = None
    command: str = ""


@dataclass(frozen=True, slots=True)
class Progress:
    """How a run stands: in which stage (its label, or WARM_UP) of which repeat (both from 0), and how that stands.

    `trial`: of a search, from 1; else 0. `left`: seconds that the stage has left, None if that cannot be told.
    """

    stage_label: str
    repeat: int
    repeats: int
    stage_index: int
    stages: int
    seconds: float
    sent: int
    ended: int
    errors: int
    live: int
    tokens: int
    left: float | None
    trial: int


Hear = Callable[[Progress], None]


class Bench:
    """Measures stages one by one, all over one target: for whoever decides the next by the last.

    `interrupted`: the task was cancelled; no further stage should be measured.
    """

    def __init__(self, plan: Plan, hear: Hear) -> None:
        self.interrupted = False
        self._plan = plan
        self._hear = hear
        self._target = open_target(plan.target, plan.url, plan.model, plan.options)
        self._host, self._port = host_and_port(plan.url)
        self._watch = Watch(plan.metrics_url, plan.model) if plan.metrics_url else None
        self._stack = AsyncExitStack()
        self._measurements: list[Measurement] = []
        self._started_at = 0.0
        self._server: dict[str, str] = {}
        self._machine: Machine | None = None

    async def __aenter__(self) -> Self:
        """Open the target and ask who is there. Failed if nobody is."""
        self._started_at = time.time()
        self._machine = describe_machine(local=is_here(self._host))
        await self._stack.enter_async_context(self._target)
        try:
            self._server = await self._target.describe()
        except BaseException:
            await self._stack.aclose()
            raise
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """Hang up; whoever cancels that keeps what was measured."""
        await self._unless_cancelled(self._stack.aclose())

    async def measure(self, stage: Stage, repeat: int = 0, index: int = 0) -> Measurement | None:
        """Warm up, then measure one stage; None if it was interrupted before it began.

        Interrupted later, even while the server's counts are awaited, it has `checks.INTERRUPTED` among its flaws.
        """
        plan, watch = self._plan, self._watch
        if plan.warmup and not await self._warm_up(stage, repeat, index):
            return None
        before = None if watch is None else await self._unless_cancelled(watch.settled())
        if self.interrupted:
            return None
        local = self._machine is not None and self._machine.local
        meter = Meter(self._port if local else None)
        sampling = None if watch is None else asyncio.create_task(watch.sample())
        try:
            measured = await self._run(stage, stage.label, plan.objectives, repeat, index)
        finally:
            if sampling is not None:
                sampling.cancel()
                await self._unless_cancelled(asyncio.wait([sampling]))
        cores = meter.read()
        counts = None
        if watch is not None and before is not None:
            counts = await self._unless_cancelled(watch.counts(before, measured.tally.all))
        restarted = meter.restarted or (watch is not None and watch.restarted)
        lost = before is not None and counts is None
        if self.interrupted:
            measured = replace(measured, interrupted=True)
        measurement = Measurement(
            stage=stage,
            repeat=repeat,
            started_at=measured.started_at,
            seconds=measured.seconds,
            tally=measured.tally,
            samples=() if watch is None else watch.samples,
            stalls=measured.stalls,
            cores=cores,
            server=counts,
            flaws=flaws(measured, stage, cores, counts, local=local, restarted=restarted, lost=lost),
            notes=notes(measured, stage, watched=None if lost else plan.metrics_url, counts=counts),
        )
        self._measurements.append(measurement)
        return measurement

    def run(self, found: Found | None = None) -> Run:
        """The document of what was measured so far, and of what was `found` if it was a search."""
        plan, measurements = self._plan, self._measurements
        if self._machine is None:
            raise RuntimeError("nothing was opened")
        if self.interrupted and measurements and INTERRUPTED not in (last := measurements[-1]).flaws:
            measurements = [*measurements[:-1], replace(last, notes=(*last.notes, _INTERRUPTED_BEHIND))]
        return Run(
            scenario=plan.scenario,
            title=plan.title,
            workload=plan.workload.name,
            target=plan.target,
            url=plan.url,
            command=plan.command,
            seed=plan.seed,
            started_at=self._started_at,
            machine=self._machine,
            objectives=tuple(str(objective) for objective in plan.objectives),
            versions=versions(*_LIBRARIES),
            server=self._server,
            measurements=tuple(measurements),
            interrupted=self.interrupted,
            found=found,
        )

    async def _unless_cancelled(self, work: Awaitable[T]) -> T | None:
        """What comes of it; None if the task is cancelled meanwhile: the run is interrupted, and keeps what it has."""
        try:
            return await work
        except asyncio.CancelledError:
            self.interrupted = True
            if (task := asyncio.current_task()) is not None:
                task.uncancel()
            return None

    async def _warm_up(self, stage: Stage, repeat: int, index: int) -> bool:
        """Whether it went through; what became of its requests is forgotten."""
        callers = min(self._plan.warmup, stage.concurrency or _WARMING_CALLERS)
        warming = Stage(concurrency=callers, requests=self._plan.warmup)
        measured = await self._run(warming, WARM_UP, (), repeat, index)
        return not measured.interrupted

    async def _run(
        self, stage: Stage, label: str, objectives: tuple[Objective, ...], repeat: int, index: int
    ) -> Measured:
        plan = self._plan
        seeds = random.Random(f"{plan.seed} {index} {stage} {label} {repeat}")  # noqa: S311  (no secret)
        requests = plan.workload.draw(seeds.getrandbits(32))

        def hear(counts: Counts) -> None:
            told = Progress(
                label,
                repeat,
                plan.repeats,
                index,
                len(plan.stages),
                counts.seconds,
                counts.sent,
                counts.ended,
                counts.errors,
                counts.live,
                counts.tokens,
                None if label == WARM_UP else _left(counts, stage),
                index if plan.search else 0,
            )
            self._hear(told)

        measured = await run_stage(
            self._target,
            requests,
            stage,
            seeds.getrandbits(32),
            objectives,
            hear,
            name=f"load-{secrets.token_hex(4)}",
            most_live=stage.concurrency or MOST_LIVE,  # an open loop that names a concurrency asks for that cap
        )
        self.interrupted = self.interrupted or measured.interrupted
        return measured


def _left(counts: Counts, stage: Stage) -> float | None:
    if stage.seconds is not None:
        return max(0.0, stage.seconds - counts.seconds)
    if stage.requests is None or not counts.ended:
        return None
    return max(0.0, counts.seconds * (stage.requests / counts.ended - 1))

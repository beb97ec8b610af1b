"""A whole run: every stage of a plan, as often as it shall be repeated, with what the server and the machine say of it.

Each stage is warmed up by requests that do not count. The prompts of a stage depend on the seed, the stage and the
repeat alone, so that every server and every version gets the same. It writes nothing and shows nothing.
"""

from __future__ import annotations

import asyncio
import random
import secrets
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import AsyncExitStack
from dataclasses import dataclass, field, replace
from importlib.metadata import PackageNotFoundError, version
from platform import python_version
from types import TracebackType
from typing import Protocol, Self, TypeVar

import tokenstream

from .checks import INTERRUPTED, flaws, notes
from .generator import CEILING, MOST_LIVE, Counts, Measured, run_stage
from .host import Meter, describe_machine, host_and_port, is_here
from .requests import Request
from .results import Machine, Measurement, Run, Stage
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

    `metrics_url`: Triton's metrics page, None without one. `warmup`: requests before each stage. `fixed_length`: all
    answers have exactly their most tokens (True), or end where the model ends them (False); None: as the workload says.
    `max_tokens`: at most so many in place of the workload's. `command`: how the run was started.
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
    fixed_length: bool | None = None
    max_tokens: int | None = None
    command: str = ""
    ceiling: float = CEILING
    most_live: int = MOST_LIVE


@dataclass(frozen=True, slots=True)
class Progress:
    """How a run stands: in which stage (its label, or WARM_UP) of which repeat (both from 0), and how that stands."""

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


Hear = Callable[[Progress], None]


async def measure(plan: Plan, hear: Hear) -> Run:
    """Everything that is planned. When the task is cancelled, what was measured until then: a stage that was cut has
    `checks.INTERRUPTED` among its flaws.

    `targets.Failed` if the server cannot be reached to begin with; ValueError for a target that cannot be.
    """
    async with Bench(plan, hear) as bench:
        for repeat in range(plan.repeats):
            for index, stage in enumerate(plan.stages):
                if not bench.interrupted:
                    await bench.measure(stage, repeat, index)
        return bench.run()


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
        """Hang up."""
        await self._stack.aclose()

    async def measure(self, stage: Stage, repeat: int = 0, index: int = 0) -> Measurement | None:
        """Warm up, then measure one stage; None if it was interrupted before it began."""
        plan = self._plan
        if plan.warmup and not await self._warm_up(stage, repeat, index):
            return None
        before = None if self._watch is None else await self._unless_cancelled(self._watch.settled())
        if self.interrupted:
            return None
        meter = Meter(self._port if self._machine and self._machine.local else None)
        sampling = None if self._watch is None else asyncio.create_task(self._watch.sample())
        try:
            measured = await self._run(stage, stage.label, plan.objectives, repeat, index)
        finally:
            samples = () if self._watch is None or sampling is None else await self._watch.samples(sampling)
        cores = meter.read()
        counts = None
        if self._watch is not None and before is not None:
            counts = await self._unless_cancelled(self._watch.counts(before, measured.tally.all))
        local = self._machine is not None and self._machine.local
        measurement = Measurement(
            stage=stage,
            repeat=repeat,
            started_at=measured.started_at,
            seconds=measured.seconds,
            tally=measured.tally,
            samples=samples,
            stalls=measured.stalls,
            cores=cores,
            server=counts,
            flaws=flaws(measured, stage, cores, counts, local=local),
            notes=notes(measured, stage, watched=plan.metrics_url, counts=counts),
        )
        self._measurements.append(measurement)
        return measurement

    def run(self) -> Run:
        """The document of what was measured so far."""
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
            versions=_versions(),
            server=self._server,
            measurements=tuple(measurements),
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
        requests = (_changed(request, plan) for request in plan.workload.draw(seeds.getrandbits(32)))

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
            ceiling=plan.ceiling,
            most_live=_most_live(stage, plan),
        )
        self.interrupted = self.interrupted or measured.interrupted
        return measured


def _most_live(stage: Stage, plan: Plan) -> int:
    """Of an open loop; one that names a concurrency asks for that cap."""
    return stage.concurrency or plan.most_live


def _changed(request: Request, plan: Plan) -> Request:
    """The request with the plan's word on its length."""
    if plan.fixed_length is None and plan.max_tokens is None:
        return request
    return replace(
        request,
        ignore_eos=request.ignore_eos if plan.fixed_length is None else plan.fixed_length,
        max_tokens=request.max_tokens if plan.max_tokens is None else plan.max_tokens,
    )


def _versions() -> dict[str, str]:
    found = {"tokenstream": tokenstream.__version__, "python": python_version()}
    for name in _LIBRARIES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found

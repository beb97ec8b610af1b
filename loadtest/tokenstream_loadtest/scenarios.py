"""Scenarios: a workload, the load that it is sent in, and what is expected of the server, from TOML files.

docs/loadtest.md says how to write one. It does not know how a load is made or measured.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Annotated, Any, Self

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, model_validator

from .amounts import Positive
from .data_files import Table, checked, locate, read_table, shipped_names
from .results import Arrivals, Stage
from .shapes import Load, OneStage, Search, Soak, Spike, Steps, Whole
from .slo import Objective
from .workloads import Workload, read_workload

__all__ = ["Change", "Scenario", "ScenarioFile", "Search", "list_scenarios", "read_scenario"]

_FOLDER = "scenarios"
_COMMAND_LINE = "the command line"
_SHAPES = ("stages", "steps", "spike", "soak", "search")


def _objective(text: str) -> str:
    return str(Objective.parse(text))


Text = Annotated[str, Field(min_length=1)]
Repeats = Annotated[int, Field(ge=1, le=100)]
Warmup = Annotated[int, Field(ge=0, le=10_000)]
Objectives = tuple[Annotated[str, AfterValidator(_objective)], ...]


class ScenarioFile(Table):
    """What the file of a scenario says. Exactly one of the shapes of load is given."""

    title: Text
    about: Text
    workload: Text
    repeats: Repeats = 1
    warmup: Warmup = 0
    objectives: Objectives = ()
    max_tokens: Whole | None = None
    fixed_length: bool = False
    stages: tuple[OneStage, ...] = ()
    steps: Steps | None = None
    spike: Spike | None = None
    soak: Soak | None = None
    search: Search | None = None

    @model_validator(mode="after")
    def _one_shape(self) -> Self:
        given = [name for name in _SHAPES if getattr(self, name)]
        if len(given) != 1:
            raise ValueError(f"should hold one of {', '.join(_SHAPES)}, not {' and '.join(given) or 'none of them'}")
        if self.search is not None and not self.objectives:
            raise ValueError("a search needs objectives")
        return self

    def all_stages(self) -> tuple[Stage, ...]:
        """What the shape comes to; nothing of a search."""
        shapes = (*self.stages, self.steps, self.spike, self.soak)
        return tuple(stage for shape in shapes if shape is not None for stage in shape.stages())


class Change(Table):
    """What a command line can put in place of what a scenario says; None keeps it."""

    workload: Text | None = None
    arrivals: Arrivals | None = None
    concurrency: Whole | None = None
    rate: Positive | None = None
    burstiness: Positive | None = None
    burst: Whole | None = None
    seconds: Positive | None = None
    requests: Whole | None = None
    repeats: Repeats | None = None
    warmup: Warmup | None = None
    objectives: Objectives | None = None
    max_tokens: Whole | None = None
    fixed_length: bool | None = None

    @model_validator(mode="after")
    def _fits(self) -> Self:
        if self.seconds is not None and self.requests is not None:
            raise ValueError("give one of seconds and requests")
        if not self.loads and any((self.arrivals, self.burstiness, self.burst)):
            raise ValueError("arrivals, burstiness and burst need a rate beside them")
        return self

    @property
    def loads(self) -> bool:
        """Whether it says how much load."""
        return self.concurrency is not None or self.rate is not None

    @property
    def ends(self) -> dict[str, Any]:
        """What ends a stage, for Stage; nothing if that is kept."""
        given = self.seconds is not None or self.requests is not None
        return {"seconds": self.seconds, "requests": self.requests} if given else {}


class Scenario(BaseModel):
    """What to run. `workload`: a shipped name or a path. `warmup`: requests before each stage that are not measured.

    There are `stages`, or a `search` and no stages. `max_tokens`: of every answer, None for the workload's own.
    `fixed_length`: answers of exactly so many tokens; else the model ends them. `objectives`: as `slo.Objective` reads.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    name: str
    title: str
    about: str
    workload: str
    stages: tuple[Stage, ...] = ()
    search: Search | None = None
    repeats: int = 1
    warmup: int = 0
    objectives: tuple[str, ...] = ()
    max_tokens: int | None = None
    fixed_length: bool = False

    def read_workload(self) -> Workload:
        """Its workload, with the answers that it wants. ValueError in one line."""
        return read_workload(self.workload).with_answers(max_tokens=self.max_tokens, fixed_length=self.fixed_length)

    def override(self, **given: Any) -> Scenario:
        """The same with the fields of `Change` that are given and not None. ValueError in one line.

        A `concurrency` or a `rate` puts one stage in place of all stages; it ends as the first of them, if neither
        `seconds` nor `requests` is given. Else these two end every stage. A search starts at that load, and `seconds`
        end its trials.
        """
        change = checked(Change, given, _COMMAND_LINE)
        kept = ("workload", "repeats", "warmup", "objectives", "max_tokens", "fixed_length")
        update: dict[str, Any] = change.model_dump(include=set(kept), exclude_none=True)
        if self.search is not None:
            update["search"] = self._searched(self.search, change)
        elif change.loads:
            update["stages"] = (self._one_stage(change),)
        elif change.ends:
            update["stages"] = tuple(replace(stage, **change.ends) for stage in self.stages)
        return self.model_copy(update=update)

    def _one_stage(self, change: Change) -> Stage:
        ends = change.ends or {"seconds": self.stages[0].seconds, "requests": self.stages[0].requests}
        load = change.model_dump(include=set(Load.model_fields), exclude_none=True)
        return checked(OneStage, load | ends, _COMMAND_LINE).stages()[0]

    @staticmethod
    def _searched(search: Search, change: Change) -> Search:
        if change.requests is not None:
            raise ValueError(f"{_COMMAND_LINE}: the trials of a search end by seconds, not by requests")
        if change.arrivals not in (None, "poisson") or change.burstiness or change.burst:
            raise ValueError(f"{_COMMAND_LINE}: the arrivals of a search by rate are poisson")
        if change.concurrency is not None and change.rate is not None:
            raise ValueError(f"{_COMMAND_LINE}: give one of concurrency and rate, where a search starts")
        update: dict[str, Any] = {} if change.seconds is None else {"seconds": change.seconds}
        if change.rate is not None:
            update |= search.starting("rate", change.rate)
        elif change.concurrency is not None:
            update |= search.starting("concurrency", change.concurrency)
        return search.model_copy(update=update)


def read_scenario(name_or_path: str) -> Scenario:
    """The scenario of a shipped name, or of a path to a TOML file. ValueError in one line."""
    path = locate(_FOLDER, name_or_path)
    file = read_table(path, ScenarioFile)
    same = file.model_dump(exclude={*_SHAPES, "workload"})
    beside = path.parent / file.workload  # a path in a file is meant from where the file is
    workload = str(beside) if file.workload.endswith(".toml") else file.workload
    return Scenario(name=path.stem, workload=workload, stages=file.all_stages(), search=file.search, **same)


def list_scenarios() -> list[Scenario]:
    """All shipped ones, by name."""
    return [read_scenario(name) for name in shipped_names(_FOLDER)]

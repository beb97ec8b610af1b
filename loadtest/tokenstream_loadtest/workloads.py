"""Workloads: which requests a load is made of, from data files that anybody can write (docs/loadtest.md says how).

A workload draws requests without end; the seed alone decides which, so that two servers, or two versions of one, get
the same. It does not know when they are sent, nor to whom.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Annotated, Self

from pydantic import Field, model_validator

from .data_files import Table, locate, read_table, shipped_names
from .dice import Dice
from .kinds import AnyKind, Frame, Source
from .requests import Request

_FOLDER = "workloads"


class WorkloadFile(Table):
    """What the file of a workload says."""

    title: Annotated[str, Field(min_length=1)]
    about: Annotated[str, Field(min_length=1)]
    max_context: Annotated[int, Field(ge=128)] = 2048
    tokens_per_word: Annotated[float, Field(ge=0.5, le=10)] = 1.15
    kinds: Annotated[tuple[AnyKind, ...], Field(min_length=1)]

    @model_validator(mode="after")
    def _names_differ(self) -> Self:
        names = [kind.name for kind in self.kinds]
        for name in names:
            if names.count(name) > 1:
                raise ValueError(f"two kinds have the name {name!r}")
        return self


@dataclass(frozen=True, slots=True)
class Workload:
    """Requests of several kinds. `max_tokens`: of every answer, in place of what the file says.

    `fixed_length`: every answer has exactly as many tokens as it may have; else the model ends it.
    """

    name: str
    title: str
    about: str
    sources: tuple[Source, ...]
    max_tokens: int | None = None
    fixed_length: bool = False

    @property
    def chats(self) -> bool:
        """Whether some of its requests are the messages of a chat."""
        return any(source.kind.chat for source in self.sources)

    def draw(self, seed: int) -> Iterator[Request]:
        """Requests without end, the same for the same seed; in each round as many of each kind as its share says."""
        dice = Dice(f"kinds {seed}")
        streams = [source.draw(Dice(f"{source.kind.name} {seed}")) for source in self.sources]
        round_ = [
            stream for source, stream in zip(self.sources, streams, strict=True) for _ in range(source.kind.share)
        ]
        for stream in dice.deal(round_):
            request = next(stream)
            yield replace(request, max_tokens=self.max_tokens or request.max_tokens, ignore_eos=self.fixed_length)

    def with_answers(self, *, max_tokens: int | None = None, fixed_length: bool = False) -> Workload:
        """The same prompts with other answers."""
        return replace(self, max_tokens=max_tokens, fixed_length=fixed_length)


def read_workload(name_or_path: str) -> Workload:
    """The workload of a shipped name, or of a path to a TOML file. ValueError in one line."""
    path = locate(_FOLDER, name_or_path)
    file = read_table(path, WorkloadFile)
    frame = Frame(str(path.parent), file.max_context, file.tokens_per_word)
    return Workload(path.stem, file.title, file.about, tuple(kind.load(frame) for kind in file.kinds))


def list_workloads() -> list[Workload]:
    """All shipped ones, by name."""
    return [read_workload(name) for name in shipped_names(_FOLDER)]

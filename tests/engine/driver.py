"""Drives an engine from a test: answers that collect their deltas, and an engine that checks its books every turn.

Nothing here sleeps: every wait is for an event, and is bounded. It does not know what a test wants to see.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache
from itertools import count
from typing import Any

import pytest
import torch
from _pytest.mark import ParameterSet
from torch import Tensor

from engine import tiny_models
from llm_engine import loading
from llm_engine.config import EngineConfig, cache_folder
from llm_engine.engine import Engine
from llm_engine.loading import LoadedModel
from llm_engine.request import Delta, Request, SamplingParams
from llm_engine.scheduler import Plan
from llm_kernels.compiling import NativeUnavailableError
from llm_kernels.objects import load_object
from waiting import WAIT

_NUMBERS = count()


@dataclass(eq=False)
class Answer:
    """What one request has been told. `wait` returns when it has been told the end."""

    request: Request
    deltas: list[Delta] = field(default_factory=list)
    first: threading.Event = field(default_factory=threading.Event)
    done: threading.Event = field(default_factory=threading.Event)

    def emit(self, deltas: list[Delta]) -> None:
        self.deltas.extend(deltas)
        self.first.set()
        if any(delta.terminal for delta in deltas):
            self.done.set()

    def wait(self) -> Answer:
        """Wait for the end and check what holds for every answer: no gap in `index`, one terminal delta, the last."""
        assert self.done.wait(WAIT), f"request {self.request.id} has not ended; told so far: {self.deltas}"
        self.check()
        return self

    def check(self) -> None:
        assert [delta.terminal for delta in self.deltas] == [False] * (len(self.deltas) - 1) + [True]
        index = len(self.request.resume_token_ids)
        for delta in self.deltas:
            assert delta.index == index
            index += len(delta.token_ids)

    @property
    def tokens(self) -> list[int]:
        return [token for delta in self.deltas for token in delta.token_ids]

    @property
    def text(self) -> str:
        return "".join(delta.text for delta in self.deltas)

    @property
    def last(self) -> Delta:
        return self.deltas[-1]

    @property
    def code(self) -> str:
        """The reason of the end: `stop`, `length` or an error's code."""
        assert self.last.error or self.last.finish_reason
        return self.last.error.code if self.last.error else str(self.last.finish_reason)


class CheckedEngine(Engine):
    """An engine that begins when it is told to, and checks pool and seats after every turn.

    `on_turn` is called with the number of turns behind it, on the engine thread, where it may submit and cancel.
    """

    def __init__(self, config: EngineConfig, loaded: LoadedModel, *, asynchronous: bool = False) -> None:
        self.turns = 0
        self.faults: list[BaseException] = []
        self.on_turn: Callable[[int], None] = lambda _turn: None
        self._begun = threading.Event()
        super().__init__(config, loaded)
        self._runner.asynchronous = asynchronous

    def start(self, request: Request) -> Answer:
        answer = Answer(request)
        self.submit(request, answer.emit)
        return answer

    def ask(self, prompt: Sequence[int], params: SamplingParams | None = None, **fields: Any) -> Answer:
        request_id = fields.pop("id", None) or f"r{next(_NUMBERS)}"
        return self.start(Request(request_id, prompt, params or SamplingParams(), **fields))

    def begin(self) -> None:
        """Let the first turn take all that was submitted before, at once."""
        self._begun.set()

    def pause(self) -> None:
        """Take no more turns until the next `begin`, but for one that has begun."""
        self._begun.clear()

    def close(self, timeout: float = WAIT) -> None:
        self._begun.set()
        super().close(timeout)

    def check_idle(self) -> None:
        """Nobody holds anything: no blocks, seats, or places in lists."""
        assert self._pool.free == self._pool.blocks
        assert sorted(self._scheduler._seats) == list(range(self.config.max_sequences))
        assert not self._scheduler.has_work
        assert not self.live
        assert self._door.occupancy() == {"running": 0, "waiting": 0}

    def _take_inbox(self, *, wait: bool) -> bool:
        assert self._begun.wait(WAIT)
        return super()._take_inbox(wait=wait)

    def _end_turn(self, started: float, *, stepped: bool) -> None:
        super()._end_turn(started, stepped=stepped)
        self.turns += 1
        try:
            self._check_books()
            self.on_turn(self.turns)
        except BaseException as fault:  # noqa: BLE001 - told by `serving`; here it would end the thread without a word
            self.faults.append(fault)

    def _check_books(self) -> None:
        running = self._scheduler.running
        self._pool.check([request.blocks for request in (*running, *self._scheduler.waiting)])
        seats = [request.seat for request in running]
        assert sorted(seats + self._scheduler._seats) == list(range(self.config.max_sequences))


@contextmanager
def serving(loaded: LoadedModel, *, asynchronous: bool = False, begin: bool = True) -> Iterator[CheckedEngine]:
    """An engine for `loaded`; afterwards it has closed, its books were right after every turn and nothing is held."""
    engine = CheckedEngine(loaded.config, loaded, asynchronous=asynchronous)
    if begin:
        engine.begin()
    try:
        yield engine
    finally:
        engine.close()
    if engine.faults:
        raise engine.faults[0]
    engine.check_idle()


@cache
def native_lack() -> str:
    """Why the native kernels do not run on this machine, "" if they do; compiled here if need be."""
    try:
        load_object(cache_folder())
    except NativeUnavailableError as error:
        return f"the native kernels do not run here: {error}"
    return ""


def needs_native() -> pytest.MarkDecorator:
    """Skip with the reason where the native kernels do not run."""
    return pytest.mark.skipif(bool(native_lack()), reason=native_lack())


def native_dtypes() -> list[ParameterSet]:
    """Each dtype that the native kernels know, skipped where they do not run."""
    return [pytest.param(dtype, marks=needs_native()) for dtype in ("bfloat16", "float32")]


def kernels(dtype: str) -> list[ParameterSet]:
    """Each kind of kernels, skipped where it does not run; PyTorch's run in any `dtype`."""
    return [pytest.param("native", marks=needs_native()), pytest.param("torch")]


def modes(*dtypes: str) -> list[ParameterSet]:
    """Each (dtype, kernels), skipped where it does not run."""
    return [pytest.param(dtype, *kind.values, marks=kind.marks) for dtype in dtypes for kind in kernels(dtype)]


def config(dtype: str = "float32", **values: Any) -> EngineConfig:
    """Settings for tiny models: 4 seats, steps of 64 tokens, 64 blocks of 8 tokens."""
    defaults = {"max_sequences": 4, "max_step_tokens": 64, "block_size": 8, "kv_tokens": 512}
    return EngineConfig(**{"model": "tiny", "dtype": dtype, "threads": 1, **defaults, **values})


def load(family: str = "llama", dtype: str = "float32", **values: Any) -> LoadedModel:
    """Attach a tiny model of `family`."""
    model = tiny_models.build(family, getattr(torch, dtype))
    return loading.attach(model, tiny_models.tokenizer(), config(dtype, **values), "digest")


Logits = dict[tuple[str, int], Tensor]


def record_logits(engine: Engine) -> Logits:
    """Note from now on the logits behind every token: (request id, index in the answer) -> [vocabulary]."""
    noted: Logits = {}
    plans: list[Plan] = []
    runner: Any = engine._runner
    launch, sample = runner.launch, runner._sampler.sample

    def noting_launch(plan: Plan) -> Any:
        plans[:] = [plan]
        return launch(plan)

    def noting_sample(logits: Tensor, *args: Any) -> Any:
        drawing = [chunk for chunk in plans[0].chunks if chunk.samples] if plans else []
        for chunk, row in zip(drawing, logits, strict=True):
            noted[chunk.request.id, chunk.start + chunk.count - chunk.request.prompt_len] = row.clone()
        return sample(logits, *args)

    runner.launch = noting_launch
    runner._sampler.sample = noting_sample
    return noted

"""The longest gap: how long running streams wait for their next token while a long prompt enters.

The engine is the real one, the prompts are cut from a text. It does not know limits, and prints nothing.
"""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from uuid import uuid4

from llm_engine.engine import Engine
from llm_engine.request import Delta, Request, SamplingParams

GAP = (15, 512)  # streams that decode, and the tokens of the prompt that enters
CONTEXT = 256
WAIT_SECONDS = 3600.0  # a slow model on a slow machine is what one may want to measure


class BenchError(RuntimeError):
    """A measurement could not be finished. The message is one line."""


@dataclass(frozen=True, slots=True)
class Gap:
    """The longest wait of `rows` streams for a token while a prompt of `tokens` entered; the worst of `samples`.

    bound_ms: three decode steps and the prefill, as measured; more than this would be a stall.
    """

    rows: int
    tokens: int
    samples: int
    longest_ms: float
    bound_ms: float
    ratio: float
    kind: str = "gap"


def prompt_of(ids: Sequence[int], start: int, length: int) -> list[int]:
    """`length` token ids of `ids`, which is repeated, from place `start` on."""
    return [ids[(start + i) % len(ids)] for i in range(length)]


class _Listener:
    """Takes the deltas of streams on the engine thread and notes when each step's came; `begun` at the first step in
    which all of `rows` streams got a token, `over` when all requests have ended.
    """

    def __init__(self, rows: int) -> None:
        self.times: list[float] = []
        self.begun, self.over = threading.Event(), threading.Event()
        self._rows = self._open = rows

    def __call__(self, deltas: list[Delta]) -> None:
        if sum(bool(d.token_ids) for d in deltas) == self._rows:
            self.times.append(time.perf_counter())
            self.begun.set()
        self._open -= sum(d.terminal for d in deltas)
        if self._open == 0:
            self.over.set()


def longest_gap(engine: Engine, rows: int, tokens: int, ids: Sequence[int]) -> float:
    """Seconds of the longest gap in `rows` decoding streams while one prompt enters. Raises BenchError."""
    streams, prompt = _Listener(rows), _Listener(1)
    params = SamplingParams(temperature=0.0, ignore_eos=True)
    requests = [Request(uuid4().hex, prompt_of(ids, row, CONTEXT), params) for row in range(rows)]
    for request in requests:
        engine.submit(request, streams)
    entering = Request(uuid4().hex, prompt_of(ids, rows, tokens), SamplingParams(max_tokens=4, ignore_eos=True))
    heard = streams.begun.wait(WAIT_SECONDS)
    entered = time.perf_counter()
    engine.submit(entering, prompt)
    heard = heard and prompt.over.wait(WAIT_SECONDS)
    for request in requests:
        engine.cancel(request.id)
    if not heard or not streams.over.wait(WAIT_SECONDS) or len(prompt.times) == 0:
        raise BenchError("a prompt that entered beside running streams was not answered")
    times = [at for at in streams.times if at <= prompt.times[-1]]
    before = max((at for at in times if at <= entered), default=times[0])
    relevant = [at for at in times if at >= before]
    return max(b - a for a, b in itertools.pairwise(relevant))

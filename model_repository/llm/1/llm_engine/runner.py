"""Runs steps: launches a plan on the device and collects what it drew.

It owns the state that lives on the device by seat (newest token, sampling state) and nothing of a request's life.
It does not know the scheduler's rules, text, or who waits for a token.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass, replace
from itertools import islice
from time import perf_counter
from typing import Any

import torch
from torch import Tensor

from .batch import Batch, BatchBuilder
from .loading import LoadedModel, probe_exactness
from .request import Request, SamplingParams, TokenLogprob
from .sampling import Sampled, Sampler
from .scheduler import Chunk, Plan

PROBE_TOKENS = 512
log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Drawn:
    """What one row drew: the token, or `sound` false where the logits held NaN and the token means nothing.

    `error`: what was raised when this row alone was drawn or read; the rest then means nothing.
    """

    token: int = 0
    sound: bool = True
    logprob: TokenLogprob | None = None
    error: Exception | None = None


@dataclass(frozen=True, slots=True)
class InFlight:
    """A launched step. `ready` is the CUDA event behind it, None where launch computes before it returns.

    `sampled`: all rows that draw at once; or, where that failed, one by one, each with what it drew or what it raised.
    """

    plan: Plan
    sampled: tuple[Sampled | Exception, ...]
    ready: torch.cuda.Event | None


class Runner:
    """One model on one device. `asynchronous`: launch returns before the step is computed.

    `model_seconds` sums the time of launched steps in the model's forward; on CUDA that is the time to launch it.
    """

    def __init__(self, loaded: LoadedModel) -> None:
        self.loaded = loaded
        self.asynchronous = loaded.device.type == "cuda"
        self.model_seconds = 0.0
        seats = loaded.config.max_sequences
        self._last_token = torch.zeros(seats, dtype=torch.int64, device=loaded.device)
        self._builder = BatchBuilder(loaded.config.block_size, loaded.scratch_slot, self._last_token)
        numerics = None if loaded.steps is None else loaded.steps.numerics
        self._sampler = Sampler(seats, loaded.vocab_size, loaded.device, numerics)

    def admit(self, request: Request) -> None:
        """Write the state of the seat that `request` has just been given."""
        eos = tuple(token for token in self.loaded.eos_token_ids if token < self.loaded.vocab_size)
        self._sampler.admit(request.seat, request, eos_token_ids=eos, bad_words_ids=request.bad_words_ids)

    @torch.inference_mode()
    def launch(self, plan: Plan) -> InFlight:
        """Compute one step. On CUDA nothing here waits for the device."""
        batch = self._builder.build(plan)
        started = perf_counter()
        logits = self.loaded.forward(batch, batch.head_rows)
        self.model_seconds += perf_counter() - started
        if not batch.sampled:
            return InFlight(plan, (), self._event())
        return InFlight(plan, self._sample(batch, logits, 0, batch.sampled), self._event())

    def collect(self, step: InFlight) -> list[Drawn]:
        """Wait for a step; return what its sampling chunks drew, in the plan's order."""
        if step.ready is not None:
            step.ready.synchronize()
        wanted = iter([chunk.request.params.logprobs for chunk in step.plan.chunks if chunk.samples])
        drawn: list[Drawn] = []
        for part in step.sampled:
            if isinstance(part, Exception):
                next(wanted)
                drawn.append(Drawn(error=part))
            else:
                drawn += _read(part, list(islice(wanted, len(part.tokens))))
        return drawn

    def prepare(self) -> float:
        """Probe exactness, then warm up: both need the cache to be free of requests.

        Returns the seconds that the largest step is expected to take here, from those that the probe took.
        """
        config = self.loaded.config
        rows = min(PROBE_TOKENS, config.max_context, config.max_step_tokens)
        started = perf_counter()
        exact = self._probe(rows)
        seconds = perf_counter() - started
        self.loaded = replace(self.loaded, exact=exact, digest=f"{self.loaded.digest}-{exact}")
        self._warm_up()
        return seconds * config.max_step_tokens / rows

    @torch.inference_mode()
    def _probe(self, rows: int) -> str:
        request = self._scratch_request(rows)

        def forward(start: int, count: int) -> Tensor:
            batch = self._builder.build(Plan((Chunk(request, start, count, samples=False),)))
            head = torch.arange(count, device=self.loaded.device)
            return self.loaded.forward(batch, head)

        return probe_exactness(rows, forward)

    def _warm_up(self) -> None:
        """Run a prompt and a decode step, greedy and drawn, so that the first request pays for nothing."""
        request = self._scratch_request(min(64, self.loaded.config.max_context - 1))
        prompt = request.prompt_len
        for temperature in (0.0, 1.0):
            request.params = SamplingParams(temperature=temperature, seed=0)
            request.seat = 0
            self.admit(request)
            request.tokens = request.tokens[:prompt]
            for start, count in ((0, prompt), (prompt, 1)):
                step = self.launch(Plan((Chunk(request, start, count, samples=True),)))
                request.tokens.append(self.collect(step)[0].token)

    def _sample(self, batch: Batch, logits: Tensor, first: int, end: int) -> tuple[Sampled | Exception, ...]:
        """Draw for rows `first` to `end` at once, or, if that fails, for each alone; only those end that fail again."""
        rows = slice(first, end)
        index, positions = batch.seat_index[rows], batch.answer_positions[rows]
        try:
            sampled = self._sampler.sample(logits[rows], list(batch.seats[rows]), index, positions)
        except Exception as error:
            if is_device_lost(error):
                raise
            log.exception("%d rows could not be drawn", end - first)
            if end - first == 1:
                return (error,)
        else:
            self._last_token[index] = sampled.tokens
            return (sampled,)
        return tuple(part for row in range(first, end) for part in self._sample(batch, logits, row, row + 1))

    def _scratch_request(self, tokens: int) -> Request:
        ids = [(7919 * i + 11) % self.loaded.vocab_size for i in range(tokens)]
        request = Request("warm-up", ids, SamplingParams(), tokens=ids, prompt_len=tokens)
        request.blocks = list(range(-(-(tokens + 1) // self.loaded.config.block_size)))
        return request

    def _event(self) -> torch.cuda.Event | None:
        if not self.asynchronous or self.loaded.device.type != "cuda":
            return None
        event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        event.record()
        return event


def is_device_lost(error: Exception) -> bool:
    """Whether a failed step leaves the device unusable for this process, as CUDA's sticky errors do."""
    return isinstance(error, getattr(torch, "AcceleratorError", ())) or "CUDA error" in str(error)


def _read(sampled: Sampled, wanted: list[int | None]) -> list[Drawn]:
    """What each row drew, with as many logprobs as it wants (None: none)."""
    tokens, unsound, found = sampled.tokens.tolist(), sampled.bad.tolist(), sampled.logprobs
    columns: list[list[Any]] = [[None] * len(tokens)] * 4
    if found is not None:
        columns = [column.tolist() for column in (found.chosen, found.rank, found.top_ids, found.top)]
    drawn: list[Drawn] = []
    for token, bad, count, *columns_of_row in zip(tokens, unsound, wanted, *columns, strict=True):
        try:
            logprob = None if count is None else _logprob(token, count, *columns_of_row)
            drawn.append(Drawn(token, not bad, logprob))
        except Exception as error:
            log.exception("what a row drew could not be read")
            drawn.append(Drawn(error=error))
    return drawn


def _logprob(token: int, count: int, chosen: float, rank: int, ids: list[int], best: list[float]) -> TokenLogprob:
    return TokenLogprob(token, chosen, rank, tuple(zip(ids[:count], best[:count], strict=True)))

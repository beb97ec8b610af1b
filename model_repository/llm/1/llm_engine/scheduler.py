"""The scheduler: which tokens of which requests the next step computes, and who holds a seat and blocks.

There is no prefill phase and no decode phase: every step lets each running request's `computed` catch up with its
tokens within a budget, so that chunked prefill, prefix hits and recompute after preemption are one case.
It knows no tensors, no text and no clients: what a token is, and when an answer ends early, others tell it.

One order decides everything, a request's *rank*: its priority (1 first), then its arrival. By rank requests are
admitted, served and, from the other end, preempted. Two kinds of request rank before every priority: those preempted
twice, and those that newer ones overtook `OVERTAKEN_LIMIT` times while they waited. The first of the running is never
preempted and nobody is admitted past the first of the waiting; so every request ends, under any load.
"""

from __future__ import annotations

import logging
import time
from bisect import insort
from collections.abc import Callable
from dataclasses import dataclass
from heapq import heappop, heappush

from .blocks import BlockPool
from .request import Request, Status

OVERTAKEN_LIMIT = 32
PREEMPTIONS_LIMIT = 2
log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Chunk:
    """Tokens `start` to `start + count` of a request, to be computed in one step.

    `samples`: the chunk reaches the end of what is known or in flight, so its last row draws the next token.
    """

    request: Request
    start: int
    count: int
    samples: bool


@dataclass(frozen=True, slots=True)
class Plan:
    """One step: the chunks, those of a single token first; and who gained or lost a seat for it.

    `failed`: whose own part of the planning raised what; those are finished.
    """

    chunks: tuple[Chunk, ...] = ()
    admitted: tuple[Request, ...] = ()
    preempted: tuple[Request, ...] = ()
    failed: tuple[tuple[Request, Exception], ...] = ()


class Scheduler:
    """Plans steps of at most `max_step_tokens` tokens over at most `max_sequences` running requests.

    The caller's side of the bargain, for each step in turn: `plan()`, launch, then for every chunk `confirm()` if its
    KV is sound, and if it samples `tokens.append(token); in_flight -= 1`; then `finish()` for those that ended. The
    next plan may be made and launched before this, but not the one after it. A request whose chunk is not confirmed
    must be finished. Blocks and seats freed by `finish` or a preemption may be given out at once, although a launched
    step still writes to them, because the device runs steps in launch order.
    """

    def __init__(
        self, pool: BlockPool, *, max_sequences: int, max_step_tokens: int, clock: Callable[[], float] = time.monotonic
    ) -> None:
        if not 1 <= max_sequences <= max_step_tokens:
            raise ValueError(f"max_step_tokens ({max_step_tokens}) must reach max_sequences ({max_sequences})")
        self.pool = pool
        self.max_sequences = max_sequences
        self.max_step_tokens = max_step_tokens
        self.waiting: list[Request] = []  # both lists are sorted by rank; callers only read them
        self.running: list[Request] = []
        self._seats = list(range(max_sequences))  # free ones, a heap
        self._failed: list[tuple[Request, Exception]] = []  # in the plan that is being made
        self._clock = clock
        self._arrivals = 0

    @property
    def has_work(self) -> bool:
        """Whether any request has not ended."""
        return bool(self.waiting or self.running)

    def add(self, request: Request) -> None:
        """Let a request wait for its turn: 0 < tokens < max_total, and the whole pool can hold it, else ValueError."""
        if not 0 < len(request.tokens) < request.max_total:
            raise ValueError(f"request {request.id}: {len(request.tokens)} tokens, max_total {request.max_total}")
        if self.pool.blocks_for(request.max_total - 1) > self.pool.blocks:  # the last token's KV is never needed
            raise ValueError(f"request {request.id}: {request.max_total} tokens never fit in {self.pool.blocks} blocks")
        request.chain = self.pool.chain(request.cache_salt)
        self._arrivals += 1
        request.turn = self._arrivals
        insort(self.waiting, request, key=_rank)

    def plan(self) -> Plan:
        """Choose the next step's chunks; seats, blocks, `computed` and `in_flight` change at once, as if it had run.

        Rows of one token come first and always fit. Every prompt then gets a block, or less if it wants less, so that
        none stands still; what is left goes to the shortest first, which gives the earliest first tokens. If blocks run
        out for a running request, the last in rank is preempted, be it the request itself, and nobody is admitted in
        this step.
        """
        self._failed.clear()
        preempted = self._grow_running()
        live = [request for request in self.running if not _end_in_flight(request)]
        rows = [request for request in live if request.pending == 1]
        prompts = [request for request in live if request.pending > 1]
        admitted = [] if preempted else self._admit(rows, prompts)
        chunks = [_advance(request, 1) for request in rows]
        chunks += self._share(prompts, self.max_step_tokens - len(rows))
        return Plan(tuple(chunks), tuple(admitted), tuple(preempted), tuple(self._failed))

    def confirm(self, chunk: Chunk) -> None:
        """Say that a chunk's KV is written and sound: the blocks it filled become findable by others.

        A prompt's blocks wait for its last chunk, the one with logits: without them nobody could tell NaN in its KV.
        Nothing happens if the request was finished or preempted meanwhile, for then its blocks are another's.
        """
        request = chunk.request
        if request.status is Status.RUNNING and chunk.samples:
            end = chunk.start + chunk.count
            self.pool.register(request.blocks, request.tokens, request.chain, request.confirmed, end)
            request.confirmed = end

    def finish(self, request: Request) -> None:
        """End an added request, waiting or running: its seat and blocks are free at once. Again: no effect."""
        if request.status is Status.FINISHED:
            return
        if request.status is Status.RUNNING:
            self.running.remove(request)
            self._vacate(request)
        else:
            self.waiting.remove(request)
            self.pool.release(request.blocks)  # of one that failed on its way to a seat
        request.status = Status.FINISHED

    def _fail(self, request: Request, error: Exception) -> None:
        self.finish(request)
        self._failed.append((request, error))

    def _share(self, prompts: list[Request], budget: int) -> list[Chunk]:
        """Give every prompt a block of the budget, and the rest to those that want least."""
        chunks = []
        prompts.sort(key=lambda request: request.pending)
        kept = [min(request.pending, self.pool.block_size) for request in prompts]
        spare = budget - sum(kept)
        for request, count in zip(prompts, kept, strict=True):
            more = max(0, min(request.pending - count, spare))
            spare -= more
            # Only a prompt that is alone can have a budget below a block.
            chunks.append(_advance(request, min(count + more, budget)))
        return chunks

    def _grow_running(self) -> list[Request]:
        """Give each running request, first in rank first, room for its next token; return who was preempted for it.

        More is never needed: `_admit` has made room for all tokens that were known then. The first in rank cannot be
        left without a block, since it alone fits in the pool.
        """
        preempted: list[Request] = []
        index = 0
        while index < len(self.running):
            request = self.running[index]
            try:
                grown = _end_in_flight(request) or self.pool.grow(request.blocks, request.computed + 1)
            except Exception as error:
                log.exception("request %s could not be given a block", request.id)
                self._fail(request, error)
                continue
            if grown:
                index += 1
            else:
                preempted.append(self._preempt_last())
        return preempted

    def _preempt_last(self) -> Request:
        """Send the running request that is last in rank back to wait; it will be recomputed from its tokens."""
        request = self.running.pop()
        self._vacate(request)
        request.status = Status.WAITING
        request.computed = 0
        request.preemptions += 1
        insort(self.waiting, request, key=_rank)
        return request

    def _admit(self, rows: list[Request], prompts: list[Request]) -> list[Request]:
        """Seat waiting requests in order of rank, until one does not fit; each is added to `rows` or `prompts`.

        It takes a seat, room, and a claim on the budget: a block, or less if it wants less. The only prompt needs no
        claim, for something is always left beside the rows. A request whose sampled token is still in flight waits
        until the token is known.
        """
        block = self.pool.block_size
        claimed = len(rows) + sum(min(block, request.pending) for request in prompts)
        admitted: list[Request] = []
        while self.waiting and self._seats:
            request = self.waiting[0]
            if prompts and claimed + min(block, request.pending) > self.max_step_tokens:
                break
            try:
                if request.in_flight or not self._make_room(request):
                    break
            except Exception as error:
                log.exception("request %s could not be given blocks", request.id)
                self._fail(request, error)
                continue
            self.waiting.pop(0)
            self._seat(request)
            self._count_overtaken(request)
            (rows if request.pending == 1 else prompts).append(request)
            claimed += min(block, request.pending)
            admitted.append(request)
        return admitted

    def _make_room(self, request: Request) -> bool:
        """Hold the blocks of all known tokens, cached ones included, if one spare block per running row remains.

        All of them, so that a prompt is not preempted halfway for want of its own blocks; and the spare ones, so that
        the next steps do not preempt what was just admitted.
        """
        if self.pool.free <= len(self.running):  # no match covers everything: a full pool need not be searched
            return False
        request.blocks = self.pool.match(request.tokens, request.chain)
        request.computed = len(request.blocks) * self.pool.block_size
        fresh = self.pool.blocks_for(len(request.tokens)) - len(request.blocks)
        if self.pool.free - fresh >= len(self.running):
            return self.pool.grow(request.blocks, len(request.tokens))
        self.pool.release(request.blocks)
        request.computed = 0
        return False

    def _seat(self, request: Request) -> None:
        """Make a request that has its blocks a running one, on the lowest free seat."""
        if request.preemptions == 0:  # later admissions find the request's own blocks, which is no merit of the cache
            request.cached_tokens = request.computed
            request.admitted_at = self._clock()
        request.confirmed = request.computed
        request.seat = heappop(self._seats)
        request.status = Status.RUNNING
        insort(self.running, request, key=_rank)

    def _vacate(self, request: Request) -> None:
        heappush(self._seats, request.seat)
        request.seat = -1
        self.pool.release(request.blocks)

    def _count_overtaken(self, admitted: Request) -> None:
        """Count the admission against every older request that still waits, and put those over the limit in front."""
        for request in self.waiting:
            request.overtaken += request.turn < admitted.turn
        self.waiting.sort(key=_rank)


def _rank(request: Request) -> tuple[int, int]:
    """The order of requests. It changes only while a request waits, so that the running list stays sorted."""
    urgent = request.preemptions >= PREEMPTIONS_LIMIT or request.overtaken >= OVERTAKEN_LIMIT
    return (0 if urgent else request.priority, request.turn)


def _end_in_flight(request: Request) -> bool:
    """Whether the tokens in flight complete the answer, so that nothing is left to compute."""
    return len(request.tokens) + request.in_flight >= request.max_total


def _advance(request: Request, count: int) -> Chunk:
    start = request.computed
    request.computed += count
    samples = request.pending == 0
    request.in_flight += samples
    return Chunk(request, start, count, samples)

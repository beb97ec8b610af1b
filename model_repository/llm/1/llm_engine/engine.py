"""The engine: requests in, deltas out, one thread that turns the crank.

    take submissions and cancellations -> plan -> launch -> collect -> text -> deltas

Callers on any thread submit and cancel; everything about a live request happens on the engine thread. Every accepted
request ends with exactly one terminal delta, whatever fails. It does not know what carries a delta to its reader.
"""

from __future__ import annotations

import logging
import math
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from queue import Empty, SimpleQueue
from typing import Any

from . import loading
from .admission import Admission
from .blocks import BlockPool
from .config import EngineConfig
from .deltas import delta
from .door import Door
from .endings import Endings, internal
from .loading import LoadedModel
from .metrics import Metrics
from .request import Code, Delta, Emit, FinishReason, Request, RequestError, SamplingParams, Status
from .runner import Drawn, InFlight, Runner
from .scheduler import Chunk, Scheduler

STALL_SECONDS = 5.0
PREPARING_SECONDS = 0.05  # an engine without work looks so often at the clocks of requests in preparation
STALL_SLACK = 5.0  # times the longest step expected from those measured at load
log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class _Cancel:
    request_id: str


@dataclass(frozen=True, slots=True)
class _Drain:
    deadline: float


class _Close: ...


class _Entered:
    """Somebody came in who is still to be prepared: the clocks of those who wait must be watched again."""


@dataclass(frozen=True, slots=True)
class _Ended:
    """A request that had entered ends with its preparation."""

    request: Request
    end: FinishReason | RequestError


class Engine:
    """Serves one model. Loading happens in the constructor, which raises ConfigError with the cure.

    `loaded` takes the place of loading from `config.model` (tests, or a model made in memory).
    """

    def __init__(self, config: EngineConfig, loaded: LoadedModel | None = None) -> None:
        self._runner = Runner(loaded or loading.load(config))
        self._longest_step = max(STALL_SECONDS, STALL_SLACK * self._runner.prepare())
        self._loaded = self._runner.loaded
        self.config = self._loaded.config
        self.tokenizer = self._loaded.tokenizer
        self._admission = Admission(self._loaded)
        self.vocab_size, self.embedding_size = self._loaded.vocab_size, self._loaded.embedding_size
        self.metrics = Metrics()
        self.heartbeat = time.monotonic()  # when the engine thread last finished a turn
        self._pool = BlockPool(
            self.config.kv_tokens // self.config.block_size,
            self.config.block_size,
            prefix_cache=self.config.prefix_cache,
            identity=self._loaded.digest,
        )
        self._scheduler = Scheduler(
            self._pool, max_sequences=self.config.max_sequences, max_step_tokens=self.config.max_step_tokens
        )
        self._door = Door(self.config.max_sequences, self.config.max_queue_size)
        self._drain_deadline = math.inf
        self._endings = Endings(self._scheduler, self._door, self.metrics, self._loaded.exact)
        self._inbox: SimpleQueue[Request | _Ended | _Entered | _Cancel | _Drain | _Close] = SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)
        self._thread.start()

    # --- any thread -------------------------------------------------------------------------------------------------

    @property
    def defaults(self) -> SamplingParams:
        """Sampling values for what a request leaves out: the model's generation_config, else OpenAI's."""
        return self._loaded.defaults

    def submit(self, request: Request, emit: Emit) -> None:
        """Accept a request; `emit` gets lists of its deltas on the engine thread, the last one terminal.

        Raises RequestError, and emits nothing, if it is refused: an id outside the vocabulary, a prompt that cannot
        fit, a fingerprint that differs, a full queue, an engine that drains or is closed; or, INTERNAL, if the work of
        accepting it fails.
        """
        request.emit = emit
        try:
            if (ended := self._admission.admit(request)) is None:
                self._enter(request)
        except RequestError as error:
            self.metrics.count_refused(error)
            raise
        except Exception as error:
            log.exception("request %s could not be accepted", request.id)
            self.metrics.count_ended("failed")
            raise internal("the request could not be accepted", error, own_fault=True) from None
        if ended is not None:
            self.metrics.count_finished(request, ended, time.monotonic())
            self._endings.hand_out(emit, [delta(request, "", self._loaded.exact, finish_reason=ended)])
            return
        self._inbox.put(request)

    def enter(self, request: Request, emit: Emit) -> None:
        """Give a request a place in the queue before its prompt is made; whoever calls this calls `complete` later.

        From now on its clocks run, and whatever ends it (cancel, drain, a deadline) is told to `emit` at once. Raises
        RequestError, and emits nothing, if the queue is full or the engine drains or is closed.
        """
        request.emit = emit
        request.emitted = len(request.resume_token_ids)
        try:
            self._enter(request)
        except RequestError as error:
            self.metrics.count_refused(error)
            raise
        self._inbox.put(_Entered())

    def complete(self, request: Request, prepare: Callable[[Request], None]) -> None:
        """Submit a request that has entered, once `prepare` has set its `prompt_ids`: both on the calling thread.

        Raises nothing: whatever fails ends the request, unless it has ended before.
        """
        if request.status is Status.FINISHED:
            return
        end: FinishReason | RequestError | None
        try:
            prepare(request)
            end = self._admission.admit(request)
        except RequestError as error:
            end = error
        except Exception as error:
            log.exception("request %s could not be prepared", request.id)
            end = internal("the request could not be prepared", error, own_fault=True)
        self._inbox.put(request if end is None else _Ended(request, end))

    def cancel(self, request_id: str) -> None:
        """End a request within one step with CANCELLED; nothing happens if it is unknown or has ended."""
        if request := self._door.live.get(request_id):
            request.cancelled = True
        self._inbox.put(_Cancel(request_id))

    def drain(self, seconds: float) -> None:
        """Refuse new requests and end those that wait, UNAVAILABLE; after `seconds` (the fewest asked) the rest."""
        self._door.close("draining: the server is shutting down; try another one")
        self._inbox.put(_Drain(time.monotonic() + seconds))

    def wait_for_room(self, timeout: float) -> bool:
        """Block until one more request would find a seat at once, or `timeout` seconds; return whether it would."""
        return self._door.wait_for_room(timeout)

    @property
    def live(self) -> int:
        """Requests that have not ended, waiting ones included."""
        return len(self._door.live)

    @property
    def stalled(self) -> bool:
        """Whether the engine has work and has finished no step for longer than any step may take here."""
        return bool(self._door.live) and time.monotonic() - self.heartbeat > self._longest_step

    @property
    def device_lost(self) -> bool:
        """Whether a step failed in such a way that only a new process can help."""
        return self._endings.device_lost

    def info(self) -> dict[str, Any]:
        """What a client may want to know before it sends anything: the model, its limits, and how full it is."""
        return {**self._loaded.info(), **self._door.occupancy()}

    def close(self, timeout: float = 30.0) -> None:
        """End all live requests with UNAVAILABLE and the thread with them. Again: no effect."""
        self._door.close("the engine is closed")
        self._inbox.put(_Close())
        self._thread.join(timeout)

    def _enter(self, request: Request) -> None:
        if not self._door.live:
            self.heartbeat = time.monotonic()  # idle until now: the thread has had nothing to finish
        self._door.enter(request)

    # --- the engine thread ------------------------------------------------------------------------------------------

    def _run(self) -> None:
        in_flight: InFlight | None = None
        while self._take_inbox(wait=not self._scheduler.has_work and in_flight is None):
            started, steps = time.monotonic(), self.metrics.steps
            try:
                in_flight = self._turn(in_flight, started)
            except Exception as error:  # the fault of no request that is known: all of them end, the engine never does
                log.exception("a turn failed")
                self._endings.fail(error, "the engine failed", self._door.live.values())
                in_flight = None
            self._end_turn(started, stepped=self.metrics.steps > steps)
        for request in list(self._door.live.values()):
            self._endings.end(request, "failed", RequestError("the engine was closed", Code.UNAVAILABLE))

    def _turn(self, in_flight: InFlight | None, now: float) -> InFlight | None:
        """Launch a step and hand out what the one before it drew; return the step that is in flight now."""
        self._end_overdue(now)
        if in_flight is not None and self._must_see(in_flight):
            self._deliver(in_flight)
            in_flight = None
        planned = self._launch()
        if in_flight is not None:
            self._deliver(in_flight)
        if planned is None or self._runner.asynchronous:
            return planned
        self._deliver(planned)
        return None

    def _take_inbox(self, *, wait: bool) -> bool:
        """Handle all messages, waiting for the first one if idle; False once the engine is closed."""
        try:
            while True:
                message = self._inbox.get(block=wait, timeout=PREPARING_SECONDS if self._door.live else None)
                wait = False
                match message:
                    case _Close():
                        return False
                    case _Cancel():
                        if request := self._door.live.get(message.request_id):
                            self._endings.end(
                                request, "cancelled", RequestError("the request was cancelled", Code.CANCELLED)
                            )
                    case _Drain():
                        self._drain_deadline = min(self._drain_deadline, message.deadline)
                    case _Ended() if message.request.status is not Status.FINISHED:
                        self._end_prepared(message.request, message.end)
                    case Request() if message.status is not Status.FINISHED:  # ended before it was read
                        try:
                            self._scheduler.add(message)
                            self.metrics.prompt_tokens += message.prompt_len
                        except Exception as error:
                            log.exception("request %s could not be queued", message.id)
                            self._endings.blame(message, "the request could not be queued", error)
        except Empty:
            return True

    def _end_prepared(self, request: Request, end: FinishReason | RequestError) -> None:
        if isinstance(end, RequestError):
            self._endings.end(request, "invalid" if end.code is Code.INVALID_ARG else "failed", end)
            return
        self.metrics.count_finished(request, end, time.monotonic())
        self._endings.forget(request)
        self._endings.hand_out(request.emit, [delta(request, "", self._loaded.exact, finish_reason=end)])

    def _end_overdue(self, now: float) -> None:
        for request in list(self._door.live.values()):
            age = now - request.arrived_at
            if request.queued and self._drain_deadline < math.inf:
                self._endings.end(
                    request, "rejected", RequestError("draining: the server is shutting down", Code.UNAVAILABLE)
                )
            elif request.queued and age > request.queue_seconds:
                message = f"Request timeout expired: no seat was free within {request.queue_seconds:g} s"
                self._endings.end(request, "expired", RequestError(message, Code.UNAVAILABLE))
            elif age > self.config.max_request_seconds:
                message = f"the request ran longer than max_request_seconds ({self.config.max_request_seconds:g})"
                self._endings.end(request, "expired", RequestError(message, Code.CANCELLED))
            elif now > self._drain_deadline:
                self._endings.end(
                    request, "cancelled", RequestError("draining: the server is shutting down", Code.CANCELLED)
                )

    def _must_see(self, step: InFlight) -> bool:
        """Whether the next plan needs this step's tokens on the host: a stop string may have ended a request."""
        return any(chunk.samples and chunk.request.params.stop for chunk in step.plan.chunks)

    def _launch(self) -> InFlight | None:
        plan = self._scheduler.plan()
        self._door.note_backlog(bool(self._scheduler.waiting))
        self.metrics.preemptions += len(plan.preempted)
        for request, error in plan.failed:
            self._endings.blame(request, "the request could not be scheduled", error)
        for request in plan.admitted:
            if request.preemptions == 0:  # later it finds its own blocks, which is no merit of the cache
                self._door.seated(request)
                self.metrics.prefix_query_tokens += len(request.tokens)
                self.metrics.prefix_hit_tokens += request.cached_tokens
        for request in plan.admitted:  # only now, for it may fail, and the door must know of all that were seated
            try:
                self._runner.admit(request)
            except Exception as error:
                log.exception("request %s could not be seated", request.id)
                self._endings.blame(request, "the request could not be seated", error)
        plan = replace(plan, chunks=tuple(c for c in plan.chunks if c.request.status is not Status.FINISHED))
        if not plan.chunks:
            return None
        self.metrics.steps += 1
        self.metrics.rows_per_step.observe(sum(chunk.count for chunk in plan.chunks))
        self._gauge()  # before the step, so that one that hangs is seen to hang with rows in it
        try:
            return self._runner.launch(plan)
        except Exception as error:
            log.exception("a step could not be launched")
            self._endings.fail(error, "the step failed", [chunk.request for chunk in plan.chunks])
            return None

    def _deliver(self, step: InFlight) -> None:
        """Wait for a step, append its tokens, end what has ended, and hand out the deltas, one list per reader."""
        try:
            drawn = iter(self._runner.collect(step))
        except Exception as error:
            log.exception("a step failed")
            self._endings.fail(error, "the step failed", [chunk.request for chunk in step.plan.chunks])
            return
        outbox: dict[Emit, list[Delta]] = {}
        try:
            for chunk in step.plan.chunks:
                draw = next(drawn) if chunk.samples else None
                self.metrics.tokens_after_cancel += chunk.samples and chunk.request.cancelled
                if chunk.request.status is not Status.FINISHED and (told := self._settle(chunk, draw)):
                    outbox.setdefault(chunk.request.emit, []).append(told)
        finally:  # a request whose last delta lies in the outbox is no longer live: nobody else would end it
            for emit, deltas in outbox.items():
                self._endings.hand_out(emit, deltas)

    def _settle(self, chunk: Chunk, draw: Drawn | None) -> Delta | None:
        """Take note of a computed chunk; return the delta of its token, if it drew one and the request lives on."""
        request = chunk.request
        if draw is not None and not draw.sound:
            self._pool.forget(request.blocks)
            nan = RequestError("the model computed NaN for this request", Code.INTERNAL, own_fault=True)
            self._endings.end(request, "failed", nan)
            return None
        if draw is not None and draw.error is not None:
            self._endings.blame(request, "the answer failed", draw.error)
            return None
        try:
            self._scheduler.confirm(chunk)
            return None if draw is None else self._advance(request, draw)
        except Exception as error:  # its text failed, say
            log.exception("request %s failed", request.id)
            self._endings.blame(request, "the answer failed", error)
            return None

    def _advance(self, request: Request, drawn: Drawn) -> Delta:
        """Append a drawn token and return its delta, terminal if the answer ends with it."""
        now = time.monotonic()
        request.tokens.append(drawn.token)
        request.in_flight -= 1
        first = request.first_token_at == 0.0
        self.metrics.count_token(request, now)
        if first:
            request.first_token_at = now
        request.last_token_at = now
        ends = self._admission.ends(request.params, drawn.token)
        text = request.text.push(drawn.token, is_end=ends)
        reason = None
        if ends or request.text.stopped:
            reason = FinishReason.STOP
        elif len(request.tokens) >= request.max_total:
            reason = FinishReason.LENGTH
        if reason is not None:
            text += request.text.flush()
            if request.text.stopped:  # by what was held back
                reason = FinishReason.STOP
        told = delta(request, text, self._loaded.exact, drawn=drawn, finish_reason=reason, first=first)
        if reason is not None:
            self.metrics.count_finished(request, reason, now)
            self._endings.forget(request)
        request.emitted += 1
        return told

    def _end_turn(self, started: float, *, stepped: bool) -> None:
        self.heartbeat = time.monotonic()
        self._gauge()
        if stepped:
            self.metrics.step_seconds.observe(self.heartbeat - started)

    def _gauge(self) -> None:
        metrics = self.metrics
        metrics.running = len(self._scheduler.running)
        metrics.waiting = len(self._door.live) - metrics.running  # those in preparation among them
        metrics.kv_usage = 1.0 - self._pool.free / self._pool.blocks

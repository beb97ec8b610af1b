"""What the engine counts: plain numbers, written by the engine thread and read by whoever exports them.

How requests ended is counted on any thread: those that are refused never reach the engine's. TTFT is counted by whoever
sends tokens on, for it lasts until then.
A reader may see a step half-counted, never a torn number. This module does not know how or where they are shown.
"""

from __future__ import annotations

import threading
from bisect import bisect_left
from dataclasses import dataclass, field
from typing import Literal

from .request import Code, FinishReason, Request, RequestError

SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 30.0, 60.0)
ROWS = (1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 64.0, 128.0, 256.0, 512.0, 1024.0)
TOKENS = tuple(2.0**power for power in range(16))

Outcome = Literal["stopped", "limited", "cancelled", "invalid", "rejected", "failed", "expired"]


@dataclass(slots=True)
class Histogram:
    """Counts of observations at most each bound; the last count is of those above all bounds."""

    bounds: tuple[float, ...] = SECONDS
    counts: list[int] = field(default_factory=list)
    total: float = 0.0

    def __post_init__(self) -> None:
        """Start every count at zero."""
        self.counts = [0] * (len(self.bounds) + 1)

    def observe(self, value: float) -> None:
        """Count one observation."""
        self.counts[bisect_left(self.bounds, value)] += 1
        self.total += value


@dataclass(slots=True)
class Metrics:
    """Counters since the start, gauges of the last step, histograms in seconds, rows or tokens.

    `expired` requests waited or ran longer than they may; `tokens_after_cancel` were computed for a request between
    its cancellation and its end. The histograms of whole requests hold those that ended with `stop` or `length`.
    """

    stopped: int = 0
    limited: int = 0
    cancelled: int = 0
    invalid: int = 0
    rejected: int = 0
    failed: int = 0
    expired: int = 0
    preemptions: int = 0
    prompt_tokens: int = 0
    generation_tokens: int = 0
    tokens_after_cancel: int = 0
    prefix_query_tokens: int = 0
    prefix_hit_tokens: int = 0
    running: int = 0
    waiting: int = 0
    kv_usage: float = 0.0
    steps: int = 0
    step_seconds: Histogram = field(default_factory=Histogram)
    rows_per_step: Histogram = field(default_factory=lambda: Histogram(ROWS))
    queue_seconds: Histogram = field(default_factory=Histogram)
    prefill_seconds: Histogram = field(default_factory=Histogram)
    decode_seconds: Histogram = field(default_factory=Histogram)
    time_to_first_token_seconds: Histogram = field(default_factory=Histogram)
    inter_token_latency_seconds: Histogram = field(default_factory=Histogram)
    e2e_request_latency_seconds: Histogram = field(default_factory=Histogram)
    request_prompt_tokens: Histogram = field(default_factory=lambda: Histogram(TOKENS))
    request_generation_tokens: Histogram = field(default_factory=lambda: Histogram(TOKENS))
    _lock: threading.Lock = field(default_factory=threading.Lock, repr=False)

    def count_token(self, request: Request, now: float) -> None:
        """Count a token drawn at `now` (monotonic seconds), before the request notes its time."""
        self.generation_tokens += 1
        if request.first_token_at > 0.0:
            self.inter_token_latency_seconds.observe(now - request.last_token_at)

    def count_ended(self, outcome: Outcome) -> None:
        """Count how a request ended. Any thread."""
        with self._lock:
            setattr(self, outcome, getattr(self, outcome) + 1)

    def count_refused(self, error: RequestError) -> None:
        """Count a request that was refused: for what it asks (`invalid`), or because nobody would be served."""
        self.count_ended("invalid" if error.code is Code.INVALID_ARG else "rejected")

    def count_finished(self, request: Request, reason: FinishReason, now: float) -> None:
        """Count an answer that ended well at `now` (monotonic seconds); one resumed behind its end has no times."""
        if request.first_token_at > 0.0:
            self.queue_seconds.observe(request.admitted_at - request.arrived_at)
            self.prefill_seconds.observe(request.first_token_at - request.admitted_at)
            self.decode_seconds.observe(now - request.first_token_at)
            self.e2e_request_latency_seconds.observe(now - request.arrived_at)
            self.request_prompt_tokens.observe(request.prompt_len)
            self.request_generation_tokens.observe(request.answer_len - len(request.resume_token_ids))
        # Last: whoever sees that a request has ended finds the rest counted.
        self.count_ended("stopped" if reason is FinishReason.STOP else "limited")

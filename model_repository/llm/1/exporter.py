"""Brings the engine's numbers to Triton's metrics port: counters by difference, gauges by value, histograms in bulk.

A histogram is three counter families, NAME_bucket{le}, NAME_sum and NAME_count, for one call per observation would keep
the server busy. Triton 2.51 bears neither metric calls from two threads at once, nor one that it has to refuse, nor a
deleted metric that a reloaded model shares: each ends the server. So one thread exports, nothing is ever lowered, and
nothing is deleted. It does not know what the numbers count, nor when they are exported.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any

from llm_engine.metrics import Histogram, Metrics

OWN, VLLM = "llm_", "vllm:"


@dataclass(frozen=True, slots=True)
class _Number:
    """A counter or gauge: its name behind the prefix, what it means, and where it stands."""

    name: str
    meaning: str
    read: Callable[[Metrics], float]
    labels: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class _Distribution:
    """A histogram: its name behind the prefix, what it means, and where it stands."""

    name: str
    meaning: str
    read: Callable[[Metrics], Histogram]


def _ended(outcome: str, read: Callable[[Metrics], float]) -> _Number:
    return _Number("requests_total", "Requests that have ended, by outcome", read, {"outcome": outcome})


def _succeeded(reason: str, read: Callable[[Metrics], float]) -> _Number:
    return _Number("request_success_total", "Requests that have ended, by reason", read, {"finished_reason": reason})


GAUGES = (
    _Number("num_requests_running", "Requests that have a seat", lambda m: m.running),
    _Number("num_requests_waiting", "Requests in the engine that wait for a seat", lambda m: m.waiting),
    _Number("kv_cache_usage_perc", "Share of the KV cache in use, 0 to 1", lambda m: m.kv_usage),
)
COUNTERS = (
    _Number("prefix_cache_queries_total", "Tokens looked up in the prefix cache", lambda m: m.prefix_query_tokens),
    _Number("prefix_cache_hits_total", "Tokens found in the prefix cache", lambda m: m.prefix_hit_tokens),
    _Number("num_preemptions_total", "Times a running request was sent back to wait", lambda m: m.preemptions),
    _Number("prompt_tokens_total", "Prompt tokens of accepted requests", lambda m: m.prompt_tokens),
    _Number("generation_tokens_total", "Tokens generated", lambda m: m.generation_tokens),
)
HISTOGRAMS = (
    _Distribution(
        "time_to_first_token_seconds",
        "From taking a request until its first token is sent",
        lambda m: m.time_to_first_token_seconds,
    ),
    _Distribution("inter_token_latency_seconds", "From token to token", lambda m: m.inter_token_latency_seconds),
    _Distribution("e2e_request_latency_seconds", "Arrival to last token", lambda m: m.e2e_request_latency_seconds),
    _Distribution("request_queue_time_seconds", "Arrival to first seat", lambda m: m.queue_seconds),
    _Distribution("request_prefill_time_seconds", "First seat to first token", lambda m: m.prefill_seconds),
    _Distribution("request_decode_time_seconds", "First to last token", lambda m: m.decode_seconds),
    _Distribution("request_prompt_tokens", "Prompt tokens per request", lambda m: m.request_prompt_tokens),
    _Distribution("request_generation_tokens", "Generated tokens per request", lambda m: m.request_generation_tokens),
)
# Numbers that vLLM does not have, or not under such a name; how requests ended comes first (see `export`).
OWN_COUNTERS = (
    _ended("stop", lambda m: m.stopped),
    _ended("length", lambda m: m.limited),
    _ended("cancelled", lambda m: m.cancelled),
    _ended("invalid", lambda m: m.invalid),
    _ended("rejected", lambda m: m.rejected),
    _ended("error", lambda m: m.failed),
    _ended("expired", lambda m: m.expired),
    _Number("tokens_after_cancel_total", "Tokens computed behind a cancellation", lambda m: m.tokens_after_cancel),
    _Number("steps_total", "Steps of the engine", lambda m: m.steps),
)
OWN_HISTOGRAMS = (
    _Distribution("step_time_seconds", "Time per step", lambda m: m.step_seconds),
    _Distribution("rows_per_step", "Tokens computed per step", lambda m: m.rows_per_step),
)
# And numbers that only vLLM's dashboards ask for.
VLLM_COUNTERS = (
    _succeeded("stop", lambda m: m.stopped),
    _succeeded("length", lambda m: m.limited),
    _succeeded("abort", lambda m: m.cancelled + m.expired),
    _succeeded("error", lambda m: m.failed),
)
VLLM_HISTOGRAMS = (
    _Distribution("request_max_num_generation_tokens", "Longest answer", lambda m: m.request_generation_tokens),
)


class _Counter:
    """A counter in Triton and how far it has been raised from here; other instances' shares of it are theirs."""

    def __init__(self, metric: Any) -> None:
        self._metric = metric
        self._raised = 0.0

    def raise_to(self, total: float) -> None:
        if total > self._raised:
            self._metric.increment(total - self._raised)
            self._raised = total


class _Buckets:
    """A histogram in Triton."""

    def __init__(self, at_most: list[_Counter], total: _Counter, count: _Counter) -> None:
        self._at_most = at_most  # one per bound, and one for infinity
        self._total = total
        self._count = count

    def raise_to(self, counts: Sequence[int], total: float) -> None:
        cumulative = list(accumulate(counts))
        self._count.raise_to(cumulative[-1])
        for counter, count in reversed(list(zip(self._at_most, cumulative, strict=True))):
            counter.raise_to(count)  # the widest first: whoever looks meanwhile never sees a bucket above a wider one
        self._total.raise_to(total)


class Exporter:
    """Shows one engine's `metrics` with these labels; `pb_utils` is Triton's module, which only exists in its stub.

    Registers all families at once. `vllm_names` shows the numbers that vLLM has under its names too, with its label
    `model_name`. Counters that an earlier load of the model left in the server go on from where they stand.
    """

    def __init__(self, metrics: Metrics, pb_utils: Any, labels: Mapping[str, str], *, vllm_names: bool = False) -> None:
        self._metrics = metrics
        self._families_of = pb_utils.MetricFamily
        self._families: dict[str, Any] = {}
        self._gauges: list[tuple[Any, _Number]] = []
        self._counters: list[tuple[_Counter, _Number]] = []
        self._histograms: list[tuple[_Buckets, _Distribution]] = []
        self._register(OWN, labels, OWN_COUNTERS + COUNTERS, HISTOGRAMS + OWN_HISTOGRAMS)
        if vllm_names:
            with_name = {**labels, "model_name": labels["model"]}
            self._register(VLLM, with_name, VLLM_COUNTERS + COUNTERS, HISTOGRAMS + VLLM_HISTOGRAMS)

    def export(self) -> None:
        """Bring Triton's numbers up to date: a call to the server for each that has changed, tens of microseconds each.

        Called by one thread at a time. What a failed export has shown is not shown again by the next one. The engine
        counts on meanwhile, so ended requests are read first and shown last: where one is seen, all of it is.
        """
        totals = [(counter, number.read(self._metrics)) for counter, number in self._counters]
        read = [(buckets, distribution.read(self._metrics)) for buckets, distribution in self._histograms]
        copies = [(buckets, list(histogram.counts), histogram.total) for buckets, histogram in read]
        for gauge, number in self._gauges:
            gauge.set(number.read(self._metrics))
        for buckets, counts, total in copies:
            buckets.raise_to(counts, total)
        for counter, value in reversed(totals):
            counter.raise_to(value)

    def _register(
        self,
        prefix: str,
        labels: Mapping[str, str],
        counters: tuple[_Number, ...],
        histograms: tuple[_Distribution, ...],
    ) -> None:
        for number in GAUGES:
            metric = self._metric(prefix + number.name, number.meaning, labels, self._families_of.GAUGE)
            self._gauges.append((metric, number))
        for number in counters:
            counter = self._counter(prefix + number.name, number.meaning, {**labels, **number.labels})
            self._counters.append((counter, number))
        for histogram in histograms:
            buckets = self._buckets(prefix + histogram.name, histogram, labels)
            self._histograms.append((buckets, histogram))

    def _buckets(self, name: str, histogram: _Distribution, labels: Mapping[str, str]) -> _Buckets:
        meaning = histogram.meaning
        bounds = (*histogram.read(self._metrics).bounds, math.inf)
        at_most = [self._counter(f"{name}_bucket", meaning, {**labels, "le": _bound(bound)}) for bound in bounds]
        total = self._counter(f"{name}_sum", meaning, labels)
        return _Buckets(at_most, total, self._counter(f"{name}_count", meaning, labels))

    def _counter(self, name: str, meaning: str, labels: Mapping[str, str]) -> _Counter:
        return _Counter(self._metric(name, meaning, labels, self._families_of.COUNTER))

    def _metric(self, name: str, meaning: str, labels: Mapping[str, str], kind: Any) -> Any:
        if name not in self._families:  # kept: a family that is dropped takes its metrics along
            self._families[name] = self._families_of(name=name, description=meaning, kind=kind)
        return self._families[name].Metric(labels=dict(labels))


def _bound(value: float) -> str:
    return "+Inf" if value == math.inf else repr(value)

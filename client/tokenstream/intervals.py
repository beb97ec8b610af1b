"""What happened between two looks at a metrics page, for every model instance: rates, shares and percentiles.

Pure arithmetic over the samples of two pages, of which docs/metrics.md tells the meaning. A counter that has fallen
began anew, as a restarted server's does. It does not know where pages come from, nor how numbers are shown.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from .exposition import Sample

OUTCOMES = ("stop", "length", "cancelled", "invalid", "rejected", "error", "expired")
Key = tuple[str, str, str]  # model, version, instance
_PREFIX, _TRITON = "llm_", "nv_inference_"


@dataclass(frozen=True, slots=True)
class Percentiles:
    """Of a histogram's increase, in its unit."""

    p50: float
    p95: float
    p99: float


@dataclass(frozen=True, slots=True)
class InstanceInterval:
    """One model instance in one interval. None means that nothing happened of which to tell.

    The first three stand as at its end; kv_usage, prefix_hits and requests' outcomes are shares and rates per second,
    `ttft`, `itl`, `queue` and `step_seconds` seconds; `rows_per_step` counts the tokens that a step computes.
    """

    model: str
    version: str
    instance: str
    running: int
    waiting: int
    kv_usage: float
    prompt_tokens_per_second: float
    generation_tokens_per_second: float
    requests_per_second: Mapping[str, float]
    ttft: Percentiles | None
    itl: Percentiles | None
    queue: Percentiles | None
    step_seconds: float | None
    rows_per_step: float | None
    prefix_hits: float | None
    preemptions_per_second: float

    @property
    def key(self) -> Key:
        """Which instance it is."""
        return self.model, self.version, self.instance


class Page:
    """The samples of our models, by instance, and what Triton counts of them."""

    def __init__(self, samples: Sequence[Sample]) -> None:
        self._values: dict[Key, dict[tuple[str, str], float]] = {}
        self._triton: dict[tuple[str, str, str], float] = {}
        for sample in samples:
            labels = sample.labels
            if sample.name.startswith(_TRITON) and {"model", "version"} <= labels.keys():
                self._triton[labels["model"], labels["version"], sample.name.removeprefix(_TRITON)] = sample.value
            if sample.name.startswith(_PREFIX) and {"model", "version", "instance"} <= labels.keys():
                key = (labels["model"], labels["version"], labels["instance"])
                # Of the labels beside those three a family has one at most.
                detail = labels.get("outcome", labels.get("le", ""))
                self._values.setdefault(key, {})[sample.name.removeprefix(_PREFIX), detail] = sample.value

    @property
    def instances(self) -> list[Key]:
        """The instances that it shows, in order."""
        return sorted(self._values)

    def value(self, key: Key, name: str, detail: str = "") -> float:
        """A number of an instance, by its name without `llm_`; 0 if the page has none."""
        return self._values.get(key, {}).get((name, detail), 0.0)

    def triton(self, key: Key, name: str) -> float:
        """What Triton counts of an instance's model, by its name without `nv_inference_`; 0 if the page has none."""
        return self._triton.get((*key[:2], name), 0.0)

    def bounds(self, key: Key, name: str) -> list[str]:
        """The bounds of a histogram as they are written, in order."""
        found = [detail for family, detail in self._values.get(key, {}) if family == f"{name}_bucket"]
        return sorted(found, key=float)


def between(before: Page, after: Page, seconds: float) -> list[InstanceInterval]:
    """What every instance of the later page did in the `seconds` since the earlier one."""
    return [_instance(before, after, key, seconds) for key in after.instances]


def quantile(share: float, bounds: Sequence[float], cumulative: Sequence[float]) -> float | None:
    """The value that `share` (0 to 1) of the observations do not exceed; None if there are none.

    `bounds` ascend and end with infinity; `cumulative[i]` counts the observations up to bounds[i]. Within a bucket they
    are taken to lie evenly, the first one begins at 0, and above the last finite bound nothing is known but that bound.
    Source: `histogram_quantile` of Prometheus.
    """
    if not cumulative or cumulative[-1] <= 0:
        return None
    rank = share * cumulative[-1]
    at = next(index for index, count in enumerate(cumulative) if count >= rank)
    if math.isinf(bounds[at]):
        return bounds[at - 1] if at else None
    low, below = (bounds[at - 1], cumulative[at - 1]) if at else (0.0, 0.0)
    inside = cumulative[at] - below
    return low + (bounds[at] - low) * ((rank - below) / inside if inside else 0.0)


def increase(before: float, after: float) -> float:
    """By how much a counter has grown; one that fell has begun at 0 since."""
    return after - before if after >= before else after


def _instance(before: Page, after: Page, key: Key, seconds: float) -> InstanceInterval:
    def grown(name: str, detail: str = "") -> float:
        return increase(before.value(key, name, detail), after.value(key, name, detail))

    def mean(name: str) -> float | None:
        return _share(grown(f"{name}_sum"), grown(f"{name}_count"))

    def percentiles(name: str) -> Percentiles | None:
        bounds = after.bounds(key, name)
        cumulative: list[float] = []
        for bound in bounds:  # one page may show a bucket before an observation and a wider one behind it
            cumulative.append(max(grown(f"{name}_bucket", bound), cumulative[-1] if cumulative else 0.0))
        values = [quantile(share, [float(bound) for bound in bounds], cumulative) for share in (0.5, 0.95, 0.99)]
        known = [value for value in values if value is not None]
        return Percentiles(*known) if len(known) == len(values) else None

    model, version, instance = key
    return InstanceInterval(
        model=model,
        version=version,
        instance=instance,
        running=int(after.value(key, "num_requests_running")),
        waiting=int(after.value(key, "num_requests_waiting")),
        kv_usage=after.value(key, "kv_cache_usage_perc"),
        prompt_tokens_per_second=grown("prompt_tokens_total") / seconds,
        generation_tokens_per_second=grown("generation_tokens_total") / seconds,
        requests_per_second={outcome: grown("requests_total", outcome) / seconds for outcome in OUTCOMES},
        ttft=percentiles("time_to_first_token_seconds"),
        itl=percentiles("inter_token_latency_seconds"),
        queue=percentiles("request_queue_time_seconds"),
        step_seconds=mean("step_time_seconds"),
        rows_per_step=mean("rows_per_step"),
        prefix_hits=_share(grown("prefix_cache_hits_total"), grown("prefix_cache_queries_total")),
        preemptions_per_second=grown("num_preemptions_total") / seconds,
    )


def _share(part: float, whole: float) -> float | None:
    return part / whole if whole > 0 else None

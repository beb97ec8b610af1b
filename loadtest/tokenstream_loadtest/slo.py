"""Service level objectives: limits on percentiles, and what they ask of one request.

    ttft_p95=500ms    itl_p99=60ms    tpot_mean=40ms    e2e_p50=2s    errors=1%

A measurement meets an objective if its percentile does. A request is *good*, and counts for goodput, if it was answered
and meets every limit itself (DistServe, arXiv 2401.09670): with its TTFT, its TPOT, its latency, its wait in the queue,
and with the same percentile of its own gaps for an ITL. It does not know where values come from.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass

from .records import Record
from .tally import Group

LATENCIES = ("ttft", "itl", "tpot", "e2e", "queue")
ERRORS = "errors"
_FORM = re.compile(
    r"(?P<metric>[a-z0-9]+)(?:_(?P<point>mean|max|p\d{1,2}(?:\.\d+)?))?\s*=\s*(?P<value>\d+(?:\.\d+)?)\s*(?P<unit>us|ms|s|%)"
)
_UNITS = {"us": 1e-6, "ms": 1e-3, "s": 1.0, "%": 0.01}


@dataclass(frozen=True, slots=True)
class Objective:
    """One limit: `metric` of LATENCIES at `point` ("mean", "max" or "p95") in seconds, or the share of ERRORS."""

    metric: str
    point: str
    limit: float

    @staticmethod
    def parse(text: str) -> Objective:
        """The objective that was typed. ValueError saying what would be one."""
        found = _FORM.fullmatch(text.strip())
        if found is not None:
            metric, point, unit = found["metric"], found["point"] or "", found["unit"]
            wanted = metric in LATENCIES and point and unit != "%"
            if metric == ERRORS and unit == "%" and float(found["value"]) > 100:
                raise ValueError(f"no objective: {text!r}; not more than 100% of requests can fail")
            if wanted or (metric == ERRORS and not point and unit == "%"):
                return Objective(metric, point, float(found["value"]) * _UNITS[unit])
        names = ", ".join(LATENCIES)
        raise ValueError(
            f"no objective: {text!r}; one is like ttft_p95=500ms (of {names}; mean, max or p50 to p99.9) or errors=1%"
        )

    @property
    def name(self) -> str:
        """Without its limit: "ttft_p95"."""
        return f"{self.metric}_{self.point}" if self.point else self.metric

    def __str__(self) -> str:
        """As it can be typed."""
        if self.metric == ERRORS:
            return f"{self.name}={self.limit * 100:g}%"
        return f"{self.name}={self.limit * 1000:g}ms" if self.limit < 1 else f"{self.name}={self.limit:g}s"

    def measured(self, group: Group) -> float | None:
        """The value that the limit is for; None if nothing was measured."""
        if self.metric == ERRORS:
            return group.errors / group.requests if group.requests else None
        histogram = group.histograms[self.metric]
        if self.point == "mean":
            return histogram.mean
        return histogram.highest if self.point == "max" else histogram.percentile(float(self.point[1:]))

    def met(self, group: Group) -> bool:
        """Whether the limit holds; what was not measured does not."""
        value = self.measured(group)
        return value is not None and value <= self.limit

    def met_by(self, record: Record) -> bool:
        """Whether one answered request keeps to the limit; what it has no value for it keeps to."""
        if self.metric == ERRORS:
            return True
        values = {"ttft": record.ttft, "tpot": record.tpot, "e2e": record.latency, "queue": record.queue}
        value = _point(record.gaps, self.point) if self.metric == "itl" else values[self.metric]
        return value is None or value <= self.limit


def good(record: Record, objectives: Sequence[Objective]) -> bool:
    """Whether a request was answered within every limit."""
    return record.outcome == "ok" and all(objective.met_by(record) for objective in objectives)


def _point(values: Sequence[float], point: str) -> float | None:
    if not values:
        return None
    if point == "mean":
        return math.fsum(values) / len(values)
    share = 1.0 if point == "max" else float(point[1:]) / 100
    return sorted(values)[max(0, math.ceil(share * len(values)) - 1)]

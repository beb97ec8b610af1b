"""The numbers that Locust's page shows of a test of ours, as what JSON can hold.

It does not know how they are drawn.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal, TypeVar

from ..tally import Group
from .totals import Totals

_MOST = 400  # points of a line that are sent
_METRICS = {"ttft": "TTFT", "itl": "ITL", "tpot": "TPOT", "e2e": "end to end", "queue": "queue", "lag": "lag"}
Item = TypeVar("Item")


@dataclass(frozen=True, slots=True)
class Standing:
    """How it stands with the test. `why`: it could not begin, or its report could not be written.

    `flaws` and `report`, the path of its page, are of one that is over.
    """

    state: Literal["none", "running", "refused", "over"] = "none"
    why: str = ""
    flaws: tuple[str, ...] = ()
    report: str = ""


def numbers(totals: Totals | None, standing: Standing) -> dict[str, Any]:
    """What the page draws and says; times are seconds. An objective is met, missed, or, before any end, None."""
    said = {"standing": asdict(standing)}
    if totals is None:
        return {**said, "points": [], "tokens": [], "samples": [], "rows": [], "objectives": []}
    told = totals.tally
    last = max(told.seconds, default=-1)
    return {
        **said,
        "points": [asdict(point) for point in _some(totals.points)],
        "tokens": [(at, told.seconds[at].tokens if at in told.seconds else 0) for at in _some(range(last))],
        "samples": [(sample.at, sample.running, sample.waiting) for sample in _some(totals.samples)],
        "rows": rows(told.all),
        "objectives": [
            {
                "name": str(one),
                "value": one.measured(told.all),
                "met": one.met(told.all) if told.all.requests else None,
            }
            for one in totals.objectives
        ],
    }


def rows(group: Group) -> list[dict[str, object]]:
    """Exact percentiles of some requests, in milliseconds; None of nothing."""
    return [
        {
            "metric": title,
            **{f"p{share}": _milliseconds(group.histograms[name].percentile(share)) for share in (50, 95, 99)},
            "max": _milliseconds(group.histograms[name].highest),
            "count": len(group.histograms[name]),
        }
        for name, title in _METRICS.items()
    ]


def _milliseconds(seconds: float | None) -> float | None:
    """With four digits, and no more than microseconds."""
    return None if seconds is None else float(f"{round(seconds * 1000, 3):.4g}")


def _some(items: Sequence[Item]) -> Sequence[Item]:
    """Not more than can be drawn, the last one among them."""
    stride = -(-len(items) // _MOST) or 1
    return items[(len(items) - 1) % stride :: stride] if items else items

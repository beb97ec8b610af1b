"""How far a mean of few values may be off: intervals of 95 % by Student's t.

Quantiles are those of the published tables up to 30 degrees of freedom, and of the expansion around the normal ones
beyond (Abramowitz and Stegun, Handbook of Mathematical Functions, 26.7.5). It does not know what the values are.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence

# The 0.975 quantile for 1 to 30 degrees of freedom.
_TABLE = (
    *(12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228),
    *(2.201, 2.179, 2.160, 2.145, 2.131, 2.120, 2.110, 2.101, 2.093, 2.086),
    *(2.080, 2.074, 2.069, 2.064, 2.060, 2.056, 2.052, 2.048, 2.045, 2.042),
)
_NORMAL = statistics.NormalDist().inv_cdf(0.975)


def quantile(freedom: float) -> float:
    """The 0.975 quantile; a fraction of a degree of freedom is taken away, which errs on the wide side."""
    whole = int(freedom)
    if whole < 1:
        raise ValueError(f"{freedom} degrees of freedom: at least 1 is needed")
    if whole <= len(_TABLE):
        return _TABLE[whole - 1]
    z = _NORMAL
    first = (z**3 + z) / (4 * whole)
    return z + first + (5 * z**5 + 16 * z**3 + 3 * z) / (96 * whole**2)


def half_width(values: Sequence[float]) -> float | None:
    """Half of the interval around the mean of the values; None of less than two."""
    if len(values) < 2:
        return None
    return quantile(len(values) - 1) * statistics.stdev(values) / math.sqrt(len(values))


def half_width_apart(a: Sequence[float], b: Sequence[float]) -> float | None:
    """Half of the interval around the difference of both means, without pairs (Welch); None of too few."""
    if min(len(a), len(b)) < 2:
        return None
    parts = [(statistics.variance(values) / len(values), len(values) - 1) for values in (a, b)]
    variance = sum(part for part, _ in parts)
    if variance == 0:
        return 0.0
    freedom = variance**2 / sum(part**2 / count for part, count in parts)
    return quantile(freedom + 1e-9) * math.sqrt(variance)

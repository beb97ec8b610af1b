"""How many: a number, a range, or a distribution, as it stands in the data file of a workload.

    max_tokens = 64                                      # always
    max_tokens = [16, 128]                               # each as likely
    max_tokens = { median = 129, mean = 211, most = 512 }    # log-normal: two of median, mean and sigma
    max_tokens = { quantiles = [[0, 4], [0.5, 129], [0.99, 700], [1, 1000]] }    # straight lines between the points

It does not know what is counted.
"""

from __future__ import annotations

import math
from typing import Annotated, Any, Self

from pydantic import Field, model_validator

from .data_files import Table
from .dice import Dice

Positive = Annotated[float, Field(gt=0)]
Count = Annotated[int, Field(ge=0)]
Share = Annotated[float, Field(ge=0, le=1)]


class Amount(Table):
    """Whole numbers from `least` to `most`; what a distribution draws outside is moved to the nearer of them.

    A log-normal of `median` m and `sigma` s has the mean m * exp(s**2 / 2): two of the three say which one.
    """

    least: Count = 1
    most: Count | None = None
    median: Positive | None = None
    mean: Positive | None = None
    sigma: Annotated[float, Field(ge=0, le=4)] | None = None
    quantiles: tuple[tuple[Share, Count], ...] = ()

    @model_validator(mode="before")
    @classmethod
    def _short_forms(cls, value: Any) -> Any:
        if isinstance(value, int) and not isinstance(value, bool):
            return {"least": value, "most": value}
        if isinstance(value, list) and len(value) == 2:
            return {"least": value[0], "most": value[1]}
        if isinstance(value, dict):
            return value
        raise ValueError("should be a whole number, [least, most], or a table of a distribution")

    @model_validator(mode="after")
    def _one_distribution(self) -> Self:
        said = sum(value is not None for value in (self.median, self.mean, self.sigma))
        if self.quantiles:
            shares = [share for share, _ in self.quantiles]
            counts = [count for _, count in self.quantiles]
            if said or sorted(set(shares)) != shares or sorted(counts) != counts or (shares[0], shares[-1]) != (0, 1):
                raise ValueError("quantiles stand alone, rise, and go from share 0 to share 1")
        elif said not in (0, 2):
            raise ValueError("a log-normal needs two of median, mean and sigma")
        elif not said and self.most is None:
            raise ValueError("most is missing")
        if self.most is not None and self.least > self.most:
            raise ValueError(f"least ({self.least}) is more than most ({self.most})")
        if self.median is not None and self.mean is not None and self.mean < self.median:
            raise ValueError("the mean of a log-normal is not less than its median")
        return self

    def draw(self, dice: Dice) -> int:
        """One of them."""
        if self.quantiles:
            return self._within(self._between_points(dice.share()))
        if self.median is None and self.mean is None:
            return dice.between((self.least, self.most or self.least))
        median, sigma = self._log_normal()
        return self._within(median * math.exp(sigma * dice.normal()))

    def _log_normal(self) -> tuple[float, float]:
        if self.median is None:
            assert self.mean is not None and self.sigma is not None  # noqa: S101 - two of three are given
            return self.mean / math.exp(self.sigma**2 / 2), self.sigma
        sigma = self.sigma if self.mean is None else math.sqrt(2 * math.log(self.mean / self.median))
        return self.median, sigma or 0.0

    def _between_points(self, share: float) -> float:
        for (low, least), (high, most) in zip(self.quantiles, self.quantiles[1:], strict=False):
            if share <= high:
                return least + (most - least) * (share - low) / (high - low)
        return self.quantiles[-1][1]

    def _within(self, value: float) -> int:
        return max(self.least, round(value if self.most is None else min(value, self.most)))

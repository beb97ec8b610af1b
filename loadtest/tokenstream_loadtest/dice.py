"""Random choices that come out the same for the same seed in every process and on every version of Python.

Of `random.Random` only `random()` is used: Python promises the same sequence of that for the same seed, and of nothing
else. It does not know what is chosen.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from statistics import NormalDist
from typing import TypeVar

Item = TypeVar("Item")
_NORMAL = NormalDist()
_TINY = 2.0**-54  # `random()` may be 0, of which there is no quantile


class Dice:
    """A source of choices; `seed` is any text."""

    def __init__(self, seed: str) -> None:
        self._random = random.Random(seed)  # noqa: S311 - for repeatable loads, not for secrets

    def share(self) -> float:
        """A number from 0 up to 1, without 1."""
        return self._random.random()

    def below(self, limit: int) -> int:
        """A whole number from 0 up to `limit`, without `limit`."""
        return int(self._random.random() * limit)

    def between(self, span: tuple[int, int]) -> int:
        """A whole number from the first to the second, both included."""
        return span[0] + self.below(span[1] - span[0] + 1)

    def normal(self) -> float:
        """A number of the standard normal distribution."""
        return _NORMAL.inv_cdf(max(self._random.random(), _TINY))

    def choose(self, items: Sequence[Item]) -> Item:
        """One of them."""
        return items[self.below(len(items))]

    def deal(self, items: Sequence[Item]) -> Iterator[Item]:
        """All of them in a random order (Fisher and Yates), then all again in another, without end.

        So that every stretch of a load holds the kinds and prompts in their shares, which independent draws would not.
        """
        while True:
            deck = list(items)
            for last in range(len(deck) - 1, -1, -1):
                drawn = self.below(last + 1)
                deck[last], deck[drawn] = deck[drawn], deck[last]
                yield deck[last]

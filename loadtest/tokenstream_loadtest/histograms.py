"""Times in histograms that can be added up without loss: what two workers saw is what one would have seen.

High dynamic range histograms (G. Tene, hdrhistogram.org) from 1 microsecond to 1 hour with 3 significant digits: a
percentile is off by 0.1 % at most. They do not know what they measure.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Iterable, Sequence
from typing import Self

from hdrh.codec import HdrCookieException, HdrLengthException
from hdrh.histogram import HdrHistogram

LOWEST, HIGHEST, DIGITS = 1, 3_600_000_000, 3  # microseconds
_MICROSECONDS = 1e6
_NANOSECONDS = 1e9  # sums are whole ones, so that it does not matter in which order they are added


class Histogram:
    """Seconds, each counted within 0.1 %; less than a microsecond counts as one, more than an hour as an hour."""

    def __init__(self) -> None:
        self._counts = HdrHistogram(LOWEST, HIGHEST, DIGITS)
        self._sum = 0  # nanoseconds

    def add(self, seconds: float) -> None:
        """Count one value."""
        self._counts.record_value(min(max(round(seconds * _MICROSECONDS), LOWEST), HIGHEST))
        self._sum += round(seconds * _NANOSECONDS)

    def extend(self, values: Iterable[float]) -> None:
        """Count many."""
        for value in values:
            self.add(value)

    def merge(self, other: Histogram) -> None:
        """Count what the other has counted."""
        self._counts.add(other._counts)
        self._sum += other._sum

    def __len__(self) -> int:
        """How many values were counted."""
        return int(self._counts.get_total_count())

    @property
    def total(self) -> float:
        """The sum, to the nanosecond."""
        return self._sum / _NANOSECONDS

    @property
    def mean(self) -> float | None:
        """The mean to the nanosecond; None of nothing."""
        return self.total / len(self) if len(self) else None

    @property
    def highest(self) -> float | None:
        """The largest value; None of nothing."""
        return self._counts.get_max_value() / _MICROSECONDS if len(self) else None

    def percentile(self, share: float) -> float | None:
        """The value that `share` (0 to 100) percent of the values do not exceed; None of nothing."""
        if not len(self):
            return None
        rank = max(math.ceil(share / 100 * len(self) - 1e-9), 1)  # the library rounds it to the nearest
        value: int = self._counts.get_value_at_percentile(100 * rank / len(self))
        return value / _MICROSECONDS

    def buckets(self) -> Sequence[tuple[float, int]]:
        """Every distinct value with its count, ascending."""
        return [
            (entry.value_iterated_to / _MICROSECONDS, entry.count_added_in_this_iter_step)
            for entry in self._counts.get_recorded_iterator()
        ]

    def encode(self) -> str:
        """As text for JSON: HdrHistogram's own compressed form in base64, and the sum."""
        return f"{self._counts.encode().decode()} {self._sum}"

    @classmethod
    def decode(cls, text: str) -> Self:
        """The histogram that `encode` wrote. ValueError for any other text."""
        counts, _, total = text.partition(" ")
        histogram = cls()
        try:
            histogram._counts.decode_and_add(counts.encode())
            histogram._sum = int(total)
        except (ValueError, TypeError, zlib.error, HdrCookieException, HdrLengthException) as error:
            raise ValueError(f"no encoded histogram: {text[:40]!r}") from error
        return histogram

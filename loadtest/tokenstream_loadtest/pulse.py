"""Signs of life of all streams together: how many tokens came, and the times in which none did though some were due.

It is told of every request that begins or ceases to wait and of every response. It does not know what is asked.
"""

from __future__ import annotations

import time

from .results import Stall

SHORTEST = 1.0  # seconds below which no silence is a stall
GAPS = 20  # a stall is longer than so many median gaps between tokens


class Pulse:
    """Of one stage, which began at `began` (of `time.perf_counter`)."""

    def __init__(self, began: float) -> None:
        self.tokens = 0
        self._began = began
        self._waiting = 0
        self._silent_since = began
        self._silences: list[Stall] = []  # those over SHORTEST

    def wait(self) -> None:
        """One more caller waits for a token."""
        if self._waiting == 0:
            self._silent_since = time.perf_counter()
        self._waiting += 1

    def rest(self) -> None:
        """A caller waits no more, or not now: nobody owes it anything."""
        self._waiting -= 1
        if self._waiting == 0:
            self._end_silence(time.perf_counter())

    def hear(self, tokens: int, at: float) -> None:
        """A response came."""
        self.tokens += tokens
        if at - self._silent_since > SHORTEST:
            self._end_silence(at)
        self._silent_since = at

    def stalls(self, median_gap: float | None) -> tuple[Stall, ...]:
        """The silences that were far longer than the usual `median_gap` between tokens."""
        limit = max(SHORTEST, GAPS * (median_gap or 0.0))
        return tuple(silence for silence in self._silences if silence.seconds > limit)

    def _end_silence(self, at: float) -> None:
        seconds = at - self._silent_since
        if seconds > SHORTEST:
            self._silences.append(Stall(self._silent_since - self._began, seconds))
        self._silent_since = at

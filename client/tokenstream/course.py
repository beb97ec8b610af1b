"""Which endpoint is asked next, when, and whether at all.

Endpoints are in order of preference; one that failed is set aside for a while. A course goes through all of them,
pauses with jitter, and goes through them again, as long as its retries and the total clock allow; the client's budget
only makes it wait.
It knows exceptions and clocks; it sends nothing and does not know what is asked.
"""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Awaitable, Callable, Sequence
from enum import Enum

from . import errors

_ASIDE_SECONDS = 10.0
_ASIDE_FULL_SECONDS = 1.0
_PAUSE_FIRST, _PAUSE_MOST = 0.2, 5.0  # seconds; the longest pause doubles from round to round
_OUTAGE_PAUSE = 2.5  # seconds; where nobody listens the pause is as long as that has lasted, and no longer than this
_LONGEST_WAIT = 60.0  # seconds; a server that asks for more is not waited for
_BUDGET, _BUDGET_RATE, _BUDGET_WAIT = 100.0, 20.0, 5.0  # rounds, rounds per second, seconds


class Verdict(Enum):
    """What an exception means for asking again."""

    STOP = "stop"  # it would be the same everywhere, or the caller wants no more
    ELSEWHERE = "elsewhere"  # here it would be the same, or worse
    AGAIN = "again"  # it may be otherwise in a moment, here too


_PASSES = (
    errors.ConnectionFailed,
    errors.ConnectTimeout,
    errors.IncompleteStream,
    errors.Overloaded,
    errors.NotReady,
    errors.Draining,
)
# Who waits in a queue only loses the place by asking again. A model may be unknown because its server is shutting down.
_STAYS = (errors.FirstTokenTimeout, errors.IdleTimeout, errors.ResumeMismatch, errors.ModelNotFound)


def judge(error: errors.TokenstreamError) -> Verdict:
    """Whether asking again can help. Asking is always safe: the seed is fixed, and nothing is remembered of a request.

    An InternalError without a code is an answer that we do not understand; one with a code is a step that failed, or
    what failed over the request alone.
    """
    if isinstance(error, _STAYS):
        return Verdict.ELSEWHERE
    failed = isinstance(error, errors.InternalError) and error.code and not error.own_fault
    if failed or isinstance(error, _PASSES):
        return Verdict.AGAIN
    return Verdict.STOP


class Endpoints:
    """The servers that may be asked, as HOST:PORT, the best one first. Shared by threads."""

    def __init__(self, urls: Sequence[str]) -> None:
        self.urls = tuple(urls)
        self._lock = threading.Lock()
        self._aside: dict[str, float] = {}
        self._unreachable: dict[str, float] = {}  # since when, in monotonic seconds

    def in_order(self) -> list[str]:
        """All of them as they were given, those set aside last, the one first that has been so for longest."""
        now = time.monotonic()
        with self._lock:
            ends = {url: self._aside.get(url, 0.0) for url in self.urls}
        return sorted(self.urls, key=lambda url: ends[url] if ends[url] > now else 0.0)

    def set_aside(self, url: str, seconds: float = _ASIDE_SECONDS) -> None:
        """Ask the others first for `seconds`."""
        with self._lock:
            self._aside[url] = time.monotonic() + seconds

    def unreachable(self, url: str) -> float:
        """Nobody took a connection. Returns for how many seconds to leave it alone: a server that starts takes some."""
        now = time.monotonic()
        with self._lock:
            since = self._unreachable.setdefault(url, now)
        return min(_OUTAGE_PAUSE, now - since)

    def reached(self, url: str) -> None:
        """A connection was made."""
        with self._lock:
            self._unreachable.pop(url, None)

    def praise(self, url: str) -> None:
        """It has answered."""
        with self._lock:
            self._aside.pop(url, None)


class Budget:
    """The pace at which the requests of a client, together, ask again: a token bucket that time fills.

    It delays and never refuses: how often a request may ask again is its caller's to say.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._rounds = _BUDGET
        self._at = time.monotonic()

    def withdraw(self) -> float:
        """Take the right to ask everybody once more; from now, in how many seconds it holds: 0 to 5."""
        with self._lock:
            now = time.monotonic()
            grown = self._rounds + (now - self._at) * _BUDGET_RATE
            self._at = now
            self._rounds = max(min(grown, _BUDGET) - 1.0, -_BUDGET_WAIT * _BUDGET_RATE)
            return max(0.0, -self._rounds / _BUDGET_RATE)


class Course:
    """The way of one request from endpoint to endpoint until one of them answers. `endpoint` is whose turn it is."""

    def __init__(
        self,
        endpoints: Endpoints,
        budget: Budget,
        *,
        retries: int,
        deadline: float | None,
        pause: Callable[[float], Awaitable[None]],
    ) -> None:
        self._endpoints = endpoints
        self._budget = budget
        self._retries = retries
        self._deadline = deadline
        self._pause = pause
        self._round = 0
        self._left: list[str] = []
        self._waits: list[float] = []  # of those in this round who may answer later: how long they ask to be left alone
        self.endpoint = ""
        self._begin_round()

    async def after(self, error: errors.TokenstreamError) -> None:
        """Turn to the next endpoint, behind a pause if all have had their turn. Raises `error` if that is no use."""
        verdict = judge(error)
        if verdict is Verdict.STOP:
            raise error
        asked = error.retry_after if isinstance(error, errors.ServerError) else None
        if not isinstance(error, errors.ResumeMismatch):  # others it may serve well
            rest = _ASIDE_FULL_SECONDS if isinstance(error, errors.Overloaded) else _ASIDE_SECONDS
            self._endpoints.set_aside(self.endpoint, rest if asked is None else asked)
        if verdict is Verdict.AGAIN:
            dials = isinstance(error, errors.ConnectionFailed)
            self._waits.append(self._endpoints.unreachable(self.endpoint) if dials else asked or 0.0)
        if not self._left:
            await self._rest(error)
            self._begin_round()
        else:
            self.endpoint = self._left.pop(0)

    def _begin_round(self) -> None:
        self._left = self._endpoints.in_order()
        self._waits = []
        self.endpoint = self._left.pop(0)

    async def _rest(self, error: errors.TokenstreamError) -> None:
        if not self._waits or self._round >= self._retries:
            raise error
        wait = pause_before(self._round, min(self._waits))
        if wait > _LONGEST_WAIT or self._outlasts(wait):
            raise error
        wait += self._budget.withdraw()
        if self._outlasts(wait):
            error.extend("it is not asked again: the client's retry budget allows it only behind the total time")
            raise error
        self._round += 1
        await self._pause(wait)

    def _outlasts(self, wait: float) -> bool:
        return self._deadline is not None and time.monotonic() + wait >= self._deadline


def pause_before(earlier: int, asked: float = 0.0) -> float:
    """Seconds before everybody is asked again, for the (earlier + 1)th time, and never less than `asked`.

    Full jitter over a limit that doubles: clients that failed together do not come back together.
    Source: M. Brooker, "Exponential Backoff And Jitter", AWS Architecture Blog, 2015.
    """
    return asked + random.uniform(0.0, min(_PAUSE_MOST, _PAUSE_FIRST * 2.0**earlier))  # noqa: S311  (no secret)

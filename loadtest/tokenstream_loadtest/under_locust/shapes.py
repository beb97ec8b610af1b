"""How many users there are over time: steps, a spike, a ramp that ends when an objective is missed, a soak.

Pure functions of seconds, but for the ramp, which asks whether all is well. They do not know Locust, which asks them
about once a second.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Protocol

SHAPES = ("steps", "spike", "ramp", "soak")


class Shape(Protocol):
    """Asked with rising `at`, seconds since the begin; None ends the test."""

    def users(self, at: float) -> int | None:
        """How many there should be now."""


class Steps:
    """From a `count`th of the `peak` up to all of it, in as many equal steps over `seconds`."""

    def __init__(self, peak: int, seconds: float, count: int) -> None:
        self._peak, self._seconds, self._count = peak, seconds, max(1, min(count, peak))

    def users(self, at: float) -> int | None:
        """The step that `at` lies in."""
        if at >= self._seconds:
            return None
        step = int(at / self._seconds * self._count) + 1
        return math.ceil(self._peak * step / self._count)


class Spike:
    """An eighth of the `peak`, then all of it in the middle third of `seconds`, then an eighth again."""

    def __init__(self, peak: int, seconds: float) -> None:
        self._peak, self._seconds = peak, seconds

    def users(self, at: float) -> int | None:
        """Few, many, few."""
        if at >= self._seconds:
            return None
        return self._peak if 1 <= at / self._seconds * 3 < 2 else max(1, self._peak // 8)


class Soak:
    """The `peak` all the time: what leaks or grows shows only late."""

    def __init__(self, peak: int, seconds: float) -> None:
        self._peak, self._seconds = peak, seconds

    def users(self, at: float) -> int | None:
        """Always the same."""
        return None if at >= self._seconds else self._peak


class Ramp:
    """1, 2, 4, ... users up to the `peak`, each for `step` seconds, until a step does not go `well`.

    It ends behind `seconds` too, if there is such a limit. `begin` is called when a step begins, `well` when it ends:
    whether its requests met every objective. A step without a request that ended is given one more.
    """

    def __init__(
        self,
        peak: int,
        step: float,
        begin: Callable[[], None],
        well: Callable[[], bool | None],
        seconds: float | None = None,
    ) -> None:
        self._peak, self._step, self._begin, self._well, self._seconds = peak, step, begin, well, seconds
        self._users = 0
        self._until = 0.0
        self.best = 0  # the highest number of users whose step went well
        self.ended_by_objective = self.ended_by_time = False

    def users(self, at: float) -> int | None:
        """The step's, or None behind the last one."""
        if self._seconds is not None and at >= self._seconds:
            self.ended_by_time = True
            return None
        if self._users and at < self._until:
            return self._users
        if self._users:
            well = self._well()
            if well is None:
                self._until = at + self._step
                return self._users
            if not well:
                self.ended_by_objective = True
                return None
            self.best = self._users
            if self._users >= self._peak:
                return None
        self._users = min(max(1, self._users * 2), self._peak)
        self._until = at + self._step
        self._begin()
        return self._users

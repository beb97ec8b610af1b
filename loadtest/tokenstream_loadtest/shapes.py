"""Shapes of load, as they stand in a scenario's file, and the stages that each comes to.

    [[stages]]   one stage; as many as wanted
    [steps]      several loads, one after another
    [spike]      a base, a peak, the base again
    [soak]       one load for long
    [search]     the most load at which all objectives hold

It does not know how a load is made.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal, Self

from pydantic import Field, model_validator

from .amounts import Positive
from .data_files import Table
from .results import Arrivals, Stage

_FURTHER = 16  # times as far as its start goes a search that was not told how far
Whole = Annotated[int, Field(ge=1)]


class Load(Table):
    """How requests arrive: `concurrency` callers, or `rate` per second; see `results.Stage`.

    Without `arrivals` a concurrency is closed and a rate Poisson.
    """

    arrivals: Arrivals | None = None
    concurrency: Whole | None = None
    rate: Positive | None = None
    burstiness: Positive = 1.0
    burst: Whole = 1

    @model_validator(mode="after")
    def _fits(self) -> Self:
        _check(
            self.arrivals, self.burstiness, self.burst, closed=self.concurrency is not None, open_=self.rate is not None
        )
        return self

    def stage(self, *, seconds: float | None = None, requests: int | None = None) -> Stage:
        """Such a load until one of both ends it."""
        arrivals = self.arrivals or ("closed" if self.rate is None else "poisson")
        return Stage(arrivals, self.concurrency, self.rate, self.burstiness, self.burst, seconds, requests)


class OneStage(Load):
    """One of [[stages]]: a load until `seconds` have passed or `requests` were sent."""

    seconds: Positive | None = None
    requests: Whole | None = None

    @model_validator(mode="after")
    def _ends(self) -> Self:
        if (self.seconds is None) == (self.requests is None):
            raise ValueError("give one of seconds and requests, which ends a stage")
        return self

    def stages(self) -> list[Stage]:
        """The one."""
        return [self.stage(seconds=self.seconds, requests=self.requests)]


class Steps(Table):
    """[steps]: each `concurrency`, or each `rate`, for so many `seconds`."""

    arrivals: Arrivals | None = None
    concurrency: tuple[Whole, ...] = ()
    rate: tuple[Positive, ...] = ()
    burstiness: Positive = 1.0
    burst: Whole = 1
    seconds: Positive

    @model_validator(mode="after")
    def _fits(self) -> Self:
        _check(self.arrivals, self.burstiness, self.burst, closed=bool(self.concurrency), open_=bool(self.rate))
        return self

    def stages(self) -> list[Stage]:
        """One for each."""
        common = {"arrivals": self.arrivals, "burstiness": self.burstiness, "burst": self.burst}
        name, steps = ("rate", self.rate) if self.rate else ("concurrency", self.concurrency)
        return [Load.model_validate({**common, name: step}).stage(seconds=self.seconds) for step in steps]


class Spike(Table):
    """[spike]: `base` requests per second, then `peak`, then `base` again, each for so many `seconds`."""

    base: Positive
    peak: Positive
    seconds: Positive

    @model_validator(mode="after")
    def _rises(self) -> Self:
        if self.peak <= self.base:
            raise ValueError(f"peak ({self.peak:g}) should be more than base ({self.base:g})")
        return self

    def stages(self) -> list[Stage]:
        """Three of them, Poisson."""
        return [Stage("poisson", rate=rate, seconds=self.seconds) for rate in (self.base, self.peak, self.base)]


class Soak(Load):
    """[soak]: one load for so many `minutes`."""

    minutes: Positive

    def stages(self) -> list[Stage]:
        """A long one."""
        return [self.stage(seconds=self.minutes * 60)]


class Search(Table):
    """[search]: the load between `start` and `most` with the highest goodput, by trials of so many `seconds`.

    `by`: "rate" (per second, Poisson) or "concurrency". The load is doubled until an objective breaks, then bisected
    until what held and what broke are within `tolerance`, a share of the load.
    """

    by: Literal["rate", "concurrency"] = "rate"
    start: Positive
    most: Positive
    seconds: Positive
    tolerance: Annotated[float, Field(gt=0, lt=1)] = 0.1

    @model_validator(mode="after")
    def _rises(self) -> Self:
        if self.most <= self.start:
            raise ValueError(f"most ({self.most:g}) should be more than start ({self.start:g})")
        return self

    def starting(self, by: Literal["rate", "concurrency"], start: float) -> dict[str, Any]:
        """What changes if it starts elsewhere; `most` stays, unless it was of another kind, or is less."""
        most = self.most if by == self.by and start < self.most else start * _FURTHER
        return {"by": by, "start": start, "most": most}

    def stage(self, load: float) -> Stage:
        """The trial of one load; callers are whole."""
        if self.by == "concurrency":
            return Stage(concurrency=max(1, round(load)), seconds=self.seconds)
        return Stage("poisson", rate=load, seconds=self.seconds)


def _check(arrivals: Arrivals | None, burstiness: float, burst: int, *, closed: bool, open_: bool) -> None:
    """ValueError unless these make sense together."""
    if closed == open_:
        raise ValueError("give one of concurrency (a closed loop) and rate (an open one)")
    if closed and arrivals not in (None, "closed"):
        raise ValueError(f"{arrivals} arrivals need a rate, not a concurrency")
    if open_ and arrivals == "closed":
        raise ValueError("closed arrivals need a concurrency, not a rate")
    if burstiness != 1.0 and arrivals != "gamma":
        raise ValueError('burstiness needs arrivals = "gamma"')
    if (burst > 1) != (arrivals == "bursts"):
        raise ValueError('burst (2 or more) and arrivals = "bursts" need each other')

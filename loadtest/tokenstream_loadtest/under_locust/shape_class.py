"""The shapes of `shapes` as the one class that Locust asks. It knows Locust's options for users and time."""

from __future__ import annotations

import time
from argparse import Namespace

from locust import LoadTestShape

from .session import Session
from .shapes import Ramp, Shape, Soak, Spike, Steps

_SECONDS = {"steps": 300.0, "spike": 180.0, "soak": 3600.0}  # without --run-time


class TokenShape(LoadTestShape):
    """`--shape`, with `--users` as its peak, `--spawn-rate`, and `--run-time` as its length."""

    abstract = True  # so that Locust takes none unless it is asked for
    use_common_options = True

    def __init__(self, session: Session) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._session = session
        self._shape: Shape | None = None

    def reset_time(self) -> None:
        """A test begins."""
        super().reset_time()  # type: ignore[no-untyped-call]
        self._shape = None

    def tick(self) -> tuple[int, float] | None:
        """How many users there should be, and how many may come at once."""
        options = self._session.options
        if self._shape is None:
            self._shape = self._made(options)
        users = self._shape.users(time.perf_counter() - self.start_time)
        return None if users is None else (users, float(options.spawn_rate or users))

    def notes(self) -> tuple[str, ...]:
        """For the run's reader."""
        name = self._session.options.shape
        found = f"the number of users changed while it was measured: shape {name}"
        if not isinstance(self._shape, Ramp):
            return (found,)
        best = f"{self._shape.best} users at once met every objective" if self._shape.best else "no load met them all"
        how = "and the next step missed one" if self._shape.ended_by_objective else "and none was missed"
        if self._shape.ended_by_time:
            how = "then the time was up"
        return found, f"{best}, {how}"

    def _made(self, options: Namespace) -> Shape:
        peak = int(options.num_users or 1)
        seconds = float(options.run_time or _SECONDS.get(options.shape, 0.0))
        match options.shape:
            case "steps":
                return Steps(peak, seconds, int(options.shape_steps))
            case "spike":
                return Spike(peak, seconds)
            case "soak":
                return Soak(peak, seconds)
            case _:
                return Ramp(peak, float(options.shape_seconds), self._begin_step, self._went_well, seconds or None)

    def _begin_step(self) -> None:
        self._session.update()
        if self._session.totals is not None:
            self._session.totals.begin_step()

    def _went_well(self) -> bool | None:
        self._session.update()
        totals = self._session.totals
        if totals is None or not totals.step.requests:
            return None
        return not totals.missed(totals.step)

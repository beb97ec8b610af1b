"""The open loop of one Locust process: requests leave when they are due, however many are still under way.

It draws the schedule of its share of the rate and says when the next one is due; it does not know what is sent.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import replace

import gevent

from ..arrivals import schedule
from ..generator import MOST_LIVE
from ..results import Stage

_log = logging.getLogger("tokenstream")


class OpenLoop:
    """An equal share of the rate of `stage` for each of `workers`, from `began` on. `capped`: a flaw, or ""."""

    def __init__(self, stage: Stage, workers: int, seed: int, began: float) -> None:
        self._stage = replace(stage, rate=(stage.rate or 0.0) / workers)
        self._seed, self._began = seed, began
        self.capped = ""

    def run(self, send: Callable[[float], bool], live: Callable[[], int]) -> None:
        """Call `send` with the time at which each request was due, as soon as it is, until that returns False."""
        for offset in schedule(self._stage, self._seed):
            due = self._began + offset
            while (left := due - time.perf_counter()) > 0:
                gevent.sleep(left)
            while live() >= MOST_LIVE:
                self._cap()
                gevent.sleep(0.01)
            if not send(due):
                return

    def _cap(self) -> None:
        if not self.capped:
            self.capped = f"{MOST_LIVE} requests were under way at once, and others had to wait for them"
            _log.warning(self.capped)

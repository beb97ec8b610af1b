"""Waiting, with a bound, for what no event tells: files, processes, what another program has come to."""

from __future__ import annotations

import time
from collections.abc import Callable

WAIT = 300.0  # seconds; nothing comes near it unless it hangs, on the slowest machine


def eventually(
    condition: Callable[[], object], seconds: float = WAIT, told: Callable[[], str] = lambda: "it did not happen"
) -> None:
    """Return once `condition` holds; AssertionError with what is `told` if it does not within `seconds`."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, told()
        time.sleep(0.02)

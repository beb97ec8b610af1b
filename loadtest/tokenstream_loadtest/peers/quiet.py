"""Waits for a machine on which nothing else runs, before something is measured on it.

It looks at the kernel's count of busy time, of all processes together; it does not know whose they are.
"""

from __future__ import annotations

import time

from ..host import machine_seconds
from .environments import Say

MOST_CORES = 0.1
LOOK_SECONDS = 2.0
WAIT_SECONDS = 60.0


def wait_quiet(say: Say, most: float = MOST_CORES, seconds: float = WAIT_SECONDS) -> float:
    """Return once less than `most` cores were used over 2 seconds, else after `seconds`; the cores used at last."""
    deadline = time.monotonic() + seconds
    while True:
        began, before = time.monotonic(), sum(machine_seconds())
        time.sleep(LOOK_SECONDS)
        used = (sum(machine_seconds()) - before) / (time.monotonic() - began)
        if used < most or time.monotonic() > deadline:
            return used
        say(f"waiting for a quiet machine: {used:.2f} cores are used by others")

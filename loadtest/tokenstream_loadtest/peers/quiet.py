"""Waits for a machine on which nothing else runs, before something is measured on it.

It looks at the kernel's count of busy time, of all processes together; it does not know whose they are.
"""

from __future__ import annotations

import os
import time
from pathlib import Path

from .environments import Say

MOST_CORES = 0.1
LOOK_SECONDS = 2.0
WAIT_SECONDS = 60.0


def busy_seconds(stat: str) -> float:
    """CPU seconds used since boot, by anything, host included, out of the text of /proc/stat."""
    user, nice, system, _idle, _iowait, irq, softirq, steal = map(int, stat.split("\n", 1)[0].split()[1:9])
    return (user + nice + system + irq + softirq + steal) / os.sysconf("SC_CLK_TCK")


def wait_quiet(say: Say, most: float = MOST_CORES, seconds: float = WAIT_SECONDS) -> float:
    """Return once less than `most` cores were used over 2 seconds, else after `seconds`; the cores used at last."""
    deadline = time.monotonic() + seconds
    while True:
        began, before = time.monotonic(), busy_seconds(_stat())
        time.sleep(LOOK_SECONDS)
        used = (busy_seconds(_stat()) - before) / (time.monotonic() - began)
        if used < most or time.monotonic() > deadline:
            return used
        say(f"waiting for a quiet machine: {used:.2f} cores are used by others")


def _stat() -> str:
    return Path("/proc/stat").read_text()

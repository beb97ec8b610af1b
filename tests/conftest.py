"""What holds for every test here: one that hangs fails alone, and a Ctrl-C that a test sends to a child arrives.

The limit is pytest-timeout's (pyproject.toml, `--timeout`, the marker). Of its own ways to enforce it one ends the
whole run, and Hypothesis takes the other for a failing example, which it then tries again and again.

What $TOKENSTREAM_CPU names caps torch here as in a server.
"""

from __future__ import annotations

import faulthandler
import signal
import sys
import threading
from types import FrameType
from typing import Any

import pytest

from llm_kernels.cpu_level import cap_libraries

cap_libraries()  # the folders' conftest.py come after this one, and import torch
AGAIN = 60.0  # seconds until what a hanging test holds up behind its end is interrupted as well


class HangError(BaseException):
    """A test took longer than any that makes progress. Nothing that catches Exception catches it."""


def pytest_configure(config: pytest.Config) -> None:
    """Have SIGINT its default again where the suite runs in the background of a shell that ignores it, as nohup's do.

    Every child would inherit that, and be deaf to the Ctrl-C that a test sends.
    """
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_timeout_set_timer(item: pytest.Item, settings: Any) -> bool:
    """Interrupt the main thread when the time is over, and again for as long as the test's end hangs too."""

    def interrupt(signum: int, frame: FrameType | None) -> None:
        faulthandler.dump_traceback(sys.stderr)  # the other threads, into what pytest shows of the test
        raise HangError(f"the test hangs: it has run for more than {settings.timeout:g} s")

    if threading.current_thread() is not threading.main_thread():  # nobody runs pytest so, but a signal would not come
        return False
    signal.signal(signal.SIGALRM, interrupt)
    signal.setitimer(signal.ITIMER_REAL, settings.timeout, AGAIN)
    return True


def pytest_timeout_cancel_timer(item: pytest.Item) -> bool:
    """The test has ended."""
    signal.setitimer(signal.ITIMER_REAL, 0)
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    return True

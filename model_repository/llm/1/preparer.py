"""Does the long work of requests on a thread of its own, one after the other in the order of their arrival.

A megabyte of text takes most of a second to tokenize, for which nobody else's request or token waits: `execute` does
short work itself, and what is long has its place in the admission queue before it comes here. What waits here is
bounded by its bytes, and in number too, since short work never comes. It does not know what a job does.
"""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable
from queue import SimpleQueue

from llm_engine.request import Code, RequestError

LONG_BYTES = 8192  # of a request's inputs; fewer take less than about five milliseconds
MOST_BYTES = 2**26  # that may wait here
SWITCH_SECONDS = 0.0005  # a thread that computes in Python gives way so often; by default Python's do every 0.005
NICENESS = 10  # of this thread, behind the threads that compute tokens where they want the same core
log = logging.getLogger("tokenstream")


class Preparer:
    """One thread for long work. `check`, then `put`: both only on the thread that accepts requests."""

    def __init__(self) -> None:
        self._jobs: SimpleQueue[tuple[int, Callable[[], None]] | None] = SimpleQueue()
        self._bytes = 0  # of jobs that have not ended
        self._lock = threading.Lock()
        self._thread = threading.Thread(target=self._run, name="preparer", daemon=True)

    def start(self) -> None:
        """Begin to work."""
        self._thread.start()

    def stop(self, timeout: float = 10.0) -> None:
        """End the thread behind the jobs that were put before."""
        self._jobs.put(None)
        self._thread.join(timeout)

    def check(self, size: int) -> None:
        """Raise RequestError, UNAVAILABLE, if a job of `size` bytes may not wait here now. Alone, it may have any."""
        with self._lock:
            if self._bytes and self._bytes + size > MOST_BYTES:
                raise RequestError(
                    f"long requests of {self._bytes} bytes are being prepared already; at most {MOST_BYTES} may be",
                    Code.UNAVAILABLE,
                )

    def put(self, size: int, job: Callable[[], None]) -> None:
        """Have a job done, which must not raise."""
        with self._lock:
            self._bytes += size
        self._jobs.put((size, job))

    def _run(self) -> None:
        if hasattr(os, "setpriority"):  # on Linux a thread has a niceness of its own
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), NICENESS)
        while (entry := self._jobs.get()) is not None:
            size, job = entry
            try:
                job()
            except Exception:  # one job's fault must not leave all others undone
                log.exception("a request could not be prepared")
            finally:
                with self._lock:
                    self._bytes -= size

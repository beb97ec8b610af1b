"""Does the long work of requests on a thread of its own, one after the other: the shortest first, within bounds.

A megabyte of text takes most of a second to tokenize, for which nobody else's request or token waits: `execute` does
short work itself, and what is long has its place in the admission queue before it comes here. What waits here is
bounded by its bytes, and in number too, since short work never comes. The shortest goes first, for an ordinary prompt
should not wait for thirty texts of a megabyte; but whoever has waited longest is overtaken by no more bytes than its
own, so that nobody waits for more than twice the work that came before it. It does not know what a job does.
"""

from __future__ import annotations

import heapq
import logging
import os
import threading
from collections.abc import Callable

from llm_engine.request import Code, RequestError

LONG_BYTES = 8192  # of a request's inputs; fewer take less than about five milliseconds
MOST_BYTES = 2**26  # that may wait here
SWITCH_SECONDS = 0.0005  # a thread that computes in Python gives way so often; by default Python's do every 0.005
log = logging.getLogger("tokenstream")


class Preparer:
    """One thread for long work. `check`, then `put`: both only on the thread that accepts requests."""

    def __init__(self) -> None:
        self._jobs: dict[int, tuple[int, Callable[[], None]]] = {}  # by their turn, the oldest first
        self._by_size: list[tuple[int, int]] = []  # a heap of sizes and turns; of jobs that are done, too
        self._turns = 0
        self._overtaken = 0  # bytes of jobs that were done before the oldest of those that wait
        self._bytes = 0  # of jobs that have not ended
        self._stopped = False
        self._changed = threading.Condition()
        self._thread = threading.Thread(target=self._run, name="preparer", daemon=True)

    def start(self) -> None:
        """Begin to work."""
        self._thread.start()

    def stop(self, timeout: float = 10.0) -> None:
        """End the thread behind the jobs that were put before."""
        with self._changed:
            self._stopped = True
            self._changed.notify()
        self._thread.join(timeout)

    def check(self, size: int) -> None:
        """Raise RequestError, UNAVAILABLE, if a job of `size` bytes may not wait here now. Alone, it may have any."""
        with self._changed:
            if self._bytes and self._bytes + size > MOST_BYTES:
                raise RequestError(
                    f"long requests of {self._bytes} bytes are being prepared already; at most {MOST_BYTES} may be",
                    Code.UNAVAILABLE,
                )

    def put(self, size: int, job: Callable[[], None]) -> None:
        """Have a job done, which must not raise."""
        with self._changed:
            self._bytes += size
            self._turns += 1
            self._jobs[self._turns] = (size, job)
            heapq.heappush(self._by_size, (size, self._turns))
            self._changed.notify()

    def _next(self) -> tuple[int, Callable[[], None]] | None:
        """Wait for the job that is to be done now, which waits no longer; None when there will be none."""
        with self._changed:
            self._changed.wait_for(lambda: self._jobs or self._stopped)
            if not self._jobs:
                return None
            while self._by_size[0][1] not in self._jobs:
                heapq.heappop(self._by_size)
            size, turn = self._by_size[0]
            oldest = next(iter(self._jobs))
            if self._overtaken + size > self._jobs[oldest][0]:
                turn = oldest
            self._overtaken = 0 if turn == oldest else self._overtaken + size
            return self._jobs.pop(turn)

    def _run(self) -> None:
        _yield_to_others()
        while (entry := self._next()) is not None:
            size, job = entry
            try:
                job()
            except Exception:  # one job's fault must not leave all others undone
                log.exception("a request could not be prepared")
            finally:
                del job, entry  # and with them the request
                with self._changed:
                    self._bytes -= size


def _yield_to_others() -> None:
    """Run this thread only where no other wants the core: the threads that compute tokens meet, and each waits for all.

    A niceness is not enough, for who waits at such a meeting yields, and a nice thread then has the core for a slice.
    """
    if not hasattr(os, "sched_setscheduler"):  # on Linux a thread has a policy of its own
        return
    try:
        os.sched_setscheduler(threading.get_native_id(), os.SCHED_IDLE, os.sched_param(0))
    except OSError as error:  # a sandbox may refuse it, and long work then takes its turn with the rest
        log.info("the preparer's thread runs at normal priority: %s", error)

"""The Locust side of a driver: starts it, hands it requests from any number of greenlets, and hears of their ends.

This process never imports gRPC. The driver is started when it is first needed, so behind Locust's forks, and ends with
this process, whatever ends that: it reads the end of its socket. One that dies is told of in one line, fails the
requests that it had, and is followed by another. It does not know users, nor what is done with records.
"""

from __future__ import annotations

import logging
import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import TypeVar

import gevent
from gevent.event import AsyncResult
from gevent.lock import RLock
from gevent.queue import SimpleQueue

from ..records import Record
from ..requests import Request
from ..results import Sample
from ..tally import Group
from .wire import (
    Answer,
    Ask,
    Count,
    Counted,
    Cut,
    Finish,
    Finished,
    Looked,
    Open,
    Opened,
    Order,
    Report,
    order_line,
    read_report,
)

READY_SECONDS = 60.0  # for the driver to start and to reach the server, or not
_FINISH_SECONDS = 10.0
_MODULE = f"{__package__}.driver"
Told = TypeVar("Told", Opened, Finished, Counted)
_log = logging.getLogger("tokenstream")

Hear = Callable[[Record, "Asked"], Exception | None]  # what its user should raise


class DriverFailed(RuntimeError):  # noqa: N818  (the name says what happened)
    """The driver cannot ask this server, or cannot be started; one line."""


class Asked:
    """A request that was handed over. `done` gets its record, or what the hearer of records wants its user to raise."""

    def __init__(self, request: Request, scheduled_at: float, context: dict[str, object]) -> None:
        self.request, self.scheduled_at, self.context = request, scheduled_at, context
        self.done: AsyncResult = AsyncResult()


class Link:
    """To one driver at a time. `hear` and `look` get every record and sample, in the greenlet that reads them."""

    def __init__(self, hear: Hear, look: Callable[[Sample], None]) -> None:
        self._hear, self._look = hear, look
        self._order: Open | None = None
        self._running: _Running | None = None
        self._lock = RLock()
        self._numbers = 0
        self.deaths = 0

    @property
    def live(self) -> int:
        """Requests under way."""
        return len(self._running.asked) if self._running is not None else 0

    def start(self) -> None:
        """Have a driver ready for the first test. DriverFailed if it cannot be started."""
        with self._lock:
            self._start()

    def open(self, order: Open) -> Opened:
        """Begin a test. DriverFailed if there is no driver, or none that can ask this server."""
        with self._lock:
            self._numbers += 1
            self._order, self.deaths = replace(order, number=self._numbers), 0
            return self._ready(anew=True)[1]

    def ask(self, request: Request, scheduled_at: float, context: dict[str, object]) -> Asked:
        """Hand over a request; one that finds no driver ends at once as "internal"."""
        asked = Asked(request, scheduled_at, context)
        try:
            with self._lock:
                running = self._ready(anew=False)[0]
                self._numbers += 1
                running.asked[self._numbers] = asked
                try:
                    running.send(Ask(self._numbers, request, scheduled_at))
                except BaseException:  # Ctrl-C may hit any greenlet: nobody would ever answer what was not sent
                    del running.asked[self._numbers]
                    raise
        except DriverFailed as error:
            self._fail(asked, str(error))
        return asked

    def finish(self, patience: float, gap: float | None) -> tuple[int, Finished | None]:
        """Wait for what is under way, `patience` seconds at most, and cut the rest; `gap`: the median ITL.

        How many were cut, and what the driver says of the test; None if it died.
        """
        running = self._running
        if running is None:
            return 0, None
        self._await_all(running, patience)
        cut = len(running.asked)
        if cut:
            running.send(Cut())
            self._await_all(running, _FINISH_SECONDS)
        return cut, running.answer(Finish(gap), Finished, _FINISH_SECONDS)

    def count(self, told: Group) -> Counted:
        """What the server's metrics page says of the test that came to `told`."""
        counted = self._running.answer(Count(told), Counted, _FINISH_SECONDS) if self._running is not None else None
        return counted or Counted(None)

    def _await_all(self, running: _Running, seconds: float) -> None:
        deadline = time.perf_counter() + seconds
        while running.asked and time.perf_counter() < deadline:
            gevent.sleep(0.02)

    def close(self) -> None:
        """Hang up, which ends the driver."""
        running, self._running = self._running, None
        if running is not None:
            running.close()

    def _start(self) -> _Running:
        if self._running is None:
            self._running = _Running(self._heard, self._look, self._died)
        return self._running

    def _ready(self, *, anew: bool) -> tuple[_Running, Opened]:
        """The driver, and what it said when it opened the server: now if `anew`, or if it is another one."""
        if self._order is None:
            raise DriverFailed("no test has begun")
        running = self._start()
        if anew or running.opened is None:
            running.opened = running.answer(self._order, Opened, READY_SECONDS)
        opened = running.opened
        if opened is None:
            self.close()
            raise DriverFailed("the driver process does not begin")
        if opened.error:
            raise DriverFailed(opened.error)
        return running, opened

    def _heard(self, asked: Asked, record: Record) -> None:
        error = self._hear(record, asked)
        if error is None:
            asked.done.set(record)
        else:
            asked.done.set_exception(error)

    def _died(self, running: _Running, code: int) -> None:
        if self._running is not running:
            return  # it was told to
        self._running = None
        self.deaths += 1
        asked = list(running.asked.values())
        running.asked.clear()
        line = f"the driver process ended (exit code {code})"
        _log.error("%s with %d requests under way; another one is started", line, len(asked))
        for each in asked:
            self._fail(each, line)

    def _fail(self, asked: Asked, line: str) -> None:
        now = time.perf_counter()
        request = asked.request
        self._heard(
            asked,
            Record(
                id="",
                kind=request.kind,
                scheduled_at=asked.scheduled_at,
                sent_at=max(now, asked.scheduled_at),
                ended_at=max(now, asked.scheduled_at),
                outcome="internal",
                priority=request.priority,
                error=line,
            ),
        )


class _Running:
    """One driver process, with a greenlet that reads what it says."""

    def __init__(
        self,
        heard: Callable[[Asked, Record], None],
        look: Callable[[Sample], None],
        died: Callable[[_Running, int], None],
    ) -> None:
        self.asked: dict[int, Asked] = {}
        self.opened: Opened | None = None
        self._waited: AsyncResult = AsyncResult()  # for the one answer that is awaited
        self._heard, self._look, self._died = heard, look, died
        self._socket, theirs = socket.socketpair()
        try:
            with theirs:
                self._process = subprocess.Popen(
                    [sys.executable, "-P", "-m", _MODULE],
                    stdin=theirs.fileno(),
                    env={**os.environ, "PYTHONPATH": _python_path()},
                    start_new_session=True,  # a terminal's Ctrl-C is Locust's, which tells when the test is over
                )
        except OSError as error:
            self._socket.close()
            raise DriverFailed(f"the driver cannot be started: {error.strerror}") from None
        self.pid = self._process.pid
        self._lines: SimpleQueue = SimpleQueue()
        self._number = 0
        self._gone = False
        gevent.spawn(self._read)
        self._writing = gevent.spawn(self._write)

    def send(self, order: Order) -> None:
        """One line; what cannot be sent any more is answered when the reader sees the end."""
        self._lines.put(order_line(order))

    def answer(self, order: Order, kind: type[Told], seconds: float) -> Told | None:
        """Send an order and wait for its report; None if the driver died or took too long. One at a time."""
        self._waited = AsyncResult()
        self._number = order.number if isinstance(order, Open) else 0
        if self._gone:
            return None
        self.send(order)
        try:
            report = self._waited.get(timeout=seconds)
        except gevent.Timeout:
            return None
        return report if isinstance(report, kind) else None

    def close(self) -> None:
        """The driver reads the end, leaves its requests, and ends."""
        with suppress(OSError):  # it may have ended
            self._socket.shutdown(socket.SHUT_RDWR)
        self._process.wait()

    def _write(self) -> None:
        """In a greenlet of its own: a user may be killed at any moment, but not in the middle of a line."""
        with suppress(OSError):  # the reader sees that too
            while True:
                self._socket.sendall(self._lines.get())

    def _read(self) -> None:
        with self._socket.makefile("rb") as lines:
            try:
                for line in lines:
                    self._take(read_report(line))
            except (OSError, ValueError):
                self._process.kill()
        code = self._process.wait()
        self._gone = True
        self._waited.set(None)
        self._writing.kill(block=False)
        self._socket.close()
        self._died(self, code)

    def _take(self, report: Report) -> None:
        match report:
            case Answer():
                self._heard(self.asked.pop(report.number), report.record)
            case Looked():
                self._look(report.sample)
            case Opened() if report.number != self._number:
                return  # whoever waited for that was killed
            case _:
                self._waited.set(report)


def _python_path() -> str:
    """Where the driver finds this package, which may be a checkout that is not installed."""
    here = str(Path(__file__).parents[2])
    return os.pathsep.join([here, *filter(None, [os.environ.get("PYTHONPATH")])])

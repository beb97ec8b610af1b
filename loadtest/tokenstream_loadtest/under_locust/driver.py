"""The process that asks the server for one Locust process, with exact clocks: `python -m ...under_locust.driver`.

Locust runs in gevent, which neither gRPC's asyncio interface nor an exact clock survives; so the asking is done here,
in plain asyncio. Its standard input is a socket on which lines of `wire` go both ways; it ends when the other
side is gone, however that ended. It does not know Locust, users or workloads.
"""

from __future__ import annotations

import asyncio
import os
import secrets
import signal
import socket
import sys
import time
from contextlib import AsyncExitStack, suppress

from tokenstream import TLS
from tokenstream.intervals import Page

from ..generator import ask
from ..pulse import Pulse
from ..records import Record
from ..targets import Failed, Target, TargetOptions, open_target
from ..watch import PERIOD, Watch
from .wire import (
    LONGEST_LINE,
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
    read_order,
    report_line,
)

_DESCRIBE_SECONDS = 30.0  # a server may have to load its model first
_CUT = "not done when the test had been over for as long as --drain gives"


class Driver:
    """One socket to the Locust process. `run` serves it until the other side is gone."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader, self._writer = reader, writer
        self._stack = AsyncExitStack()
        self._target: Target | None = None
        self._asking: set[asyncio.Task[None]] = set()
        self._ids = secrets.token_hex(4)
        self._watch: Watch | None = None
        self._before: Page | None = None
        self._looking: asyncio.Task[None] | None = None
        self._begin()

    def _begin(self) -> None:
        self._began, self._cpu = time.perf_counter(), time.process_time()
        self._pulse = Pulse(self._began)

    async def run(self) -> None:
        """Do as told; then cancel what is under way, which cancels it on the server, and hang up."""
        try:
            while line := await self._reader.readline():
                await self._obey(read_order(line))
        finally:
            await self._leave()
            await self._stack.aclose()

    async def _leave(self) -> None:
        await asyncio.sleep(0)  # a task that is cancelled before its first step would not answer
        asking = list(self._asking)
        for task in asking:
            task.cancel()
        if asking:
            await asyncio.wait(asking)

    async def _obey(self, order: Order) -> None:
        match order:
            case Ask():
                task = asyncio.create_task(self._answer(order))
                self._asking.add(task)
                task.add_done_callback(self._asking.discard)
            case Open():
                await self._leave()
                await self._stack.aclose()
                self._tell(await self._open(order))
            case Cut():
                await self._leave()
            case Finish():
                seconds = max(time.perf_counter() - self._began, 1e-9)
                self._tell(Finished(self._pulse.stalls(order.gap), (time.process_time() - self._cpu) / seconds))
            case Count():
                self._tell(await self._count(order))

    async def _open(self, order: Open) -> Opened:
        self._target, self._watch, self._before, server = None, None, None, {}
        try:
            target = await self._stack.enter_async_context(_target(order))
            server = await _described(target)
            if order.metrics_url is not None:
                self._watch = Watch(order.metrics_url, order.model)
                self._before = await self._watch.settled()
        except (Failed, ValueError, OSError) as error:
            return Opened(order.number, time.perf_counter(), str(error))
        self._target = target
        self._begin()
        if self._watch is not None and self._before is not None:
            self._looking = asyncio.create_task(self._look(self._watch))
            self._stack.push_async_callback(self._stop_looking)
        return Opened(order.number, self._began, server=server)

    async def _look(self, watch: Watch) -> None:
        """Take samples, and pass each on, until cancelled."""
        sampling = asyncio.create_task(watch.sample())
        told = 0
        try:
            while True:
                await asyncio.sleep(PERIOD)
                for sample in watch.samples[told:]:
                    self._tell(Looked(sample))
                    told += 1
        finally:
            await _end(sampling)

    async def _stop_looking(self) -> None:
        if self._looking is not None:
            await _end(self._looking)
            self._looking = None

    async def _count(self, order: Count) -> Counted:
        await self._stop_looking()
        if self._watch is None or self._before is None:
            return Counted(None)
        server = await self._watch.counts(self._before, order.told)
        return Counted(server, lost=server is None, restarted=self._watch.restarted)

    async def _answer(self, order: Ask) -> None:
        request, name = order.request, f"locust-{self._ids}-{order.number}"
        began = time.perf_counter()
        if self._target is None:
            return
        try:
            record = await ask(self._target, request, name, scheduled_at=order.scheduled_at, pulse=self._pulse)
        except asyncio.CancelledError:
            record = Record(
                id=name,
                kind=request.kind,
                scheduled_at=order.scheduled_at,
                sent_at=began,
                ended_at=time.perf_counter(),
                outcome="timeout",
                priority=request.priority,
                error=_CUT,
            )
        self._tell(Answer(order.number, record))

    def _tell(self, report: Report) -> None:
        self._writer.write(report_line(report))


async def _described(target: Target) -> dict[str, str]:
    """What it says of itself. Failed if it does not: no request would be answered."""
    try:
        async with asyncio.timeout(_DESCRIBE_SECONDS):
            return await target.describe()
    except TimeoutError:
        raise Failed("timeout", f"the server says nothing of its model within {_DESCRIBE_SECONDS:g} s") from None


def _target(order: Open) -> Target:
    token = os.environ.get("TOKENSTREAM_TOKEN")
    headers = {"authorization": f"Bearer {token}"} if token else {}
    tls = TLS(root_certificates=order.ca) if order.ca else None
    return open_target(order.target, order.url, order.model, TargetOptions(headers=headers, tls=tls))


async def _main(connection: socket.socket) -> None:
    reader, writer = await asyncio.open_connection(sock=connection, limit=LONGEST_LINE)
    with suppress(ConnectionError, asyncio.IncompleteReadError):  # the other side was killed
        await Driver(reader, writer).run()


async def _end(task: asyncio.Task[None]) -> None:
    task.cancel()
    with suppress(asyncio.CancelledError):
        await task


if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Locust's own: it tells when the test is over
    os.environ.setdefault("GRPC_VERBOSITY", "NONE")  # its lines would stand in Locust's output
    with socket.socket(fileno=os.dup(0)) as own:
        asyncio.run(_main(own))
    sys.exit(0)

"""Keeps a server up until a signal: one that died, hangs or stalls is taken down at once and started again.

Starts that follow too fast wait longer and longer, and the fifth in a row that fails is the end; the first start has
one chance only. Load is never a reason: a full server beats like an idle one.
It knows of a server what `Server` says, and prints nothing.
"""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from types import FrameType
from typing import NoReturn, Protocol

from .diagnosis import ServerFailed, SetupError

FIRST_DELAY = 1.0
LONGEST_DELAY = 30.0
STEADY_SECONDS = 60.0  # ready for so long: the next fault is a new one
MAX_FAILED_STARTS = 5
_POLL_SECONDS = 0.1

OnDrain = Callable[[int, float], None]


class Interrupted(Exception):  # noqa: N818 (not an error: somebody asked for it)
    """`interrupt` was called while the server was being started or waited for."""


class Server(Protocol):
    """What is supervised; `tokenstream.server.TritonServer` says what each does."""

    @property
    def returncode(self) -> int | None:
        """Exit code of the process that runs or ran last."""

    @property
    def was_ready(self) -> bool:
        """Whether that process has been ready."""

    def start(self) -> None:
        """Start it for the first time."""

    def wait_ready(self, timeout: float) -> None:
        """Return when it is ready."""

    def fault(self) -> str | None:
        """Why it cannot serve any more."""

    def pause(self, seconds: float) -> None:
        """Wait, unless interrupted."""

    def death(self, message: str) -> ServerFailed:
        """The failure that says `message`."""

    def kill(self) -> None:
        """Take it down at once, whole."""

    def restart(self) -> None:
        """Start it anew where it was."""

    def stop(self, *, on_drain: OnDrain | None) -> int:
        """Drain it and take it down for good."""

    def interrupt(self) -> None:
        """End whatever waits."""


def serve_until_signal(
    server: Server,
    *,
    timeout: float = 600.0,
    on_ready: Callable[[], None] | None = None,
    on_death: Callable[[ServerFailed], None] | None = None,
    on_drain: OnDrain | None = None,
) -> int:
    """Keep `server` up until SIGINT, SIGTERM or SIGHUP comes, at whatever moment; return the shell's exit code for it.

    The first signal drains the server and passes SIGTERM on, a second one kills. `on_ready` is called whenever all
    models have become ready, `on_death` when a server is given up for another (its message says why, and when the next
    start is), `on_drain` as the drain begins (live requests, seconds). The result is the server's own code (0 for an
    orderly end), 128 + n for its death by signal n, or for signal n coming before any was ready. Only in the main
    thread. Raises SetupError when the first start fails, or the fifth in a row; the server is down when this returns.
    """
    received: list[int] = []
    served = False

    def note(signum: int, _frame: FrameType | None) -> None:
        received.append(signum)
        server.interrupt()

    with _handlers(note):
        try:
            server.start()
            server.wait_ready(timeout)
            served = True
            keep_serving(server, timeout, on_ready or _nothing, on_death or _nothing)
        except Interrupted:
            pass
        finally:
            server.stop(on_drain=on_drain)
    code = server.returncode
    if code is None or (received and not server.was_ready):
        if served:  # it was between two servers, and nothing was lost
            return 0
        return 128 + (received[0] if received else signal.SIGINT)
    return code if code >= 0 else 128 - code


def keep_serving(
    server: Server,
    timeout: float,
    on_ready: Callable[[], None],
    on_death: Callable[[ServerFailed], None],
    clock: Callable[[], float] = time.monotonic,
) -> NoReturn:
    """Watch a server that is ready, and restart it for ever; ends with Interrupted, or the fifth failed start."""
    delay = FIRST_DELAY
    while True:
        on_ready()
        ready_at = clock()
        while (fault := server.fault()) is None:
            server.pause(_POLL_SECONDS)
        if clock() - ready_at >= STEADY_SECONDS:
            delay = FIRST_DELAY
        reason = fault
        for attempt in range(1, MAX_FAILED_STARTS + 1):
            on_death(server.death(f"{reason}; restarting in {delay:g} s"))
            server.kill()  # its streams are lost, so there is nothing to wait for
            server.pause(delay)
            delay = min(2 * delay, LONGEST_DELAY)
            try:
                server.restart()
                server.wait_ready(timeout)
                break
            except SetupError as error:
                if attempt == MAX_FAILED_STARTS:
                    raise
                reason = error.message


def _nothing(*_: object) -> None:
    """Nobody wants to hear of it."""


@contextmanager
def _handlers(handler: Callable[[int, FrameType | None], None]) -> Iterator[None]:
    """Handle SIGINT, SIGTERM and SIGHUP with `handler` for a while."""
    with ExitStack() as restore:
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            restore.callback(signal.signal, number, signal.signal(number, handler))
        yield

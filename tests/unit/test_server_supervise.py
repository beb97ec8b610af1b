"""A server is started again as often as it must, no faster than it may, and not for ever if it cannot start."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from pathlib import Path

import pytest

from tokenstream.diagnosis import ServerFailed, SetupError
from tokenstream.supervise import Interrupted, OnDrain, keep_serving, serve_until_signal

LOG = Path("server.log")


class FakeServer:
    """A server whose life is written down: how long it is ready each time, or an error for a start that fails.

    Behind the last entry comes an interrupt.
    """

    def __init__(self, *lives: float | SetupError) -> None:
        self.now = 0.0
        self.did: list[str] = []
        self.returncode: int | None = None
        self.was_ready = False
        self._lives = list(lives)
        self._until = 0.0

    def start(self) -> None:
        self.did.append("start")
        self.returncode = None

    restart = start

    def wait_ready(self, timeout: float) -> None:
        if not self._lives:
            raise Interrupted
        life = self._lives.pop(0)
        if isinstance(life, SetupError):
            raise life
        self._until = self.now + life
        self.was_ready = True

    def fault(self) -> str | None:
        return "it died" if self.now >= self._until else None

    def pause(self, seconds: float) -> None:
        self.now += seconds
        if seconds >= 1.0:
            self.did.append(f"wait {seconds:g}")

    def death(self, message: str) -> ServerFailed:
        self.did.append(message)
        return ServerFailed(message, (), LOG)

    def kill(self) -> None:
        self.did.append("kill")
        self.was_ready = False
        self.returncode = -9

    def stop(self, *, on_drain: OnDrain | None) -> int:
        self.did.append("stop")
        self.returncode = 0 if self.was_ready else self.returncode
        return 0

    def interrupt(self) -> None:
        self._until = float("inf")

    def waits(self) -> list[float]:
        return [float(entry.split()[1]) for entry in self.did if entry.startswith("wait ")]


def supervise(server: FakeServer, end: type[Exception] = Interrupted) -> list[str]:
    """Keep the server up until it is interrupted; what `on_death` heard."""
    heard: list[str] = []
    server.start()
    server.wait_ready(1.0)
    with pytest.raises(end):
        keep_serving(server, 1.0, lambda: None, lambda failure: heard.append(failure.message), lambda: server.now)
    return heard


def failed(message: str = "it could not start") -> ServerFailed:
    return ServerFailed(message, (), LOG)


def test_a_dead_server_is_told_taken_down_and_started_again() -> None:
    server = FakeServer(100.0)
    assert supervise(server) == ["it died; restarting in 1 s"]
    assert server.did == ["start", "it died; restarting in 1 s", "kill", "wait 1", "start"]


def test_the_waits_double_up_to_thirty_seconds() -> None:
    server = FakeServer(*[5.0] * 8)
    supervise(server)
    assert server.waits() == [1, 2, 4, 8, 16, 30, 30, 30]


def test_a_minute_of_service_forgives() -> None:
    server = FakeServer(5.0, 5.0, 61.0, 5.0)
    supervise(server)
    assert server.waits() == [1, 2, 1, 2]


def test_failed_starts_are_told_and_tried_again() -> None:
    server = FakeServer(5.0, SetupError("the port is taken"), failed(), 5.0)
    assert supervise(server) == [
        "it died; restarting in 1 s",
        "the port is taken; restarting in 2 s",
        "it could not start; restarting in 4 s",
        "it died; restarting in 8 s",
    ]


def test_the_fifth_failed_start_in_a_row_is_the_end() -> None:
    server = FakeServer(5.0, *[failed()] * 4, 5.0, *[failed(str(number)) for number in range(5)])
    heard = supervise(server, ServerFailed)
    assert len(heard) == 5 + 5
    assert heard[-1].startswith("3; restarting")


def test_a_first_start_that_fails_is_not_repeated() -> None:
    server = FakeServer(failed())
    with pytest.raises(ServerFailed, match="it could not start"):
        serve_until_signal(server)
    assert server.did == ["start", "stop"]


def test_the_fifth_failed_start_takes_the_server_down_for_good() -> None:
    server = FakeServer(0.0, *[failed()] * 5)
    with pytest.raises(ServerFailed):
        serve_until_signal(server)
    assert server.did[-1] == "stop"


@pytest.mark.parametrize("life", [1e9, 0.0], ids=["while it serves", "between two starts"])
def test_a_signal_ends_a_server_that_has_been_ready_in_order(life: float) -> None:
    server = FakeServer(life)

    def interrupted_pause(seconds: float) -> None:
        os.kill(os.getpid(), signal.SIGTERM)
        raise Interrupted

    server.pause = interrupted_pause  # type: ignore[method-assign]
    ready: list[Callable[[], None]] = []
    assert serve_until_signal(server, on_ready=lambda: ready.append(server.kill)) == 0
    assert len(ready) == 1
    assert server.did[-1] == "stop"

"""A server that was away and is back on its port: the next attempt finds it, whatever came of those before."""

from __future__ import annotations

import asyncio
import inspect
import socket
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from tokenstream import AsyncClient, Client, ConnectionFailed, ConnectTimeout, Timeout, TokenstreamError
from tokenstream.asynchronous import AsyncConnection
from tokenstream.blocking import BlockingConnection
from unit.scripted_triton import WAIT, ScriptedTriton, answer, token

CONNECT = 1.0  # seconds
LONG = 1.5 * CONNECT  # in which a dial that nobody watches has run out of time
Ask = Callable[..., Any]
FACES = pytest.mark.parametrize("face", [Client, AsyncClient])


@pytest.fixture
def port() -> int:
    """Where nobody listens."""
    with socket.create_server(("127.0.0.1", 0)) as closed:
        return int(closed.getsockname()[1])


@pytest.fixture
def started() -> Iterator[Callable[..., ScriptedTriton]]:
    """Start servers that are closed after the test."""
    running: list[ScriptedTriton] = []

    def start(*texts: str, port: int) -> ScriptedTriton:
        running.append(ScriptedTriton(answer(*texts), port=port))
        return running[-1]

    yield start
    for server in running:
        server.close()


@pytest.fixture
def asking(port: int) -> Iterator[Callable[[type[Any]], Ask]]:
    """Make a client of either kind for `port`; what is returned calls a method of it and waits for the outcome."""
    loop, clients = asyncio.new_event_loop(), []

    def outcome(value: Any) -> Any:
        return loop.run_until_complete(asyncio.wait_for(value, WAIT)) if inspect.isawaitable(value) else value

    def make(face: type[Any]) -> Ask:
        client = face(f"127.0.0.1:{port}", retries=0, resume=False, timeout=Timeout(connect=CONNECT))
        clients.append(client)
        return lambda method, *given: outcome(getattr(client, method)(*given))

    yield make
    for client in clients:
        outcome(client.close())
    loop.close()


@FACES
def test_a_server_that_is_back_answers_the_first_attempt_after_any_pause(face, asking, started, port) -> None:
    ask = asking(face)
    first = started("a", port=port)
    assert ask("generate", "x").text == "a"
    first.close()
    for pause in (LONG, 0.0, LONG):
        with pytest.raises(TokenstreamError):
            ask("generate", "x")
        time.sleep(pause)
    started("b", port=port)
    assert ask("generate", "x").text == "b"


@FACES
def test_while_nobody_listens_that_is_what_every_attempt_says(face, asking, port) -> None:
    ask = asking(face)
    for pause in (LONG, LONG, 0.0):
        with pytest.raises(ConnectionFailed, match="connection refused"):
            ask("generate", "x")
        time.sleep(pause)


@FACES
@pytest.mark.parametrize(
    ("method", "given"), [("ready", ()), ("models", ()), ("tokenize", ("x",)), ("wait_until_ready", (CONNECT,))]
)
def test_small_questions_find_a_server_that_restarted_behind_their_back(
    face, asking, started, port, method, given
) -> None:
    ask = asking(face)
    first = started("a", port=port)
    assert ask("generate", "x").text == "a"
    first.close()
    started("b", port=port)
    assert ask(method, *given) is not False


@FACES
def test_a_server_that_said_nothing_in_time_is_dialled_anew(face, asking, started, port) -> None:
    ask = asking(face)
    with socket.create_server(("127.0.0.1", port)) as mute:
        with pytest.raises(ConnectTimeout):
            ask("generate", "x")
        mute.accept()[0].close()
    started("a", port=port)
    assert ask("generate", "x").text == "a"


@FACES
def test_connections_that_could_not_be_made_are_not_kept(face, asking, started, port, monkeypatch) -> None:
    kind = BlockingConnection if face is Client else AsyncConnection
    opened: list[str] = []
    closed: list[object] = []
    begin, end = kind.__init__, kind.close

    def opens(self: Any, *given: Any) -> None:
        opened.append(given[0])
        begin(self, *given)

    async def closes(self: Any) -> None:
        closed.append(self)
        await end(self)

    monkeypatch.setattr(kind, "__init__", opens)
    monkeypatch.setattr(kind, "close", closes)
    ask = asking(face)
    for _ in range(20):
        with pytest.raises(ConnectionFailed):
            ask("generate", "x")
    started("a", port=port)
    assert ask("generate", "x").text == "a"
    assert (len(opened), len(closed)) == (21, 20)


def test_a_stream_of_a_server_that_drains_is_not_cut_by_requests_that_find_nobody() -> None:
    asked = threading.Event()

    def script(request: Any, call: Any) -> Iterator:
        yield token(0, "a", 100)
        asked.wait(WAIT)
        yield token(1, "b", 101, final=True, finish_reason="stop")

    server = ScriptedTriton(script)
    with Client(server.url, retries=0, resume=False) as client, client.stream("x") as stream:
        assert next(stream).text == "a"
        drained = server.drain()
        for _ in range(3):
            with pytest.raises(TokenstreamError):
                client.generate("y")
        asked.set()
        assert (stream.final().text, stream.resumes) == ("ab", 0)
    assert drained.wait(WAIT)


def test_threads_that_find_nobody_together_are_all_told_so(port) -> None:
    def ask(client: Client) -> set[str]:
        told = set()
        for _ in range(20):
            with pytest.raises(ConnectionFailed) as caught:
                client.generate("x")
            told.add(caught.value.message)
        return told

    with Client(f"127.0.0.1:{port}", retries=0) as client, ThreadPoolExecutor(8) as pool:
        told = set().union(*pool.map(ask, [client] * 8))
    assert told == {f"cannot connect to 127.0.0.1:{port}: connection refused"}

"""What ends a request that dials: cancelling, the total clock; and small questions on a line that has gone silent."""

from __future__ import annotations

import asyncio
import socket
import threading
from collections.abc import Iterator

import pytest

from tokenstream import AsyncClient, Cancelled, Client, ConnectTimeout, Timeout, TotalTimeout, connections
from tokenstream.blocking import BlockingConnection
from tokenstream.transport import Failed, Status
from unit.scripted_triton import WAIT, ScriptedTriton, answer, failure

FOR_EVER = Timeout(connect=None)
CUT = "Stub process 'llm_0_0' is not healthy."


@pytest.fixture
def mute() -> Iterator[socket.socket]:
    """It takes connections and says nothing."""
    with socket.create_server(("127.0.0.1", 0)) as listening:
        listening.settimeout(WAIT)
        yield listening


@pytest.fixture
def cutting() -> Iterator[ScriptedTriton]:
    """It breaks off behind the first token."""

    def cut(request, call) -> Iterator:
        yield failure(CUT)

    server = ScriptedTriton(answer("a", "b", cut=cut, at=1))
    yield server
    server.close()


def url(listening: socket.socket) -> str:
    return f"127.0.0.1:{listening.getsockname()[1]}"


def test_cancelling_a_stream_that_dials_ends_it_at_once(cutting, mute):
    heard: list[Exception] = []

    def read() -> None:
        try:
            stream.final()
        except Cancelled as error:
            heard.append(error)

    with Client([cutting.url, url(mute)], timeout=FOR_EVER) as client:
        stream = client.stream("x")
        reader = threading.Thread(target=read)
        reader.start()
        with mute.accept()[0]:
            stream.cancel()
            reader.join(WAIT)
            assert not reader.is_alive()
    assert [error.text for error in heard] == ["a"]


@pytest.mark.parametrize("by_thread", [False, True])
def test_cancelling_an_asynchronous_stream_that_dials_ends_it_at_once(cutting, mute, by_thread):
    async def main() -> None:
        async with asyncio.timeout(WAIT), AsyncClient([cutting.url, url(mute)], timeout=FOR_EVER) as client:
            stream = client.stream("x")
            reader = asyncio.create_task(stream.final())
            with (await asyncio.to_thread(mute.accept))[0]:
                if by_thread:
                    await asyncio.to_thread(stream.cancel)
                else:
                    stream.cancel()
                with pytest.raises(Cancelled):
                    await reader

    asyncio.run(main())


def test_the_total_clock_runs_while_a_connection_is_made(mute):
    with Client(url(mute), timeout=Timeout(connect=WAIT, total=0.25)) as client:
        with pytest.raises(TotalTimeout, match=r"took longer than its total time of 0\.25 s"):
            client.stream("x")
        with pytest.raises(TotalTimeout, match=r"of 0\.2 s"):
            client.stream("x", timeout=0.2)


def test_the_total_clock_runs_while_a_cut_answer_dials(cutting, mute):
    clocks = Timeout(connect=WAIT, total=0.5)
    with Client([cutting.url, url(mute)], timeout=clocks) as client, pytest.raises(TotalTimeout) as caught:
        client.generate("x")
    assert caught.value.text == "a"
    assert "0.5 s" in str(caught.value)


@pytest.mark.parametrize("question", ["models", "info"])
def test_a_small_question_on_a_silent_line_ends_with_the_connect_clock(serve, monkeypatch, question):
    _, client = serve(answer("a"), retries=0)
    client.generate("x")  # the line is known to be good
    asked = []

    async def ask(self, method: str, *args, **options) -> None:
        asked.append((method, options["limit"]))
        raise Failed(Status("DEADLINE_EXCEEDED", "silent"))

    monkeypatch.setattr(BlockingConnection, "ask", ask)
    with pytest.raises(ConnectTimeout, match="did not answer within 5 s"):
        getattr(client, question)()
    assert asked == [("ServerLive", 5.0)]


def test_texts_hold_seconds_without_the_noise_of_their_last_digits():
    assert [connections.in_words(value) for value in (0.1 + 0.2, 1.0, 4.999999, 86400.0)] == [
        "0.3 s",
        "1 s",
        "5 s",
        "86400 s",
    ]

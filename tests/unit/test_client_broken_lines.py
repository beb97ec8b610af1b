"""A line that breaks between a client and a healthy server: torn down, or silent for ever as behind a pulled plug."""

from __future__ import annotations

import contextlib
import itertools
import socket
import threading
from collections.abc import Iterator

import pytest

from tokenstream import Cancelled, Client, FirstTokenTimeout, IdleTimeout, Timeout
from unit.scripted_triton import WAIT, ScriptedTriton, answer, failure, inputs, token

WORDS = ("a", "b", "c", "d")


class Line:
    """Carries bytes to a server and back until it is `cut` or `frozen`; later connections are carried again."""

    def __init__(self, target: str) -> None:
        self._target = ("127.0.0.1", int(target.rpartition(":")[2]))
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.url = f"127.0.0.1:{self._listener.getsockname()[1]}"
        self._frozen: set[socket.socket] = set()
        self._open: list[socket.socket] = []
        threading.Thread(target=self._accept, daemon=True).start()

    def cut(self) -> None:
        """Tear down what is connected."""
        for end in self._open:
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)

    def freeze(self) -> None:
        """Swallow whatever is sent over what is connected."""
        self._frozen.update(self._open)

    def close(self) -> None:
        self._listener.close()
        self.cut()
        for end in self._open:
            end.close()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                near, _ = self._listener.accept()
                far = socket.create_connection(self._target)
                self._open += [near, far]
                for source, sink in ((near, far), (far, near)):
                    threading.Thread(target=self._carry, args=(source, sink), daemon=True).start()

    def _carry(self, source: socket.socket, sink: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(65536):
                if source not in self._frozen:
                    sink.sendall(data)
            sink.shutdown(socket.SHUT_RDWR)


@pytest.fixture
def line() -> Iterator[Line]:
    """A line to a server that sends two tokens and then waits, but goes on with what is resumed."""

    def script(request, call) -> Iterator:
        if inputs(request).get("resume_token_ids"):
            yield from answer(*WORDS)(request, call)
            return
        yield token(0, "a", 100, fingerprint="print")
        yield token(1, "b", 101)
        call.over.wait(WAIT)

    server = ScriptedTriton(script)
    line = Line(server.url)
    yield line
    line.close()
    server.close()


def begin(client: Client) -> tuple[list[str], Iterator]:
    stream = client.stream("x")
    return [next(stream).text, next(stream).text], stream


def test_a_line_that_is_cut_is_made_anew_and_the_answer_goes_on(line):
    with Client(line.url) as client:
        begun, stream = begin(client)
        line.cut()
        assert [*begun, *(chunk.text for chunk in stream)] == list(WORDS)
        assert stream.resumes == 1


def test_a_line_that_falls_silent_is_left_for_another_endpoint(line):
    other = ScriptedTriton(answer(*WORDS))
    clocks = Timeout(connect=0.3, first_token=0.3, idle=0.2)
    with Client([line.url, other.url], timeout=clocks) as client:
        begun, stream = begin(client)
        line.freeze()
        assert [*begun, *(chunk.text for chunk in stream)] == list(WORDS)
        assert stream.resumes == 1
        assert client.generate("y").text == "abcd"  # no more of it, for a while
    other.close()


def test_a_silent_line_without_another_is_an_idle_timeout(line):
    clocks = Timeout(connect=0.2, first_token=0.2, idle=0.2)
    with Client(line.url, timeout=clocks, retries=0) as client:
        begun, stream = begin(client)
        line.freeze()
        with pytest.raises(IdleTimeout) as caught:
            next(stream)
        assert caught.value.text == "".join(begun)
        assert "did not answer" in caught.value.__notes__[0]


def test_cancel_ends_the_pause_before_another_attempt(serve):
    def script(request, call) -> Iterator:
        yield failure("the queue is full [request=r tokens=0 code=UNAVAILABLE retry_after=30]")

    server, client = serve(script)
    stream = client.stream("x")
    threading.Timer(0.2, stream.cancel).start()
    with pytest.raises(Cancelled):
        next(stream)
    assert len(server.requests) == 1


def test_a_resumed_answer_that_no_longer_comes_says_what_cut_it(serve):
    def script(request, call) -> Iterator:
        if "resume_token_ids" not in inputs(request):
            yield from itertools.islice(answer(*WORDS)(request, call), 2)
        call.over.wait(WAIT)

    server, client = serve(script, timeout=Timeout(first_token=0.1, idle=0.1))
    with pytest.raises(IdleTimeout) as caught:
        client.generate("x")
    assert isinstance(caught.value.__cause__, FirstTokenTimeout)
    assert caught.value.text == "ab"
    assert len(server.requests) == 2

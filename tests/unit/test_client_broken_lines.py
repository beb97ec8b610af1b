"""A line that breaks between a client and a healthy server: torn down, or silent for ever as behind a pulled plug."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Iterator

import pytest

from tokenstream import Cancelled, Client, FirstTokenTimeout, IdleTimeout, Timeout
from unit.breaking_line import Cut, Line, Way, messages
from unit.scripted_triton import WAIT, ScriptedTriton, answer, failure, inputs, token

WORDS = ("a", "b", "c", "d")


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
    clocks = Timeout(connect=0.6, first_token=0.6, idle=0.4)
    with Client([line.url, other.url], timeout=clocks) as client:
        begun, stream = begin(client)
        line.freeze()
        assert [*begun, *(chunk.text for chunk in stream)] == list(WORDS)
        assert stream.resumes == 1
        assert client.generate("y").text == "abcd"  # no more of it, for a while
    other.close()


def test_a_silent_line_without_another_is_an_idle_timeout(line):
    clocks = Timeout(connect=0.6, first_token=0.6, idle=0.4)
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

    server, client = serve(script, timeout=Timeout(first_token=0.6, idle=0.4))
    with pytest.raises(IdleTimeout) as caught:
        client.generate("x")
    assert isinstance(caught.value.__cause__, FirstTokenTimeout)
    assert caught.value.text == "ab"
    assert len(server.requests) == 2


def uncut(server: ScriptedTriton) -> Line:
    """A line that has carried one answer."""
    line = Line(server.url)
    with Client(line.url) as client:
        assert client.generate("x").text == "".join(WORDS)
    line.close()
    return line


@pytest.mark.parametrize("way", Way)
def test_an_answer_cut_at_any_byte_is_the_answer(way: Way) -> None:
    server = ScriptedTriton(answer(*WORDS))
    traffic = uncut(server).traffic
    assert len(messages(traffic.down)) == 1 + len(WORDS)  # one for the greeting
    torn = 0
    for place in (*range(0, len(traffic.of(way)), 29), *messages(traffic.of(way))):
        line = Line(server.url, Cut(way, bytes=place))
        with Client(line.url) as client, client.stream("x", seed=1) as stream:
            chunks = list(stream)
            assert [chunk.text for chunk in chunks] == list(WORDS)
            assert [chunk.index for chunk in chunks] == list(range(len(WORDS)))
        torn += line.torn.is_set()
        line.close()
    assert torn > 10
    server.close()

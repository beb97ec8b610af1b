"""How long a stream lives against a scripted server: connecting, the four clocks, cancelling, threads and closing."""

from __future__ import annotations

import contextlib
import gc
import socket
import threading
import time
from collections.abc import Iterator

import grpc
import pytest

from tokenstream import (
    Cancelled,
    Client,
    ConnectionFailed,
    ConnectTimeout,
    FirstTokenTimeout,
    IdleTimeout,
    IncompleteStream,
    NotReady,
    Timeout,
    TotalTimeout,
    blocking,
    transport,
)
from tokenstream.replies import ReplyReader
from unit.scripted_triton import WAIT, answer, final_mark, token
from waiting import eventually


def hold(request, call) -> Iterator:
    """Send one token, then nothing until the client leaves."""
    yield token(0, "one", 100)
    call.over.wait(WAIT)


def silence(request, call) -> Iterator:
    call.over.wait(WAIT)
    yield from ()


def test_the_first_token_clock_runs_from_sending_and_cancels(serve):
    server, client = serve(silence, timeout=Timeout(first_token=0.05))
    with pytest.raises(FirstTokenTimeout):
        client.generate("x")
    assert server.calls[0].over.wait(WAIT)


def test_the_idle_clock_starts_with_the_first_response(serve):
    def script(request, call):
        call.over.wait(0.2)  # a prefill longer than the idle clock
        yield from hold(request, call)

    server, client = serve(script, timeout=Timeout(first_token=WAIT, idle=0.05))
    stream = client.stream("x")
    assert next(stream).text == "one"
    with pytest.raises(IdleTimeout) as caught:
        next(stream)
    assert caught.value.text == "one"
    assert server.calls[0].over.wait(WAIT)


def test_the_idle_clock_stands_still_while_the_consumer_is_busy(serve):
    def script(request, call):
        yield token(0, "a", 1)
        sent.set()
        yield token(1, "b", 2, finish_reason="stop", final=True)

    sent = threading.Event()
    _, client = serve(script, timeout=Timeout(idle=0.2))
    stream = client.stream("x")
    next(stream)
    sent.wait(WAIT)
    threading.Event().wait(0.3)  # the consumer's own pause, longer than the clock
    assert next(stream).text == "b"


def test_the_total_clock_ends_an_answer_that_never_pauses(serve):
    def script(request, call):
        index = 0
        while not call.over.wait(0.001):
            yield token(index, "a", 1)
            index += 1

    server, client = serve(script, timeout=Timeout(total=0.2))
    with pytest.raises(TotalTimeout) as caught:
        client.generate("x")
    assert caught.value.text.startswith("a")
    assert 100_000 < server.requests[0].parameters["timeout"].int64_param <= 200_000  # what connecting has left


def test_a_request_may_bring_its_own_clocks(serve):
    _, client = serve(silence, timeout=Timeout(first_token=WAIT))
    with pytest.raises(FirstTokenTimeout):
        client.generate("x", timeout=Timeout(first_token=0.05))


def test_a_port_that_accepts_and_says_nothing_is_a_connect_timeout():
    with socket.create_server(("127.0.0.1", 0)) as mute:
        url = f"127.0.0.1:{mute.getsockname()[1]}"
        with Client(url, timeout=Timeout(connect=0.2)) as client, pytest.raises(ConnectTimeout):
            client.stream("x")


def test_a_closed_port_is_a_failed_connection_and_later_works(serve):
    with socket.create_server(("127.0.0.1", 0)) as closed:
        url = f"127.0.0.1:{closed.getsockname()[1]}"
    with Client(url) as client:
        with pytest.raises(ConnectionFailed, match=f"cannot connect to {url}: connection refused"):
            client.stream("x")
        assert not client.ready()


def test_waiting_for_readiness_ends_when_it_is_there_or_the_time_is_up(serve):
    server, client = serve(answer("a"))
    client.wait_until_ready(WAIT)
    server.ready = False
    with pytest.raises(NotReady, match="'llm'"):
        client.wait_until_ready(0.1)
    threading.Timer(0.1, setattr, (server, "ready", True)).start()
    client.wait_until_ready(WAIT)


def test_a_server_that_dies_in_mid_answer_leaves_an_incomplete_stream(serve):
    server, client = serve(hold)
    stream = client.stream("x")
    next(stream)
    server.close()
    with pytest.raises((IncompleteStream, Cancelled)) as caught:
        next(stream)
    assert caught.value.text == "one"


def test_leaving_the_with_block_cancels_on_the_server(serve):
    server, client = serve(hold)
    with client.stream("x") as stream:
        next(stream)
    assert server.calls[0].over.wait(WAIT)
    assert server.calls[0].cancelled
    with pytest.raises(Cancelled):
        next(stream)


def test_an_abandoned_stream_is_cancelled_when_it_is_collected(serve):
    server, client = serve(hold)
    for _ in client.stream("x"):
        break
    gc.collect()
    assert server.calls[0].over.wait(WAIT)
    assert server.calls[0].cancelled


def test_cancel_from_another_thread_wakes_the_consumer(serve):
    server, client = serve(hold)
    stream = client.stream("x")
    next(stream)
    thread = threading.Thread(target=stream.cancel)
    thread.start()
    with pytest.raises(Cancelled) as caught:
        next(stream)
    thread.join(WAIT)
    assert caught.value.text == "one"
    assert server.calls[0].over.wait(WAIT)


@pytest.mark.parametrize("cut", [False, True])
def test_no_thread_outlives_its_stream_however_it_ends(serve, cut):
    def script(request, call):
        if cut:
            call.context.abort(grpc.StatusCode.UNAVAILABLE, "Socket closed")
        yield from answer("a", "b")(request, call)

    _, client = serve(script)
    before = set(threading.enumerate())
    for _ in range(3):
        with contextlib.suppress(IncompleteStream):
            client.generate("x")
    for thread in set(threading.enumerate()) - before:
        if not thread.name.startswith("ThreadPoolExecutor"):  # the scripted server's own
            thread.join(WAIT)
            assert not thread.is_alive()


def test_many_threads_share_one_client(serve):
    _, client = serve(answer("a", "b", "c"))
    texts: list[str] = []
    threads = [threading.Thread(target=lambda: texts.append(client.generate("x").text)) for _ in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(WAIT)
    assert texts == ["abc"] * 6


def test_closing_the_client_ends_its_streams_and_refuses_new_ones(serve):
    _, client = serve(hold)
    stream = client.stream("x")
    next(stream)
    client.close()
    with pytest.raises(Cancelled):
        next(stream)
    with pytest.raises(RuntimeError, match="closed"):
        client.stream("x")


def test_a_second_reader_is_refused_and_the_first_goes_on_undisturbed(serve):
    go_on = threading.Event()

    def script(request, call) -> Iterator:
        yield token(0, "a", 100)
        go_on.wait(WAIT)
        yield token(1, "b", 101, final=True, finish_reason="stop")

    _, client = serve(script)
    stream, heard = client.stream("x"), []
    assert next(stream).text == "a"
    first = threading.Thread(target=lambda: heard.append(next(stream).text))
    first.start()
    while not stream._pursuit._reading.locked():
        first.join(0.001)
    with pytest.raises(RuntimeError, match="is being read by another thread"):
        next(stream)
    go_on.set()
    first.join(WAIT)
    assert heard == ["b"]
    assert list(stream) == []


def test_a_wait_that_begins_while_the_watchman_looks_round_is_not_lost(monkeypatch):
    class Waiting:
        def __init__(self) -> None:
            self.rung = threading.Event()

        def cancel(self) -> None:
            self.rung.set()

    first, long, late = Waiting(), Waiting(), Waiting()
    watchman, entering = blocking.Watchman(), []

    def slow_min(dues: list[float]) -> float:
        earliest = min(dues)
        if first.rung.is_set() and not entering:  # between the look and the note of what was seen
            due = time.monotonic() + 0.05
            entering.append(threading.Thread(target=watchman.enter, args=(late, due)))
            entering[0].start()
            while not any(call is late for call, _ in list(watchman._waits)):
                entering[0].join(0.001)
            entering[0].join(0.1)  # it is through, or waits for the lock that this thread holds
        return earliest

    monkeypatch.setattr(blocking, "_LOOK_SECONDS", 10 * WAIT)
    monkeypatch.setattr(blocking, "min", slow_min, raising=False)
    watchman.enter(long, time.monotonic() + 10 * WAIT)
    watchman.enter(first, time.monotonic() + 0.02)
    assert late.rung.wait(WAIT)
    watchman.dismiss()


def test_a_call_whose_answer_came_while_the_watchman_looks_round_is_left_alone():
    class Waiting:
        def __init__(self) -> None:
            self.cancelled = threading.Event()
            self.neighbour: Waiting | None = None
            self.wait: object = None

        def cancel(self) -> None:  # meanwhile the neighbour's answer has come, and it waits for the next one
            assert self.neighbour is not None
            assert watchman.leave(self.neighbour.wait)
            watchman.enter(self.neighbour, time.monotonic() + 10 * WAIT)
            self.cancelled.set()

    watchman, one, other = blocking.Watchman(), Waiting(), Waiting()
    one.neighbour, other.neighbour = other, one
    with watchman._condition:  # both are late when it looks
        for call in (one, other):
            call.wait = (call, 0.0)
            watchman._waits.add(call.wait)
    watchman.enter(Waiting(), time.monotonic() + 10 * WAIT)
    eventually(lambda: one.cancelled.is_set() or other.cancelled.is_set())
    watchman.dismiss()
    assert one.cancelled.is_set() != other.cancelled.is_set()


def test_who_keeps_sending_behind_the_last_response_is_hung_up_on(monkeypatch):
    class Endless:
        cancelled = False

        async def receive(self, limit: float | None) -> transport.Arrival:
            return transport.Arrival(0.0, ReplyReader().read(final_mark().SerializeToString()))

        def release(self) -> None:
            pass

        def cancel(self) -> None:
            self.cancelled = True

    monkeypatch.setattr(transport, "_END_SECONDS", 0.05)
    call = Endless()
    transport.run(transport.settle(call))
    assert call.cancelled

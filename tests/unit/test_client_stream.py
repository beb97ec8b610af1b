"""Streams against a scripted server: order, ends, the four clocks, cancelling."""

from __future__ import annotations

import contextlib
import gc
import json
import socket
import threading
from collections.abc import Callable, Iterator

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
    InternalError,
    InvalidRequest,
    NotReady,
    Timeout,
    TotalTimeout,
)
from unit.scripted_triton import WAIT, Script, ScriptedTriton, add, answer, failure, final_mark, inputs, token

Serve = Callable[..., tuple[ScriptedTriton, Client]]


@pytest.fixture
def serve() -> Iterator[Serve]:
    """Start a scripted server and a client for it; both are closed after the test."""
    open_now: list[ScriptedTriton | Client] = []

    def start(script: Script, **options: object) -> tuple[ScriptedTriton, Client]:
        server = ScriptedTriton(script)
        client = Client(server.url, **options)
        open_now[:0] = [client, server]
        return server, client

    yield start
    for one in open_now:
        one.close()


def hold(request, call) -> Iterator:
    """Send one token, then nothing until the client leaves."""
    yield token(0, "one", 100)
    call.over.wait(WAIT)


def silence(request, call) -> Iterator:
    call.over.wait(WAIT)
    yield from ()


def test_chunks_come_in_order_and_add_up(serve):
    server, client = serve(answer("Once", " upon", " a time"))
    with client.stream("tell", max_tokens=3, request_id="mine") as stream:
        chunks = list(stream)
    assert [(chunk.index, chunk.text, chunk.token_ids) for chunk in chunks] == [
        (0, "Once", (100,)),
        (1, " upon", (101,)),
        (2, " a time", (102,)),
    ]
    assert [chunk.finish_reason for chunk in chunks] == [None, None, "stop"]
    assert (stream.text, stream.token_ids, stream.finish_reason) == ("Once upon a time", (100, 101, 102), "stop")
    assert (stream.usage.input_tokens, stream.usage.output_tokens) == (7, 3)
    assert (stream.fingerprint, stream.request_id) == ("print", "mine")
    assert server.requests[0].id == "mine"
    assert inputs(server.requests[0])["sampling_parameters"] == {"max_tokens": 3, "seed": stream.seed}


def test_the_server_sees_a_half_close_and_no_cancel_after_the_last_chunk(serve):
    server, client = serve(answer("a", "b"))
    stream = client.stream("x")
    stream.final()
    assert server.calls[0].half_closed.wait(WAIT)
    stream.cancel()
    assert stream.finish_reason == "stop"
    assert stream.final().text == "ab"


def test_the_answer_is_over_with_its_last_chunk_not_one_read_later(serve):
    server, client = serve(answer("a"))
    stream = client.stream("x")
    next(stream)
    assert server.calls[0].half_closed.wait(WAIT)


def test_a_final_mark_without_data_ends_the_answer_and_is_no_chunk(serve):
    def script(request, call):
        yield token(0, "a", 1)
        yield token(1, "b", 2, finish_reason="length")
        yield final_mark()

    _, client = serve(script)
    stream = client.stream("x")
    assert [chunk.text for chunk in stream] == ["a", "b"]
    assert stream.final().finish_reason == "length"


def test_a_server_that_ends_after_its_reason_without_a_mark_is_believed(serve):
    def script(request, call):
        yield token(0, "a", 1, finish_reason="stop")

    server, client = serve(script)
    server.awaits_half_close = False
    assert client.generate("x").text == "a"


def test_generate_gives_the_whole_answer(serve):
    timings = json.dumps({"queue": 0.25, "exact": "bitwise"})

    def script(request, call):
        yield token(0, "a", 1, seed=5, fingerprint="f", num_input_tokens=3)
        yield token(1, "", final=True, finish_reason="stop", timings=timings)

    _, client = serve(script)
    completion = client.generate(input_ids=[1, 2, 3])
    assert (completion.text, completion.token_ids, completion.seed) == ("a", (1,), 5)
    assert (completion.timings.queue, completion.timings.exact) == (0.25, "bitwise")
    assert (completion.usage.input_tokens, completion.usage.output_tokens) == (3, 1)
    assert completion.stats.ttft > 0
    assert completion.stats.gaps == ()


def test_a_gap_is_kept_for_every_token_behind_the_first(serve):
    _, client = serve(answer("a", "b", "c"))
    stats = client.generate("x").stats
    assert len(stats.gaps) == 2
    assert stats.tokens_per_second * sum(stats.gaps) == pytest.approx(2)


@pytest.mark.parametrize(("second", "due"), [(0, "token 0"), (2, "token 2")])
def test_a_repeated_or_missing_token_is_an_error(serve, second, due):
    def script(request, call):
        yield token(0, "a", 1)
        yield token(second, "b", 2)

    _, client = serve(script)
    stream = client.stream("x")
    next(stream)
    with pytest.raises(InternalError, match=f"{due} where token 1 was due") as caught:
        next(stream)
    assert (caught.value.text, caught.value.token_ids) == ("a", (1,))


def test_nothing_may_follow_a_finish_reason(serve):
    def script(request, call):
        yield token(0, "a", 1, finish_reason="stop")
        yield token(1, "b", 2, finish_reason="stop", final=True)

    _, client = serve(script)
    with pytest.raises(InternalError, match="after the answer had ended"):
        client.generate("x")


def test_a_refusal_is_raised_with_its_message_alone_and_cancels_nothing_else(serve):
    def script(request, call):
        if request.id == "bad":
            yield failure("top_p must be at most 1, got 2 [request=bad tokens=0 code=INVALID_ARG]")
        else:
            yield from answer("good")(request, call)

    _, client = serve(script)
    with pytest.raises(InvalidRequest) as caught:
        client.generate("x", request_id="bad", top_p=2.0)
    assert str(caught.value) == "top_p must be at most 1, got 2"
    assert client.generate("x").text == "good"


def test_an_error_in_mid_answer_keeps_what_had_arrived_and_is_raised_again(serve):
    def script(request, call):
        yield token(0, "half", 1)
        yield failure("step failed [request=r tokens=1 code=INTERNAL]")

    _, client = serve(script)
    with pytest.raises(InternalError) as caught:
        client.generate("x")
    assert (caught.value.text, caught.value.token_ids, caught.value.request_id) == ("half", (1,), "r")
    stream = client.stream("x")
    next(stream)
    for _ in range(2):
        with pytest.raises(InternalError, match="step failed"):
            next(stream)


@pytest.mark.parametrize("end", ["abort", "clean", "mark"])
def test_a_stream_cut_without_a_reason_is_incomplete_and_keeps_its_text(serve, end):
    def script(request, call):
        yield token(0, "one", 1)
        yield token(1, " two", 2)
        if end == "abort":
            call.context.abort(grpc.StatusCode.UNAVAILABLE, "Socket closed")
        if end == "mark":
            yield final_mark()

    server, client = serve(script)
    server.awaits_half_close = False
    with pytest.raises(IncompleteStream) as caught:
        list(client.stream("x", request_id="cut"))
    assert (caught.value.text, caught.value.token_ids, caught.value.request_id) == ("one two", (1, 2), "cut")


def test_a_server_that_dies_in_mid_answer_leaves_an_incomplete_stream(serve):
    server, client = serve(hold)
    stream = client.stream("x")
    next(stream)
    server.close()
    with pytest.raises((IncompleteStream, Cancelled)) as caught:
        next(stream)
    assert caught.value.text == "one"


def test_garbage_on_the_wire_is_an_internal_error(serve):
    def script(request, call):
        yield b"\xff\xff\xff\xff"

    _, client = serve(script)
    with pytest.raises(InternalError):
        client.generate("x")


def test_a_malformed_tensor_is_an_internal_error_and_ends_the_call(serve):
    def script(request, call):
        response = token(0, "a", 1)
        add(response, "timings", "BYTES", b"\x01")
        yield response
        call.over.wait(WAIT)

    server, client = serve(script)
    with pytest.raises(InternalError, match="malformed"):
        client.generate("x")
    assert server.calls[0].over.wait(WAIT)


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
    assert server.requests[0].parameters["timeout"].int64_param == 200_000


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


def test_tokenize_detokenize_and_info_ask_by_operation(serve):
    def script(request, call):
        asked = inputs(request)
        if asked["operation"] == "tokenize":
            yield token(0, "", 4, 5, final=True)
        elif asked["operation"] == "detokenize":
            yield token(0, "".join(f"<{one}>" for one in asked["input_ids"]))
            yield final_mark()
        else:
            yield token(0, '{"model": "tiny"}', final=True)

    _, client = serve(script)
    assert client.tokenize("a b") == [4, 5]
    assert client.detokenize([7, 8]) == "<7><8>"
    assert client.info().model == "tiny"


def test_an_operation_that_fails_raises(serve):
    def script(request, call):
        yield failure("operation must be ... [request=r tokens=0 code=INVALID_ARG]")

    _, client = serve(script)
    with pytest.raises(InvalidRequest, match="operation must be"):
        client.tokenize("x")


def test_waiting_for_readiness_ends_when_it_is_there_or_the_time_is_up(serve):
    server, client = serve(answer("a"))
    client.wait_until_ready(WAIT)
    server.ready = False
    with pytest.raises(NotReady, match="'llm'"):
        client.wait_until_ready(0.1)
    threading.Timer(0.1, setattr, (server, "ready", True)).start()
    client.wait_until_ready(WAIT)


def test_misuse_is_refused_before_anything_is_sent(serve):
    server, client = serve(answer("a"))
    with pytest.raises(TypeError, match="max_new_tokens"):
        client.stream("x", max_new_tokens=3)
    with pytest.raises(TypeError, match="exactly one"):
        client.stream("x", messages=[])
    with pytest.raises(ValueError, match="HOST:PORT"):
        Client("http://127.0.0.1:8000")
    assert server.requests == []

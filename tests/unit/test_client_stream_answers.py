"""Answers of a scripted server: their chunks in order, their ends, the errors that cut them, and other operations."""

from __future__ import annotations

import json

import grpc
import pytest

from tokenstream import Client, IncompleteStream, InternalError, InvalidRequest
from tokenstream.course import Verdict, judge
from tokenstream.errors import from_status
from unit.scripted_triton import WAIT, add, answer, failure, final_mark, inputs, token


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


def test_the_server_sees_no_cancel_after_the_last_chunk(serve):
    server, client = serve(answer("a", "b"))
    stream = client.stream("x")
    stream.final()
    assert server.calls[0].over.wait(WAIT)
    assert not server.calls[0].cancelled
    stream.cancel()
    assert stream.finish_reason == "stop"
    assert stream.final().text == "ab"


def test_the_answer_is_over_on_the_server_when_it_is_sent_and_not_when_it_is_read(serve):
    server, client = serve(answer("a", "b"))
    stream = client.stream("x")
    assert next(stream).text == "a"
    assert server.calls[0].over.wait(WAIT)
    assert [chunk.text for chunk in stream] == ["b"]
    assert not server.calls[0].cancelled


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

    _, client = serve(script)
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

    _, client = serve(script)
    with pytest.raises(IncompleteStream) as caught:
        list(client.stream("x", request_id="cut"))
    assert (caught.value.text, caught.value.token_ids, caught.value.request_id) == ("one two", (1, 2), "cut")


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


@pytest.mark.parametrize("ask", [Client.generate, Client.tokenize])
def test_a_call_that_is_refused_ends_by_itself_and_is_not_cancelled(serve, ask):
    def script(request, call):
        yield failure("no [request=r tokens=0 code=INVALID_ARG]")
        call.over.wait(0.2)  # whoever hangs up on a refusal has done so by then

    server, client = serve(script)
    with pytest.raises(InvalidRequest):
        ask(client, "x")
    assert server.calls[0].over.wait(WAIT)
    assert not server.calls[0].cancelled


def test_misuse_is_refused_before_anything_is_sent(serve):
    server, client = serve(answer("a"))
    with pytest.raises(TypeError, match="max_new_tokens"):
        client.stream("x", max_new_tokens=3)
    with pytest.raises(TypeError, match="exactly one"):
        client.stream("x", messages=[])
    with pytest.raises(ValueError, match="HOST:PORT"):
        Client("http://127.0.0.1:8000")
    assert server.requests == []


def test_a_response_of_many_megabytes_arrives_whole(serve):
    long = "sea " * 2_000_000
    _, client = serve(answer("a", long))
    assert client.generate("x").text == "a" + long


def test_a_message_that_is_too_long_for_somebody_on_the_way_is_no_overload_and_not_sent_again():
    error = from_status("RESOURCE_EXHAUSTED", "Received message larger than max (11700111 vs. 4194304)", "host:1")
    assert type(error) is InvalidRequest
    assert judge(error) is Verdict.STOP

"""Both protocols over gRPC against a scripted Triton: what is sent, what counts as a token, how it ends."""

from __future__ import annotations

import asyncio
import json
import socket
from collections.abc import Iterator
from typing import Any

import pytest
from tritonclient.grpc import service_pb2 as pb

from tokenstream_loadtest.pulse import Pulse
from tokenstream_loadtest.requests import Message, Request
from tokenstream_loadtest.targets import KINDS, Failed, Seen, TargetOptions, open_target
from unit.scripted_triton import WAIT, ScriptedCall, ScriptedTriton, add, add_string, failure, final_mark, inputs, token

CHAT = (Message("system", "Be brief."), Message("user", "Grüß Gott"))


def request(**parts: Any) -> Request:
    return Request(**({"kind": "k", "max_tokens": 5, "prompt": "Once"} | parts))


def ask(kind: str, url: str, asked: Request, options: TargetOptions | None = None) -> Seen:
    """One request to its end; an exception carries what was seen before it."""
    seen = Seen(asked)

    async def main() -> None:
        async with asyncio.timeout(WAIT), open_target(kind, url, "llm", options) as target:
            await target.ask(asked, "request-1", seen)

    try:
        asyncio.run(main())
    except Failed as error:
        error.seen = seen  # type: ignore[attr-defined]
        raise
    return seen


def ask_triton(script: Any, asked: Request, kind: str = "tokenstream", **options: Any) -> tuple[Seen, ScriptedTriton]:
    server = ScriptedTriton(script)
    try:
        return ask(kind, server.url, asked, TargetOptions(**options)), server
    finally:
        server.close()


def two_then_more(request: pb.ModelInferRequest, call: ScriptedCall) -> Iterator[pb.ModelStreamInferResponse]:
    timings = json.dumps({"queue": 0.25, "cached_tokens": 3, "preemptions": 1})
    yield token(0, "a", 5, fingerprint="p", num_input_tokens=9)
    yield token(1, "b", 6, 7)
    yield token(3, "", 8, final=True, finish_reason="length", timings=timings)


def endless(request: pb.ModelInferRequest, call: ScriptedCall) -> Iterator[pb.ModelStreamInferResponse]:
    index = 0
    while not call.over.wait(0.005):
        yield token(index, "x", 100)
        index += 1


# --- this project's server


def test_tokenstream_asks_for_what_the_request_says_and_keeps_what_the_server_says():
    asked = request(ignore_eos=True, priority=2, seed=7, temperature=0.5)
    seen, server = ask_triton(two_then_more, asked, headers={"x-tenant": "a"})
    assert seen.tokens == [1, 2, 1]
    assert seen.times == sorted(seen.times)
    assert (seen.input_tokens, seen.output_tokens, seen.cached_tokens) == (9, 4, 3)
    assert (seen.queue, seen.preemptions, seen.resumes) == (0.25, 1, 0)
    (sent,) = server.requests
    assert sent.id == "request-1"
    assert inputs(sent)["text_input"] == "Once"
    wanted = {"max_tokens": 5, "ignore_eos": True, "seed": 7, "temperature": 0.5}
    assert inputs(sent)["sampling_parameters"] == wanted
    assert server.calls[0].metadata["x-tenant"] == "a"
    assert not server.calls[0].cancelled


def test_tokenstream_sends_messages_through_the_models_template():
    _, server = ask_triton(two_then_more, request(prompt=None, messages=CHAT))
    sent = inputs(server.requests[0])
    assert sent["messages"] == [{"role": one.role, "content": one.content} for one in CHAT]
    assert "text_input" not in sent


@pytest.mark.parametrize("after", [0, 1, 4])
def test_a_caller_of_tokenstream_that_leaves_cancels_on_the_server(after):
    seen, server = ask_triton(endless, request(abandon_after=after))
    assert seen.unwanted
    assert sum(seen.tokens) == after
    if server.calls:  # who leaves at once may be gone before the server looks
        assert server.calls[0].over.wait(WAIT)
        assert server.calls[0].cancelled


@pytest.mark.parametrize(
    ("message", "outcome"),
    [
        ("the queue is full [request=r tokens=0 code=UNAVAILABLE retry_after=1]", "overloaded"),
        ("Exceeds maximum queue size", "overloaded"),
        ("draining [request=r tokens=0 code=UNAVAILABLE]", "overloaded"),
        ("max_tokens is too large [request=r tokens=0 code=INVALID_ARG]", "invalid"),
        ("it broke [request=r tokens=0 code=INTERNAL]", "internal"),
        ("no such model [request=r tokens=0 code=NOT_FOUND]", "invalid"),
    ],
)
def test_what_tokenstreams_server_refuses_is_told_once_in_one_line(message, outcome):
    asked = []

    def refuse(request: pb.ModelInferRequest, call: ScriptedCall) -> Iterator[pb.ModelStreamInferResponse]:
        asked.append(request)
        yield failure(message)

    with pytest.raises(Failed) as error:
        ask_triton(refuse, request())
    assert error.value.outcome == outcome
    assert error.value.line == str(error.value) == message.split(" [")[0]
    assert len(asked) == 1


@pytest.mark.parametrize(("resume", "outcome"), [(False, "incomplete"), (True, None)])
def test_a_cut_answer_is_taken_up_only_if_that_was_asked_for(resume, outcome):
    def cut(request: pb.ModelInferRequest, call: ScriptedCall) -> Iterator[pb.ModelStreamInferResponse]:
        if "resume_token_ids" in inputs(request):
            yield token(1, "b", 6, final=True, finish_reason="length", fingerprint="p")
        else:
            yield token(0, "a", 5, fingerprint="p")
            call.context.abort(pb_status("UNAVAILABLE"), "connection reset")

    if outcome is None:
        seen, _ = ask_triton(cut, request(), resume=resume)
        assert (seen.tokens, seen.resumes) == ([1, 1], 1)
        return
    with pytest.raises(Failed) as error:
        ask_triton(cut, request(), resume=resume)
    assert error.value.outcome == outcome
    assert error.value.seen.tokens == [1]  # type: ignore[attr-defined]


@pytest.mark.parametrize("kind", KINDS)
def test_nobody_there_is_a_failed_connection_and_its_line_names_the_address(kind):
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        url = f"127.0.0.1:{unused.getsockname()[1]}"
        with pytest.raises(Failed) as error:
            ask(kind, f"http://{url}" if kind == "openai" else url, request())
    assert error.value.outcome == "connection"
    assert url in error.value.line


@pytest.mark.parametrize("kind", KINDS)
def test_what_cannot_be_a_url_is_refused(kind):
    with pytest.raises(ValueError, match=r"url"):
        open_target(kind, "127.0.0.1:9000" if kind == "openai" else "http://127.0.0.1:9000", "llm")


def test_an_unknown_kind_is_refused():
    with pytest.raises(ValueError, match=r"tokenstream, openai, triton"):
        open_target("grpc", "127.0.0.1:1", "llm")


@pytest.mark.parametrize("kind", KINDS)
def test_secrets_do_not_go_unencrypted_to_another_machine(kind):
    url = "http://192.0.2.1:9000" if kind == "openai" else "192.0.2.1:9000"
    secret = {"authorization": "Bearer s"}
    with pytest.raises(ValueError, match=r"unencrypted"):
        open_target(kind, url, "llm", TargetOptions(headers=secret))
    if kind != "tokenstream":
        open_target(kind, url, "llm", TargetOptions(headers=secret, allow_insecure_credentials=True))


# --- a plain Triton model


def plain(*words: str, counts: tuple[int, int] | None = None, end: bool = True) -> Any:
    def script(request: pb.ModelInferRequest, call: ScriptedCall) -> Iterator[pb.ModelStreamInferResponse]:
        for word in words:
            response = pb.ModelStreamInferResponse()
            add_string(response, "text_output", word)
            yield response
        if counts is not None:
            response = pb.ModelStreamInferResponse()
            add(response, "completion_tokens", "INT32", counts[0].to_bytes(4, "little"))
            add(response, "prompt_tokens", "INT32", counts[1].to_bytes(4, "little"))
            yield response
        if end:
            yield final_mark()

    return script


@pytest.mark.parametrize("batched", [False, True])
def test_a_plain_model_is_asked_with_text_and_parameters(batched):
    extra = {"top_k": 3, "beam": False, "scale": 0.5, "note": "n"}
    seen, server = ask_triton(plain("a", "", "c"), request(), "triton", extra=extra, batched=batched)
    assert seen.tokens == [1, 1, 1]
    assert (seen.input_tokens, seen.output_tokens) == (None, None)
    (sent,) = server.requests
    assert inputs(sent) == {"text_input": "Once"}
    assert list(sent.inputs[0].shape) == ([1, 1] if batched else [1])
    given = {name: getattr(value, value.WhichOneof("parameter_choice")) for name, value in sent.parameters.items()}
    assert given == {"max_tokens": 5, **extra, "triton_enable_empty_final_response": True}
    assert not server.calls[0].cancelled


def test_a_plain_models_own_counts_are_kept():
    seen, _ = ask_triton(plain("a", "b", counts=(3, 9)), request(), "triton")
    assert (seen.tokens, seen.output_tokens, seen.input_tokens) == ([1, 1], 3, 9)


@pytest.mark.parametrize(
    ("script", "outcome"),
    [
        (plain("a", end=False), "incomplete"),
        (lambda request, call: iter([failure("Exceeds maximum queue size")]), "overloaded"),
        (lambda request, call: iter([failure("Request for unknown model: 'llm' is not found")]), "invalid"),
        (lambda request, call: iter([failure("it broke")]), "internal"),
        (lambda request, call: iter([b"\xff"]), "internal"),
        (lambda request, call: call.context.abort(pb_status("UNAUTHENTICATED"), "who?"), "unauthorized"),
        (lambda request, call: call.context.abort(pb_status("UNAVAILABLE"), "gone"), "incomplete"),
    ],
)
def test_every_failure_of_a_plain_model_is_told(script, outcome):
    with pytest.raises(Failed) as error:
        ask_triton(script, request(), "triton")
    assert error.value.outcome == outcome


@pytest.mark.parametrize("after", [0, 2])
def test_a_caller_of_a_plain_model_that_leaves_cancels_on_the_server(after):
    def endless_text(request: pb.ModelInferRequest, call: ScriptedCall) -> Iterator[pb.ModelStreamInferResponse]:
        while not call.over.wait(0.005):
            response = pb.ModelStreamInferResponse()
            add_string(response, "text_output", "x")
            yield response

    seen, server = ask_triton(endless_text, request(abandon_after=after), "triton")
    assert sum(seen.tokens) == after
    if server.calls:
        assert server.calls[0].over.wait(WAIT)
        assert server.calls[0].cancelled


def test_a_plain_model_knows_no_chat():
    with pytest.raises(Failed) as error:
        ask_triton(plain("a"), request(prompt=None, messages=CHAT), "triton")
    assert error.value.outcome == "invalid"


# --- callers


def test_a_slow_reader_reads_late():
    seen, _ = ask_triton(two_then_more, request(pause=0.1))
    assert all(later - earlier >= 0.1 for earlier, later in zip(seen.times, seen.times[1:], strict=False))


def test_an_error_is_cut_to_one_line_of_bounded_length():
    assert Failed("internal", "a\n b\t" + "x" * 900).line == ("a b " + "x" * 900)[:300]


def test_a_paused_reader_waits_again_behind_its_pause():
    seen = Seen(request(pause=0.01), pulse := Pulse(0.0))
    pulse.wait()
    asyncio.run(seen.pause())
    assert pulse._waiting == 1


def pb_status(name: str) -> Any:
    import grpc

    return getattr(grpc.StatusCode, name)

"""Which exception a server's words become."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from llm_engine.request import Code, RequestError
from tokenstream import errors
from tokenstream.errors import from_server, from_status, reason_of
from unit.scripted_triton import answer


@pytest.mark.parametrize(
    ("code", "text", "kind"),
    [
        ("INVALID_ARG", "top_p must be above 0", errors.InvalidRequest),
        ("INVALID_ARG", "resume_mismatch: begun by abc", errors.ResumeMismatch),
        ("UNAVAILABLE", "the queue is full", errors.Overloaded),
        ("UNAVAILABLE", "the server is draining", errors.Draining),
        ("UNAVAILABLE", "model is not ready", errors.NotReady),
        ("CANCELLED", "cancelled by the client", errors.Cancelled),
        ("CANCELLED", "ended by drain", errors.Draining),
        ("INTERNAL", "step failed", errors.InternalError),
        ("SOMETHING_NEW", "who knows", errors.ServerError),
    ],
)
def test_our_models_code_decides_and_its_bracket_is_not_shown(code, text, kind):
    error = from_server(f"{text} [request=r-7 tokens=12 code={code}]")
    assert type(error) is kind
    assert (str(error), error.request_id, error.code) == (text, "r-7", code)


@pytest.mark.parametrize(
    ("message", "text", "request_id", "code"),
    [
        ("a [b] went wrong [code=INTERNAL]", "a [b] went wrong", "", "INTERNAL"),
        ("bad [request=x]", "bad", "x", ""),
        ("bad [tokens=3 request=x]\n", "bad", "x", ""),
        ("got [1, 2]", "got [1, 2]", "", ""),
        ("list [request=x] in the middle", "list [request=x] in the middle", "", ""),
        ("two [request=a] [request=b code=INTERNAL]", "two [request=a]", "b", "INTERNAL"),
        ("[request=only]", "the server gave no reason", "only", ""),
        ("[request id: r6] Exceeds maximum queue size", "Exceeds maximum queue size", "r6", ""),
    ],
)
def test_machine_readable_parts_may_be_missing(message, text, request_id, code):
    error = from_server(message)
    assert (str(error), error.request_id, error.code) == (text, request_id, code)


@pytest.mark.parametrize(
    ("message", "kind"),
    [
        ("[request id: r6] Exceeds maximum queue size", errors.Overloaded),
        ("Request timeout expired", errors.Overloaded),
        ("Request for unknown model: 'x' is not found", errors.ModelNotFound),
        ("Stub process 'llm_0_0' is not healthy.", errors.NotReady),
        ("GRPC server is shutting down and has stopped accepting new requests.", errors.Draining),
        ("unexpected inference input 'foo' for model 'llm'", errors.InvalidRequest),
        ("[request id: a] unexpected shape for input 'messages' for model 'llm'", errors.InvalidRequest),
        ("inference input 'top_k' data-type is 'INT64', but model 'llm' expects 'INT32'", errors.InvalidRequest),
        ("something else", errors.ServerError),
    ],
)
def test_tritons_own_words_are_understood(message, kind):
    assert type(from_server(message)) is kind


@pytest.mark.parametrize(
    ("status", "details", "kind"),
    [
        (
            "UNAVAILABLE",
            "failed to connect to all addresses; last error: X: Connection refused",
            errors.ConnectionFailed,
        ),
        ("UNAVAILABLE", "errors resolving nohost:1: [x: Domain name not found]", errors.ConnectionFailed),
        ("UNAVAILABLE", "failed to connect to all addresses: connection attempt timed out", errors.ConnectTimeout),
        ("UNAVAILABLE", "Socket closed", errors.IncompleteStream),
        ("UNAVAILABLE", "GRPC server is shutting down", errors.Draining),
        ("DEADLINE_EXCEEDED", "Deadline Exceeded", errors.TotalTimeout),
        ("INTERNAL", "Received RST_STREAM with error code 2", errors.IncompleteStream),
        ("INTERNAL", "Exception deserializing response!", errors.InternalError),
        ("CANCELLED", "RST_STREAM closed stream. HTTP/2 error code: CANCEL", errors.IncompleteStream),
        ("UNIMPLEMENTED", "Method not found!", errors.ServerError),
        ("PERMISSION_DENIED", "no", errors.Unauthorized),
        ("UNAUTHENTICATED", "who are you", errors.Unauthorized),
        ("RESOURCE_EXHAUSTED", "too many", errors.Overloaded),
    ],
)
def test_a_grpc_status_becomes_one_of_ours(status, details, kind):
    error = from_status(status, details, "host:1")
    assert type(error) is kind
    assert "host:1" in str(error)
    assert "\n" not in str(error)


@pytest.mark.parametrize(
    ("said", "understood"), [("0.25", 0.25), ("3", 3.0), ("-1", None), ("inf", None), ("nan", None), ("soon", None)]
)
def test_a_server_may_say_how_long_to_leave_it_alone(said, understood):
    error = from_server(f"the queue is full [request=r tokens=0 code=UNAVAILABLE retry_after={said}]")
    assert type(error) is errors.Overloaded
    assert (str(error), error.retry_after) == ("the queue is full", understood)


@pytest.mark.parametrize(
    ("tail", "own"),
    [("fault=request", True), ("fault=step", False), ("tokens=1", False), ("code=INTERNAL fault=", False)],
)
def test_a_server_may_say_that_it_failed_over_this_request_alone(tail, own):
    error = from_server(f"it failed [{tail}]")
    assert (str(error), error.own_fault) == ("it failed", own)


@pytest.mark.parametrize("retry_after", [None, 0.1, 12.5])
def test_what_the_model_writes_behind_an_error_is_what_is_read(replies: Any, retry_after: float | None) -> None:
    sent: list[Any] = []
    sender = SimpleNamespace(send=lambda response, flags: sent.append((response.error.text, flags)))
    replies.pb_utils.TritonError.UNAVAILABLE = 2
    sending = replies.Replies(1, str, abs)
    refusal = RequestError("the queue [it is full]", Code.UNAVAILABLE, retry_after)
    sending.put(replies.Reply(replies.Stream(sender, replies.Call("r-1")), [], refusal))
    sending.start()
    sending.stop()
    ((text, flags),) = sent
    assert flags == replies.FINAL
    error = from_server(text)
    assert type(error) is errors.Overloaded
    assert (str(error), error.request_id) == ("the queue [it is full]", "r-1")
    assert (error.code, error.retry_after) == ("UNAVAILABLE", retry_after)


def test_who_says_when_to_come_again_is_overloaded_and_not_cut_off():
    error = from_status("UNAVAILABLE", "limit reached", "host:1", 2.0)
    assert (type(error), error.retry_after) == (errors.Overloaded, 2.0)


def test_the_most_telling_part_of_a_nested_text_is_shown():
    nested = (
        "failed to connect to all addresses; last error: UNKNOWN: ipv4:127.0.0.1:1: connect: Connection refused (111)"
    )
    assert reason_of(nested) == "connection refused"
    assert reason_of("") == "no reason given"


@pytest.mark.parametrize(
    ("nested", "reason"),
    [
        ("Handshake read failed: OK", "OK"),
        ("FD Shutdown", "FD Shutdown"),
        ("write failed (recvmsg: Bad file descriptor (9))", "bad file descriptor"),
        ("HTTP/2 settings missing", "HTTP/2 settings missing"),
        ("Socket closed", "socket closed"),
        ("Tls: NO_CIPHER: Invalid certificate verification context: OK", "NO_CIPHER"),
    ],
)
def test_a_reason_keeps_its_abbreviations_and_has_no_odd_brackets(nested, reason):
    assert reason_of(nested) == reason


@pytest.mark.parametrize(
    ("details", "told"),
    [
        ("failed to connect; last error: Tls handshake: WRONG_VERSION_NUMBER", "does not speak TLS"),
        ("failed to connect to all addresses; last error: UNKNOWN: FD Shutdown", "while it was being made"),
        ("failed to connect to all addresses; UNKNOWN: (recvmsg: Bad file descriptor (9))", "while it was being made"),
    ],
)
def test_a_connection_that_is_not_made_says_if_it_may_be_tls(details, told):
    error = from_status("UNAVAILABLE", details, "host:1")
    assert type(error) is errors.ConnectionFailed
    assert told in str(error)


def test_headers_that_are_too_long_are_the_callers_fault(serve):
    server, client = serve(answer("a"))
    with pytest.raises(errors.InvalidRequest, match="headers are too long"):
        client.generate("x", headers={"x-long": "y" * 100_000})
    assert server.requests == []


def test_timeouts_and_lost_connections_are_also_the_builtin_kinds():
    assert issubclass(errors.StreamTimeout, TimeoutError)
    assert issubclass(errors.ConnectionFailed, ConnectionError)


def test_every_exception_is_caught_by_the_base_and_drawn_in_the_tree():
    kinds = [kind for kind in vars(errors).values() if isinstance(kind, type) and kind.__module__ == errors.__name__]
    assert len(kinds) > 10
    for kind in kinds:
        assert issubclass(kind, errors.TokenstreamError)
        assert kind.__name__ in errors.__doc__

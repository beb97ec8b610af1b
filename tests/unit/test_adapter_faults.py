"""The Triton adapter when something fails: the request that it fails for hears one FINAL, and nobody else anything."""

from __future__ import annotations

import importlib
import itertools
import logging
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from llm_engine.metrics import Metrics
from llm_engine.request import Code, Delta, FinishReason, RequestError, SamplingParams, Timings

TIMINGS = Timings(0.1, 0.1, 0.2, 0.3, 0, 0, "bitwise")


class Broken(RuntimeError):
    """What the tests inject."""


def broken(*_: object, **__: object) -> Any:
    raise Broken


class Sender:
    """Notes what is sent; sends for which `refuses` is true fail."""

    def __init__(self, refuses: Callable[[int, Any], bool] = lambda _number, _response: False) -> None:
        self.sent: list[tuple[Any, int]] = []
        self._refuses = refuses
        self._sends = itertools.count()

    def send(self, response: Any, flags: int = 0) -> None:
        if self._refuses(next(self._sends), response):
            raise Broken
        self.sent.append((response, flags))

    @property
    def finals(self) -> int:
        return sum(flags for _, flags in self.sent)

    @property
    def error(self) -> str:
        """The text of the error that came with FINAL."""
        return str(self.sent[-1][0].error.text)


class Request:
    """A Triton request for two ids; `breaks` is what of it cannot be asked."""

    def __init__(self, breaks: str = "") -> None:
        self.sender = Sender()
        prompt = SimpleNamespace(name=lambda: "input_ids", as_numpy=lambda: np.array([[5, 6]], dtype=np.int32))
        self.request_id = lambda: "bad" if breaks else "good"
        self.inputs = lambda: [prompt]
        self.parameters = lambda: ""
        self.requested_output_names = lambda: ["token_ids"]
        self.timeout = lambda: 0
        self.get_response_sender = lambda: self.sender
        if breaks:
            setattr(self, breaks, broken)


class Engine:
    """Notes what is submitted, but for what `breaks`."""

    defaults = SamplingParams()
    vocab_size = 100
    config = SimpleNamespace(max_queue_seconds=60.0)

    def __init__(self) -> None:
        self.metrics = Metrics()
        self.submitted: list[Any] = []
        self.fault: Exception | None = None

    def submit(self, request: Any, emit: Callable[..., None]) -> None:
        if fault := self.fault:
            self.fault = None
            raise fault
        self.submitted.append(request)


@pytest.fixture
def adapter(replies: Any) -> Any:
    """The adapter over an engine and a tokenizer that are made up."""
    made = importlib.import_module("model").TritonPythonModel()
    made._engine = Engine()
    made._prompts = SimpleNamespace(check_size=lambda size: None)
    made._keeps_queue, made._yields, made._ids = True, False, itertools.count()
    made._replies = replies.Replies(1, lambda key: None, lambda seconds: None)
    return made


def served(adapter: Any, *requests: Request) -> None:
    adapter.execute(list(requests))
    adapter._replies.start()
    adapter._replies.stop()


@pytest.mark.parametrize("breaks", ["inputs", "parameters", "requested_output_names", "timeout"])
def test_a_request_that_cannot_be_read_hears_one_final_and_the_next_is_accepted(adapter: Any, breaks: str) -> None:
    bad, good = Request(breaks), Request()
    served(adapter, bad, good)
    assert (len(bad.sender.sent), bad.sender.finals) == (1, 1)
    assert bad.sender.error == "internal error: Broken [request=bad tokens=0 code=INTERNAL fault=request]"
    assert [stream.sender for stream in adapter._replies.streams.values()] == [good.sender]
    assert (len(adapter._engine.submitted), good.sender.sent) == (1, [])
    assert adapter._engine.metrics.failed == 1


def test_a_request_whose_id_cannot_be_asked_hears_one_final_under_a_name_of_ours(adapter: Any) -> None:
    bad, good = Request("request_id"), Request()
    served(adapter, bad, good)
    assert (len(bad.sender.sent), bad.sender.finals) == (1, 1)
    assert bad.sender.error.startswith("internal error: Broken [request=auto-")
    assert len(adapter._engine.submitted) == 1


@pytest.mark.parametrize(
    ("breaks", "told"),
    [
        ("request_id", "the request id is not valid UTF-8 [request=auto-"),
        ("parameters", "a request parameter, or its name, is not valid UTF-8 [request=good "),
    ],
)
def test_what_is_no_utf8_is_refused_with_one_final(adapter: Any, breaks: str, told: str) -> None:
    bad, good = Request(), Request()
    setattr(bad, breaks, lambda: b"a\xff".decode())
    served(adapter, bad, good)
    assert (len(bad.sender.sent), bad.sender.finals) == (1, 1)
    assert bad.sender.error.startswith(told)
    assert bad.sender.error.endswith(" code=INVALID_ARG]")
    assert len(adapter._engine.submitted) == 1


@pytest.mark.parametrize(
    ("identity", "told"),
    [
        ("chat-7.a:b@c/d+e", "chat-7.a:b@c/d+e"),
        ("a b\nc\u2028d", "a_b_c_d"),
        ("x tokens=9 code=UNAVAILABLE] [request=y", "x_tokens_9_code_UNAVAILABLE___request_y"),
        ("\u00e9", "_"),
    ],
)
def test_no_request_id_can_be_taken_for_another_part_of_an_errors_tail(adapter: Any, identity: str, told: str) -> None:
    bad = Request()
    bad.request_id = lambda: identity
    adapter._engine.fault = RequestError("no")
    served(adapter, bad)
    assert bad.sender.error == f"no [request={told} tokens=0 code=INVALID_ARG]"


def test_an_error_is_one_line_whatever_it_quotes(adapter: Any) -> None:
    adapter._engine.fault = RequestError("a\nb\r\nc\u2028d\ud800" + "x" * 5000)
    bad = Request()
    served(adapter, bad)
    assert bad.sender.error.startswith("a b c d?xxx")
    assert len(bad.sender.error) < 900


def test_a_request_that_nobody_can_be_told_of_does_not_take_the_next_one_along(adapter: Any) -> None:
    bad, good = Request("get_response_sender"), Request()
    served(adapter, bad, good)
    assert (bad.sender.sent, len(adapter._engine.submitted)) == ([], 1)


@pytest.mark.parametrize(
    ("fault", "told", "failed"),
    [
        (Broken(), "internal error: Broken [request=good tokens=0 code=INTERNAL fault=request]", 1),
        (
            RequestError("it could not be accepted", Code.INTERNAL, own_fault=True),
            "it could not be accepted [request=good tokens=0 code=INTERNAL fault=request]",
            0,  # the engine counts what it refuses
        ),
        (RequestError("top_p is wrong"), "top_p is wrong [request=good tokens=0 code=INVALID_ARG]", 0),
    ],
)
def test_a_request_that_the_engine_does_not_take_is_no_live_stream(
    adapter: Any, fault: Exception, told: str, failed: int
) -> None:
    adapter._engine.fault = fault
    bad, good = Request(), Request()
    served(adapter, bad, good)
    assert (bad.sender.finals, bad.sender.error) == (1, told)
    assert [stream.sender for stream in adapter._replies.streams.values()] == [good.sender]
    assert adapter._engine.metrics.failed == failed


def test_a_request_id_without_end_is_refused_and_shortened_where_it_is_named(adapter: Any) -> None:
    bad = Request()
    bad.request_id = lambda: "x" * 5000
    served(adapter, bad)
    assert bad.sender.error == (
        f"the request id may have at most 256 bytes, got 5000 [request={'x' * 256} tokens=0 code=INVALID_ARG]"
    )


def answered(replies: Any, senders: dict[str, Sender], **call: Any) -> list[str]:
    """Send three tokens to every sender in turn; return whom the engine was told to cancel."""
    cancelled: list[str] = []
    sending = replies.Replies(1, cancelled.append, lambda seconds: None)
    asked = {"outputs": frozenset({"token_ids"})} | call
    sending.streams = {key: replies.Stream(sender, replies.Call(key, **asked)) for key, sender in senders.items()}
    for index in range(3):
        last = {"finish_reason": FinishReason.LENGTH, "timings": TIMINGS} if index == 2 else {}
        sending.put([Delta(key, index, (7,), "x", 1, **last) for key in senders])
    sending.start()
    sending.stop()
    assert sending.streams == {}
    return cancelled


@pytest.mark.parametrize("stream", [True, False])
def test_a_stream_to_which_nothing_can_be_sent_keeps_nothing_from_the_others(replies: Any, stream: bool) -> None:
    senders = {"a": Sender(lambda *_: True), "b": Sender()}
    assert answered(replies, senders, stream=stream) == (["a"] if stream else [])  # else it has ended already
    assert senders["a"].sent == []
    assert [flags for _, flags in senders["b"].sent] == ([0, 0, 1] if stream else [1])


@pytest.mark.parametrize("index", [0, 1, 2])
def test_tensors_that_cannot_be_made_are_their_requests_own_fault_and_an_unsent_response_is_not(
    replies: Any, index: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    senders = {"a": Sender(lambda number, _: number == index), "b": Sender()}
    answered(replies, senders)
    assert senders["a"].error.endswith(" code=INTERNAL]")
    tensors = replies._tensors
    monkeypatch.setattr(
        replies,
        "_tensors",
        lambda call, d: broken() if (call.request_id, d[0].index) == ("a", index) else tensors(call, d),
    )
    senders = {"a": Sender(), "b": Sender()}
    assert answered(replies, senders) == ["a"]
    assert [flags for _, flags in senders["a"].sent] == [0] * index + [1]
    assert senders["a"].error.endswith(" code=INTERNAL fault=request]")
    assert [flags for _, flags in senders["b"].sent] == [0, 0, 1]


def test_an_answer_without_the_engine_that_cannot_be_sent_ends_with_an_error(replies: Any) -> None:
    sender, other = Sender(lambda _, response: response.error is None), Sender()
    sending = replies.Replies(1, str, abs)
    for one in (sender, other):
        sending.put(replies.Reply(replies.Stream(one, replies.Call("r")), [replies.int32("token_ids", [1])]))
    sending.start()
    sending.stop()
    assert (sender.finals, sender.error) == (1, "internal error: Broken [request=r tokens=0 code=INTERNAL]")
    assert (other.finals, other.sent[0][0].error) == (1, None)


def test_a_request_that_cannot_be_logged_has_its_one_final(replies: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(replies.Replies, "_line", broken)
    monkeypatch.setattr(replies.request_log, "level", logging.INFO)
    senders = {"a": Sender(), "b": Sender()}
    assert answered(replies, senders) == []
    assert [[flags for _, flags in sender.sent] for sender in senders.values()] == [[0, 0, 1], [0, 0, 1]]


def test_a_stream_of_which_triton_says_nothing_is_asked_about_once(replies: Any) -> None:
    asked: list[str] = []

    def is_cancelled() -> bool:
        asked.append("a")
        raise Broken

    stream = replies.Stream(SimpleNamespace(is_cancelled=is_cancelled), replies.Call("a"))
    assert [stream.left() for _ in range(3)] == [False] * 3
    assert asked == ["a"]

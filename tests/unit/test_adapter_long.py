"""The adapter beside a request whose preparation is long: nobody waits for it, and it ends with exactly one FINAL."""

from __future__ import annotations

import importlib
import itertools
import json
import threading
from collections.abc import Iterator
from queue import SimpleQueue
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from chat_options import ChatOptions
from engine import scripted
from engine.driver import WAIT, serving
from prompts import PromptEncoder

LONG = "a b " * 5000
PLAIN = ChatOptions()


class Slow(PromptEncoder):
    """Waits for the test before it tokenizes a long text, and notes that it is about to."""

    def __init__(self, engine: Any) -> None:
        super().__init__(engine.tokenizer, engine.config.max_context, engine.vocab_size)
        self.begun, self.go = threading.Event(), threading.Event()
        self.texts: list[str] = []
        self.fault: Exception | None = None
        self._max_bytes = 10 * len(LONG)

    def text(self, field: str, text: str, options: ChatOptions = PLAIN, *, fits: bool = False) -> list[int]:
        self.texts.append(text)
        if len(text) > 1000:
            self.begun.set()
            assert self.go.wait(WAIT)
            if self.fault is not None:
                raise self.fault
            text = text[:16]
        return super().text(field, text, options, fits=fits)


class Input:
    """An input of shape [1, n]: a string, an integer or a list of integers."""

    def __init__(self, name: str, value: Any) -> None:
        self._name = name
        if isinstance(value, str):
            self._array = np.array([[value.encode()]], dtype=np.object_)
        else:
            self._array = np.array([value if isinstance(value, list) else [value]], dtype=np.int32)

    def name(self) -> str:
        return self._name

    def as_numpy(self) -> Any:
        return self._array


class Asked:
    """A Triton request and its sender: `sent` gets every response as (error or None, tensors, whether it is FINAL)."""

    def __init__(self, *, timeout: int = 0, **inputs: Any) -> None:
        self.sent: SimpleQueue[tuple[Any, dict[str, Any], bool]] = SimpleQueue()
        self.left = False
        self._timeout = timeout
        self._inputs = [Input(name, value) for name, value in inputs.items()]

    def request_id(self) -> str:
        return ""

    def parameters(self) -> str:
        return ""

    def timeout(self) -> int:
        return self._timeout

    def inputs(self) -> list[Any]:
        return self._inputs

    def requested_output_names(self) -> list[str]:
        return ["token_ids", "finish_reason"]

    def get_response_sender(self) -> Any:
        return SimpleNamespace(send=self._send, is_cancelled=lambda: self.left)

    def _send(self, response: Any, flags: int = 0) -> None:
        self.sent.put((response.error, dict(response.tensors), bool(flags)))

    def wait(self) -> tuple[list[int], str]:
        """Wait for FINAL; the tokens, and the reason of the end or the error."""
        tokens: list[int] = []
        while True:
            error, tensors, final = self.sent.get(timeout=WAIT)
            tokens += tensors["token_ids"].flatten().tolist() if "token_ids" in tensors else []
            if final:
                assert self.sent.empty()
                if error is not None:
                    return tokens, error.text
                reason = tensors.get("finish_reason")
                return tokens, "" if reason is None else reason[0, 0].decode()


@pytest.fixture
def adapter(replies: Any) -> Iterator[Any]:
    """The model over an engine whose model is scripted; what it sends is read by `Asked`."""
    module = importlib.import_module("model")
    with serving(scripted.load(max_queue_size=4)) as engine:
        model = module.TritonPythonModel()
        model._engine, model._prompts = engine, Slow(engine)
        model._keeps_queue, model._yields, model._ids = True, False, itertools.count()
        model._replies = replies.Replies(1, engine.cancel, lambda seconds: None)
        model._preparer = importlib.import_module("preparer").Preparer()
        model._replies.start()
        model._preparer.start()
        yield model
        model._prompts.go.set()
        model._preparer.stop()
        engine.close()
        model._replies.stop()
        assert model._replies.streams == {}


def ask(adapter: Any, **inputs: Any) -> Asked:
    asked = Asked(**inputs)
    adapter.execute([asked])
    return asked


@pytest.mark.parametrize("operation", ["generate", "tokenize"])
def test_while_a_long_text_is_tokenized_others_are_admitted_and_get_their_tokens(adapter: Any, operation: str) -> None:
    running = ask(adapter, text_input="a b", max_tokens=200)
    long = ask(adapter, text_input=LONG, max_tokens=3, operation=operation)
    assert adapter._prompts.begun.wait(WAIT)
    newcomer = ask(adapter, text_input="a", max_tokens=3)
    assert len(newcomer.wait()[0]) == 3
    assert len(running.wait()[0]) == 200
    assert long.sent.empty()
    adapter._prompts.go.set()
    tokens, reason = long.wait()
    assert (len(tokens), reason) == ((3, "length") if operation == "generate" else (len(tokens), ""))
    assert tokens


def test_long_requests_are_prepared_in_the_order_of_their_arrival(adapter: Any) -> None:
    asked = [ask(adapter, text_input=letter + LONG, operation="tokenize") for letter in "abc"]
    adapter._prompts.go.set()
    for one in asked:
        one.wait()
    assert [text[0] for text in adapter._prompts.texts] == ["a", "b", "c"]


def test_a_cancelled_request_is_answered_while_it_is_prepared(adapter: Any) -> None:
    long = ask(adapter, text_input=LONG, max_tokens=3)
    assert adapter._prompts.begun.wait(WAIT)
    (key,) = adapter._replies.streams
    adapter._engine.cancel(key)
    assert "cancelled" in long.wait()[1]
    adapter._prompts.go.set()
    adapter._preparer.stop()
    assert long.sent.empty()


def test_the_clock_of_a_long_request_runs_from_its_arrival(adapter: Any) -> None:
    long = ask(adapter, text_input=LONG, max_tokens=3, timeout=1000)
    assert "Request timeout expired" in long.wait()[1]


def test_an_operation_whose_client_has_left_before_its_turn_is_not_done(adapter: Any) -> None:
    first, second = (ask(adapter, text_input=letter + LONG, operation="tokenize") for letter in "ab")
    assert adapter._prompts.begun.wait(WAIT)
    second.left = True
    (stream,) = adapter._replies.streams.values()
    assert stream.left()
    adapter._prompts.go.set()
    first.wait()
    assert "cancelled" in second.wait()[1]
    assert len(adapter._prompts.texts) == 1


@pytest.mark.parametrize("operation", ["generate", "tokenize"])
def test_a_long_preparation_that_fails_is_its_requests_answer_alone(adapter: Any, operation: str) -> None:
    adapter._prompts.fault = OSError("secret")
    adapter._prompts.go.set()
    reason = ask(adapter, text_input=LONG, max_tokens=3, operation=operation).wait()[1]
    assert "OSError" in reason
    assert "secret" not in reason
    assert len(ask(adapter, text_input="a", max_tokens=3).wait()[0]) == 3
    assert adapter._engine.metrics.failed == 1


def test_a_long_request_is_refused_at_once_by_a_full_queue_and_by_a_server_that_drains(adapter: Any) -> None:
    held = [ask(adapter, text_input=LONG, max_tokens=1) for _ in range(8)]  # four seats and a queue of four
    assert "Exceeds maximum queue size" in ask(adapter, text_input=LONG, max_tokens=1).wait()[1]
    adapter._engine.drain(60.0)
    assert "draining" in ask(adapter, text_input=LONG, max_tokens=1).wait()[1]
    assert all("draining" in one.wait()[1] for one in held)


def test_what_waits_to_be_prepared_is_bounded_in_bytes(adapter: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.import_module("preparer"), "MOST_BYTES", 2 * len(LONG) + 100)
    asked = [ask(adapter, text_input=LONG, operation="tokenize") for _ in range(2)]
    assert "bytes are being prepared already" in ask(adapter, text_input=LONG, operation="tokenize").wait()[1]
    adapter._prompts.go.set()
    for one in asked:
        one.wait()
    adapter._preparer.stop()
    adapter._preparer.check(2 * len(LONG))


def test_a_request_of_more_bytes_than_any_that_fits_is_refused_before_it_is_read(adapter: Any) -> None:
    messages = json.dumps([{"role": "user", "content": "a" * (adapter._prompts._max_bytes * 6 + 2**20)}])
    assert "bytes; at most" in ask(adapter, messages=messages).wait()[1]
    assert adapter._engine.metrics.invalid == 1

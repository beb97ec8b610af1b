"""How much a request may say before anybody parses it: Python reads JSON with the interpreter's lock held."""

from __future__ import annotations

import json
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import json_text
import wire
from json_text import MAX_CHARACTERS, MAX_PARTS, read_json
from llm_engine.request import Code, RequestError, SamplingParams
from quoted import quoted
from wire import Call, input_bytes, read_call

CHAT = '[{"role": "user", "content": "Hi"}]'
MEGABYTES = 3 * 2**20


def tensor(name: str, value: Any) -> Any:
    if isinstance(value, str):
        value = np.array([[value.encode()]], dtype=np.object_)
    return SimpleNamespace(name=lambda: name, as_numpy=lambda: value)


def request(parameters: str = "", **inputs: Any) -> Any:
    tensors = [tensor(name, value) for name, value in inputs.items()]
    return SimpleNamespace(
        inputs=lambda: tensors, parameters=lambda: parameters, requested_output_names=list, timeout=lambda: 0
    )


def call(parameters: str = "", **inputs: Any) -> Call:
    return read_call(request(parameters, **inputs), "a", SamplingParams(), 100)


def briefly(value: object) -> str:
    return quoted(value)[:12]


def refusal(work: Callable[[], Any]) -> str:
    with pytest.raises(RequestError) as refused:
        work()
    assert refused.value.code is Code.INVALID_ARG
    assert len(refused.value.message) < 600
    assert refused.value.message.isprintable()
    return refused.value.message


@pytest.fixture
def unread(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody may parse anything."""

    def loads(*_: object, **__: object) -> Any:
        raise AssertionError("parsed")

    monkeypatch.setattr(json_text, "json", SimpleNamespace(loads=loads))
    monkeypatch.setattr(wire, "json", SimpleNamespace(loads=loads))


@pytest.mark.usefixtures("unread")
@pytest.mark.parametrize("value", ["x" * MEGABYTES, "[[]," + "[]," * 2**20 + "[]]"], ids=briefly)
def test_long_request_parameters_are_refused_before_they_are_read(value: str) -> None:
    told = refusal(lambda: call(json.dumps({"max_tokens": value}), text_input="x"))
    assert told.startswith("the request parameters have 3")
    assert "at most 1048576 are read" in told


def test_a_request_has_a_bounded_number_of_parameters(monkeypatch: pytest.MonkeyPatch) -> None:
    compared: list[str] = []
    monkeypatch.setattr(wire, "get_close_matches", lambda name, *_: compared.append(name) or [])
    told = refusal(lambda: call(json.dumps({f"x-{i}": 1 for i in range(40_000)}), text_input="x"))
    assert told == "a request may have at most 256 parameters, got 40000"
    call(json.dumps({"y" * 100_000: 1} | {f"x-{i}": 1 for i in range(255)}), text_input="x")
    assert len(compared) == 255  # a name without end is nobody's misspelling


@pytest.mark.usefixtures("unread")
@pytest.mark.parametrize("name", ["sampling_parameters", "tools", "documents", "chat_template_kwargs"])
@pytest.mark.parametrize(
    ("text", "told"),
    [
        ('{"a": "' + "x" * MEGABYTES + '"}', f"{MEGABYTES + 9} characters; at most {MAX_CHARACTERS} are read"),
        ("[" + "[]," * 200_000 + "[]]", f"400002 values; at most {MAX_PARTS} are read"),
    ],
    ids=briefly,
)
def test_json_beside_the_messages_is_bounded_before_it_is_read(name: str, text: str, told: str) -> None:
    assert refusal(lambda: read_json(name, text)).endswith(told)


def test_the_bounds_hold_wherever_json_comes_in() -> None:
    many = "[" + "[]," * 200_000 + "[]]"
    for name in ("sampling_parameters", "tools", "documents", "chat_template_kwargs", "messages"):
        assert refusal(lambda name=name: call(**({"messages": CHAT} | {name: many}))).startswith(f"{name} holds")
    for name in ("tools", "logit_bias", "chat_template_kwargs"):
        inside = json.dumps({name: many})
        assert refusal(lambda inside=inside: call(inside, messages=CHAT)).startswith(f"{name} holds")
        said = {"sampling_parameters": inside}
        assert refusal(lambda said=said: call(messages=CHAT, **said)).startswith(f"{name} holds")
    calling = [{"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": many}}]}]
    assert "arguments holds" in refusal(lambda: call(messages=json.dumps(calling)))
    assert "guided_json is not supported" in refusal(lambda: call(json.dumps({"guided_json": many}), text_input="x"))


@pytest.mark.usefixtures("unread")
@pytest.mark.parametrize(
    "text",
    ["[" + "{}," * 10**6, "[" + "1," * 10**6, '["",' * 10**6, r'"\"' + ',""' * 10**6, '"\\\\",' * 10**6],
    ids=briefly,
)
def test_whatever_makes_millions_of_values_is_refused_before_it_is_read(text: str) -> None:
    assert refusal(lambda: read_json("messages", text, None)).startswith("messages holds at least ")


@pytest.mark.parametrize(
    "text", ["1,2,[3]," * 100_000, '"a", "b\\" ' * 100_000, "{" * 10**6, "\\" * 10**6 + '"' * 9], ids=briefly
)
def test_a_messages_text_may_hold_any_number_of_brackets_and_commas(text: str) -> None:
    chat = [{"role": "user", "content": text}]
    assert call(messages=json.dumps(chat)).messages == chat


@pytest.mark.parametrize("name", ["stop_words", "bad_words", "text_input", "messages"])
def test_strings_are_counted_before_they_are_read_though_they_are_empty(name: str) -> None:
    class Unread(bytes):
        def __len__(self) -> int:
            raise AssertionError("read")

    many = np.empty((1, 2000), dtype=np.object_)
    many[0] = [Unread()] * 2000
    limit = {"stop_words": 16, "bad_words": 64}.get(name, 1)
    assert refusal(lambda: input_bytes(request(**{name: many}))) == f"{name} may hold at most {limit} entries, got 2000"


def test_an_inputs_elements_are_counted_before_they_are_converted() -> None:
    ids = np.zeros((1, 2_000_000), dtype=np.int32)
    assert refusal(lambda: call(text_input="x", stop_token_ids=ids)) == (
        "stop_token_ids may hold at most 64 entries, got 2000000"
    )
    warm = np.zeros((1, 2_000_000), dtype=np.float32)
    assert refusal(lambda: call(text_input="x", temperature=warm)).endswith("shape [1, 1], got [1, 2000000]")


@pytest.mark.parametrize(
    ("value", "told"),
    [
        ("a\nb\u2028", r"'a\nb\u2028'"),
        (10**5000, "an integer of some 5001 digits"),
        (1.5, "1.5"),
        ({"a": [1, None, True]}, "{'a': [1, None, True]}"),
    ],
    ids=briefly,
)
def test_a_value_is_quoted_on_one_line(value: object, told: str) -> None:
    assert quoted(value) == told


def test_a_long_value_is_cut_before_it_is_written() -> None:
    class Whole(str):
        def __repr__(self) -> str:
            raise AssertionError("written whole")

    for value in (Whole("x" * 1000), ["x" * 1000] * 1000, {"k" * 1000: "x" * 1000}, [[[[[[[[1]]]]]]]]):
        assert len(quoted(value)) < 1200


@pytest.mark.parametrize("name", ["end_id", "eos_token_id"])
def test_an_end_is_refused_by_the_name_it_was_sent_under(name: str) -> None:
    assert refusal(lambda: call(sampling_parameters=json.dumps({name: 100}), text_input="x")) == (
        f"{name} must hold token ids from 0 to 99, got 100"
    )
    many = json.dumps({name: list(range(65))})
    assert refusal(lambda: call(sampling_parameters=many, text_input="x")).startswith(f"{name} and stop_token_ids may")


def test_no_name_of_a_clients_breaks_a_line() -> None:
    named = {"sampling_parameters": '{"a\\nb": 1}'}, {"operation": "a\nb"}, {"template_time": "a\nb"}
    for said in named:
        assert r"a\nb" in refusal(lambda said=said: call(text_input="x", **said))

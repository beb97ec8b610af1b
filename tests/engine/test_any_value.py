"""Any value of any parameter is refused by name, or answered as if it were alone; its neighbour notices neither."""

from __future__ import annotations

import json
import struct
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from functools import cache
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from engine import scripted, tiny_models
from engine.driver import CheckedEngine, serving
from llm_engine.request import Code, RequestError, SamplingParams
from parameters import NAMES
from wire import Call, read_call

PROMPT = tiny_models.prompt(6)
CONTEXT = 24  # tokens; an answer without a limit fills it
NEIGHBOUR = SamplingParams(max_tokens=12, temperature=0.0, ignore_eos=True)


def asked(tensors: Mapping[str, np.ndarray[Any, Any]], parameters: str = "", name: str = "a") -> Call:
    """The call of a request with these inputs besides its prompt, and these request parameters."""
    inputs = {"input_ids": np.array([PROMPT], dtype=np.int32), **tensors}
    request = SimpleNamespace(
        inputs=lambda: [SimpleNamespace(name=lambda n=n: n, as_numpy=lambda v=v: v) for n, v in inputs.items()],
        parameters=lambda: parameters,
        requested_output_names=lambda: ["text_output"],
        timeout=lambda: 0,
    )
    return read_call(request, name, SamplingParams())


def sampling(text: str) -> dict[str, np.ndarray[Any, Any]]:
    return {"sampling_parameters": np.array([[text.encode()]], dtype=np.object_)}


@cache
def neighbour() -> list[int]:
    return scripted.expected(PROMPT, 12)


@pytest.fixture
def engine() -> Iterator[CheckedEngine]:
    with serving(scripted.load(max_context=CONTEXT, max_sequences=2)) as one:
        yield one


def refused_or_served(engine: CheckedEngine, field: str, read: Callable[[], Call]) -> None:
    """Read a request and serve it beside a neighbour, and again alone."""
    engine.pause()
    beside, answer = engine.ask(PROMPT, NEIGHBOUR), None
    try:
        call = read()
        answer = engine.ask(call.input_ids, call.params, cache_salt=call.cache_salt, priority=call.priority)
    except RequestError as error:
        assert error.code is Code.INVALID_ARG
        assert field in error.message
    engine.begin()
    assert beside.wait().tokens == neighbour()
    if answer is not None:
        assert answer.wait().code in ("stop", "length"), answer.last.error
        again = engine.ask(PROMPT, replace(answer.request.params, seed=answer.request.seed)).wait()
        assert (again.tokens, again.text, again.code) == (answer.tokens, answer.text, answer.code)


NUMBERS = (
    *(0, 1, -1, 2, 20, 2**31, 2**32, 2**62, 2**63 - 1, 2**63, 2**64 - 1, 2**64, -(2**63), 10**400, -(10**400)),
    *(0.5, 1e-5, 1e-40, 5e-324, 1e-50, 1e-8, 0.01, 100.0, 1e308, -1e308, 0.9999999999, float("inf"), float("nan")),
)
WORDS = ("", "1e999", "-1e999", "nan", "inf", "1e-50", "9" * 400, "9" * 5000, "0x10", "1_0", "true", "null", "[" * 2000)
values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=6) | st.sampled_from([*NUMBERS, *WORDS]),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=6,
)
ids = st.sampled_from(["0", "5", "99999999", "-1", "9" * 400, "9" * 5000, "05", "x"])
biases = st.dictionaries(ids, st.sampled_from(NUMBERS), max_size=3)
texts = (
    st.one_of(values, biases).map(json.dumps).filter(lambda text: "\\ud" not in text)  # half characters: test_bad_input
    | st.sampled_from(["9" * 5000, "-" + "9" * 5000, "1e999", "-1e999", "[" * 300 + "]" * 300, "[[1e999]]"])
)


@pytest.mark.parametrize("field", NAMES)
@settings(max_examples=settings.default.max_examples // 2)
@given(text=texts)
@example(text="9" * 400)
@example(text="9" * 5000)
@example(text=str(2**63))
@example(text="1e-40")
@example(text='"1e999"')
@example(text="[" * 900 + "]" * 900)
def test_any_json_value_of_a_sampling_parameter_is_refused_by_name_or_served(
    engine: CheckedEngine, field: str, text: str
) -> None:
    refused_or_served(engine, field, lambda: asked(sampling(f'{{"{field}": {text}}}')))


FLOATS = ("temperature", "top_p", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty")


@pytest.mark.parametrize("field", FLOATS)
@settings(max_examples=settings.default.max_examples // 2)
@given(bits=st.integers(0, 2**32 - 1))
@example(bits=1)  # the smallest denormal number
@example(bits=0x7F800000)  # infinity
@example(bits=0x7FC00000)  # NaN
@example(bits=0x3F7FFFFF)  # just below 1
def test_any_bits_of_an_fp32_input_are_refused_by_name_or_served(engine: CheckedEngine, field: str, bits: int) -> None:
    (number,) = struct.unpack("f", struct.pack("I", bits))
    refused_or_served(engine, field, lambda: asked({field: np.array([[number]], dtype=np.float32)}))


@pytest.mark.parametrize(
    ("field", "dtype"),
    [
        ("max_tokens", "int32"),
        ("min_tokens", "int32"),
        ("top_k", "int32"),
        ("seed", "uint64"),
        ("stop_token_ids", "int32"),
    ],
)
@settings(max_examples=settings.default.max_examples // 2)
@given(data=st.data())
def test_any_integer_input_is_refused_by_name_or_served(
    engine: CheckedEngine, field: str, dtype: str, data: st.DataObject
) -> None:
    limits = np.iinfo(dtype)
    value = data.draw(
        st.integers(int(limits.min), int(limits.max)) | st.sampled_from([int(limits.min), int(limits.max)])
    )
    refused_or_served(engine, field, lambda: asked({field: np.array([[value]], dtype=dtype)}))


@pytest.mark.parametrize("field", ["timeout", "llm_priority", "cache_salt"])
@settings(max_examples=settings.default.max_examples // 2)
@given(text=texts)
def test_any_value_of_a_request_parameter_is_refused_by_name_or_served(
    engine: CheckedEngine, field: str, text: str
) -> None:
    try:
        value = json.loads(text)
    except ValueError:
        return  # Triton writes no such JSON
    refused_or_served(engine, field, lambda: asked({}, json.dumps({field: value})))


@pytest.mark.parametrize(
    ("told", "read"),
    [
        ("the request id may have at most 256 bytes, got 257", lambda: asked({}, name="x" * 257)),
        ("cache_salt may have at most 1024 bytes, got 1025", lambda: asked({}, json.dumps({"cache_salt": "x" * 1025}))),
        ("cache_salt holds half of a surrogate pair", lambda: asked({}, '{"cache_salt": "\\ud800"}')),
        ("timeout must be at most 18446744073709551615", lambda: asked({}, f'{{"timeout": {2**64}}}')),
        ("timeout must be a whole number", lambda: asked({}, '{"timeout": -1}')),
        (
            "seed must be from 0 to .*, got an integer of some 400 digits",
            lambda: asked(sampling(f'{{"seed": {10**399}}}')),
        ),
        ("min_tokens must be at most 9223372036854775807, got", lambda: asked(sampling(f'{{"min_tokens": {2**63}}}'))),
        (
            "repetition_penalty must be from 0.01 to 100.0, got 1e-40",
            lambda: asked(sampling('{"repetition_penalty": 1e-40}')),
        ),
        ("max_tokens must be at most", lambda: asked(sampling(f'{{"max_tokens": {10**400}}}'))),
        ("top_k must be at most", lambda: asked(sampling(f'{{"top_k": "{2**64}"}}'))),
    ],
)
def test_a_value_out_of_bounds_is_refused_with_the_bound_and_the_value(told: str, read: Callable[[], Call]) -> None:
    with pytest.raises(RequestError, match=told) as refused:
        read()
    assert refused.value.code is Code.INVALID_ARG
    assert len(refused.value.message) < 300


@pytest.mark.parametrize("parameters", ["", '{"cache_salt": null}', '{"cache_salt": ""}'])
def test_without_a_salt_all_share_one(parameters: str) -> None:
    assert asked({}, parameters).cache_salt == ""

"""Whatever a client gets wrong is refused by name, in one line, and nobody else notices."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from tritonclient.grpc import service_pb2 as pb

from server.raw import Wire, add, infer, tokens
from tokenstream import Client, ServerInfo

LIMIT = 1000  # characters of a refusal, whatever was sent


@pytest.fixture(autouse=True)
def still_answering(wire: Wire) -> Iterator[None]:
    yield
    assert len(tokens(wire.ask(input_ids=[1], max_tokens=1))) == 1


def refused(wire: Wire, request: pb.ModelInferRequest, *words: str) -> None:
    """Our refusal: INVALID_ARG, with all of `words`, the request's id, and nothing of the server's inside."""
    request.id = "bad-1"
    message = wire.refusal(request)
    for word in words:
        assert word in message
    assert message.endswith("[request=bad-1 tokens=0 code=INVALID_ARG]")
    assert len(message) < LIMIT
    assert not re.search(r"Traceback|\.py\b|/\w+/\w+|\n", message)


def sampling(text: str) -> dict[str, Any]:
    return {"sampling_parameters": text}


SAMPLING: list[tuple[dict[str, Any], str, str]] = [
    ({"temperature": -0.1}, "temperature", "0.0 to 100.0"),
    ({"temperature": "warm"}, "temperature", "number"),
    ({"temperature": float("nan")}, "temperature", "0.0 to 100.0"),
    ({"temperature": float("inf")}, "temperature", "0.0 to 100.0"),
    ({"top_p": 0.0}, "top_p", "above 0 and at most 1"),
    ({"top_p": 1.01}, "top_p", "above 0 and at most 1"),
    ({"top_k": -2}, "top_k", "at least -1"),
    ({"top_k": 1.5}, "top_k", "integer"),
    ({"min_p": 1.5}, "min_p", "0.0 to 1.0"),
    ({"repetition_penalty": 0}, "repetition_penalty", "from 0.01 to 100.0"),
    ({"repetition_penalty": 1e-40}, "repetition_penalty", "from 0.01 to 100.0, got 1e-40"),
    ({"presence_penalty": 2.1}, "presence_penalty", "-2.0 to 2.0"),
    ({"frequency_penalty": -2.1}, "frequency_penalty", "-2.0 to 2.0"),
    ({"max_tokens": 0}, "max_tokens", "at least 1"),
    ({"max_tokens": -1}, "max_tokens", "at least 1"),
    ({"max_tokens": True}, "max_tokens", "integer"),
    ({"min_tokens": -1}, "min_tokens", "at least 0"),
    ({"min_tokens": 5, "max_tokens": 4}, "min_tokens", "at most max_tokens (4)"),
    ({"seed": -2}, "seed", "from 0 to 18446744073709551615"),
    ({"seed": 2**64}, "seed", "from 0 to 18446744073709551615"),
    ({"seed": 10**400}, "seed", "an integer of some 401 digits"),
    ({"min_tokens": 2**63}, "min_tokens", "at most 9223372036854775807"),
    ({"max_tokens": 10**400}, "max_tokens", "at most 9223372036854775807"),
    ({"temperature": "1e999"}, "temperature", "0.0 to 100.0, got inf"),
    ({"temperature": 10**400}, "temperature", "0.0 to 100.0, got inf"),
    ({"ignore_eos": "maybe"}, "ignore_eos", "true or false"),
    ({"stop": ["a"] * 17}, "stop", "at most 16"),
    ({"stop": "x" * 257}, "stop", "256 bytes"),
    ({"stop": ""}, "stop", "empty"),
    ({"stop": [1]}, "stop", "list of strings"),
    ({"stop": "\ud800"}, "stop in sampling_parameters", "half a character"),
    ({"bad_words": ["\ud800"]}, "bad_words in sampling_parameters", "half a character"),
    ({"bad_words": ["a"] * 65}, "bad_words", "at most 64"),
    ({"stop_token_ids": list(range(65))}, "stop_token_ids", "at most 64"),
    ({"stop_token_ids": [-1]}, "stop_token_ids", "token ids from 0"),
    ({"logprobs": 21}, "logprobs", "0 to 20"),
    ({"logprobs": -1}, "logprobs", "0 to 20"),
    ({"logit_bias": {"5": 101}}, "logit_bias", "-100.0 to 100.0"),
    ({"logit_bias": {"five": 1}}, "logit_bias", "token ids as keys"),
    ({"logit_bias": {"99999999": 1}}, "logit_bias", "token ids from 0"),
    ({"logit_bias": [1]}, "logit_bias", "object"),
    ({"best_of": 2}, "best_of", "one answer is made per request"),
    ({"max_new_tokens": 0}, "max_new_tokens", "at least 1"),
    ({"do_sample": False, "temperature": 0.5}, "do_sample", "contradicts temperature 0.5"),
    ({"response_format": {"type": "json_object"}}, "response_format", "guided decoding is not done here"),
    ({"tool_choice": "required"}, "tool_choice", "cannot force a tool call"),
    ({"enable_thinking": True}, "enable_thinking needs messages", "no chat template"),
    ({"temprature": "x" * 5000}, "'temprature'", "did you mean 'temperature'?"),
    ({"colour": "x" * 5000}, "'colour'", "known ones are"),
]


@pytest.mark.parametrize(("values", "name", "bound"), SAMPLING, ids=lambda value: str(value)[:40])
def test_a_sampling_value_that_cannot_be_honoured_is_refused(
    wire: Wire, values: dict[str, Any], name: str, bound: str
) -> None:
    refused(wire, infer(text_input="x", **sampling(json.dumps(values))), name, bound)


def test_the_same_bounds_hold_for_single_tensors_and_request_parameters(wire: Wire) -> None:
    for values, name, bound in SAMPLING:
        value = values.get(name)
        if name in ("temperature", "top_p", "min_p") and isinstance(value, float):
            refused(wire, infer(text_input="x", **values), name, bound)
            refused(wire, infer(text_input="x", parameters=values), name, bound)


GUIDE = "guided_decoding_guide"
CHAT = '[{"role": "user", "content": "Hi"}]'
ENDED = CHAT.replace("]", ', {"role": "assistant", "content": "Well"}]')
CALLING = '[{"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "{"}}]}]'
INPUTS: list[tuple[Any, ...]] = [
    ({"max_tokens": 1}, "exactly one of text_input, messages and input_ids", "none"),
    ({"text_input": "x", "input_ids": [1]}, "exactly one", "text_input and input_ids"),
    ({"text_input": "x", "messages": CHAT}, "exactly one", "text_input and messages"),
    ({"text_input": ""}, "text_input", "at least one character"),
    ({"text_input": b"ab\xff"}, "text_input", "UTF-8 at byte 2"),
    ({"text_input": "x " * 9000}, "the prompt has", "at most 8191 fit"),
    ({"text_input": "x" * 3_000_000}, "text_input has 3000000 characters", "8192 tokens"),
    ({"input_ids": []}, "input_ids", "at least one token"),
    ({"input_ids": [1] * 8192}, "the prompt has 8192 tokens", "at most 8191 fit"),
    ({"input_ids": [49152]}, "input_ids", "from 0 to 49151, got 49152"),
    ({"input_ids": [-1]}, "input_ids", "got -1"),
    ({"text_input": "x", "stop_words": [b"\xc3"]}, "stop_words", "UTF-8 at byte 0"),
    ({"text_input": "x", "bad_words": [b"\xc3"]}, "bad_words", "UTF-8 at byte 0"),
    ({"messages": b"\xfe"}, "messages", "UTF-8 at byte 0"),
    ({"messages": "[{"}, "messages", "not valid JSON"),
    ({"messages": '{"role": "user"}'}, "messages", "JSON array"),
    ({"messages": "[]"}, "messages", "at least one message"),
    ({"messages": '[{"content": "Hi"}]'}, "messages[0]", '"role"'),
    ({"messages": '[{"role": 1, "content": "Hi"}]'}, "messages[0]", '"role"'),
    ({"messages": '["Hi"]'}, "messages[0]", '"role"'),
    ({"messages": '[{"role": "user", "content": 5}]'}, "messages[0].content", "string"),
    ({"messages": '[{"role": "user", "content": [{"type": "image"}]}]'}, "messages[0].content", '"text"'),
    ({"messages": CALLING}, "messages[0].tool_calls[0].function.arguments", "not valid JSON"),
    ({"messages": ENDED}, "messages[1]", "continue_final_message true"),
    ({"messages": CHAT, "continue_final_message": True}, "continue_final_message", "role 'user', not assistant"),
    ({"messages": CHAT, "tools": '[{"name": "f"}]'}, "tools", "does not read them"),
    ({"messages": CHAT, "chat_template_kwargs": "{"}, "chat_template_kwargs", "not valid JSON"),
    ({"messages": CHAT, "chat_template_kwargs": '{"colour": 1}'}, "colour", "does not read this variable"),
    ({"messages": CHAT, "chat_template_kwargs": '{"a":' * 99 + "1" + "}" * 99}, "chat_template_kwargs", "too deeply"),
    ({"text_input": "x", "tools": '[{"name": "f"}]'}, "tools", "needs messages"),
    ({"messages": '[{"role": "user", "content": "\\ud800"}]'}, "messages", "half a character"),
    ({"messages": "[" * 90_000 + "]" * 90_000}, "messages", "too deeply"),
    ({"messages": CHAT, "template_time": "tomorrow"}, "template_time", "ISO 8601"),
    ({"text_input": "x", "sampling_parameters": "{"}, "sampling_parameters", "not valid JSON"),
    ({"text_input": "x", "sampling_parameters": "[]"}, "sampling_parameters", "JSON object, got list"),
    ({"text_input": "x", "sampling_parameters": '{"a":' * 90_000}, "sampling_parameters", "too deeply"),
    ({"text_input": "x", "sampling_parameters": b"\xff"}, "sampling_parameters", "UTF-8 at byte 0"),
    ({"text_input": "x", "operation": "translate"}, "operation", "generate, tokenize, detokenize, info"),
    ({"text_input": "x", "operation": "y" * 5_000_000}, "operation", "generate, tokenize, detokenize, info"),
    ({"text_input": "x", "operation": "detokenize"}, "detokenize", "input_ids"),
    ({"input_ids": [10**6], "operation": "detokenize"}, "input_ids", "from 0 to 49151"),
    ({"operation": "tokenize"}, "exactly one", "none"),
    ({"text_input": "x", "exclude_input_in_output": False}, "exclude_input_in_output", "stream false"),
    ({"text_input": "x", "beam_width": 2}, "beam_width", "not supported here (got 2)"),
    ({"text_input": "x", "num_return_sequences": 2}, "num_return_sequences", "not supported here (got 2)"),
    ({"text_input": "x", "return_context_logits": True}, "return_context_logits", "ask for logprobs"),
    ({"text_input": "x", "guided_decoding_guide_type": "json"}, "guided_decoding_guide_type", "not supported"),
    ({"text_input": "x", "parameters": {"best_of": 2}}, "best_of", "one answer is made per request"),
    ({"text_input": "x", "parameters": {"response_format": '{"type": "json_object"}'}}, "response_format", "guided"),
    ({"text_input": "x", "parameters": {"num_predict": 3, "max_tokens": 4}}, "num_predict", "given twice"),
    ({"text_input": "x", "parameters": {"stream": False}}, "stream", "an input of its own"),
    ({"text_input": "x", "parameters": {"max_length": 30}}, "max_length", "send max_tokens"),
    ({"text_input": "x", GUIDE: "{}"}, GUIDE, "not supported"),
    ({"text_input": "x", "parameters": {"cache_salt": "x" * 1025}}, "cache_salt", "at most 1024 bytes, got 1025"),
    ({"text_input": "x", "sampling_parameters": f'{{"seed": {"1" * 5000}}}'}, "seed", "an integer of some 4300 digits"),
    ({"text_input": "x", "parameters": {"llm_priority": 0}}, "llm_priority", "1, 2 or 3"),
    ({"text_input": "x", "parameters": {"llm_priority": "high"}}, "llm_priority", "1, 2 or 3"),
    ({"text_input": "x", "resume_token_ids": [49152]}, "resume_token_ids", "from 0 to 49151"),
    ({"text_input": "x", "resume_token_ids": [1, 2], "max_tokens": 1}, "resume_token_ids", "at most 1 fit"),
]


@pytest.mark.parametrize(
    ("inputs", "words"), [(inputs, words) for inputs, *words in INPUTS], ids=lambda value: str(value)[:60]
)
def test_an_input_that_cannot_be_honoured_is_refused(wire: Wire, inputs: dict[str, Any], words: list[str]) -> None:
    refused(wire, infer(**inputs), *words)


@pytest.mark.parametrize(
    ("field", "value", "other"),
    [("temperature", 0.5, 0.6), ("max_tokens", 3, 4), ("seed", 1, 2), ("ignore_eos", True, False), ("top_p", 0.9, 1.0)],
)
def test_two_different_values_for_one_parameter_are_refused(wire: Wire, field: str, value: Any, other: Any) -> None:
    refused(wire, infer(text_input="x", **sampling(json.dumps({field: value})), **{field: other}), field, "given twice")
    refused(wire, infer(text_input="x", parameters={field: other}, **{field: value}), field, "given twice")


def test_stop_words_that_differ_from_the_json_are_refused(wire: Wire) -> None:
    refused(wire, infer(text_input="x", stop_words=["a"], **sampling('{"stop": "b"}')), "stop", "given twice")


def wrong_type() -> pb.ModelInferRequest:
    request = infer(text_input="x")
    add(request, "max_tokens", "FP32", [1, 1], [3.0])
    return request


def wrong_shape() -> pb.ModelInferRequest:
    return infer(text_input="x", max_tokens=[1, 2])


def no_batch() -> pb.ModelInferRequest:
    request = infer(text_input="x")
    add(request, "max_tokens", "INT32", [1], [3])
    return request


def unknown() -> pb.ModelInferRequest:
    return infer(text_input="x", colour="red")


def short() -> pb.ModelInferRequest:
    request = infer(text_input="x", max_tokens=1)
    request.raw_input_contents[1] = b"\x01"
    return request


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (wrong_type, ("'max_tokens'", "data-type is 'FP32'", "expects 'INT32'")),
        (wrong_shape, ("'max_tokens'", "unexpected shape")),
        (no_batch, ("'max_tokens'", "unexpected shape")),
        (unknown, ("unexpected inference input 'colour'",)),
        (short, ("max_tokens",)),
    ],
)
def test_what_is_not_of_the_declared_form_is_refused_by_tritons_words(
    wire: Wire, make: Callable[[], pb.ModelInferRequest], words: tuple[str, ...]
) -> None:
    message = wire.refusal(make())
    for word in words:
        assert word in message


def test_two_prompts_in_one_request_are_refused(wire: Wire) -> None:
    request = infer()
    add(request, "text_input", "BYTES", [2, 1], ["a", "b"])
    refused(wire, request, "text_input", "[1, n]", "[2, 1]")


def test_a_refusal_reaches_the_one_who_asked_and_nobody_else(wire: Wire, client: Client, info: ServerInfo) -> None:
    good = [infer(name=f"good-{i}", input_ids=[5, 6, 7 + i], max_tokens=8, ignore_eos=True) for i in range(4)]
    bad = [infer(name=f"bad-{i}", input_ids=[5], max_tokens=-i) for i in range(1, 5)]
    answers = wire.together([request for pair in zip(good, bad, strict=True) for request in pair])
    assert [len(tokens(answer)) for answer in answers[::2]] == [8] * 4
    for i, (response,) in enumerate(answers[1::2], 1):
        assert f"got {-i} [request=bad-{i} " in response.error

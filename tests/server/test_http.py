"""Triton's generate extension: the same model over HTTP, for clients without gRPC."""

from __future__ import annotations

import json
import urllib.error
import urllib.request
from typing import Any

import pytest

from server.raw import Web, Wire, text, tokens
from tokenstream import Client
from tokenstream.server import TritonServer
from waiting import WAIT

PROMPT = "The capital of France is"


def test_generate_answers_once_and_as_grpc_does(web: Web, wire: Wire) -> None:
    expected = wire.ask(text_input=PROMPT, max_tokens=8, temperature=0.0)
    page = web.post("generate", text_input=PROMPT, max_tokens=8, temperature=0, stream=False, id="web-1")
    assert page.status == 200
    assert page.json["text_output"] == text(expected)
    assert page.json["token_ids"] == tokens(expected)
    assert page.json["finish_reason"] == "length"
    assert page.json["id"] == "web-1"
    assert page.json["num_output_tokens"] == 8


def test_generate_without_stream_false_is_tritons_complaint_in_place_of_the_answer(web: Web) -> None:
    page = web.post("generate", text_input=PROMPT, max_tokens=3, ignore_eos=True)
    assert page.status == 200
    assert page.json["error"].startswith("generate expects model to produce exactly 1 response")


def test_generate_stream_sends_one_event_per_token(web: Web, wire: Wire) -> None:
    expected = wire.ask(text_input=PROMPT, max_tokens=8, temperature=0.0)
    page = web.post("generate_stream", text_input=PROMPT, max_tokens=8, temperature=0)
    assert page.status == 200
    assert [event["text_output"] for event in page.events] == [response["text_output"] for response in expected]
    assert [event["index"] for event in page.events] == list(range(8))
    assert [event["finish_reason"] for event in page.events] == [""] * 7 + ["length"]


def test_lists_and_large_seeds_and_nested_parameters_arrive(web: Web, wire: Wire) -> None:
    asked = {"max_tokens": 8, "temperature": 1.2, "seed": 2**64 - 1, "ignore_eos": True}
    expected = wire.ask(text_input=PROMPT, **asked)
    stop = expected[3]["text_output"] + expected[4]["text_output"]
    until = text(expected).index(stop)
    for body in (
        {**asked, "stop_words": [stop, "never written"]},
        {"parameters": {**asked, "stop_words": [stop]}},
        {"stop_words": stop, "parameters": asked},
    ):
        events = web.post("generate_stream", text_input=PROMPT, **body).events
        assert "".join(event["text_output"] for event in events) == text(expected)[:until]
        assert events[-1]["finish_reason"] == "stop"
        assert events[0]["seed"] == 2**64 - 1
    ids = wire.ask(operation="tokenize", text_input=PROMPT)[0].tensors["token_ids"]
    assert web.post("generate", input_ids=ids, stream=False, **asked).json["token_ids"] == tokens(expected)


def test_generate_takes_the_same_bodies_as_generate_stream(web: Web, wire: Wire) -> None:
    scalars = {"max_tokens": 10, "temperature": 1.2, "top_k": 50, "top_p": 0.9, "seed": 11, "ignore_eos": True}
    expected = wire.ask(text_input=PROMPT, **scalars)
    stop = expected[3]["text_output"] + expected[4]["text_output"]
    for body in (
        {**scalars, "stop_words": [stop, "never written"]},
        {"parameters": {**scalars, "stop_words": [stop, "never written"]}},
        {"sampling_parameters": json.dumps({**scalars, "stop": [stop]})},
    ):
        whole = web.post("generate", text_input=PROMPT, stream=False, **body)
        events = web.post("generate_stream", text_input=PROMPT, **body).events
        assert whole.status == 200
        assert whole.json["text_output"] == text(expected).partition(stop)[0]
        assert whole.json["text_output"] == "".join(event["text_output"] for event in events)
        assert whole.json["token_ids"] == [event["token_ids"] for event in events]
        assert whole.json["finish_reason"] == events[-1]["finish_reason"] == "stop"
        (only,) = web.post("generate_stream", text_input=PROMPT, stream=False, **body).events
        assert only["token_ids"] == whole.json["token_ids"]


def test_what_is_not_there_has_status_404_or_400(web: Web) -> None:
    for model, method, status in (("llm", "generate", 400), ("other", "generate", 404), ("llm", "guess", 404)):
        page = web.post(method, model, text_input=PROMPT, max_tokens=0, stream=False)
        assert (page.status, method, model) == (status, method, model)


def test_a_sampling_field_without_a_tensor_is_honoured_as_a_parameter(web: Web) -> None:
    for body in ({"logprobs": 2}, {"parameters": {"logprobs": 2}}):
        events = web.post("generate_stream", text_input=PROMPT, max_tokens=2, temperature=0, **body).events
        for event in events:
            (entry,) = json.loads(event["logprobs"])
            assert len(entry["top"]) == 2
    page = web.post("generate", text_input=PROMPT, max_tokens=2, stream=False, logprobs=99)
    assert page.status == 400
    assert "logprobs must be from 0 to 20, got 99" in page.json["error"]


def test_a_refused_request_has_status_400_and_the_reason(web: Web) -> None:
    for method, stream in (("generate", False), ("generate_stream", True)):
        page = web.post(method, text_input=PROMPT, temperature=-1, stream=stream, id="web-2")
        assert page.status == 400
        error = page.body.removeprefix("data: ")
        assert "temperature must be from 0.0 to 100.0, got -1.0" in json.loads(error)["error"]
        assert "[request=web-2 tokens=0 code=INVALID_ARG]" in error


def test_what_json_says_wrongly_is_refused(web: Web, client: Client) -> None:
    for body in (
        {"text_input": "\ud800"},
        {"text_input": PROMPT, "max_tokens": "many"},
        {"text_input": PROMPT, "max_tokens": 2**40},
        {"text_input": {"role": "user"}},
        {"text_input": PROMPT, "nested": {"a": 1}},
    ):
        page = web.post("generate", stream=False, **body)
        assert page.status >= 400  # Triton calls its own parser's complaint 500
        assert page.json["error"]
    assert client.generate(PROMPT, max_tokens=1).usage.output_tokens == 1


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("max_tokens", None),
        ("max_tokens", "3"),
        ("max_tokens", 3.0),
        ("temperature", None),
        ("seed", -1),
        ("seed", 2**64),
    ],
)
def test_an_input_that_tritons_parser_does_not_read_has_status_500_and_the_json_object_takes_it(
    web: Web, name: str, value: Any
) -> None:
    for method in ("generate", "generate_stream"):
        for place in ({name: value}, {"parameters": {name: value}}):
            page = web.post(method, text_input=PROMPT, stream=False, **place)
            assert page.status == 500
            assert "Unable to parse 'data'" in page.json["error"]
    said = json.dumps({"max_tokens": 3} | {name: value if value is not None or name != "max_tokens" else 3})
    page = web.post("generate", text_input=PROMPT, stream=False, sampling_parameters=said)
    if value == 2**64:
        assert page.status == 400
        assert "seed must be from 0 to 18446744073709551615, got 18446744073709551616" in page.json["error"]
    else:
        assert page.json["num_output_tokens"] <= 3


def test_triton_cuts_integers_of_inputs_to_32_bits_and_the_json_object_has_them_whole(web: Web) -> None:
    asked = {"text_input": PROMPT, "stream": False}
    assert web.post("generate", **asked, max_tokens=2**32 + 1).json["num_output_tokens"] == 1
    assert web.post("generate", input_ids=[2**40], operation="tokenize").json["token_ids"] == 0
    page = web.post("generate", **asked, sampling_parameters=json.dumps({"max_tokens": 1, "stop_token_ids": [2**40]}))
    assert page.status == 400
    assert f"stop_token_ids must hold token ids from 0 to 49151, got {2**40}" in page.json["error"]
    page = web.post("generate", **asked, sampling_parameters=json.dumps({"max_tokens": 2**63}))
    assert page.status == 400
    assert "max_tokens must be at most 9223372036854775807, got 9223372036854775808" in page.json["error"]


def test_null_is_no_request_parameter_to_triton(web: Web) -> None:
    asked = {"text_input": PROMPT, "stream": False, "max_tokens": 1}
    for place in ({"n": None}, {"n": [1]}, {"parameters": {"n": None}}):
        page = web.post("generate", **asked, **place)
        assert page.status == 400
        assert "parameter 'n' has invalid type" in page.json["error"]
    assert web.post("generate", **asked, sampling_parameters='{"n": null}').status == 200


def test_a_priority_that_only_tritons_queue_would_know_is_refused_with_the_right_name(web: Web, wire: Wire) -> None:
    for place in ({"priority": 1}, {"parameters": {"priority": 1}}, {"sampling_parameters": '{"priority": 1}'}):
        page = web.post("generate", text_input=PROMPT, stream=False, **place)
        assert page.status == 400
        assert "priority is not supported here (got 1): send llm_priority" in page.json["error"]
    assert len(tokens(wire.ask(text_input=PROMPT, max_tokens=1, parameters={"priority": 1}))) == 1  # Triton's


def test_operations_are_answered_over_http(web: Web, client: Client) -> None:
    ids = web.post("generate", operation="tokenize", text_input=PROMPT).json["token_ids"]
    assert ids == client.tokenize(PROMPT)
    assert web.post("generate", operation="detokenize", input_ids=ids).json["text_output"] == PROMPT
    assert json.loads(web.post("generate", operation="info").json["text_output"])["vocab_size"] == 49152


def test_a_huge_form_is_refused_and_the_server_goes_on(server: TritonServer, client: Client) -> None:
    body = b'{"text_input": "' + b"x" * 9_000_000 + b'", "stream": false}'
    form = {"Content-Type": "application/x-www-form-urlencoded"}
    request = urllib.request.Request(f"{server.http_url}/v2/models/llm/generate", data=body, headers=form)
    with pytest.raises(urllib.error.HTTPError) as refused:
        urllib.request.urlopen(request, timeout=WAIT)
    with refused.value as page:
        assert page.code == 400
    assert client.generate(PROMPT, max_tokens=1).usage.output_tokens == 1


def test_a_request_parameter_with_a_wrong_value_or_nearly_a_name_is_refused_by_name(web: Web) -> None:
    asked = {"text_input": PROMPT, "stream": False, "max_tokens": 1}
    for parameters, words in (
        ({"timeout": "soon"}, "timeout must be a whole number of microseconds, got 'soon'"),
        ({"timeout": -5}, "timeout must be a whole number of microseconds, got -5"),
        ({"max_token": 5}, "parameter 'max_token' is unknown; did you mean 'max_tokens'?"),
    ):
        page = web.post("generate", **asked, **parameters)
        assert page.status == 400
        assert words in page.json["error"]
    assert web.post("generate", **asked, timeout=5_000_000, traceparent="00-1-2-3").status == 200

"""The wire without a wire: what a request looks like, and what a response becomes."""

from __future__ import annotations

import json

import pytest
from tritonclient.grpc import service_pb2 as pb

from tokenstream.errors import InternalError, InvalidRequest
from tokenstream.params import PROMPTING_NAMES, SAMPLING_NAMES, draw_seed, sampling_json
from tokenstream.protocol import Begun, Prompt, Question, attempt, generate_request, operation_request, server_info
from tokenstream.timeouts import Timeout
from unit.scripted_triton import inputs


def request(prompt: Prompt, **options: object) -> pb.ModelInferRequest:
    sent = {name: options.pop(name) for name in ("timeout", "begun") if name in options}
    return attempt(generate_request(Question("llm", prompt, "{}", "r1", **options)), **sent)


def test_every_tensor_of_a_request_is_one_row():
    made = [
        request(Prompt(text="hi")),
        request(Prompt(messages=[{"role": "user", "content": "hi"}])),
        request(Prompt(input_ids=[1, 2, 3])),
    ]
    for tensor in (tensor for one in made for tensor in one.inputs):
        assert tensor.shape[0] == 1
        assert list(tensor.shape) == ([1, 3] if tensor.name == "input_ids" else [1, 1])


@pytest.mark.parametrize(
    ("prompt", "expected"),
    [
        (Prompt(text="grüß 🌊"), {"text_input": "grüß 🌊"}),
        (Prompt(text=""), {"text_input": ""}),
        (Prompt(input_ids=[0, 5, 2**31 - 1]), {"input_ids": [0, 5, 2**31 - 1]}),
    ],
)
def test_a_prompt_arrives_as_it_was_given_and_nothing_unasked_is_sent(prompt, expected):
    assert inputs(request(prompt)) == expected | {"sampling_parameters": {}}


def test_messages_travel_with_the_time_their_template_may_print():
    sent = inputs(request(Prompt(messages=[{"role": "user", "content": "ä"}]), template_time="2026-11-30T08:00:00"))
    assert sent["messages"] == [{"role": "user", "content": "ä"}]
    assert sent["template_time"] == "2026-11-30T08:00:00"
    assert "template_time" not in inputs(request(Prompt(text="x"), template_time="2026-11-30T08:00:00"))


def test_the_rest_of_an_answer_is_asked_for_by_its_tokens():
    exact = inputs(request(Prompt(text="x"), begun=Begun([5, 6], "print")))
    assert (exact["resume_token_ids"], exact["resume_fingerprint"]) == ([5, 6], "print")
    assert "resume_fingerprint" not in inputs(request(Prompt(text="x"), begun=Begun([5])))
    assert not {name for name in inputs(request(Prompt(text="x"))) if name.startswith("resume")}


@pytest.mark.parametrize("given", [{}, {"text": "a", "input_ids": [1]}, {"text": "", "messages": []}])
def test_none_and_several_prompts_are_refused(given):
    with pytest.raises(TypeError, match="exactly one"):
        Prompt(**given)


def test_the_final_mark_is_always_asked_for():
    for made in (request(Prompt(text="x")), operation_request("llm", "info", request_id="r2")):
        assert made.parameters["triton_enable_empty_final_response"].bool_param is True


def test_priority_and_timeout_are_sent_only_when_given():
    assert set(request(Prompt(text="x")).parameters) == {"triton_enable_empty_final_response"}
    made = request(Prompt(text="x"), priority=1, timeout=2.5, cache_salt="tenant")
    assert made.parameters["cache_salt"].string_param == "tenant"
    assert made.parameters["priority"].uint64_param == 1
    assert made.parameters["llm_priority"].int64_param == 1
    assert made.parameters["timeout"].int64_param == 2_500_000


@pytest.mark.parametrize("ids", [[2**31], [-(2**31) - 1], [1.5], ["1"]])
def test_token_ids_that_do_not_fit_are_refused_by_name(ids):
    with pytest.raises(InvalidRequest, match="input_ids"):
        request(Prompt(input_ids=ids))


def test_half_a_character_is_refused_before_it_is_sent():
    with pytest.raises(InvalidRequest, match="text_input is not Unicode text"):
        request(Prompt(text="a\ud83c"))


def test_operations_carry_their_argument():
    assert inputs(operation_request("llm", "tokenize", request_id="r", text="a b")) == {
        "operation": "tokenize",
        "text_input": "a b",
    }
    assert inputs(operation_request("llm", "detokenize", request_id="r", input_ids=[4])) == {
        "operation": "detokenize",
        "input_ids": [4],
    }


def test_a_seed_is_sent_even_if_none_was_given_and_unset_values_are_not():
    assert json.loads(sampling_json({"temperature": None, "stop": ["a", "b"]}, 17)) == {"seed": 17, "stop": ["a", "b"]}
    assert json.loads(sampling_json({"seed": None}, 17)) == {"seed": 17}


def test_drawn_seeds_differ_and_fit_a_signed_integer():
    seeds = {draw_seed() for _ in range(100)}
    assert len(seeds) == 100
    assert all(0 <= seed < 2**63 for seed in seeds)


def test_an_unknown_sampling_keyword_is_named():
    with pytest.raises(TypeError, match="'max_new_tokens' is no sampling parameter"):
        sampling_json({"max_new_tokens": 5}, 0)


def test_client_and_engine_know_the_same_sampling_parameters():
    from dataclasses import fields

    from llm_engine.request import SamplingParams

    assert {field.name for field in fields(SamplingParams)} == SAMPLING_NAMES


def test_client_and_server_know_the_same_of_prompts() -> None:
    from chat_options import COERCE

    assert COERCE.keys() == PROMPTING_NAMES


def test_what_is_said_of_the_prompt_travels_with_the_sampling_so_that_every_attempt_says_it():
    said = {"chat_template_kwargs": {"a": [1]}, "tools": [{"name": "ä"}], "continue_final_message": False}
    assert json.loads(sampling_json({**said, "enable_thinking": None}, 3)) == said | {"seed": 3}
    with pytest.raises(TypeError, match="JSON"):
        sampling_json({"chat_template_kwargs": {"a": object()}}, 3)


def test_server_info_keeps_what_it_does_not_know():
    info = server_info('{"model": "m", "dtype": "bfloat16", "exact": "bitwise", "limits": {"max_context": 8}}')
    assert (info.model, info.dtype, info.exact) == ("m", "bfloat16", "bitwise")
    assert info.details["limits"] == {"max_context": 8}
    for text in ("", "[]", "nonsense"):
        with pytest.raises(InternalError):
            server_info(text)


@pytest.mark.parametrize("seconds", [0, -1, float("nan"), float("inf")])
def test_a_clock_that_no_answer_can_meet_is_refused_by_name(seconds):
    with pytest.raises(ValueError, match="first_token"):
        Timeout(first_token=seconds)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_number_that_json_cannot_hold_is_refused_by_name(value):
    with pytest.raises(InvalidRequest, match="temperature must be a finite number"):
        sampling_json({"temperature": value}, 1)


@pytest.mark.parametrize("name", ["seed", "stop_token_ids", "logit_bias"])
def test_an_integer_of_more_digits_than_are_ever_read_is_refused_by_name(name):
    value = {"seed": 10**5000, "stop_token_ids": [10**5000], "logit_bias": {1: 10**5000}}[name]
    with pytest.raises(InvalidRequest, match=f"{name} holds too long an integer"):
        sampling_json({name: value}, value if name == "seed" else 7)
    assert '"seed": 1000' in sampling_json({"seed": 10**400}, 10**400)  # the server knows its bounds

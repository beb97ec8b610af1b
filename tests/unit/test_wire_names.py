"""Names of other servers' requests: each is honoured or refused by name, wherever a request can carry it."""

from __future__ import annotations

import json
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from chat_options import COERCE, ChatOptions
from foreign_names import FOREIGN, NO_EFFECT, Refused, Synonym
from llm_engine.request import RequestError, SamplingParams
from parameters import NAMES, is_known
from wire import Call, read_call

PROMPT = "text_input"
CHAT = '[{"role": "user", "content": "Hi"}]'


def tensor(name: str, value: Any) -> Any:
    values = value if isinstance(value, list) else [value]
    encoded = [v.encode() if isinstance(v, str) else v for v in values]
    kind = {str: np.object_, bool: np.bool_, float: np.float32, int: np.int32}[type(values[0])]
    return SimpleNamespace(name=lambda: name, as_numpy=lambda: np.array([encoded], dtype=kind))


def call(*, defaults: SamplingParams | None = None, parameters: dict[str, Any] | None = None, **inputs: Any) -> Call:
    prompt = {} if {"messages", "input_ids", PROMPT} & inputs.keys() else {PROMPT: "Hi"}
    request = SimpleNamespace(
        inputs=lambda: [tensor(name, value) for name, value in (prompt | inputs).items()],
        parameters=lambda: json.dumps(parameters or {}),
        requested_output_names=list,
        timeout=lambda: 0,
    )
    return read_call(request, "a", defaults or SamplingParams())


def in_json(name: str, value: Any, **more: Any) -> Call:
    return call(sampling_parameters=json.dumps({name: value}), **more)


def as_parameter(name: str, value: Any, **more: Any) -> Call:
    return call(parameters={name: value}, **more)


def as_parameter_in_text(name: str, value: Any, **more: Any) -> Call:
    return call(parameters={name: value if isinstance(value, str) else json.dumps(value)}, **more)


def as_input(name: str, value: Any, **more: Any) -> Call:
    return call(**{name: json.dumps(value) if isinstance(value, list | dict) else value}, **more)


PLACES = [in_json, as_parameter, as_parameter_in_text, as_input]
Place = Callable[..., Call]

OURS: dict[str, Any] = {  # a value of each of our parameters that another server's name can stand for
    "max_tokens": 7,
    "min_tokens": 3,
    "temperature": 0.25,
    "top_k": 9,
    "top_p": 0.5,
    "seed": 11,
    "repetition_penalty": 1.5,
    "stop": "end",
    "logprobs": 4,
    "return_logprobs": True,
    "end_id": 5,
    "include_stop_str_in_output": True,
    "enable_thinking": True,
}


SYNONYMS = {name: meaning for name, meaning in FOREIGN.items() if isinstance(meaning, Synonym)}
REFUSED = {name: meaning for name, meaning in FOREIGN.items() if isinstance(meaning, Refused)}
READ_AS_INPUTS = {  # what these say as inputs is not for the table
    *("text_input", "messages", "input_ids", "sampling_parameters", "operation", "stream"),
    *("exclude_input_in_output", "resume_token_ids", "resume_fingerprint", "template_time"),
}


@pytest.mark.parametrize("name", SYNONYMS)
def test_a_synonym_means_what_our_name_means_in_every_place(name: str) -> None:
    ours = SYNONYMS[name].ours
    for place in PLACES:
        given = place(name, OURS[ours], messages=CHAT)
        assert given != call(messages=CHAT)
        assert given == in_json(ours, OURS[ours], messages=CHAT)


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_not_done_here_is_refused_by_name_in_every_place_unless_it_asks_for_nothing(name: str) -> None:
    refused = 0
    for value in (3, 0.37, "something", ["something"], {"a": "b"}, {}, True, False, -7):
        for place in PLACES[:3] if name in READ_AS_INPUTS else PLACES:
            if any(
                value == fine and isinstance(value, bool) == isinstance(fine, bool) for fine in REFUSED[name].neutral
            ):
                assert place(name, value) == call()
                continue
            refused += 1
            with pytest.raises(RequestError, match=f"^{name} is not supported here"):
                place(name, value)
    assert refused


@pytest.mark.parametrize("name", REFUSED)
def test_a_value_that_asks_for_nothing_passes_in_every_place(name: str) -> None:
    for value in (*REFUSED[name].neutral, None, "", []):
        for place in PLACES[:3]:
            assert place(name, value) == call()


@pytest.mark.parametrize("name", sorted(NO_EFFECT))
def test_a_name_that_says_nothing_of_the_answer_passes(name: str) -> None:
    for value in (1, True, "x", {"a": 1}):
        assert in_json(name, value) == as_parameter(name, value) == call()


def test_a_name_has_one_meaning() -> None:
    ours = {*NAMES, *COERCE}
    assert not ours & FOREIGN.keys()
    assert not (ours | FOREIGN.keys()) & NO_EFFECT
    assert {meaning.ours for meaning in SYNONYMS.values()} == OURS.keys()


@pytest.mark.parametrize(
    ("name", "value", "expected"),
    [
        ("num_predict", -1, {"max_tokens": None}),
        ("num_predict", "-2", {"max_tokens": None}),
        ("n_predict", -1, {"max_tokens": None}),
        ("seed", -1, {"seed": None}),
        ("seed", "-1", {"seed": None}),
        ("random_seed", -1, {"seed": None}),
        ("do_sample", False, {"temperature": 0.0}),
        ("do_sample", True, {"temperature": 0.5}),
        ("end_id", -1, {}),
        ("eos_token_id", [4, 5], {"stop_token_ids": (4, 5)}),
        ("logprobs", True, {"logprobs": 0}),
        ("logprobs", False, {}),
        ("top_logprobs", 0, {}),
        ("n_probs", 2, {"logprobs": 2}),
        ("return_log_probs", False, {}),
    ],
)
def test_conventions_of_others_are_kept(name: str, value: Any, expected: dict[str, Any]) -> None:
    defaults = SamplingParams(temperature=0.5)
    for place in (in_json, as_parameter):
        assert place(name, value, defaults=defaults).params == SamplingParams(**({"temperature": 0.5} | expected))


def test_do_sample_draws_where_the_models_default_is_greedy() -> None:
    assert in_json("do_sample", True, defaults=SamplingParams(temperature=0.0)).params.temperature == 1.0


@pytest.mark.parametrize(
    ("values", "told"),
    [
        ({"max_tokens": 5, "max_new_tokens": 6}, "max_tokens, which is max_new_tokens, is given twice .* 5 and 6"),
        ({"num_predict": -1, "max_tokens": 6}, "num_predict, which is max_tokens, is given twice .* -1 and 6"),
        ({"stop": ["a"], "stop_sequences": ["b"]}, "stop, which is stop_sequences, is given twice"),
        ({"do_sample": False, "temperature": 0.7}, "do_sample false contradicts temperature 0.7"),
        ({"do_sample": True, "temp": 0}, "do_sample true contradicts temp 0"),
        ({"logprobs": False, "top_logprobs": 3}, "logprobs, which is top_logprobs, is given twice"),
        ({"max_new_tokens": 0}, "^max_new_tokens: max_tokens must be at least 1, got 0"),
        ({"num_predict": "many"}, "^num_predict must be an integer, got 'many'"),
        ({"think": True, "enable_thinking": False}, "think, which is enable_thinking, is given twice"),
        ({"think": "low"}, "^think 'low' is an effort here: send reasoning_effort"),
        ({"logit_bias": {"5": 100, " 5": 100}}, "^logit_bias must have token ids as keys.* got ' 5'"),
        ({"logit_bias": {"5": 100, "05": 100}}, "^logit_bias must have token ids as keys.* got '05'"),
        ({"logit_bias": {"5": 100, "+5": 100}}, "^logit_bias must have token ids as keys.* got '\\+5'"),
        ({"logit_bias": {"1_0": 100}}, "^logit_bias must have token ids as keys.* got '1_0'"),
        ({"logit_bias": {"\u0665": 100}}, "^logit_bias must have token ids as keys"),
        ({"logit_bias": {"9" * 5000: 100}}, "^logit_bias must have token ids as keys.* got '9+\\.\\.\\.9+'$"),
        ({"stop_wrods": ["a"]}, "^sampling parameter 'stop_wrods' is unknown; did you mean 'stop_words'"),
        ({"max_new_token": 3}, "^sampling parameter 'max_new_token' is unknown; did you mean 'max_new_tokens'"),
        ({"max_tokens" * 7: 3}, "is unknown; known ones are"),
        ({"colour": 3}, "^sampling parameter 'colour' is unknown; known ones are .*do_sample, .*end_id, .*stop, "),
        ({"seed": 1, "stop": "\ud800"}, "^stop in sampling_parameters holds half a character"),
        ({"st\ud800p": "x"}, "^sampling_parameters holds half a character"),
        ({"add_generation_prompt": True, "continue_final_message": True}, "cannot both be true"),
        ({"enable_thinking": True, "chat_template_kwargs": {"enable_thinking": False}}, "^enable_thinking is given tw"),
        ({"tool_choice": "required"}, '^tool_choice may be "auto" or "none", got'),
        ({"tools": [{"type": "retrieval"}]}, r"^tools\[0\] is of type 'retrieval'"),
        ({"tools": {}}, "^tools must be a JSON array of objects"),
        ({"tools": ["x"]}, "^tools must be a JSON array of objects"),
        ({"chat_template_kwargs": [1]}, "^chat_template_kwargs must be a JSON object, got list"),
        ({"chat_template_kwargs": "{"}, "^chat_template_kwargs is not valid JSON"),
        ({"reasoning_effort": 3}, "^reasoning_effort must be a string"),
    ],
)
def test_contradictions_and_wrong_values_are_refused_with_the_names_that_were_sent(
    values: dict[str, Any], told: str
) -> None:
    with pytest.raises(RequestError, match=told):
        call(sampling_parameters=json.dumps(values))


def test_the_same_said_by_several_names_and_in_several_places_is_fine() -> None:
    said = call(
        sampling_parameters=json.dumps({"max_tokens": 5, "max_new_tokens": "5", "do_sample": False, "temperature": 0}),
        max_tokens=5,
        parameters={"num_predict": 5, "stop": "a", "stop_words": "a", "logprobs": True, "top_logprobs": 2},
    )
    assert said.params == SamplingParams(max_tokens=5, temperature=0.0, stop=("a",), logprobs=2)


@pytest.mark.parametrize("place", PLACES, ids=lambda place: place.__name__)
@pytest.mark.parametrize(
    ("name", "value", "expected"),
    [
        ("chat_template_kwargs", {"a": 1, "b": None}, ChatOptions(template_kwargs={"a": 1})),
        ("enable_thinking", False, ChatOptions(template_kwargs={"enable_thinking": False})),
        ("reasoning_effort", "low", ChatOptions(template_kwargs={"reasoning_effort": "low"})),
        ("tools", [{"name": "f"}], ChatOptions(tools=({"name": "f"},))),
        ("documents", [{"text": "f"}], ChatOptions(documents=({"text": "f"},))),
        ("continue_final_message", True, ChatOptions(continue_final_message=True)),
        ("add_generation_prompt", False, ChatOptions(add_generation_prompt=False)),
        ("parse_special", True, ChatOptions(parse_special=True)),
        ("add_special_tokens", True, ChatOptions(add_special_tokens=True)),
    ],
)
def test_what_a_template_is_told_comes_from_every_place(
    name: str, value: Any, expected: ChatOptions, place: Place
) -> None:
    assert place(name, value, messages=CHAT).chat == expected
    if not name.startswith(("parse", "add_special")):
        with pytest.raises(RequestError, match=f"^{name} needs messages"):
            place(name, value)


def test_what_needs_messages_is_refused_by_the_name_that_was_sent() -> None:
    for name in ("enable_thinking", "think"):
        for value in (True, False):
            with pytest.raises(RequestError, match=f"^{name} needs messages"):
                in_json(name, value)
            with pytest.raises(RequestError, match=f"^{name} needs messages"):
                call(sampling_parameters=json.dumps({"chat_template_kwargs": {}, name: value}))


def test_a_number_of_thousands_of_digits_is_refused_by_the_name_of_its_place() -> None:
    for sign in ("", "-"):
        number = sign + "7" * 5000
        for name in ("chat_template_kwargs", "tools", "documents", "logit_bias"):
            text = f'{{"a": {number}}}' if name in ("chat_template_kwargs", "logit_bias") else f'[{{"a": {number}}}]'
            with pytest.raises(RequestError, match=f"^{name} holds a number of 5000 digits; at most 4300 are read"):
                call(messages=CHAT, **{name: text})
        with pytest.raises(RequestError, match=r"^messages holds a number of 5000 digits; at most 4300 are read"):
            call(messages=f'[{{"role": "user", "content": "x", "more": {number}}}]')


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("text", "text"),
        ("guided_regex", "text"),
        ("regex", "text"),
        ("image_url", ["text"]),
        ("raw", True),
        ("include_reasoning", False),
        ("separate_reasoning", True),
        ("priority", 1),
        ("thinking", {"type": "enabled"}),
        ("streaming", False),
    ],
)
def test_what_asks_for_nothing_under_one_name_is_refused_under_another(name: str, value: Any) -> None:
    for place in PLACES[:3]:
        with pytest.raises(RequestError, match=f"^{name} is not supported here"):
            place(name, value)


NAMES_OF_OTHERS = """
    think raw context options regex ebnf lora_path custom_logit_processor separate_reasoning instructions reasoning text
    include max_tool_calls priority include_reasoning vllm_xargs kv_transfer_params is_return_log_probs
    exclude_input_from_output lora_weights lora_config draft_input_ids draft_logits num_draft_tokens decoder_input_ids
    image_bytes image_url video_bytes retention_token_range_starts retention_token_range_ends
    retention_token_range_priorities retention_token_range_durations_ms lookahead_window_size lookahead_ngram_size
    lookahead_verification_set_size n_discard grammar_lazy grammar_triggers response_fields thinking_forced_open
    parse_tool_calls speculative.n_max speculative.n_min speculative.p_min renormalize_logits remove_invalid_values
    dola_layers prompt_lookup_num_tokens cache_implementation custom_generate candidate_count response_schema
    response_mime_type generation_config thinking thinking_budget max_think_tokens nvext safe_prompt extra_body
    best_of_sequences return_logprob top_logprobs_num no_stop_trim streaming sampling_params
"""


@pytest.mark.parametrize("name", NAMES_OF_OTHERS.split())
def test_no_name_of_another_server_is_taken_for_a_proxys(name: str) -> None:
    assert is_known(name)


def test_tools_that_may_not_be_called_are_not_told() -> None:
    tools = json.dumps([{"type": "function", "function": {"name": "f"}}])
    assert call(messages=CHAT, tools=tools, parameters={"tool_choice": "auto"}).chat.tools
    assert not call(messages=CHAT, tools=tools, parameters={"tool_choice": "none"}).chat.tools


def test_deep_nesting_is_refused_by_name_and_not_by_a_full_stack() -> None:
    for depth in (70, 90_000):
        deep = '{"a":' * depth + "1" + "}" * depth
        for name in ("chat_template_kwargs", "tools", "documents"):
            with pytest.raises(RequestError, match=f"^{name} is (nested too deeply|not valid JSON)"):
                call(messages=CHAT, **{name: deep if name == "chat_template_kwargs" else f"[{deep}]"})
        message = f'[{{"role": "user", "content": "x", "more": {deep}}}]'
        with pytest.raises(RequestError, match=r"^messages is (nested too deeply|not valid JSON)"):
            call(messages=message)

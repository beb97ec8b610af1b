"""What a request's parameters say besides sampling: its longest wait, and names that are nearly right."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from types import SimpleNamespace

import numpy as np
import pytest

from llm_engine.request import Code, RequestError, SamplingParams
from wire import Call, read_call


def asked(parameters: Mapping[str, object] | None = None, timeout: int = 0) -> Call:
    """The call that a prompt with these parameters makes; `timeout` is what Triton itself knows of, in microseconds."""
    prompt = SimpleNamespace(name=lambda: "text_input", as_numpy=lambda: np.array([[b"Hi"]], dtype=np.object_))
    request = SimpleNamespace(
        inputs=lambda: [prompt],
        parameters=lambda: "" if parameters is None else json.dumps(parameters),
        requested_output_names=lambda: ["text_output"],
        timeout=lambda: timeout,
    )
    return read_call(request, "a", SamplingParams())


@pytest.mark.parametrize("parameters", [None, {}, {"timeout": None}, {"timeout": 0}, {"timeout": "0"}])
def test_without_a_timeout_a_request_may_wait_as_long_as_the_server_lets_it(parameters: dict[str, object]) -> None:
    assert asked(parameters).timeout_seconds == math.inf


@pytest.mark.parametrize("value", [2_500_000, "2500000"])
def test_a_timeout_is_in_microseconds_be_it_tritons_or_a_parameter_as_over_http(value: int | str) -> None:
    assert asked({"timeout": value}).timeout_seconds == 2.5
    assert asked(timeout=int(value)).timeout_seconds == 2.5
    assert asked({"timeout": 7}, timeout=int(value)).timeout_seconds == 2.5


@pytest.mark.parametrize("value", ["soon", "", "1.5", -1, "-1", 1.5, 2.0, True, math.inf, math.nan])
def test_a_timeout_that_is_no_whole_number_of_microseconds_is_refused(value: object) -> None:
    with pytest.raises(RequestError, match="timeout must be a whole number of microseconds, got") as refused:
        asked({"timeout": value})
    assert refused.value.code is Code.INVALID_ARG


@pytest.mark.parametrize(
    ("name", "meant"),
    [
        ("max_token", "max_tokens"),
        ("temprature", "temperature"),
        ("stop_word", "stop_words"),
        ("llm_prioritiy", "llm_priority"),
        ("cache-salt", "cache_salt"),
        ("timeouts", "timeout"),
    ],
)
def test_what_is_nearly_a_parameters_name_is_refused_with_the_right_one(name: str, meant: str) -> None:
    with pytest.raises(RequestError, match=f"parameter '{name}' is unknown; did you mean '{meant}'?"):
        asked({name: 1})


def test_what_proxies_and_clients_of_triton_add_means_nothing() -> None:
    strange = ("traceparent", "tracestate", "x-request-id", "triton_enable_empty_final_response", "binary_data_output")
    assert asked(dict.fromkeys(strange, "1")) == asked()

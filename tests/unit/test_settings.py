"""What config.pbtxt says, as the model reads it: all of it or one line that names what is wrong."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from google.protobuf import json_format, text_format  # type: ignore[import-untyped]
from tritonclient.grpc import model_config_pb2

from llm_engine.config import ConfigError, EngineConfig
from settings import Settings, model_keeps_queue, read_settings

CONFIG = (Path(__file__).parents[2] / "model_repository/llm/config.pbtxt").read_text()
CALM = "dynamic_batching { preferred_batch_size: [ 1 ] }"


def as_triton_tells(text: str) -> dict[str, Any]:
    """A configuration as `initialize` gets it: JSON, in which 64-bit numbers are strings."""
    message = text_format.Parse(text, model_config_pb2.ModelConfig())
    found: dict[str, Any] = json_format.MessageToDict(message, preserving_proto_field_name=True)
    return found


def config(**parameters: str) -> dict[str, Any]:
    texts = {"model": "tiny", **parameters}
    values = {key: {"string_value": text} for key, text in texts.items()}
    return {"model_transaction_policy": {"decoupled": True}, "parameters": values}


def refusal(values: Mapping[str, Any], **given: Any) -> str:
    with pytest.raises(ConfigError) as refused:
        read_settings(values, **given)
    message = str(refused.value)
    assert "\n" not in message
    return message


def test_what_the_project_ships_is_understood_and_changes_no_default(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("MODEL", "DTYPE", "KERNELS", "THREADS", "LOG_LEVEL"):
        monkeypatch.delenv(f"TOKENSTREAM_{name}", raising=False)
    settings, engine = read_settings(as_triton_tells(CONFIG), device="cpu", cpu_share=2)
    assert settings == Settings()
    assert engine == EngineConfig(engine.model, cpu_share=2)


def test_texts_become_values_and_variables_are_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WHICH", "other")
    texts = {"model": "${WHICH}", "max_sequences": " 7 ", "max_queue_seconds": "2.5", "prefix_cache": "No"}
    settings, engine = read_settings(config(**texts, log_prompts="TRUE", log_level="${LOUD:-debug}"))
    assert (engine.model, engine.max_sequences, engine.max_queue_seconds, engine.prefix_cache) == (
        "other",
        7,
        2.5,
        False,
    )
    assert (settings.log_prompts, settings.log_level) == (True, "debug")


@pytest.mark.parametrize("name", ["max_sequence", "Model", "", "device", "cpu_share"])
def test_a_parameter_that_is_unknown_or_not_the_deployers_is_refused_with_those_that_are_known(name: str) -> None:
    message = refusal(config(**{name: "1"}))
    assert f"parameter {name!r} is unknown" in message
    assert "max_sequences, " in message
    assert "vllm_metric_names" in message


@pytest.mark.parametrize(
    ("name", "text", "told"),
    [
        ("max_sequences", "many", "must be an integer, got 'many'"),
        ("max_sequences", "1.5", "must be an integer"),
        ("max_sequences", "", "must be an integer"),
        ("max_sequences", "nan", "must be an integer"),
        ("max_sequences", "0", "must be at least 1"),
        ("kv_tokens", "-1", "must be at least 0"),
        ("max_queue_size", "-1", "must be at least 0"),
        ("max_queue_seconds", "soon", "must be a number, got 'soon'"),
        ("max_queue_seconds", "nan", "must be at least 0.001 and finite, got nan"),
        ("max_queue_seconds", "inf", "must be at least 0.001 and finite, got inf"),
        ("max_queue_seconds", "0", "must be at least 0.001"),
        ("max_request_seconds", "-inf", "must be at least 0.001 and finite, got -inf"),
        ("prefix_cache", "maybe", "must be true or false, got 'maybe'"),
        ("metrics", "", "must be true or false"),
        ("dtype", "int4", "must be one of auto, bfloat16, float16, float32"),
        ("kernels", "fast", "must be one of auto, native, torch"),
        ("log_level", "loud", "must be one of debug, info, warning, error"),
        ("max_tokens_per_response", "0", "must be at least 1, got 0"),
        ("max_step_tokens", "33", "must be at least max_sequences + block_size (64), got 33"),
        ("model", "", "must name a folder"),
    ],
)
def test_a_value_that_cannot_be_used_is_refused_by_name(name: str, text: str, told: str) -> None:
    assert refusal(config(**{name: text})).startswith(f"{name} {told}")


def test_what_nobody_can_do_without_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("NOWHERE", raising=False)
    streaming = {"model_transaction_policy": {"decoupled": True}}
    assert "parameter 'model' is missing" in refusal(streaming)
    assert "environment variable NOWHERE is not set" in refusal(config(model="${NOWHERE}"))
    for policy in ({}, {"decoupled": False}):
        assert "decoupled: true } is missing" in refusal({**config(), "model_transaction_policy": policy})


@pytest.mark.parametrize(
    "batching",
    [
        "",
        "dynamic_batching { }",
        CALM,
        "dynamic_batching { preferred_batch_size: [ 1 ] max_queue_delay_microseconds: 100 preserve_ordering: true }",
        "dynamic_batching { default_queue_policy { } }",
        "dynamic_batching { priority_levels: 0 default_queue_policy { max_queue_size: 0 } }",
    ],
)
def test_the_model_keeps_the_queue_where_triton_has_no_policy(batching: str) -> None:
    assert model_keeps_queue(as_triton_tells(batching))


@pytest.mark.parametrize(
    "policy",
    [
        "priority_levels: 3 default_priority_level: 2",
        "default_queue_policy { max_queue_size: 256 }",
        "default_queue_policy { default_timeout_microseconds: 60000000 allow_timeout_override: true }",
        "priority_queue_policy { key: 1 value { max_queue_size: 2 } }",
    ],
)
def test_any_policy_leaves_the_queue_to_triton(policy: str) -> None:
    assert not model_keeps_queue(as_triton_tells(f"dynamic_batching {{ preferred_batch_size: [ 1 ] {policy} }}"))


def test_config_pbtxt_comes_without_a_policy_and_the_one_it_shows_is_one() -> None:
    assert model_keeps_queue(as_triton_tells(CONFIG))
    lines = CONFIG.partition("as below.")[2].splitlines()
    shown = " ".join(line.removeprefix("#") for line in lines if line.startswith("#   "))
    assert "max_queue_size" in shown
    assert CONFIG.count(CALM) == 1
    assert not model_keeps_queue(as_triton_tells(CONFIG.replace(CALM, CALM.replace("[ 1 ]", f"[ 1 ] {shown}"))))

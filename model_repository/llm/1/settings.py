"""What config.pbtxt sets for the adapter itself; all other parameters are the engine's.

Every value is checked once, at load. It does not know what the settings do.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from llm_engine.config import ConfigError, EngineConfig, expand, parse

LEVELS = ("debug", "info", "warning", "error")
_GIVEN = ("device", "cpu_share")  # decided by the adapter, never by the deployer


@dataclass(frozen=True, slots=True)
class Settings:
    """`max_tokens_per_response` bounds how many waiting tokens of a stream one response may carry.

    `log_level` is one of LEVELS; `log_prompts` puts prompts into the log; `metrics` exports the engine's numbers to
    Triton's metrics port, with `vllm_metric_names` under vLLM's names too.
    """

    max_tokens_per_response: int = 1
    log_level: str = "info"
    log_prompts: bool = False
    metrics: bool = True
    vllm_metric_names: bool = False

    def __post_init__(self) -> None:
        """Refuse values out of range."""
        if self.max_tokens_per_response < 1:
            raise ConfigError(f"max_tokens_per_response must be at least 1, got {self.max_tokens_per_response}")
        if self.log_level not in LEVELS:
            raise ConfigError(f"log_level must be one of {', '.join(LEVELS)}, got {self.log_level!r}")


def read_settings(config: Mapping[str, Any], **given: Any) -> tuple[Settings, EngineConfig]:
    """The adapter's and the engine's settings from a model's configuration; `given` are the adapter's decisions.

    Raises ConfigError naming a parameter that is unknown, not of its type, or out of range.
    """
    if not config.get("model_transaction_policy", {}).get("decoupled"):
        raise ConfigError("model_transaction_policy { decoupled: true } is missing; without it nothing can be streamed")
    texts = {key: value["string_value"] for key, value in config.get("parameters", {}).items()}
    own = {field.name: str(field.type) for field in fields(Settings)}
    engine = {field.name: str(field.type) for field in fields(EngineConfig) if field.name not in _GIVEN}
    values: dict[str, Any] = {}
    for key, text in texts.items():
        if (kind := own.get(key) or engine.get(key)) is None:
            raise ConfigError(f"parameter {key!r} is unknown; known ones are {', '.join(sorted({*own, *engine}))}")
        values[key] = parse(key, kind, expand(text).strip())
    settings = Settings(**{key: value for key, value in values.items() if key in own})
    if "model" not in values:
        raise ConfigError("parameter 'model' is missing; name a folder, a .gguf file, package://NAME/FILE or an id")
    return settings, EngineConfig(**{key: value for key, value in values.items() if key in engine}, **given)


def model_keeps_queue(config: Mapping[str, Any]) -> bool:
    """Whether the model keeps the queue: config.pbtxt gives Triton's no policy, so Triton hands requests over at once.

    With any policy (size, timeout, priorities) Triton 2.51 gives out queued requests only when the instance is seen
    idle, and may look for that but every 500 ms; measured, one of eight requests of a burst waited that long.
    """
    batching = config.get("dynamic_batching") or {}
    policy = batching.get("default_queue_policy") or {}
    numbers = (
        batching.get("priority_levels"),
        policy.get("max_queue_size"),
        policy.get("default_timeout_microseconds"),
    )
    return not any(int(number or 0) for number in numbers) and not batching.get("priority_queue_policy")

"""What a checkpoint says of answers: which tokens end them, and how tokens are drawn if a request does not say."""

from __future__ import annotations

from typing import Any

from ..config import ConfigError
from ..request import RequestError, SamplingParams


def eos_token_ids(model: Any, tokenizer: Any) -> tuple[int, ...]:
    """Token ids that end an answer; empty for a model without any, whose answers end at max_tokens."""
    for source in (model.generation_config, model.config, tokenizer):
        ids = getattr(source, "eos_token_id", None)
        if ids is not None:
            return tuple(ids) if isinstance(ids, list | tuple) else (int(ids),)
    return ()


def defaults(generation: Any) -> SamplingParams:
    """Sampling values of a generation_config; ConfigError if one is out of range."""
    names = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty")
    chosen = {name: getattr(generation, name, None) for name in names}
    try:
        return SamplingParams(**{name: value for name, value in chosen.items() if value is not None})
    except RequestError as error:
        raise ConfigError(f"the model's generation_config.json is out of range: {error}") from None

"""What a checkpoint says of answers: which tokens end them, and how tokens are drawn if a request does not say."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from llm_tools.folder import CONFIG, read_json

from ..config import ConfigError
from ..request import RequestError, SamplingParams

log = logging.getLogger(__name__)

_GENERATION = "generation_config.json"
_NUMBERS = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty")


def check_generation(folder: Path) -> None:
    """Raise ConfigError for a generation_config.json that transformers would pass over, with its ends and defaults."""
    file = folder / _GENERATION
    if not file.is_file():
        return
    stated = read_json(file)
    for name in _NUMBERS:
        value = stated.get(name)
        kinds, told = (int, "a whole number") if name == "top_k" else (int | float, "a number")
        if value is not None and (isinstance(value, bool) or not isinstance(value, kinds)):
            raise ConfigError(f"{name} in {file} must be {told}, got {value!r}; correct it, or fetch the file again")


def eos_token_ids(model: Any, tokenizer: Any) -> tuple[int, ...]:
    """Token ids that end an answer; empty for a model without any, whose answers end at max_tokens.

    All that generation_config.json, config.json and the tokenizer name, in this order. Ids that the model cannot draw
    are left out, with a warning. Raises ConfigError for what is neither a token nor an id.
    """
    found: dict[int, None] = {}
    vocab_size = model.get_output_embeddings().weight.shape[0]
    places = {_GENERATION: model.generation_config, CONFIG: model.config, "the tokenizer": tokenizer}
    text_config = model.config.get_text_config()
    if text_config is not model.config:
        places["text_config"] = text_config
    for place, source in places.items():
        for token in _ids(place, getattr(source, "eos_token_id", None), tokenizer):
            if 0 <= token < vocab_size:
                found[token] = None
            else:
                log.warning("eos_token_id %d of %s is no token of this model (%d tokens)", token, place, vocab_size)
    return tuple(found)


def forget_unstated(model: Any, folder: Path) -> None:
    """Drop end tokens that `folder` does not state: those are of the model's class, and of another vocabulary."""
    stated = read_json(folder / CONFIG)
    inner = stated.get("text_config")
    if "eos_token_id" in stated or (isinstance(inner, dict) and "eos_token_id" in inner):
        return
    for config in (model.config, model.config.get_text_config()):
        config.eos_token_id = None
    if not (folder / _GENERATION).is_file():  # then transformers derived it from the configuration
        model.generation_config.eos_token_id = None


def defaults(generation: Any) -> SamplingParams:
    """Sampling values of a generation_config; ConfigError if one is out of range."""
    chosen = {name: getattr(generation, name, None) for name in _NUMBERS}
    try:
        return SamplingParams(**{name: value for name, value in chosen.items() if value is not None})
    except RequestError as error:
        raise ConfigError(f"the model's {_GENERATION} is out of range: {error}") from None


def _ids(place: str, stated: Any, tokenizer: Any) -> Iterator[int]:
    """The ids in an `eos_token_id` as files have it: nothing, an id, a token's text, or a list of these."""
    for one in stated if isinstance(stated, list | tuple) else [stated]:
        if isinstance(one, str):
            token = tokenizer.get_vocab().get(one)
            if token is None:
                raise ConfigError(f"eos_token_id of {place} names {one!r}, which is no token of the model's tokenizer")
            yield token
        elif isinstance(one, int) and not isinstance(one, bool):
            yield one
        elif one is not None:
            raise ConfigError(f"eos_token_id of {place} must be a token id or a list of them, got {one!r}")

"""Sampling parameters as clients write them: a JSON object whose values may be strings, made into SamplingParams.

A key that is unknown, or a value of the wrong type or out of range, is a RequestError naming the field.
It does not know tensors, nor what the parameters do.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from dataclasses import fields, replace
from typing import Any

from llm_engine.request import RequestError, SamplingParams

NAMES = tuple(field.name for field in fields(SamplingParams))


def read_parameters(values: Mapping[str, Any], defaults: SamplingParams) -> SamplingParams:
    """Return `defaults` (a model's generation_config, say) with `values` in place of theirs; null changes nothing."""
    for key in values:
        if key not in NAMES:
            raise RequestError(f"sampling parameter {key!r} is unknown; known ones are {', '.join(sorted(NAMES))}")
    coerced = {key: _coerced(key, value) for key, value in values.items() if value is not None}
    return replace(defaults, **coerced)


def _coerced(key: str, value: object) -> Any:
    try:
        return _COERCE[key](key, value)
    except RecursionError:
        raise RequestError(f"{key} is nested too deeply") from None


def _as_int(name: str, value: object) -> int:
    if isinstance(value, str):
        try:
            return int(value)
        except ValueError:
            raise RequestError(f"{name} must be an integer, got {value!r}") from None
    if isinstance(value, bool) or not isinstance(value, int | float) or value != value // 1:
        raise RequestError(f"{name} must be an integer, got {value!r}")
    return int(value)


def _as_float(name: str, value: object) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float | str):
        raise RequestError(f"{name} must be a number, got {value!r}")
    try:
        return float(value)
    except OverflowError:  # an integer of more than 308 digits
        return math.inf if isinstance(value, int) and value > 0 else -math.inf
    except ValueError:
        raise RequestError(f"{name} must be a number, got {value!r}") from None


def _as_bool(name: str, value: object) -> bool:
    if isinstance(value, bool):
        return value
    text = str(value).lower()
    if text in ("true", "1"):
        return True
    if text in ("false", "0"):
        return False
    raise RequestError(f"{name} must be true or false, got {value!r}")


def _as_strings(name: str, value: object) -> tuple[str, ...]:
    if isinstance(value, str):
        return (value,)
    if not isinstance(value, list | tuple) or not all(isinstance(v, str) for v in value):
        raise RequestError(f"{name} must be a string or a list of strings, got {value!r}")
    return tuple(value)


def _as_ids(name: str, value: object) -> tuple[int, ...]:
    if not isinstance(value, list | tuple):
        raise RequestError(f"{name} must be a list of token ids, got {value!r}")
    return tuple(_as_int(name, v) for v in value)


def _as_bias(name: str, value: object) -> tuple[tuple[int, float], ...]:
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except ValueError:
            raise RequestError(f"{name} must be an object of token id to bias, got {value!r}") from None
    if not isinstance(value, Mapping):
        raise RequestError(f"{name} must be an object of token id to bias, got {value!r}")
    return tuple(sorted((_as_int(name, k), _as_float(name, v)) for k, v in value.items()))


_COERCE: Mapping[str, Callable[[str, object], Any]] = {
    "max_tokens": _as_int,
    "min_tokens": _as_int,
    "temperature": _as_float,
    "top_k": _as_int,
    "top_p": _as_float,
    "min_p": _as_float,
    "repetition_penalty": _as_float,
    "presence_penalty": _as_float,
    "frequency_penalty": _as_float,
    "seed": _as_int,
    "stop": _as_strings,
    "stop_token_ids": _as_ids,
    "ignore_eos": _as_bool,
    "include_stop_str_in_output": _as_bool,
    "skip_special_tokens": _as_bool,
    "logprobs": _as_int,
    "logit_bias": _as_bias,
    "bad_words": _as_strings,
}

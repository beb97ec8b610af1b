"""Parameters as clients write them, by our names and by others', made into SamplingParams and ChatOptions.

A name that is unknown, a value of the wrong type or out of range, and two that contradict each other are a RequestError
naming what was sent. It does not know tensors, nor what the parameters do.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, fields, replace
from difflib import get_close_matches
from typing import Any

import chat_options
from chat_options import ChatOptions, as_bool
from foreign_names import FOREIGN, NO_EFFECT, Refused, Synonym
from llm_engine.request import MAX_COUNT, MAX_STOP_TOKEN_IDS, RequestError, SamplingParams, check_token_ids
from quoted import quoted

NAMES = tuple(field.name for field in fields(SamplingParams))
_TOKEN_ID = re.compile("0|[1-9][0-9]{0,18}")  # as JSON writes a number, so that one id has one key
_MAX_NAME = 64  # characters of an unknown name that is compared with the known ones


@dataclass(frozen=True, slots=True)
class _Value:
    """What was sent as `name`, and what it `means`."""

    name: str
    sent: Any
    means: Any


def is_known(name: str) -> bool:
    """Whether `read_parameters` takes it: to honour, to refuse, or to pass where it asks for nothing."""
    return name in _COERCE or name in FOREIGN or name in NO_EFFECT


def read_parameters(
    given: Iterable[tuple[str, Any]], defaults: SamplingParams, vocabulary: int = MAX_COUNT
) -> tuple[SamplingParams, ChatOptions]:
    """What all of `given`, pairs of name and value, say together; null says nothing.

    What is not given of the sampling is `defaults`', a model's generation_config say. The same may be given twice.
    Ids that end an answer lie below `vocabulary`, which the engine checks too, but for names that it does not know.
    """
    values: dict[str, _Value] = {}
    for name, value in given:
        if value is not None and name not in NO_EFFECT:
            _enter(values, name, value)
    means = {ours: value.means for ours, value in values.items()}
    params = replace(defaults, **{name: means[name] for name in NAMES if name in means})
    sent = {ours: value.name for ours, value in values.items()}
    return _derived(params, values, vocabulary), chat_options.chat_options(means, sent)


def _enter(values: dict[str, _Value], name: str, value: Any) -> None:
    ours, sent = name, value
    foreign = FOREIGN.get(name)
    if isinstance(foreign, Refused):
        if foreign.passes(value):
            return
        raise RequestError(f"{name} is not supported here (got {quoted(value)}): {foreign.reason}")
    if isinstance(foreign, Synonym):
        ours, value = foreign.ours, foreign.convert(value)
    elif name not in _COERCE:
        raise RequestError(f"sampling parameter {quoted(name)} is unknown; {_advice(name)}")
    if name == "logprobs" and isinstance(value, bool):  # the chat API's: whether, and top_logprobs says how many
        ours, value = ("return_logprobs", True) if value else ("logprobs", None)
    means = None if value is None else _meaning(name, ours, value)
    before = values.setdefault(ours, _Value(name, sent, means))
    if before.means != means:
        which = name if before.name == name else f"{before.name}, which is {name},"
        raise RequestError(f"{which} is given twice with different values: {quoted(before.sent)} and {quoted(sent)}")


def _advice(name: str) -> str:
    honoured = {*_COERCE, *(theirs for theirs, meaning in FOREIGN.items() if isinstance(meaning, Synonym))}
    if len(name) <= _MAX_NAME and (near := get_close_matches(name, sorted(honoured), 1, 0.75)):
        return f"did you mean {near[0]!r}?"
    return f"known ones are {', '.join(sorted(_COERCE))}, and those of other servers that docs/requests.md names"


def _meaning(name: str, ours: str, value: Any) -> Any:
    """The value of `ours` that was sent as `name`; one that is refused even alone is refused by that name."""
    means = _coerced(ours, name, value)
    if ours in NAMES:
        try:
            SamplingParams(**{ours: means})
        except RequestError as error:
            raise error if name == ours else RequestError(f"{name}: {error}") from None
    return means


def _derived(params: SamplingParams, values: Mapping[str, _Value], vocabulary: int) -> SamplingParams:
    """With what parameters that are none of SamplingParams' ask of it."""
    changes: dict[str, Any] = {}
    if "do_sample" in values:
        draws, warm = values["do_sample"].means, params.temperature > 0
        if "temperature" in values and draws != warm:
            temperature = values["temperature"]
            raise RequestError(
                f"do_sample {str(draws).lower()} contradicts {temperature.name} {quoted(temperature.sent)}; "
                f"send one of them"
            )
        if draws != warm:
            changes["temperature"] = 1.0 if draws else 0.0
    if "return_logprobs" in values and values["return_logprobs"].means and params.logprobs is None:
        changes["logprobs"] = 0
    if "end_id" in values:
        ends = values["end_id"]
        check_token_ids(ends.name, ends.means, vocabulary)
        ids = tuple(dict.fromkeys((*params.stop_token_ids, *ends.means)))
        if len(ids) > MAX_STOP_TOKEN_IDS:
            raise RequestError(
                f"{ends.name} and stop_token_ids may hold at most {MAX_STOP_TOKEN_IDS} ids together, got {len(ids)}"
            )
        changes["stop_token_ids"] = ids
    return replace(params, **changes) if changes else params


def _coerced(ours: str, name: str, value: object) -> Any:
    try:
        return _COERCE[ours](name, value)
    except RecursionError:
        raise RequestError(f"{name} is nested too deeply") from None


def _as_int(name: str, value: object) -> int:
    if isinstance(value, str):
        try:
            return int(value)
        except ValueError:
            raise RequestError(f"{name} must be an integer, got {quoted(value)}") from None
    if isinstance(value, bool) or not isinstance(value, int | float) or value != value // 1:
        raise RequestError(f"{name} must be an integer, got {quoted(value)}")
    return int(value)


def _as_float(name: str, value: object) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float | str):
        raise RequestError(f"{name} must be a number, got {quoted(value)}")
    try:
        return float(value)
    except OverflowError:  # an integer of more than 308 digits
        return math.inf if isinstance(value, int) and value > 0 else -math.inf
    except ValueError:
        raise RequestError(f"{name} must be a number, got {quoted(value)}") from None


def _as_strings(name: str, value: object) -> tuple[str, ...]:
    if isinstance(value, str):
        return (value,)
    if not isinstance(value, list | tuple) or not all(isinstance(v, str) for v in value):
        raise RequestError(f"{name} must be a string or a list of strings, got {quoted(value)}")
    return tuple(value)


def _as_ids(name: str, value: object) -> tuple[int, ...]:
    if not isinstance(value, list | tuple):
        raise RequestError(f"{name} must be a list of token ids, got {quoted(value)}")
    return tuple(_as_int(name, v) for v in value)


def _as_ends(name: str, value: object) -> tuple[int, ...]:
    """One id or several; -1 is TensorRT-LLM's "none"."""
    ids = value if isinstance(value, list | tuple) else [value]
    return tuple(i for i in (_as_int(name, v) for v in ids) if i >= 0)


def _as_seed(name: str, value: object) -> int | None:
    """-1 asks for one to be drawn, as nothing does."""
    seed = _as_int(name, value)
    return None if seed == -1 else seed


def _as_bias(name: str, value: object) -> tuple[tuple[int, float], ...]:
    value = chat_options.from_json(name, value)
    if not isinstance(value, Mapping):
        raise RequestError(f"{name} must be an object of token id to bias, got {quoted(value)}")
    for key in value:
        if not _TOKEN_ID.fullmatch(str(key)):
            raise RequestError(f'{name} must have token ids as keys, in digits alone like "5"; got {quoted(str(key))}')
    return tuple(sorted((int(k), _as_float(name, v)) for k, v in value.items()))


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
    "seed": _as_seed,
    "stop": _as_strings,
    "stop_token_ids": _as_ids,
    "ignore_eos": as_bool,
    "include_stop_str_in_output": as_bool,
    "skip_special_tokens": as_bool,
    "logprobs": _as_int,
    "logit_bias": _as_bias,
    "bad_words": _as_strings,
    "do_sample": as_bool,
    "return_logprobs": as_bool,
    "end_id": _as_ends,
    **chat_options.COERCE,
}

"""What a Triton request says, as plain values: the inputs of config.pbtxt read, checked and given their defaults.

Whatever is wrong is a RequestError naming the input and the bound. It does not know how a request is answered.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from datetime import datetime
from difflib import get_close_matches
from enum import Enum
from typing import Any, cast

import numpy as np

from chat_options import COERCE, ChatOptions
from json_text import read_json
from llm_engine.request import (
    MAX_BAD_WORDS,
    MAX_COUNT,
    MAX_STOP_STRINGS,
    MAX_STOP_TOKEN_IDS,
    RequestError,
    SamplingParams,
    is_unicode,
)
from messages import read_messages
from parameters import NAMES, is_known, read_parameters
from quoted import quoted

_LISTS = {  # inputs of several elements, and how many say something
    "stop_words": MAX_STOP_STRINGS,
    "bad_words": MAX_BAD_WORDS,
    "stop_token_ids": MAX_STOP_TOKEN_IDS,
}
_MAX_ELEMENTS = 1024  # of these, the empty ones included, and of any other input of strings
_OWN_INPUTS = frozenset(
    (
        *("text_input", "messages", "input_ids", "sampling_parameters", "operation", "stream"),
        *("exclude_input_in_output", "resume_token_ids", "resume_fingerprint", "template_time"),
    )
)
_OWN_PARAMETERS = frozenset({"llm_priority", "cache_salt", "timeout"})
_NEARLY = tuple({*NAMES, *COERCE, *_LISTS, *_OWN_PARAMETERS})
MAX_ID_BYTES = 256
_MAX_SALT_BYTES = 1024
_MAX_TIMEOUT = 2**64 - 1  # microseconds: Triton's own are 64 bits
_MAX_PARAMETERS = 256  # request parameters
_MAX_PARAMETERS_CHARACTERS = 2**20  # of all of them together, as the JSON that Triton hands over
_MAX_NAME = 64  # characters of an unknown parameter's name that is compared with the known ones


class Operation(Enum):
    """What is wanted; only GENERATE needs a seat."""

    GENERATE = "generate"
    TOKENIZE = "tokenize"
    DETOKENIZE = "detokenize"
    INFO = "info"


@dataclass(slots=True)
class Call:
    """One request. Exactly one of `text`, `messages` and `input_ids` is set, but for INFO, which needs none."""

    request_id: str
    operation: Operation = Operation.GENERATE
    text: str | None = None
    messages: list[dict[str, Any]] | None = None
    input_ids: list[int] = field(default_factory=list)
    params: SamplingParams = field(default_factory=SamplingParams)
    chat: ChatOptions = field(default_factory=ChatOptions)
    stream: bool = True
    exclude_input: bool = True
    echo: str | None = None  # the prompt's text, where it opens the answer
    resume_token_ids: list[int] = field(default_factory=list)
    resume_fingerprint: str | None = None
    template_time: datetime | None = None
    priority: int = 2
    cache_salt: str = ""
    timeout_seconds: float = math.inf  # longest wait for a seat
    outputs: frozenset[str] = frozenset()


def read_id(request: Any) -> str:
    """A Triton request's id, "" if it has none; RequestError if it is no text."""
    try:
        return str(request.request_id())
    except UnicodeDecodeError:
        raise RequestError("the request id is not valid UTF-8") from None


def input_bytes(request: Any) -> int:
    """Bytes of all inputs of a Triton InferenceRequest, which is roughly what its preparation costs.

    Strings that are too many to be counted are a RequestError.
    """
    return sum(_bytes(tensor.name(), tensor.as_numpy()) for tensor in request.inputs())


def _bytes(name: str, array: Any) -> int:
    if array.dtype != np.object_:
        return int(array.nbytes)
    if array.size > _MAX_ELEMENTS:  # strings of no bytes cost as much
        raise RequestError(f"{name} may hold at most {_LISTS.get(name, 1)} entries, got {array.size}")
    return sum(map(len, array.flat))


def read_call(request: Any, request_id: str, defaults: SamplingParams, vocabulary: int = MAX_COUNT) -> Call:
    """Read a Triton InferenceRequest, known as `request_id`; RequestError if anything in it cannot be honoured.

    Token ids that an answer may hold lie below `vocabulary`.
    """
    if (size := len(request_id.encode())) > MAX_ID_BYTES:
        raise RequestError(f"the request id may have at most {MAX_ID_BYTES} bytes, got {size}")
    parameters = _request_parameters(request)
    inputs = {tensor.name(): tensor for tensor in request.inputs()}
    call = Call(request_id=request_id, outputs=frozenset(request.requested_output_names()))
    operation = _one(inputs, "operation", _text)
    try:
        call.operation = Operation(operation or "generate")
    except ValueError:
        known = ", ".join(o.value for o in Operation)
        raise RequestError(f"operation must be one of {known}, got {quoted(operation)}") from None
    _read_prompt(call, inputs)
    call.params, call.chat = read_parameters(_parameters(inputs, parameters), defaults, vocabulary)
    if call.messages is None:
        call.chat.refuse_without_messages()
    call.stream = _one(inputs, "stream", bool) is not False
    call.exclude_input = _one(inputs, "exclude_input_in_output", bool) is not False
    if call.stream and not call.exclude_input:
        raise RequestError("exclude_input_in_output may be false only with stream false")
    call.resume_token_ids = _many(inputs, "resume_token_ids", int) or []
    call.resume_fingerprint = _one(inputs, "resume_fingerprint", _text) or None
    call.template_time = _read_time(_one(inputs, "template_time", _text))
    call.priority = _priority(parameters.get("llm_priority", 2))
    call.cache_salt = _salt(parameters.get("cache_salt"))
    call.timeout_seconds = _timeout(request.timeout() or parameters.get("timeout"))
    return call


def _request_parameters(request: Any) -> dict[str, Any]:
    """Triton's request parameters. All of them come in one piece, which is measured before it is read."""
    try:
        text = request.parameters()
    except UnicodeDecodeError:
        raise RequestError("a request parameter, or its name, is not valid UTF-8") from None
    if not text:
        return {}
    if len(text) > _MAX_PARAMETERS_CHARACTERS:
        raise RequestError(
            f"the request parameters have {len(text)} characters; at most {_MAX_PARAMETERS_CHARACTERS} are read: "
            f"send what is long as an input"
        )
    parameters = cast(dict[str, Any], json.loads(text))
    if len(parameters) > _MAX_PARAMETERS:
        raise RequestError(f"a request may have at most {_MAX_PARAMETERS} parameters, got {len(parameters)}")
    return parameters


def _read_prompt(call: Call, inputs: dict[str, Any]) -> None:
    call.text = _one(inputs, "text_input", _text)
    messages = _one(inputs, "messages", _text)
    if messages is not None:
        call.messages = read_messages("messages", messages)
    ids = _many(inputs, "input_ids", int)
    given = [
        n for n, v in (("text_input", call.text), ("messages", call.messages), ("input_ids", ids)) if v is not None
    ]
    if call.operation is Operation.INFO:
        return
    if call.operation is Operation.DETOKENIZE and given != ["input_ids"]:
        raise RequestError("operation detokenize takes input_ids and no other prompt")
    if len(given) != 1:
        raise RequestError(
            f"send exactly one of text_input, messages and input_ids; got {' and '.join(given) if given else 'none'}"
        )
    call.input_ids = ids or []
    if ids == []:
        raise RequestError("input_ids is empty; send at least one token id")


def _read_time(text: str | None) -> datetime | None:
    if not text:
        return None
    try:
        return datetime.fromisoformat(text)
    except ValueError:
        raise RequestError(f"template_time must be an ISO 8601 time, got {quoted(text)}") from None


def _parameters(inputs: dict[str, Any], parameters: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    """All that is said by name: in the JSON object, as inputs of their own, and as Triton's request parameters.

    A request parameter of another name may be a proxy's and means nothing here, unless it is nearly a right one.
    """
    yield from _json_object("sampling_parameters", _one(inputs, "sampling_parameters", _text)).items()
    for name in inputs:
        if name in _OWN_INPUTS:
            continue
        if name not in _LISTS:
            yield name, _one(inputs, name, _scalar)
        elif name == "stop_token_ids":
            yield name, _many(inputs, name, int)
        else:  # clients of other backends send [""] for "none"
            yield name, [word for word in _many(inputs, name, _text) or [] if word]
    for name, value in parameters.items():
        if is_known(name):
            yield name, value
        elif name in _OWN_PARAMETERS or name.startswith("triton_"):
            continue
        elif len(name) <= _MAX_NAME and (near := get_close_matches(name, _NEARLY, 1, 0.85)):
            raise RequestError(f"parameter {quoted(name)} is unknown; did you mean {quoted(near[0])}?")


def _json_object(name: str, text: str | None) -> dict[str, Any]:
    if not text:
        return {}
    value = read_json(name, text, bounded=True)
    if not isinstance(value, dict):
        raise RequestError(f"{name} must be a JSON object, got {type(value).__name__}")
    return {key: item for key, item in value.items() if item is not None}


def _timeout(microseconds: Any) -> float:
    """Seconds of the request parameter `timeout`, which over HTTP is one among others; absent and 0: no limit."""
    if microseconds is None:
        return math.inf
    try:
        value = int(microseconds)
    except (ValueError, OverflowError, TypeError):
        value = -1
    if value < 0 or isinstance(microseconds, bool | float):
        raise RequestError(f"timeout must be a whole number of microseconds, got {quoted(microseconds)}")
    if value > _MAX_TIMEOUT:
        raise RequestError(f"timeout must be at most {_MAX_TIMEOUT} microseconds, got {quoted(microseconds)}")
    return value / 1e6 or math.inf


def _salt(value: Any) -> str:
    """The request parameter `cache_salt`; absent and null: the salt that all share who name none."""
    salt = "" if value is None else str(value)
    if not is_unicode(salt):
        raise RequestError("cache_salt holds half of a surrogate pair, which is no character")
    if (size := len(salt.encode())) > _MAX_SALT_BYTES:
        raise RequestError(f"cache_salt may have at most {_MAX_SALT_BYTES} bytes, got {size}")
    return salt


def _priority(value: Any) -> int:
    if value not in (1, 2, 3, "1", "2", "3") or isinstance(value, bool):
        raise RequestError(f"llm_priority must be 1, 2 or 3 (1 is the highest), got {quoted(value)}")
    return int(value)


def _row(inputs: dict[str, Any], name: str) -> Any:
    """The elements of an input of shape [1, n], as an array of shape [n], or None if it was not sent."""
    tensor = inputs.get(name)
    if tensor is None:
        return None
    array = tensor.as_numpy()
    if array.shape[0] != 1:
        raise RequestError(f"{name} must have shape [1, n], got {list(array.shape)}")
    if name in _LISTS and array.size > _MAX_ELEMENTS:
        raise RequestError(f"{name} may hold at most {_LISTS[name]} entries, got {array.size}")
    return array[0]


def _many(inputs: dict[str, Any], name: str, convert: Callable[..., Any]) -> list[Any] | None:
    """All elements of an input of shape [1, n], or None if it was not sent."""
    row = _row(inputs, name)
    return None if row is None else _converted(name, row, convert)


def _one(inputs: dict[str, Any], name: str, convert: Callable[..., Any]) -> Any:
    """The single element of an input of shape [1, 1], or None if it was not sent."""
    row = _row(inputs, name)
    if row is None:
        return None
    if len(row) != 1:
        raise RequestError(f"{name} must have shape [1, 1], got [1, {len(row)}]")
    return _converted(name, row, convert)[0]


def _converted(name: str, row: Any, convert: Callable[..., Any]) -> list[Any]:
    if convert is int and row.dtype != np.object_:
        return cast(list[Any], row.tolist())  # a megabyte of token ids takes milliseconds
    try:
        return [convert(value) for value in row]
    except UnicodeDecodeError as error:
        raise RequestError(f"{name} is not valid UTF-8 at byte {error.start}") from None


def _scalar(value: np.generic | bytes) -> Any:
    if isinstance(value, bytes):
        return value.decode()
    return float(str(value)) if isinstance(value, np.floating) else value.item()  # FP32 0.9 is 0.9, not 0.89999998


def _text(value: bytes) -> str:
    return value.decode()

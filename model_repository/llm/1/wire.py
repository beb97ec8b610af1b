"""What a Triton request says, as plain values: the inputs of config.pbtxt read, checked and given their defaults.

Whatever is wrong is a RequestError naming the input and the bound. It does not know how a request is answered.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from datetime import datetime
from difflib import get_close_matches
from enum import Enum
from typing import Any, cast

import numpy as np

from llm_engine.request import RequestError, SamplingParams, is_unicode
from parameters import NAMES, read_parameters

_SAMPLING_TENSORS = {
    "max_tokens": "max_tokens",
    "min_tokens": "min_tokens",
    "temperature": "temperature",
    "top_k": "top_k",
    "top_p": "top_p",
    "min_p": "min_p",
    "repetition_penalty": "repetition_penalty",
    "presence_penalty": "presence_penalty",
    "frequency_penalty": "frequency_penalty",
    "seed": "seed",
    "ignore_eos": "ignore_eos",
    "stop_words": "stop",
    "bad_words": "bad_words",
    "stop_token_ids": "stop_token_ids",
}
_REQUEST_PARAMETERS = frozenset({*NAMES, *_SAMPLING_TENSORS, "llm_priority", "cache_salt", "timeout", "priority"})
_GUIDES = ("guided_decoding_guide_type", "guided_decoding_guide")
MAX_ID_BYTES = 256
_MAX_SALT_BYTES = 1024
_MAX_TIMEOUT = 2**64 - 1  # microseconds: Triton's own are 64 bits
_MAX_DIGITS = 4300  # of an integer, for Python


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


def input_bytes(request: Any) -> int:
    """Bytes of all inputs of a Triton InferenceRequest, which is roughly what its preparation costs."""
    arrays = [tensor.as_numpy() for tensor in request.inputs()]
    return sum(sum(map(len, array.flat)) if array.dtype == np.object_ else array.nbytes for array in arrays)


def read_call(request: Any, request_id: str, defaults: SamplingParams) -> Call:
    """Read a Triton InferenceRequest, known as `request_id`; RequestError if anything in it cannot be honoured."""
    if (size := len(request_id.encode())) > MAX_ID_BYTES:
        raise RequestError(f"the request id may have at most {MAX_ID_BYTES} bytes, got {size}")
    inputs = {tensor.name(): tensor for tensor in request.inputs()}
    parameters = json.loads(request.parameters() or "{}")
    call = Call(request_id=request_id, outputs=frozenset(request.requested_output_names()))
    operation = _one(inputs, "operation", _text)
    try:
        call.operation = Operation(operation or "generate")
    except ValueError:
        known = ", ".join(o.value for o in Operation)
        raise RequestError(f"operation must be one of {known}, got {operation!r}") from None
    _read_prompt(call, inputs)
    call.params = _read_params(inputs, parameters, defaults)
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
    _refuse_misspelt(parameters)
    return call


def _read_prompt(call: Call, inputs: dict[str, Any]) -> None:
    call.text = _one(inputs, "text_input", _text)
    call.messages = _read_messages("messages", _one(inputs, "messages", _text))
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


def _read_messages(field: str, payload: str | None) -> list[dict[str, Any]] | None:
    if payload is None:
        return None
    _refuse_half_characters(field, payload)
    try:
        messages = json.loads(payload)
    except (ValueError, RecursionError) as error:
        raise RequestError(f"{field} is not valid JSON: {error}") from None
    if not isinstance(messages, list) or not messages:
        raise RequestError(f"{field} must be a JSON array with at least one message")
    return [_read_message(f"{field}[{i}]", message) for i, message in enumerate(messages)]


def _read_message(field: str, message: object) -> dict[str, Any]:
    if not isinstance(message, dict) or not isinstance(message.get("role"), str):
        raise RequestError(f'{field} must be an object like {{"role": "user", "content": "..."}}')
    content = message.get("content")
    if isinstance(content, list):  # OpenAI's parts
        parts = [part.get("text") if isinstance(part, dict) else None for part in content]
        if not all(isinstance(part, str) for part in parts):
            raise RequestError(f'{field}.content may hold only parts of type "text"')
        content = "".join(cast(list[str], parts))
    if content is None and message.get("tool_calls"):
        content = ""
    if not isinstance(content, str):
        raise RequestError(f"{field}.content must be a string")
    return {**message, "content": content}


def _read_time(text: str | None) -> datetime | None:
    if not text:
        return None
    try:
        return datetime.fromisoformat(text)
    except ValueError:
        raise RequestError(f"template_time must be an ISO 8601 time, got {text!r}") from None


def _read_params(inputs: dict[str, Any], parameters: dict[str, Any], defaults: SamplingParams) -> SamplingParams:
    """Merge the JSON object, the single tensors and Triton's request parameters; a contradiction is refused."""
    values = _json_object("sampling_parameters", _one(inputs, "sampling_parameters", _text))
    read_parameters(values, defaults)  # its own faults are told before contradictions
    for source in (_single_tensors(inputs), {k: v for k, v in parameters.items() if k in NAMES}):
        for name, value in source.items():
            if name in values and _alone(name, value) != _alone(name, values[name]):
                raise RequestError(f"{name} is given twice with different values: {values[name]!r} and {value!r}")
            values[name] = value
    return _read_foreign(inputs, read_parameters(values, defaults))


def _alone(name: str, value: Any) -> Any:
    """What a parameter means by itself."""
    return getattr(read_parameters({name: value}, SamplingParams()), name)


def _single_tensors(inputs: dict[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for tensor, name in _SAMPLING_TENSORS.items():
        if tensor not in inputs:
            continue
        if tensor in ("stop_words", "bad_words"):
            # Clients of other backends send [""] for "none".
            found[name] = [word for word in _many(inputs, tensor, _text) or [] if word]
        elif tensor == "stop_token_ids":
            found[name] = _many(inputs, tensor, int)
        else:
            found[name] = _one(inputs, tensor, _scalar)
    return found


def _read_foreign(inputs: dict[str, Any], params: SamplingParams) -> SamplingParams:
    """Inputs that TensorRT-LLM-shaped clients send."""
    for name in _GUIDES:
        if _one(inputs, name, _text):
            raise RequestError(f"{name} is not supported by this server")
    beams = _one(inputs, "beam_width", int)
    if beams not in (None, 1):
        raise RequestError(f"beam_width must be 1, got {beams}")
    end = _one(inputs, "end_id", int)
    if end is not None and end >= 0 and end not in params.stop_token_ids:
        params = replace(params, stop_token_ids=(*params.stop_token_ids, end))
    asked = _one(inputs, "return_logprobs", bool) or _one(inputs, "return_log_probs", bool)
    if asked and params.logprobs is None:
        params = replace(params, logprobs=0)
    return params


def _json_object(name: str, text: str | None) -> dict[str, Any]:
    if not text:
        return {}
    _refuse_half_characters(name, text)
    try:
        value = json.loads(text, parse_int=lambda digits: int(digits[:_MAX_DIGITS]))  # still beyond every bound
    except (ValueError, RecursionError) as error:
        raise RequestError(f"{name} is not valid JSON: {error}") from None
    if not isinstance(value, dict):
        raise RequestError(f"{name} must be a JSON object, got {type(value).__name__}")
    return {key: item for key, item in value.items() if item is not None}


def _refuse_half_characters(name: str, text: str) -> None:
    """Refuse JSON whose escapes spell a lone surrogate: no tokenizer takes it, and no answer could repeat it."""
    if "\\ud" not in text.lower():
        return
    try:
        json.dumps(json.loads(text), ensure_ascii=False).encode()
    except UnicodeEncodeError as error:
        half = ascii(error.object[error.start])
        raise RequestError(f"{name} holds half a character (lone surrogate) {half}") from None
    except (ValueError, RecursionError):
        return  # not JSON: whoever reads it says so


def _timeout(microseconds: Any) -> float:
    """Seconds of the request parameter `timeout`, which over HTTP is one among others; absent and 0: no limit."""
    if microseconds is None:
        return math.inf
    try:
        value = int(microseconds)
    except (ValueError, OverflowError, TypeError):
        value = -1
    if value < 0 or isinstance(microseconds, bool | float):
        raise RequestError(f"timeout must be a whole number of microseconds, got {microseconds!r}")
    if value > _MAX_TIMEOUT:
        raise RequestError(f"timeout must be at most {_MAX_TIMEOUT} microseconds, got {microseconds!r}")
    return value / 1e6 or math.inf


def _salt(value: Any) -> str:
    """The request parameter `cache_salt`; absent and null: the salt that all share who name none."""
    salt = "" if value is None else str(value)
    if not is_unicode(salt):
        raise RequestError("cache_salt holds half of a surrogate pair, which is no character")
    if (size := len(salt.encode())) > _MAX_SALT_BYTES:
        raise RequestError(f"cache_salt may have at most {_MAX_SALT_BYTES} bytes, got {size}")
    return salt


def _refuse_misspelt(parameters: dict[str, Any]) -> None:
    """Refuse what nearly has a parameter's name; other names may be a proxy's, and mean nothing here."""
    for name in parameters:
        if name not in _REQUEST_PARAMETERS and (near := get_close_matches(name, _REQUEST_PARAMETERS, 1, 0.85)):
            raise RequestError(f"parameter {name!r} is unknown; did you mean {near[0]!r}?")


def _priority(value: Any) -> int:
    if value not in (1, 2, 3, "1", "2", "3") or isinstance(value, bool):
        raise RequestError(f"llm_priority must be 1, 2 or 3 (1 is the highest), got {value!r}")
    return int(value)


def _many(inputs: dict[str, Any], name: str, convert: Callable[..., Any]) -> list[Any] | None:
    """All elements of an input of shape [1, n], or None if it was not sent."""
    tensor = inputs.get(name)
    if tensor is None:
        return None
    array = tensor.as_numpy()
    if array.shape[0] != 1:
        raise RequestError(f"{name} must have shape [1, n], got {list(array.shape)}")
    if convert is int and array.dtype != np.object_:
        return cast(list[Any], array[0].tolist())  # a megabyte of token ids takes milliseconds
    try:
        return [convert(value) for value in array[0]]
    except UnicodeDecodeError as error:
        raise RequestError(f"{name} is not valid UTF-8 at byte {error.start}") from None


def _one(inputs: dict[str, Any], name: str, convert: Callable[..., Any]) -> Any:
    """The single element of an input of shape [1, 1], or None if it was not sent."""
    values = _many(inputs, name, convert)
    if values is None:
        return None
    if len(values) != 1:
        raise RequestError(f"{name} must have shape [1, 1], got [1, {len(values)}]")
    return values[0]


def _scalar(value: np.generic) -> Any:
    return float(str(value)) if isinstance(value, np.floating) else value.item()  # FP32 0.9 is 0.9, not 0.89999998


def _text(value: bytes) -> str:
    return value.decode()

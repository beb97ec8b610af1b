"""The wire, outwards: caller's values to a ModelInferRequest. What comes back is read by `replies`.

Pure functions over Triton's protobuf messages, so that a blocking and an asynchronous client share every rule.
It knows tensors, names and encodings; it does not know connections, clocks or what came before.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tritonclient.grpc import service_pb2 as pb

from .errors import InternalError, InvalidRequest
from .params import json_text, utf8
from .results import ModelStatus, ServerInfo

# What is asked for by name, so that the server does not send what follows from the rest, at every token.
_OUTPUTS = (
    *("text_output", "token_ids", "index", "finish_reason", "num_input_tokens"),
    *("fingerprint", "seed", "logprobs", "timings"),
)
Message = Mapping[str, Any]  # a chat message as the model's template wants it: role, content, ...


@dataclass(frozen=True, slots=True)
class Prompt:
    """What to answer: exactly one of text, chat messages and token ids. TypeError otherwise."""

    text: str | None = None
    messages: Sequence[Message] | None = None
    input_ids: Sequence[int] | None = None

    def __post_init__(self) -> None:
        """Refuse none and several."""
        if sum(value is not None for value in (self.text, self.messages, self.input_ids)) != 1:
            raise TypeError("give exactly one of prompt, messages and input_ids")


@dataclass(frozen=True, slots=True)
class Question:
    """What is asked, the same for every attempt to have it answered.

    `sampling` is the JSON object of `params.sampling_json`, with the seed. `template_time`: what chat templates that
    print the date print, ISO 8601; they must print the same when the answer is made again elsewhere.
    """

    model: str
    prompt: Prompt
    sampling: str
    request_id: str
    priority: int | None = None
    cache_salt: str | None = None
    template_time: str = ""


@dataclass(frozen=True, slots=True)
class Begun:
    """What there is of an answer that is to go on. Without a fingerprint any server may go on with it."""

    token_ids: Sequence[int]
    fingerprint: str | None = None


def generate_request(question: Question) -> pb.ModelInferRequest:
    """What every attempt to have it answered asks.

    InvalidRequest for text that is no Unicode and numbers that the wire has no room for; TypeError for what has the
    wrong type. Both name it.
    """
    request, prompt = _request(question.model, question.request_id), question.prompt
    if prompt.text is not None:
        _add_string(request, "text_input", prompt.text)
    if prompt.messages is not None:
        _add_string(request, "messages", json_text("messages", prompt.messages))
        if question.template_time:
            _add_string(request, "template_time", question.template_time)
    if prompt.input_ids is not None:
        _add_ids(request, "input_ids", prompt.input_ids)
    _add_string(request, "sampling_parameters", question.sampling)
    for name in _OUTPUTS:
        request.outputs.add(name=name)
    if question.priority is not None:
        _check_priority(question.priority)
        request.parameters["priority"].uint64_param = question.priority  # Triton keeps it to itself, for its queue
        request.parameters["llm_priority"].int64_param = question.priority  # the engine's copy
    if question.cache_salt is not None:
        utf8("cache_salt", question.cache_salt)
        request.parameters["cache_salt"].string_param = question.cache_salt
    return request


def attempt(
    asked: pb.ModelInferRequest, *, timeout: float | None = None, begun: Begun | None = None
) -> pb.ModelInferRequest:
    """A request for the answer to what is `asked`, or for the rest of it. `timeout` in seconds is what is left for it.

    The server takes `timeout` for the longest wait in its queue.
    """
    request = pb.ModelInferRequest()
    request.CopyFrom(asked)
    if begun is not None:
        _add_ids(request, "resume_token_ids", begun.token_ids)
        if begun.fingerprint is not None:
            _add_string(request, "resume_fingerprint", begun.fingerprint)
    if timeout is not None:
        request.parameters["timeout"].int64_param = max(1, int(timeout * 1e6))
    return request


def operation_request(
    model: str, operation: str, *, request_id: str, text: str | None = None, input_ids: Sequence[int] | None = None
) -> pb.ModelInferRequest:
    """A request that needs no seat: `tokenize` (text), `detokenize` (input_ids) or `info`."""
    request = _request(model, request_id)
    _add_string(request, "operation", operation)
    if text is not None:
        _add_string(request, "text_input", text)
    if input_ids is not None:
        _add_ids(request, "input_ids", input_ids)
    return request


def server_info(text: str) -> ServerInfo:
    """Read the JSON object that `info` answers with; InternalError if it is none."""
    try:
        details = json.loads(text)
        model, dtype, exact = (str(details.get(name, "")) for name in ("model", "dtype", "exact"))
    except (ValueError, AttributeError) as error:
        raise InternalError(f"the server's info is not a JSON object: {text[:80]!r}") from error
    return ServerInfo(model, dtype, exact, details)


def model_states(index: pb.RepositoryIndexResponse) -> tuple[ModelStatus, ...]:
    """What a server's repository holds, in its order."""
    return tuple(ModelStatus(model.name, model.version, model.state, model.reason) for model in index.models)


def _check_priority(priority: int) -> None:
    if isinstance(priority, bool) or not isinstance(priority, int):
        raise TypeError(f"priority must be an integer, got {type(priority).__name__}")
    if not 0 <= priority < 2**63:  # the server knows its levels
        told = priority if abs(priority) < 2**64 else f"an integer of {priority.bit_length()} bits"
        raise InvalidRequest(f"priority must be from 1 (highest) to 3, got {told}")


def _request(model: str, request_id: str) -> pb.ModelInferRequest:
    utf8("request_id", request_id)
    request = pb.ModelInferRequest(model_name=model, id=request_id)
    # Makes a final mark without data visible; without it such an end could not be told from a pause.
    request.parameters["triton_enable_empty_final_response"].bool_param = True
    return request


def _add_string(request: pb.ModelInferRequest, name: str, text: str) -> None:
    data = utf8(name, text)
    request.inputs.add(name=name, datatype="BYTES", shape=[1, 1])
    request.raw_input_contents.append(struct.pack("<I", len(data)) + data)


def _add_ids(request: pb.ModelInferRequest, name: str, ids: Sequence[int]) -> None:
    try:
        data = struct.pack(f"<{len(ids)}i", *ids)
    except struct.error:
        raise InvalidRequest(f"{name} must hold integers from 0 to {2**31 - 1}") from None
    request.inputs.add(name=name, datatype="INT32", shape=[1, len(ids)])
    request.raw_input_contents.append(data)

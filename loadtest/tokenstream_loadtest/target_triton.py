"""Asks a plain decoupled model of Triton, as tutorials build it, over gRPC: text in, a response per token out.

`text_input` holds the prompt, `max_tokens` is a parameter of the request. A response with `text_output` counts as one
token; outputs `completion_tokens` and `prompt_tokens` above 0 are the model's own counts, and such a response is none.
It knows no chat template, and not when requests are sent.
"""

from __future__ import annotations

from types import TracebackType
from typing import Any, Self

import grpc
from tritonclient.grpc import service_pb2 as pb
from tritonclient.grpc import service_pb2_grpc

from tokenstream.base import read_urls
from tokenstream.errors import reason_of
from tokenstream.security import Passport

from .records import Outcome
from .requests import Request
from .targets import Failed, Seen, TargetOptions

_SECONDS = 10.0  # for a small question
_OUTCOMES: dict[str, Outcome] = {
    "UNAVAILABLE": "connection",
    "DEADLINE_EXCEEDED": "timeout",
    "INVALID_ARGUMENT": "invalid",
    "NOT_FOUND": "invalid",
    "UNIMPLEMENTED": "invalid",
    "RESOURCE_EXHAUSTED": "overloaded",
    "UNAUTHENTICATED": "unauthorized",
    "PERMISSION_DENIED": "unauthorized",
    "CANCELLED": "incomplete",
}


class TritonTarget:
    """The model at HOST:PORT."""

    def __init__(self, url: str, model: str, options: TargetOptions) -> None:
        (self._url,) = read_urls([url])
        self._model = model
        self._extra = options.extra
        self._shape = [1, 1] if options.batched else [1]
        self._tls = options.tls
        passport = Passport(
            [self._url],
            encrypted=self._tls is not None,
            token=None,
            headers=options.headers,
            allow_insecure=options.allow_insecure_credentials,
        )
        self._metadata = passport.stamp({})

    async def __aenter__(self) -> Self:
        """The target itself, with a channel that belongs to this event loop."""
        if self._tls is None:
            self._channel = grpc.aio.insecure_channel(self._url)
        else:
            name = self._tls.server_name
            options = [("grpc.ssl_target_name_override", name)] if name else []
            credentials = grpc.ssl_channel_credentials(*self._tls.read())
            self._channel = grpc.aio.secure_channel(self._url, credentials, options=options)
        self._stub = service_pb2_grpc.GRPCInferenceServiceStub(self._channel)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """Hang up."""
        await self._channel.close()

    async def describe(self) -> dict[str, str]:
        """The server's name and version."""
        try:
            told = await self._stub.ServerMetadata(
                pb.ServerMetadataRequest(), timeout=_SECONDS, metadata=self._metadata
            )
        except grpc.RpcError as error:
            raise self._failed(error) from error
        return {"server": f"{told.name} {told.version}"}

    async def ask(self, request: Request, request_id: str, seen: Seen) -> None:
        """See `Target.ask`."""
        if request.prompt is None:
            raise Failed("invalid", "a plain Triton model takes a prompt, not the messages of a chat")
        rpc = self._stub.ModelStreamInfer(metadata=self._metadata)
        try:
            await rpc.write(self._message(request.prompt, request, request_id))
            await rpc.done_writing()
            await _read(rpc, seen)
        except grpc.RpcError as error:
            raise self._failed(error) from error
        finally:
            rpc.cancel()  # no effect on one that has ended

    def _message(self, prompt: str, request: Request, request_id: str) -> pb.ModelInferRequest:
        text = prompt.encode()
        message = pb.ModelInferRequest(model_name=self._model, id=request_id)
        message.inputs.add(name="text_input", datatype="BYTES", shape=self._shape)
        message.raw_input_contents.append(len(text).to_bytes(4, "little") + text)
        for name, value in {"max_tokens": request.max_tokens, **self._extra}.items():
            setattr(message.parameters[name], _field(value), value)
        message.parameters["triton_enable_empty_final_response"].bool_param = True
        return message

    def _failed(self, error: grpc.RpcError) -> Failed:
        details = error.details() or ""
        outcome = _OUTCOMES.get(error.code().name, "internal")
        if outcome == "connection" and "connect" not in details.lower():
            outcome = "incomplete"
        if outcome == "connection":
            return Failed(outcome, f"cannot connect to {self._url}: {reason_of(details)}")
        return Failed(outcome, f"{error.code().name}: {reason_of(details)}")


def _field(value: object) -> str:
    """The field of a parameter for a value of this type."""
    if isinstance(value, bool):
        return "bool_param"
    if isinstance(value, int):
        return "int64_param"
    return "double_param" if isinstance(value, float) else "string_param"


async def _read(rpc: Any, seen: Seen) -> None:
    final = False
    while not seen.unwanted:
        message = await rpc.read()
        if message is grpc.aio.EOF:
            if not final:
                raise Failed("incomplete", "the stream ended before the answer did")
            return
        if message is None:
            raise Failed("internal", "the server sent a message that is not Triton's")
        if message.error_message:
            raise Failed(_outcome(message.error_message), message.error_message)
        response = message.infer_response
        _take(response, seen)
        final = final or response.parameters["triton_final_response"].bool_param
        if not final:
            await seen.pause()


def _take(response: pb.ModelInferResponse, seen: Seen) -> None:
    outputs = {output.name: raw for output, raw in zip(response.outputs, response.raw_output_contents, strict=False)}
    counted = int.from_bytes(outputs.get("completion_tokens", b""), "little")
    if counted > 0:
        seen.output_tokens = counted
        seen.input_tokens = int.from_bytes(outputs.get("prompt_tokens", b""), "little") or None
    elif "text_output" in outputs:
        seen.note(1)


def _outcome(message: str) -> Outcome:
    """What Triton's own words on a stream mean; they carry no status."""
    words = message.lower()
    if "exceeds maximum queue size" in words or "request timeout expired" in words:
        return "overloaded"
    return "invalid" if "unknown model" in words or "unexpected" in words else "internal"

"""Triton's wire without our client: requests made tensor by tensor, responses taken apart, calls that can be cancelled.

It knows service_pb2 and the encodings of tensors; it checks nothing and hides nothing, so that tests see what was sent.
It does not know what the model does with any of it.
"""

from __future__ import annotations

import http.client
import json
import struct
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, suppress
from dataclasses import dataclass
from queue import SimpleQueue
from types import TracebackType
from typing import Any, Self, cast

import grpc
from tritonclient.grpc import service_pb2 as pb
from tritonclient.grpc import service_pb2_grpc

from waiting import WAIT

FORMATS = {"INT32": "i", "UINT64": "Q", "FP32": "f", "BOOL": "?"}


@dataclass(frozen=True, slots=True)
class Response:
    """One response: its tensors by name (values flat), whether it is marked final, and its error text ("" if none).

    `at` is when it was read, on the clock of `time.monotonic`.
    """

    tensors: Mapping[str, tuple[Any, ...]]
    shapes: Mapping[str, tuple[int, ...]]
    final: bool
    error: str
    at: float

    def __getitem__(self, name: str) -> Any:
        """The single value of an output."""
        (value,) = self.tensors[name]
        return value


def infer(
    *, name: str = "", outputs: Sequence[str] = (), parameters: Mapping[str, Any] | None = None, **inputs: Any
) -> pb.ModelInferRequest:
    """A request called `name` for model `llm`: a scalar becomes [1, 1], a list [1, n]; the type follows from it."""
    request = pb.ModelInferRequest(model_name="llm", id=name)
    for key, value in (parameters or {}).items():
        kinds = {bool: "bool_param", int: "int64_param", float: "double_param", str: "string_param"}
        setattr(request.parameters[key], "uint64_param" if key == "priority" else kinds[type(value)], value)
    for tensor, value in inputs.items():
        values = value if isinstance(value, list) else [value]
        add(request, tensor, _datatype(tensor, values), [1, len(values)], values)
    for output in outputs:
        request.outputs.add(name=output)
    return request


def add(request: pb.ModelInferRequest, name: str, datatype: str, shape: Sequence[int], values: Sequence[Any]) -> None:
    """Append an input as it is said to be, fitting or not."""
    if datatype == "BYTES":
        encoded = [value.encode() if isinstance(value, str) else value for value in values]
        data = b"".join(struct.pack("<I", len(value)) + value for value in encoded)
    else:
        data = struct.pack(f"<{len(values)}{FORMATS[datatype]}", *values)
    request.inputs.add(name=name, datatype=datatype, shape=list(shape))
    request.raw_input_contents.append(data)


class Call:
    """One stream with one request; responses are read by a thread and waited for with a limit. Leaving it cancels."""

    def __init__(
        self, stub: service_pb2_grpc.GRPCInferenceServiceStub, request: pb.ModelInferRequest, deadline: float | None
    ) -> None:
        self.sent_at = time.monotonic()
        self._rpc = stub.ModelStreamInfer(iter((request,)), timeout=deadline)
        self._arrived: SimpleQueue[Response | None] = SimpleQueue()
        threading.Thread(target=self._read, name="raw-reader", daemon=True).start()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.cancel()

    def next(self, timeout: float = WAIT) -> Response | None:
        """The next response; None at the end of the stream, however it came. queue.Empty after `timeout` seconds."""
        return self._arrived.get(timeout=timeout)

    def rest(self) -> list[Response]:
        """All responses up to the end of the stream."""
        return list(iter(self.next, None))

    @property
    def silent(self) -> bool:
        """Whether nothing has arrived that was not read."""
        return self._arrived.empty()

    def cancel(self) -> None:
        """Cancel on the server."""
        self._rpc.cancel()

    def _read(self) -> None:
        with suppress(grpc.RpcError):
            for response in self._rpc:
                self._arrived.put(_parse(response))
        self._arrived.put(None)


class Wire:
    """A connection to one server."""

    def __init__(self, url: str) -> None:
        self._channel = grpc.insecure_channel(url, options=[("grpc.max_receive_message_length", -1)])
        self._stub = service_pb2_grpc.GRPCInferenceServiceStub(self._channel)

    def close(self) -> None:
        self._channel.close()

    def call(self, request: pb.ModelInferRequest, deadline: float | None = None) -> Call:
        """Send a request; `deadline` in seconds is gRPC's own."""
        return Call(self._stub, request, deadline)

    def ask(self, **parts: Any) -> list[Response]:
        """All responses to `infer(**parts)`."""
        return self.answers(infer(**parts))

    def answers(self, request: pb.ModelInferRequest) -> list[Response]:
        """All responses to `request`."""
        with self.call(request) as call:
            return call.rest()

    def refusal(self, request: pb.ModelInferRequest) -> str:
        """The error of a request that gets nothing else."""
        (response,) = self.answers(request)
        assert response.error, f"not refused: {response}"
        assert not response.tensors
        return response.error

    def together(self, requests: Sequence[pb.ModelInferRequest]) -> list[list[Response]]:
        """All responses to requests that are sent at once."""
        with ThreadPoolExecutor(len(requests)) as pool:
            return list(pool.map(self.answers, requests))


@dataclass(frozen=True, slots=True)
class Page:
    """What came back over HTTP."""

    status: int
    type: str
    body: str

    @property
    def json(self) -> dict[str, Any]:
        """The body of `generate`."""
        return cast(dict[str, Any], json.loads(self.body))

    @property
    def events(self) -> list[dict[str, Any]]:
        """The body of `generate_stream`."""
        assert self.type.startswith("text/event-stream")
        *events, end = self.body.split("\n\n")
        assert end == ""
        assert all(event.startswith("data: ") for event in events)
        return [json.loads(event.removeprefix("data: ")) for event in events]


@dataclass(frozen=True, slots=True)
class Web:
    """Posts JSON to the model."""

    address: str

    def post(self, method: str, model: str = "llm", /, **body: Any) -> Page:
        """The whole answer of `generate` or `generate_stream`."""
        return self.send(method, json.dumps(body).encode(), model)

    def send(self, method: str, body: bytes, model: str = "llm") -> Page:
        """The same for a body as it is, JSON or not."""
        with closing(http.client.HTTPConnection(self.address, timeout=WAIT)) as connection:
            connection.request("POST", f"/v2/models/{model}/{method}", body)
            response = connection.getresponse()
            return Page(response.status, response.getheader("Content-Type", ""), response.read().decode())


def tokens(responses: Sequence[Response]) -> list[int]:
    """The answer's tokens; fails if the request did not end well."""
    assert all(not response.error for response in responses), responses[-1].error
    assert responses
    assert responses[-1]["finish_reason"] in ("stop", "length")
    return [token for response in responses for token in response.tensors["token_ids"]]


def text(responses: Sequence[Response]) -> str:
    """The answer's text."""
    return "".join(response["text_output"] for response in responses)


def _datatype(tensor: str, values: Sequence[Any]) -> str:
    if tensor == "seed":
        return "UINT64"
    kinds = {bool: "BOOL", int: "INT32", float: "FP32", str: "BYTES", bytes: "BYTES"}
    return kinds[type(values[0])] if values else "INT32"


def _parse(message: pb.ModelStreamInferResponse) -> Response:
    body = message.infer_response
    tensors: dict[str, tuple[Any, ...]] = {}
    shapes: dict[str, tuple[int, ...]] = {}
    for output, data in zip(body.outputs, body.raw_output_contents, strict=True):
        tensors[output.name] = tuple(_strings(data)) if output.datatype == "BYTES" else _numbers(output.datatype, data)
        shapes[output.name] = tuple(output.shape)
    final = body.parameters["triton_final_response"].bool_param
    return Response(tensors, shapes, final, message.error_message, time.monotonic())


def _numbers(datatype: str, data: bytes) -> tuple[Any, ...]:
    letter = FORMATS[datatype]
    return struct.unpack(f"<{len(data) // struct.calcsize(letter)}{letter}", data)


def _strings(data: bytes) -> Iterator[str]:
    at = 0
    while at < len(data):
        (length,) = struct.unpack_from("<I", data, at)
        yield data[at + 4 : at + 4 + length].decode()
        at += 4 + length

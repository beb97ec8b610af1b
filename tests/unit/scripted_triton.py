"""A gRPC server that speaks Triton's streaming protocol from a script, for faults that a healthy server never shows.

A script is a function (request, call) that yields responses; `call` tells how the client leaves.
It knows nothing of models.
"""

from __future__ import annotations

import json
import struct
import threading
from collections.abc import Callable, Iterator
from concurrent import futures

import grpc
from tritonclient.grpc import service_pb2 as pb

from waiting import WAIT


class ScriptedCall:
    """One RPC as the server sees it."""

    def __init__(self, context: grpc.ServicerContext) -> None:
        self.context = context
        self.metadata = dict(context.invocation_metadata())
        self.over = threading.Event()
        self.finished = threading.Event()  # set when the script has ended and the client was still there
        context.add_callback(self.over.set)

    @property
    def cancelled(self) -> bool:
        """Whether the client left before the script had ended."""
        return self.over.is_set() and not self.finished.is_set()


Script = Callable[[pb.ModelInferRequest, ScriptedCall], Iterator[pb.ModelStreamInferResponse | bytes]]


class ScriptedTriton:
    """Listens on a loopback port, a free one by default; plays `script` for every request; keeps requests and calls."""

    def __init__(
        self, script: Script, *, credentials: grpc.ServerCredentials | None = None, port: int = 0, workers: int = 8
    ) -> None:
        self.script = script
        self.requests: list[pb.ModelInferRequest] = []
        self.calls: list[ScriptedCall] = []
        self.ready = True
        self._server = grpc.server(futures.ThreadPoolExecutor(workers))
        methods = {
            "ServerLive": grpc.unary_unary_rpc_method_handler(
                lambda request, context: pb.ServerLiveResponse(live=True),
                pb.ServerLiveRequest.FromString,
                pb.ServerLiveResponse.SerializeToString,
            ),
            "ModelReady": grpc.unary_unary_rpc_method_handler(
                lambda request, context: pb.ModelReadyResponse(ready=self.ready),
                pb.ModelReadyRequest.FromString,
                pb.ModelReadyResponse.SerializeToString,
            ),
            "RepositoryIndex": grpc.unary_unary_rpc_method_handler(
                lambda request, context: pb.RepositoryIndexResponse(
                    models=[pb.RepositoryIndexResponse.ModelIndex(name="llm", version="1", state="READY")]
                ),
                pb.RepositoryIndexRequest.FromString,
                pb.RepositoryIndexResponse.SerializeToString,
            ),
            "ModelStreamInfer": grpc.stream_stream_rpc_method_handler(
                self._stream,
                pb.ModelInferRequest.FromString,
                lambda message: message if isinstance(message, bytes) else message.SerializeToString(),
            ),
        }
        service = "inference.GRPCInferenceService"
        self._server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(service, methods),))
        if credentials is None:
            port = self._server.add_insecure_port(f"127.0.0.1:{port}")
        else:
            port = self._server.add_secure_port(f"127.0.0.1:{port}", credentials)
        self.url = f"127.0.0.1:{port}"
        self._server.start()

    def close(self) -> None:
        self._server.stop(0).wait(WAIT)

    def drain(self) -> threading.Event:
        """Take no more connections and requests; what runs goes on. The event is set when it has ended."""
        return self._server.stop(WAIT)

    def _stream(
        self, requests: Iterator[pb.ModelInferRequest], context: grpc.ServicerContext
    ) -> Iterator[pb.ModelStreamInferResponse | bytes]:
        call = ScriptedCall(context)
        request = next(requests)
        self.requests.append(request)
        self.calls.append(call)
        yield from self.script(request, call)
        for _ in requests:  # as Triton does, which ends an RPC only when its client wants no more
            pass
        if not call.over.is_set():
            call.finished.set()


def token(
    index: int,
    text: str,
    *token_ids: int,
    final: bool = False,
    finish_reason: str = "",
    **tensors: str | int,
) -> pb.ModelStreamInferResponse:
    """A data response as the model sends it; `tensors` adds fingerprint, seed, timings, logprobs, num_input_tokens."""
    response = pb.ModelStreamInferResponse()
    add_string(response, "text_output", text)
    add(response, "token_ids", "INT32", struct.pack(f"<{len(token_ids)}i", *token_ids), len(token_ids))
    add(response, "index", "INT32", struct.pack("<i", index))
    add_string(response, "finish_reason", finish_reason)
    add(response, "num_output_tokens", "INT32", struct.pack("<i", len(token_ids)))
    for name, value in tensors.items():
        if isinstance(value, str):
            add_string(response, name, value)
        elif name == "seed":
            add(response, name, "UINT64", struct.pack("<Q", value))
        else:
            add(response, name, "INT32", struct.pack("<i", value))
    response.infer_response.parameters["triton_final_response"].bool_param = final
    return response


def final_mark() -> pb.ModelStreamInferResponse:
    """The end without data."""
    response = pb.ModelStreamInferResponse()
    response.infer_response.parameters["triton_final_response"].bool_param = True
    return response


def failure(message: str) -> pb.ModelStreamInferResponse:
    """An error as it comes on a stream: text alone."""
    return pb.ModelStreamInferResponse(error_message=message)


def add(response: pb.ModelStreamInferResponse, name: str, datatype: str, raw: bytes, count: int = 1) -> None:
    response.infer_response.outputs.add(name=name, datatype=datatype, shape=[1, count])
    response.infer_response.raw_output_contents.append(raw)


def add_string(response: pb.ModelStreamInferResponse, name: str, text: str) -> None:
    data = text.encode()
    add(response, name, "BYTES", struct.pack("<I", len(data)) + data)


def inputs(request: pb.ModelInferRequest) -> dict[str, object]:
    """The request's tensors by name: a string, JSON already read where it is JSON, or a list of integers."""
    values: dict[str, object] = {}
    for tensor, raw in zip(request.inputs, request.raw_input_contents, strict=True):
        if tensor.datatype == "INT32":
            values[tensor.name] = list(struct.unpack(f"<{len(raw) // 4}i", raw))
        else:
            assert struct.unpack_from("<I", raw) == (len(raw) - 4,)
            text = raw[4:].decode()
            values[tensor.name] = json.loads(text) if tensor.name in ("sampling_parameters", "messages") else text
    return values


def answer(*words: str, fingerprint: str = "print", cut: Script | None = None, at: int = -1) -> Script:
    """A script that sends `words`, one token each, and ends with `stop`.

    It goes on from where a request's answer stands, and refuses another print. A fresh answer is cut by `cut` when its
    token `at` is due; one that goes on is not.
    """

    def script(request: pb.ModelInferRequest, call: ScriptedCall) -> Iterator[pb.ModelStreamInferResponse | bytes]:
        asked = inputs(request)
        begun = asked.get("resume_token_ids", [])
        assert isinstance(begun, list)
        assert begun == [100 + index for index in range(len(begun))]
        if asked.get("resume_fingerprint", fingerprint) != fingerprint:
            yield failure(f"resume_mismatch: mine is {fingerprint} [request={request.id} tokens=0 code=INVALID_ARG]")
            return
        for index in range(len(begun), len(words)):
            if index == at and cut is not None and not begun:
                yield from cut(request, call)
                return
            last = index == len(words) - 1
            first = {"fingerprint": fingerprint, "num_input_tokens": 7} if index == len(begun) else {}
            reason = "stop" if last else ""
            yield token(index, words[index], 100 + index, final=last, finish_reason=reason, **first)

    return script

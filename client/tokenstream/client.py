"""The blocking client: one shared connection, one gRPC stream per request.

A thin face: it draws ids and seeds, connects and starts calls; `protocol` builds requests, `TokenStream` reads answers.
It does not know the model, its tokenizer or its limits: the server checks values.
"""

from __future__ import annotations

import os
import threading
import time
import uuid
from collections.abc import Sequence
from types import TracebackType
from typing import Self, Unpack

import grpc
from tritonclient.grpc import service_pb2 as pb
from tritonclient.grpc import service_pb2_grpc

from . import protocol
from .answer import Answer
from .errors import (
    ConnectionFailed,
    ConnectTimeout,
    IncompleteStream,
    NotReady,
    TokenstreamError,
    from_status,
    reason_of,
)
from .params import DEFAULT_URL, Sampling, draw_seed, sampling_json
from .results import Completion, ServerInfo
from .stream import Call, TokenStream
from .timeouts import Timeout

_POLL_FIRST, _POLL_MOST = 0.05, 1.0  # seconds between questions for readiness, doubling from the first to the most


class Client:
    """Talks to one model of one Triton server. Safe to share between threads; close it, or use it in a `with` block.

    `url` is HOST:PORT of Triton's gRPC endpoint; unset, the environment's TOKENSTREAM_URL, else 127.0.0.1:8001.
    `timeout` holds for requests that bring none of their own.
    `keepalive`: seconds between pings on a silent connection. They find a dead peer sooner, but a server that was not
    started with a smaller `--grpc-http2-min-recv-ping-interval-without-data` hangs up on whoever pings: so None
    (no pings) is the default.
    The connection is made by the first request, so that a client made before a fork works after it.
    """

    def __init__(
        self,
        url: str | None = None,
        *,
        model: str = "llm",
        timeout: Timeout | None = None,
        keepalive: float | None = None,
    ) -> None:
        url = url or os.environ.get("TOKENSTREAM_URL") or DEFAULT_URL
        if "://" in url:
            raise ValueError(f"the url is HOST:PORT of Triton's gRPC endpoint (8001 by default), got {url!r}")
        self.url = url
        self.model = model
        self.timeout = timeout or Timeout()
        self._keepalive = keepalive
        self._lock = threading.Lock()
        self._channel: grpc.Channel | None = None
        self._stub: service_pb2_grpc.GRPCInferenceServiceStub | None = None
        self._connected = False
        self._closed = False

    def __enter__(self) -> Self:
        """The client itself."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """Close."""
        self.close()

    def close(self) -> None:
        """Cancel what is running and hang up. The client cannot be used again."""
        with self._lock:
            self._closed = True
            channel, self._channel = self._channel, None
        if channel is not None:
            channel.close()

    def stream(
        self,
        prompt: str | None = None,
        *,
        messages: Sequence[protocol.Message] | None = None,
        input_ids: Sequence[int] | None = None,
        request_id: str | None = None,
        priority: int | None = None,
        timeout: Timeout | None = None,
        **sampling: Unpack[Sampling],
    ) -> TokenStream:
        """Ask for an answer and return at once; iterate the result for its chunks.

        Exactly one of `prompt` (text as it is), `messages` (through the model's chat template) and `input_ids` must be
        given. `request_id` and the seed are drawn if they are not. `priority` 1 is the highest. Raises TypeError for an
        unknown sampling keyword, ConnectionFailed or ConnectTimeout; what the server refuses is raised by iterating.
        """
        started = time.monotonic()
        clocks = timeout or self.timeout
        given = sampling.get("seed")
        seed = draw_seed() if given is None else given
        name = request_id or uuid.uuid4().hex
        request = protocol.generate_request(
            self.model,
            protocol.Prompt(prompt, messages, input_ids),
            sampling_json(sampling, seed),
            request_id=name,
            priority=priority,
            timeout=clocks.total,
        )
        stub = self._connect(clocks)
        sent_at = time.monotonic()
        left = None if clocks.total is None else max(0.0, clocks.total - (sent_at - started))
        return TokenStream(Call(stub, request, left), Answer(name, seed, sent_at), clocks, self.url)

    def chat(
        self,
        messages: Sequence[protocol.Message],
        *,
        request_id: str | None = None,
        priority: int | None = None,
        timeout: Timeout | None = None,
        **sampling: Unpack[Sampling],
    ) -> TokenStream:
        """`stream` for chat messages: `[{"role": "user", "content": "..."}]`."""
        return self.stream(messages=messages, request_id=request_id, priority=priority, timeout=timeout, **sampling)

    def generate(
        self,
        prompt: str | None = None,
        *,
        messages: Sequence[protocol.Message] | None = None,
        input_ids: Sequence[int] | None = None,
        request_id: str | None = None,
        priority: int | None = None,
        timeout: Timeout | None = None,
        **sampling: Unpack[Sampling],
    ) -> Completion:
        """The whole answer at once. Arguments and exceptions as in `stream`; what had arrived is in the exception."""
        with self.stream(
            prompt,
            messages=messages,
            input_ids=input_ids,
            request_id=request_id,
            priority=priority,
            timeout=timeout,
            **sampling,
        ) as stream:
            return stream.final()

    def tokenize(self, text: str) -> list[int]:
        """The token ids of `text`, by the server's tokenizer."""
        return list(self._operate("tokenize", text=text).token_ids)

    def detokenize(self, ids: Sequence[int]) -> str:
        """The text of token ids, by the server's tokenizer."""
        return self._operate("detokenize", input_ids=ids).text

    def info(self) -> ServerInfo:
        """What the server says of its model: limits, dtype, exactness, versions."""
        return protocol.server_info(self._operate("info").text)

    def ready(self) -> bool:
        """Whether the server says that the model can be asked. Never raises for a server that is not there."""
        try:
            stub = self._connect(self.timeout)
            answer = stub.ModelReady(pb.ModelReadyRequest(name=self.model), timeout=self.timeout.connect)
            return bool(answer.ready)
        except (TokenstreamError, grpc.RpcError):
            return False

    def wait_until_ready(self, timeout: float = 60.0) -> None:
        """Return as soon as the model is ready; NotReady if it is not within `timeout` seconds."""
        end, pause = time.monotonic() + timeout, _POLL_FIRST
        while not self.ready():
            left = end - time.monotonic()
            if left <= 0:
                raise NotReady(f"model {self.model!r} at {self.url} was not ready within {timeout:g} s")
            time.sleep(min(pause, left))
            pause = min(2 * pause, _POLL_MOST)

    def _operate(
        self, operation: str, *, text: str | None = None, input_ids: Sequence[int] | None = None
    ) -> protocol.Reply:
        name = uuid.uuid4().hex
        request = protocol.operation_request(self.model, operation, request_id=name, text=text, input_ids=input_ids)
        stub = self._connect(self.timeout)
        answer = None
        try:
            for response in stub.ModelStreamInfer(iter((request,)), timeout=self.timeout.total or self.timeout.idle):
                reply = protocol.parse(response)
                answer = reply if reply.data else answer
        except grpc.RpcError as error:
            raise from_status(error.code().name, error.details() or "", self.url) from error
        if answer is None:
            raise IncompleteStream(f"{self.url} did not answer {operation}", request_id=name)
        return answer

    def _connect(self, clocks: Timeout) -> service_pb2_grpc.GRPCInferenceServiceStub:
        """The shared stub, once the server has answered on this connection."""
        with self._lock:
            if self._closed:
                raise RuntimeError("this client is closed")
            if self._channel is None:
                self._channel = grpc.insecure_channel(self.url, options=self._options())
                self._stub = service_pb2_grpc.GRPCInferenceServiceStub(self._channel)
            stub = self._stub
        if not self._connected:
            self._greet(stub, min(filter(None, (clocks.connect, clocks.total)), default=None))
            self._connected = True
        return stub

    def _greet(self, stub: service_pb2_grpc.GRPCInferenceServiceStub, limit: float | None) -> None:
        """One small question, because a stream gives no sign of life before the first token."""
        try:
            stub.ServerLive(pb.ServerLiveRequest(), timeout=limit)
        except grpc.RpcError as error:
            status = error.code()
            if status is grpc.StatusCode.DEADLINE_EXCEEDED:
                raise ConnectTimeout(f"{self.url} did not answer within {limit} s") from error
            if status is grpc.StatusCode.UNAVAILABLE:
                raise self._not_connected(error.details() or "") from error
            # Any other status is an answer: the health service may be closed to us and the model open.

    def _not_connected(self, details: str) -> TokenstreamError:
        reason = from_status("UNAVAILABLE", details, self.url)
        if isinstance(reason, IncompleteStream):  # nothing had begun
            return ConnectionFailed(f"cannot connect to {self.url}: {reason_of(details)}")
        return reason

    def _options(self) -> list[tuple[str, int]]:
        options = [("grpc.initial_reconnect_backoff_ms", 100), ("grpc.max_reconnect_backoff_ms", 2000)]
        if self.timeout.connect is not None:  # bounds reconnecting too, which no request's clock sees
            options.append(("grpc.min_reconnect_backoff_ms", int(self.timeout.connect * 1000)))
        if self._keepalive is not None:
            options += [
                ("grpc.keepalive_time_ms", int(self._keepalive * 1000)),
                ("grpc.keepalive_timeout_ms", 10_000),
                ("grpc.http2.max_pings_without_data", 0),
            ]
        return options

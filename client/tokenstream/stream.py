"""A blocking stream of one answer: iterator, context manager, four clocks, cancel.

One thread per stream reads the RPC and stamps each arrival, so that a consumer waits with a limit and is woken at once.
It does not know how a request is built, nor how a response is read: `Answer` does.
"""

from __future__ import annotations

import threading
import time
import weakref
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from queue import Empty, SimpleQueue
from types import TracebackType
from typing import Self

import grpc
from tritonclient.grpc import service_pb2 as pb
from tritonclient.grpc import service_pb2_grpc

from .answer import Answer
from .errors import Cancelled, FirstTokenTimeout, IdleTimeout, StreamTimeout, TokenstreamError, from_status
from .results import Chunk, Completion, Stats, Timings, Usage
from .timeouts import Timeout

_END_SECONDS = 1.0  # within which a stream should end that was refused and closed on our side


@dataclass(frozen=True, slots=True)
class Arrival:
    """A response, or the end of the RPC (`response` None) with the error that caused it, if any."""

    at: float
    response: pb.ModelStreamInferResponse | None = None
    error: grpc.RpcError | None = None


class Call:
    """One ModelStreamInfer RPC carrying one request. `deadline` in seconds is gRPC's own, None for none.

    The request side stays open until `half_close`, as Triton's own clients keep it.
    """

    def __init__(
        self, stub: service_pb2_grpc.GRPCInferenceServiceStub, request: pb.ModelInferRequest, deadline: float | None
    ) -> None:
        self._requests: SimpleQueue[pb.ModelInferRequest | None] = SimpleQueue()
        self._arrivals: SimpleQueue[Arrival] = SimpleQueue()
        self._requests.put(request)
        self._rpc = stub.ModelStreamInfer(iter(self._requests.get, None), timeout=deadline)
        # The thread knows the RPC and the queues but not the stream, so that an abandoned stream is collected.
        arguments = (self._rpc, self._requests, self._arrivals)
        threading.Thread(target=_read, args=arguments, name="tokenstream-reader", daemon=True).start()

    def receive(self, timeout: float | None) -> Arrival:
        """The next arrival; queue.Empty after `timeout` seconds."""
        return self._arrivals.get(timeout=None if timeout is None else max(0.0, timeout))

    def half_close(self) -> None:
        """Say that nothing more will be asked: the server then ends the RPC, which would otherwise pin the model."""
        self._requests.put(None)

    def cancel(self) -> None:
        """Cancel on the server; what is being waited for ends at once. No effect on an RPC that has ended."""
        self._rpc.cancel()


def _read(
    rpc: Iterator[pb.ModelStreamInferResponse],
    requests: SimpleQueue[pb.ModelInferRequest | None],
    arrivals: SimpleQueue[Arrival],
) -> None:
    error = None
    try:
        for response in rpc:
            arrivals.put(Arrival(time.monotonic(), response))
    except grpc.RpcError as caught:
        error = caught
    arrivals.put(Arrival(time.monotonic(), error=error))
    requests.put(None)  # releases gRPC's thread that waits for the next request


class TokenStream:
    """The answer to one request, chunk by chunk; made by `Client.stream`. For one consumer; `cancel` from any thread.

    Leaving the `with` block, or dropping the last reference, cancels what has not ended. When a chunk cannot be had,
    iterating raises an exception of `tokenstream.errors`, which holds what had arrived.
    """

    def __init__(self, call: Call, answer: Answer, timeout: Timeout, url: str) -> None:
        self._call = call
        self._answer = answer
        self._timeout = timeout
        self._url = url
        self._cancelled = False
        self._ended = False
        self._failure: TokenstreamError | None = None
        self._cancel_call = weakref.finalize(self, call.cancel)

    def __iter__(self) -> Self:
        """The stream itself: it can be read once."""
        return self

    def __next__(self) -> Chunk:
        """The next chunk as soon as it arrives."""
        if self._failure is not None:
            raise self._failure
        while not self._answer.final:
            try:
                chunk = self._step()
            except TokenstreamError as error:
                self._cancel_call()
                self._failure = self._answer.complete(error)
                raise
            if self._answer.final:
                self._call.half_close()
            if chunk is not None:
                return chunk
        self._let_end()
        raise StopIteration

    def __enter__(self) -> Self:
        """The stream itself."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """Cancel what has not ended."""
        if self._answer.final:
            self._let_end()
        self.cancel()

    def cancel(self) -> None:
        """Stop the answer on the server; iterating then raises Cancelled. No effect once the answer has ended."""
        if not self._answer.final:
            self._cancelled = True
            self._cancel_call()

    def final(self) -> Completion:
        """Read what is left and return the whole answer. Raises as iterating does."""
        for _ in self:
            pass
        return self._answer.completion()

    @property
    def request_id(self) -> str:
        """The name under which the server logs this request."""
        return self._answer.request_id

    @property
    def text(self) -> str:
        """All text read so far."""
        return self._answer.text

    @property
    def token_ids(self) -> tuple[int, ...]:
        """All tokens read so far."""
        return tuple(self._answer.token_ids)

    @property
    def finish_reason(self) -> str | None:
        """`stop` or `length`; None until the last chunk was read, and for ever if the answer was cut."""
        return self._answer.finish_reason

    @property
    def usage(self) -> Usage:
        """Tokens of the prompt (0 until the first chunk) and of the answer so far."""
        return self._answer.usage

    @property
    def timings(self) -> Timings | None:
        """The server's clocks, with the last chunk."""
        return self._answer.timings

    @property
    def stats(self) -> Stats:
        """This client's clocks so far."""
        return self._answer.stats

    @property
    def seed(self) -> int:
        """The seed in use: with it, the same request gives the same answer."""
        return self._answer.seed

    @property
    def fingerprint(self) -> str:
        """What the answer depends on besides request and seed, as a digest; "" until the first chunk."""
        return self._answer.fingerprint

    def _step(self) -> Chunk | None:
        if self._cancelled:
            raise Cancelled("the request was cancelled by this client")
        arrival = self._receive()
        if arrival.response is not None:
            if arrival.response.error_message:
                self._let_end()
            return self._answer.feed(arrival.response, arrival.at)
        if self._cancelled:
            raise Cancelled("the request was cancelled by this client")
        if arrival.error is not None and self._answer.finish_reason is None:
            raise from_status(arrival.error.code().name, arrival.error.details() or "", self._url) from arrival.error
        self._answer.end()
        return None

    def _let_end(self) -> None:
        """Close our side behind the last response and wait for the RPC to end by itself.

        An RPC that is cancelled at this point, by hanging up say, can pin the model: 2.51 then cannot stop in order.
        """
        if self._ended:
            return
        self._ended = True
        self._call.half_close()
        deadline = time.monotonic() + _END_SECONDS
        with suppress(Empty):
            while self._call.receive(deadline - time.monotonic()).response is not None:
                pass
            self._cancel_call.detach()

    def _receive(self) -> Arrival:
        """Wait for the next arrival as long as the running clock allows. The total clock is the RPC's deadline."""
        try:
            if self._answer.begun:
                return self._call.receive(self._timeout.idle)
            waited = time.monotonic() - self._answer.sent_at
            limit = self._timeout.first_token
            return self._call.receive(None if limit is None else limit - waited)
        except Empty:
            raise self._late() from None

    def _late(self) -> StreamTimeout:
        if self._answer.begun:
            return IdleTimeout(f"{self._url} sent no token for {self._timeout.idle} s")
        return FirstTokenTimeout(f"{self._url} sent no first token within {self._timeout.first_token} s")

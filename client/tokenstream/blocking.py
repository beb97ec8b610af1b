"""A connection whose calls block: gRPC's synchronous channel behind the interfaces of `transport`.

One thread per call reads the RPC and stamps each arrival, so that a consumer waits with a limit and is woken at once.
Its coroutines never suspend: `transport.run` drives them. It does not know what the requests mean.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from queue import Empty, SimpleQueue
from typing import Any

import grpc
from tritonclient.grpc import service_pb2 as pb
from tritonclient.grpc import service_pb2_grpc

from .transport import Arrival, Failed, Late, Metadata, Status, status_of


class BlockingCall:
    """One ModelStreamInfer RPC carrying one request."""

    def __init__(
        self,
        stub: service_pb2_grpc.GRPCInferenceServiceStub,
        request: pb.ModelInferRequest,
        deadline: float | None,
        metadata: Metadata,
    ) -> None:
        self._arrivals: SimpleQueue[Arrival] = SimpleQueue()
        self._rpc = stub.ModelStreamInfer(iter((request,)), timeout=deadline, metadata=metadata)
        # The thread knows the RPC and the queue but not the stream, so that an abandoned stream is collected.
        arguments = (self._rpc, self._arrivals)
        threading.Thread(target=_read, args=arguments, name="tokenstream-reader", daemon=True).start()

    async def receive(self, limit: float | None) -> Arrival:
        """The next arrival; Late after `limit` seconds."""
        try:
            return self._arrivals.get(timeout=limit)
        except Empty:
            raise Late from None

    def release(self) -> None:
        """Nothing to do: its thread reads to the end."""

    def cancel(self) -> None:
        """Cancel on the server."""
        self._rpc.cancel()


class BlockingConnection:
    """A channel of gRPC's, shared by all threads."""

    def __init__(self, url: str, options: list[tuple[str, Any]], credentials: grpc.ChannelCredentials | None) -> None:
        if credentials is None:
            self._channel = grpc.insecure_channel(url, options=options)
        else:
            self._channel = grpc.secure_channel(url, credentials, options=options)
        self._stub = service_pb2_grpc.GRPCInferenceServiceStub(self._channel)

    async def ask(self, method: str, request: Any, *, limit: float | None, metadata: Metadata) -> Any:
        """The answer to one small request."""
        try:
            return getattr(self._stub, method)(request, timeout=limit, metadata=metadata)
        except grpc.RpcError as error:
            raise Failed(status_of(error)) from None
        except ValueError:  # what gRPC says of a channel that was closed by another thread
            raise Failed(_CLOSED) from None

    async def open(self, request: pb.ModelInferRequest, *, deadline: float | None, metadata: Metadata) -> BlockingCall:
        """Send a request."""
        try:
            return BlockingCall(self._stub, request, deadline, metadata)
        except ValueError:
            raise Failed(_CLOSED) from None

    async def close(self) -> None:
        """Cancel what is running and hang up."""
        self._channel.close()


class BlockingBell:
    """A pause of the calling thread."""

    def __init__(self) -> None:
        self._event = threading.Event()

    async def pause(self, limit: float) -> None:
        """Return after `limit` seconds, or once `ring` has been called."""
        self._event.wait(limit)

    def ring(self) -> None:
        """End this pause and all further ones."""
        self._event.set()


_CLOSED = Status("CANCELLED", "the channel is closed")


def _read(rpc: Iterator[pb.ModelStreamInferResponse], arrivals: SimpleQueue[Arrival]) -> None:
    failure = None
    try:
        for response in rpc:
            arrivals.put(Arrival(time.monotonic(), response))
    except grpc.RpcError as error:
        failure = status_of(error)
    arrivals.put(Arrival(time.monotonic(), failure=failure))

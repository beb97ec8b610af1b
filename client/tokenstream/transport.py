"""What the protocol needs of a connection, and what the blocking and the asynchronous one have in common.

The protocol is written once, as coroutines over these interfaces: an asynchronous connection suspends in them, a
blocking one blocks and never suspends, so that `run` can drive the same coroutines without an event loop. It does not
know requests, answers or why a connection is wanted.
"""

from __future__ import annotations

import ctypes
import time
import weakref
from collections.abc import Callable, Coroutine, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

import grpc
from tritonclient.grpc import service_pb2 as pb

from .errors import read_seconds
from .replies import Reply

# Each RPC carries one request, so it is opened as one of a single request: the same on the wire, and it costs less.
STREAM_METHOD = "/inference.GRPCInferenceService/ModelStreamInfer"
_END_SECONDS = 1.0  # within which an RPC should end that is closed on our side and has had its last response
Metadata = Sequence[tuple[str, str]]
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Status:
    """How an RPC failed: the name of its gRPC status and its text. `retry_after` in seconds, if the server says so."""

    name: str
    details: str
    retry_after: float | None = None


@dataclass(slots=True)
class Arrival:
    """A response, or the end of the RPC (`reply` None) with its failure, if it failed. `at`: monotonic seconds.

    Not frozen, which would double what it costs, at every token.
    """

    at: float
    reply: Reply | None = None
    failure: Status | None = None


class Failed(Exception):  # noqa: N818  (an RPC's end, turned into one of `errors` where its meaning is known)
    """An RPC failed."""

    def __init__(self, status: Status) -> None:
        super().__init__(status.name)
        self.status = status


class Late(Exception):  # noqa: N818
    """Nothing came within the time that was given."""


class Call(Protocol):
    """One ModelStreamInfer RPC that carries one request.

    Our side is closed once the request is sent, so that the server ends the RPC behind its last response: one that
    stayed open, because its reader is slow, say, would pin the model and keep the server from stopping.
    """

    async def receive(self, limit: float | None) -> Arrival:
        """The next arrival; Late after `limit` seconds, 0 or more (None: never)."""

    def release(self) -> None:
        """The last response has come: let the RPC end by itself, even if nobody reads on."""

    def cancel(self) -> None:
        """Cancel on the server; what is being waited for ends at once. No effect on an RPC that has ended.

        From any thread.
        """


class Connection(Protocol):
    """A connection to one endpoint, made when it is first used. No exception of gRPC's own leaves it."""

    @property
    def busy(self) -> bool:
        """Whether a call is running."""

    async def ask(self, method: str, request: Any, *, limit: float | None, metadata: Metadata, bell: Bell) -> Any:
        """The answer to one small request; Failed, at once when `bell` rings."""

    async def open(self, request: pb.ModelInferRequest, *, deadline: float | None, metadata: Metadata) -> Call:
        """Send a request; `deadline` in seconds is gRPC's own. Failed."""

    async def close(self) -> None:
        """Cancel what is running and hang up."""


class Bell(Protocol):
    """A pause that can be cut short, and a question."""

    async def pause(self, limit: float) -> None:
        """Return after `limit` seconds, or once `ring` has been called."""

    def on_ring(self, action: Callable[[], object] | None) -> None:
        """Call `action` too when it rings, at once if it has rung; None: nothing any more."""

    def ring(self) -> None:
        """End this pause and all further ones at once. From any thread."""


class Running:
    """The RPCs of a connection that run. One that nobody holds does not: gRPC cancels what is forgotten."""

    def __init__(self) -> None:
        self._rpcs: set[weakref.ref[Any]] = set()

    def add(self, rpc: Any) -> None:
        """One more, until it is done."""
        self._rpcs.add(weakref.ref(rpc, self._rpcs.discard))

    def __bool__(self) -> bool:
        """Whether there is any."""
        return any(rpc is not None and not rpc.done() for rpc in [known() for known in list(self._rpcs)])


def keep_for_good(thing: object) -> None:
    """Never let `thing` be destroyed: in a child process, gRPC's destructors would act on the parent's connections."""
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(thing))


def run(coroutine: Coroutine[Any, Any, T]) -> T:
    """Drive a coroutine whose awaits all block: it ends without ever suspending."""
    try:
        coroutine.send(None)
    except StopIteration as end:
        value: T = end.value
        return value
    coroutine.close()
    raise RuntimeError("a blocking connection has suspended")


async def settle(call: Call) -> None:
    """Wait for an RPC to end by itself behind its last response; cancel it if it does not.

    One that is cancelled at this point, by hanging up say, can pin the model: 2.51 then cannot stop in order.
    """
    end = time.monotonic() + _END_SECONDS
    with suppress(Late):
        while (left := end - time.monotonic()) > 0:
            if (await call.receive(left)).reply is None:
                return
    call.cancel()


def channel_options(keepalive: float | None, connect: float | None, server_name: str | None) -> list[tuple[str, Any]]:
    """gRPC's options: a bound for dials, and pings every `keepalive` seconds of silence while an answer is awaited."""
    options: list[tuple[str, Any]] = [
        ("grpc.enable_retries", 0),  # whether to ask again is for `course` to say
        ("grpc.max_receive_message_length", 2**31 - 1),  # as Triton's own; gRPC's 4 MiB is less than a long text
        ("grpc.use_local_subchannel_pool", 1),  # or a new connection would sit out the pauses of others that failed
    ]
    if connect is not None:  # bounds reconnecting too, which no request's clock sees
        options.append(("grpc.min_reconnect_backoff_ms", int(connect * 1000)))
    if keepalive is not None:
        options += [
            ("grpc.keepalive_time_ms", int(keepalive * 1000)),
            ("grpc.keepalive_timeout_ms", 10_000),
            ("grpc.http2.max_pings_without_data", 0),
        ]
    if server_name is not None:
        options.append(("grpc.ssl_target_name_override", server_name))
    return options


def status_of(error: grpc.RpcError) -> Status:
    """What a gRPC exception says."""
    waits = [
        wait / unit
        for key, value in error.trailing_metadata() or ()
        for name, unit in (("retry-after", 1.0), ("retry-after-ms", 1e3), ("grpc-retry-pushback-ms", 1e3))
        if key == name and isinstance(value, str) and (wait := read_seconds(value)) is not None
    ]
    return Status(error.code().name, error.details() or "", max(waits, default=None))

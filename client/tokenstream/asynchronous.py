"""A connection whose calls suspend: gRPC's asyncio channel behind the interfaces of `transport`.

It talks to the stub itself: Triton's own asyncio client can neither ask for a final mark without data nor keep gRPC's
exceptions to itself. It starts no task of its own, and belongs to the event loop in which it is first used.
It does not know what the requests mean.
"""

from __future__ import annotations

import asyncio
import time
import weakref
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import grpc
from tritonclient.grpc import service_pb2 as pb
from tritonclient.grpc import service_pb2_grpc

from .replies import ReplyReader
from .transport import STREAM_METHOD, Arrival, Bell, Failed, Late, Metadata, Running, Status, status_of

_CANCELLED = Status("CANCELLED", "the call was cancelled")
_GARBAGE = Status("INTERNAL", "Exception deserializing response!")


class AsyncCall:
    """One ModelStreamInfer RPC carrying one request. Cancelling a task that waits for it cancels it.

    `ending` keeps an RPC that was released until it has ended: gRPC cancels what is forgotten before.
    """

    def __init__(self, rpc: Any, loop: asyncio.AbstractEventLoop, ending: set[Any]) -> None:
        self._rpc = rpc
        self._loop = loop
        self._ending = ending
        self._due: float | None = None  # when the wait must be over, in the loop's seconds; None: nobody waits
        self._alarm: asyncio.TimerHandle | None = None
        self._late = False

    async def receive(self, limit: float | None) -> Arrival:
        """The next arrival; Late after `limit` seconds, which cancels the RPC."""
        if limit is not None:
            self._set_alarm(self._loop.time() + limit)
        message, failure = None, None
        try:
            message = await self._rpc.read()
        except grpc.RpcError as error:
            failure = status_of(error)
        except asyncio.CancelledError:
            if _task_is_cancelled():
                raise
            failure = _CANCELLED
        finally:
            self._due = None
        if self._late:
            raise Late
        if message is None:  # unless it failed, this is what gRPC makes of bytes that it cannot read
            return Arrival(time.monotonic(), failure=failure or _GARBAGE)
        return Arrival(time.monotonic(), None if message is grpc.aio.EOF else message)

    def _set_alarm(self, due: float) -> None:
        """One timer serves many waits: it is set anew when it rings too early, or would ring too late."""
        self._due = due
        if self._alarm is not None and self._alarm.when() > due:
            self._alarm.cancel()
            self._alarm = None
        if self._alarm is None:
            self._alarm = self._loop.call_at(due, _ring, weakref.ref(self))

    def ring(self) -> None:
        """The time that was set has come."""
        self._alarm = None
        if self._due is None:
            return
        if self._due > self._loop.time():
            self._set_alarm(self._due)
        else:
            self._late = True
            self._rpc.cancel()

    def release(self) -> None:
        """Let the RPC end by itself, even if nobody reads on."""
        if not self._rpc.done():
            self._ending.add(self._rpc)
            self._rpc.add_done_callback(self._ending.discard)

    def cancel(self) -> None:
        """Cancel on the server. A loop that is closed has ended its calls."""
        try:
            running = asyncio.get_running_loop()
        except RuntimeError:
            running = None
        if running is self._loop:
            self._rpc.cancel()
        elif not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._rpc.cancel)


class AsyncConnection:
    """A channel of gRPC's, shared by all tasks of one event loop."""

    def __init__(self, url: str, options: list[tuple[str, Any]], credentials: grpc.ChannelCredentials | None) -> None:
        self._loop = asyncio.get_running_loop()
        self._ending: set[Any] = set()
        self._running = Running()
        if credentials is None:
            self._channel = grpc.aio.insecure_channel(url, options=options)
        else:
            self._channel = grpc.aio.secure_channel(url, credentials, options=options)
        self._stub = service_pb2_grpc.GRPCInferenceServiceStub(self._channel)

    @property
    def busy(self) -> bool:
        """Whether a call is running."""
        return bool(self._running)

    async def ask(self, method: str, request: Any, *, limit: float | None, metadata: Metadata, bell: Bell) -> Any:
        """The answer to one small request."""
        self._check_loop()
        try:
            rpc = getattr(self._stub, method)(request, timeout=limit, metadata=metadata)
            self._running.add(rpc)
            bell.on_ring(rpc.cancel)
            return await rpc
        except (grpc.RpcError, grpc.aio.UsageError, asyncio.CancelledError) as error:
            raise _failed(error) from None
        finally:
            bell.on_ring(None)

    async def open(self, request: pb.ModelInferRequest, *, deadline: float | None, metadata: Metadata) -> AsyncCall:
        """Send a request."""
        self._check_loop()
        try:
            rpc = self._stream()(request, timeout=deadline, metadata=metadata)
        except grpc.aio.UsageError as error:
            raise _failed(error) from None
        self._running.add(rpc)
        return AsyncCall(rpc, self._loop, self._ending)

    def _stream(self) -> Any:
        """The RPC with a reader of its own; gRPC ends it with INTERNAL if that finds no response."""
        return self._channel.unary_stream(STREAM_METHOD, pb.ModelInferRequest.SerializeToString, ReplyReader().read)

    async def close(self) -> None:
        """Cancel what is running and hang up."""
        self._check_loop()
        await self._channel.close()

    def _check_loop(self) -> None:
        if asyncio.get_running_loop() is not self._loop:
            raise RuntimeError("this client belongs to another event loop: make one for each")


class AsyncBell:
    """A pause of the current task."""

    def __init__(self) -> None:
        self._event = asyncio.Event()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._rung = False
        self._action: Callable[[], object] | None = None

    def on_ring(self, action: Callable[[], object] | None) -> None:
        """Do this too when it rings, at once if it has rung."""
        self._loop = asyncio.get_running_loop()
        self._action = action
        if action is not None and self._rung:
            action()

    async def pause(self, limit: float) -> None:
        """Return after `limit` seconds, or once `ring` has been called."""
        self._loop = asyncio.get_running_loop()
        if self._rung:
            return
        with suppress(TimeoutError):
            async with asyncio.timeout(limit):
                await self._event.wait()

    def ring(self) -> None:
        """End this pause and all further ones."""
        self._rung = True
        if self._loop is not None and not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._event.set)
            if (action := self._action) is not None:
                self._loop.call_soon_threadsafe(action)


def _ring(call: weakref.ref[AsyncCall]) -> None:
    """For a timer, which must not keep a stream alive that nobody has."""
    if (waiting := call()) is not None:
        waiting.ring()


def _failed(error: BaseException) -> BaseException:
    """What a call's end is to be known as; a task's own cancellation stays what it is."""
    if isinstance(error, grpc.RpcError):
        return Failed(status_of(error))
    if isinstance(error, asyncio.CancelledError) and _task_is_cancelled():
        return error
    return Failed(_CANCELLED)


def _task_is_cancelled() -> bool:
    """Whether it is the task that was cancelled, and not the call it waits for."""
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0

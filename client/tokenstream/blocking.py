"""A connection whose calls block: gRPC's synchronous channel behind the interfaces of `transport`.

Whoever waits for a call reads it, so that no thread of ours stands between; a watchman for each connection cancels
calls whose time has run out. Its coroutines never suspend: `transport.run` drives them. It does not know what requests
mean.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

import grpc
from tritonclient.grpc import service_pb2 as pb
from tritonclient.grpc import service_pb2_grpc

from .replies import ReplyReader
from .transport import STREAM_METHOD, Arrival, Bell, Failed, Late, Metadata, Running, Status, status_of

_LOOK_SECONDS = 1.0


class BlockingCall:
    """One ModelStreamInfer RPC carrying one request. For one thread, but for `cancel`.

    `ending` keeps an RPC that was released until it has ended: gRPC cancels what is forgotten before.
    """

    def __init__(self, rpc: Any, watchman: Watchman, ending: set[Any]) -> None:
        self._rpc = rpc
        self._watchman = watchman
        self._ending = ending

    async def receive(self, limit: float | None) -> Arrival:
        """The next arrival; Late after `limit` seconds, which cancels the RPC."""
        wait = None if limit is None else self._watchman.enter(self, time.monotonic() + limit)
        reply, failure = None, None
        try:
            reply = next(self._rpc, None)
        except grpc.RpcError as error:
            failure = status_of(error)
        finally:
            late = wait is not None and not self._watchman.leave(wait)
        if late:
            raise Late
        return Arrival(time.monotonic(), reply, failure)

    def release(self) -> None:
        """Let the RPC end by itself, even if nobody reads on."""
        self._ending.add(self._rpc)
        self._rpc.add_done_callback(self._ending.discard)

    def cancel(self) -> None:
        """Cancel on the server."""
        self._rpc.cancel()


Wait = tuple[BlockingCall, float]  # who waits, and when that must be over, in monotonic seconds


class Watchman:
    """Cancels the calls that are waited for too long. The thread looks up every second, and goes if nobody waits.

    Whoever waits enters and leaves at every token, so that they do it without the lock: each step on the set is whole,
    and the thread looks into it once more behind the moment from which it is not counted on. A wait is ended by who
    takes it out of the set, so that a call whose answer has come is left alone.
    """

    def __init__(self) -> None:
        self._waits: set[Wait] = set()
        self._wakes_at: float | None = None  # None: no thread
        self._dismissed = False
        self._condition = threading.Condition()

    def enter(self, call: BlockingCall, due: float) -> Wait:
        """A wait begins that must be over at `due`."""
        wait = (call, due)
        self._waits.add(wait)
        wakes_at = self._wakes_at
        if wakes_at is None or due < wakes_at:
            self._call(due)
        return wait

    def leave(self, wait: Wait) -> bool:
        """A wait is over; whether it was in time, or its call has been cancelled."""
        try:
            self._waits.remove(wait)
        except KeyError:
            return False
        return True

    def dismiss(self) -> None:
        """Nobody will wait any more."""
        with self._condition:
            self._dismissed = True
            self._condition.notify()

    def _call(self, due: float) -> None:
        with self._condition:
            if self._wakes_at is None:
                threading.Thread(target=self._watch, name="tokenstream-watchman", daemon=True).start()
            self._wakes_at = due
            self._condition.notify()

    def _watch(self) -> None:
        with self._condition:
            while not self._dismissed:
                now = time.monotonic()
                for wait in [wait for wait in list(self._waits) if wait[1] <= now]:
                    if self.leave(wait):
                        wait[0].cancel()
                self._wakes_at = now + _LOOK_SECONDS  # from here on whoever is earlier calls; the others are seen next
                self._wakes_at = min([self._wakes_at, *(due for _, due in list(self._waits))])
                if not self._waits:
                    self._wakes_at = None
                    if not self._waits:
                        return
                    self._wakes_at = now
                self._condition.wait(self._wakes_at - now)
            self._wakes_at = None


class BlockingConnection:
    """A channel of gRPC's, shared by all threads."""

    def __init__(self, url: str, options: list[tuple[str, Any]], credentials: grpc.ChannelCredentials | None) -> None:
        if credentials is None:
            self._channel = grpc.insecure_channel(url, options=options)
        else:
            self._channel = grpc.secure_channel(url, credentials, options=options)
        self._stub = service_pb2_grpc.GRPCInferenceServiceStub(self._channel)
        self._watchman = Watchman()
        self._ending: set[Any] = set()
        self._running = Running()

    @property
    def busy(self) -> bool:
        """Whether a call is running."""
        return bool(self._running)

    async def ask(self, method: str, request: Any, *, limit: float | None, metadata: Metadata, bell: Bell) -> Any:
        """The answer to one small request."""
        try:
            rpc = getattr(self._stub, method).future(request, timeout=limit, metadata=metadata)
            self._running.add(rpc)
            bell.on_ring(rpc.cancel)
            return rpc.result()
        except grpc.RpcError as error:
            raise Failed(status_of(error)) from None
        except (ValueError, grpc.FutureCancelledError):  # the first: of a channel that was closed by another thread
            raise Failed(_CLOSED) from None
        finally:
            bell.on_ring(None)

    async def open(self, request: pb.ModelInferRequest, *, deadline: float | None, metadata: Metadata) -> BlockingCall:
        """Send a request."""
        try:
            rpc = self._stream()(request, timeout=deadline, metadata=metadata)
        except ValueError:
            raise Failed(_CLOSED) from None
        self._running.add(rpc)
        return BlockingCall(rpc, self._watchman, self._ending)

    def _stream(self) -> Any:
        """The RPC with a reader of its own; gRPC ends it with INTERNAL if that finds no response."""
        return self._channel.unary_stream(STREAM_METHOD, pb.ModelInferRequest.SerializeToString, ReplyReader().read)

    async def close(self) -> None:
        """Cancel what is running and hang up."""
        self._channel.close()
        self._watchman.dismiss()


class BlockingBell:
    """A pause of the calling thread."""

    def __init__(self) -> None:
        self._event = threading.Event()
        self._action: Callable[[], object] | None = None

    def on_ring(self, action: Callable[[], object] | None) -> None:
        """Do this too when it rings, at once if it has rung."""
        self._action = action
        if action is not None and self._event.is_set():
            action()

    async def pause(self, limit: float) -> None:
        """Return after `limit` seconds, or once `ring` has been called."""
        self._event.wait(limit)

    def ring(self) -> None:
        """End this pause and all further ones."""
        self._event.set()
        if (action := self._action) is not None:
            action()


_CLOSED = Status("CANCELLED", "the call was cancelled")

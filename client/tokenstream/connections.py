"""The connections of one client: made when first needed, greeted once, shared by all its requests.

It asks small questions, of every endpoint in its course, and hands out connections for answers.
It does not know streams, prompts or event loops: what it is given makes the connections.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

from tritonclient.grpc import service_pb2 as pb

from .course import Budget, Course, Endpoints
from .errors import (
    ConnectionFailed,
    ConnectTimeout,
    IncompleteStream,
    NotReady,
    TokenstreamError,
    from_status,
    reason_of,
)
from .protocol import Reply, parse
from .security import Passport
from .timeouts import Timeout
from .transport import Bell, Connection, Failed, Status, settle

_POLL_FIRST, _POLL_MOST = 0.05, 1.0  # seconds between questions for readiness, doubling from the first to the most
T = TypeVar("T")


class Connections:
    """Connections by endpoint. Safe to share as its connections are."""

    def __init__(
        self, endpoints: Endpoints, passport: Passport, make: Callable[[str], Connection], bell: Callable[[], Bell]
    ) -> None:
        self.endpoints = endpoints
        self.passport = passport
        self.closed = False
        self._make = make
        self._bell = bell
        self._budget = Budget()
        self._lock = threading.Lock()
        self._connections: dict[str, Connection] = {}
        self._greeted: set[str] = set()

    def check_open(self) -> None:
        """RuntimeError if the client is closed."""
        if self.closed:
            raise RuntimeError("this client is closed")

    def course(self, *, retries: int, deadline: float | None, pause: Callable[[float], Awaitable[None]]) -> Course:
        """The way of a request through the endpoints."""
        self._budget.deposit()
        return Course(self.endpoints, self._budget, retries=retries, deadline=deadline, pause=pause)

    async def connect(self, url: str, limit: float | None) -> Connection:
        """The connection to `url`, once its server has answered on it. ConnectionFailed, ConnectTimeout and others."""
        with self._lock:
            self.check_open()
            if url not in self._connections:
                self._connections[url] = self._make(url)
            connection, greeted = self._connections[url], url in self._greeted
        if not greeted:
            await self._greet(connection, url, limit)
            self._greeted.add(url)
        return connection

    def doubt(self, url: str) -> None:
        """Greet the server anew before the next request."""
        self._greeted.discard(url)

    async def close(self) -> None:
        """Cancel what is running and hang up."""
        with self._lock:
            self.closed = True
            connections, self._connections = list(self._connections.values()), {}
        for connection in connections:
            await connection.close()

    async def ask(self, method: str, request: Any, timeout: Timeout, retries: int) -> Any:
        """The answer to one small request, from the first endpoint that gives one."""

        async def once(url: str) -> Any:
            connection = await self.connect(url, timeout.connect)
            return await connection.ask(method, request, limit=timeout.idle, metadata=self.passport.stamp({}))

        return await self._anywhere(once, retries)

    async def operate(self, request: pb.ModelInferRequest, timeout: Timeout, retries: int) -> Reply:
        """The answer to a request that needs no seat, from the first endpoint that gives one."""

        async def once(url: str) -> Reply:
            connection = await self.connect(url, timeout.connect)
            limit = timeout.total or timeout.idle
            call = await connection.open(request, deadline=limit, metadata=self.passport.stamp({}))
            answer = None
            try:
                while (arrival := await call.receive(None)).response is not None:
                    if arrival.response.error_message:
                        await settle(call)
                    reply = parse(arrival.response)
                    answer = reply if reply.data else answer
            finally:
                call.cancel()
            if arrival.failure is not None:
                raise Failed(arrival.failure)
            if answer is None:
                raise IncompleteStream(f"{url} ended a request without an answer", request_id=request.id)
            return answer

        return await self._anywhere(once, retries)

    async def ready(self, model: str, timeout: Timeout) -> bool:
        """Whether any endpoint says that the model can be asked."""
        for url in self.endpoints.in_order():
            try:
                connection = await self.connect(url, timeout.connect)
                question = pb.ModelReadyRequest(name=model)
                metadata = self.passport.stamp({})
                answer = await connection.ask("ModelReady", question, limit=timeout.connect, metadata=metadata)
            except (TokenstreamError, Failed):
                continue
            if answer.ready:
                return True
        return False

    async def wait_until_ready(self, model: str, timeout: Timeout, limit: float) -> None:
        """Return as soon as the model is ready; NotReady if it is not within `limit` seconds."""
        end, pause, bell = time.monotonic() + limit, _POLL_FIRST, self._bell()
        while not await self.ready(model, timeout):
            left = end - time.monotonic()
            if left <= 0:
                raise NotReady(f"model {model!r} at {','.join(self.endpoints.urls)} was not ready within {limit:g} s")
            await bell.pause(min(pause, left))
            pause = min(2 * pause, _POLL_MOST)

    async def _anywhere(self, once: Callable[[str], Awaitable[T]], retries: int) -> T:
        course = self.course(retries=retries, deadline=None, pause=self._bell().pause)
        while True:
            try:
                return await once(course.endpoint)
            except Failed as failed:
                error: TokenstreamError = meaning(failed.status, course.endpoint)
            except TokenstreamError as caught:
                error = caught
            self.check_open()
            self.doubt(course.endpoint)
            await course.after(error)

    async def _greet(self, connection: Connection, url: str, limit: float | None) -> None:
        """One small question, because a stream gives no sign of life before the first token."""
        try:
            metadata = self.passport.stamp({})
            await connection.ask("ServerLive", pb.ServerLiveRequest(), limit=limit, metadata=metadata)
        except Failed as failed:
            status = failed.status
            if status.name == "DEADLINE_EXCEEDED":
                raise ConnectTimeout(f"{url} did not answer within {limit} s") from None
            if status.name in ("UNAVAILABLE", "CANCELLED"):
                raise _not_connected(url, status.name, status.details) from None
            # Any other status is an answer: the health service may be closed to us and the model open.


def meaning(status: Status, url: str) -> TokenstreamError:
    """The exception for the end of an RPC to `url`."""
    return from_status(status.name, status.details, url, status.retry_after)


def _not_connected(url: str, name: str, details: str) -> TokenstreamError:
    reason = from_status(name, details, url)
    if isinstance(reason, IncompleteStream):  # nothing had begun
        return ConnectionFailed(f"cannot connect to {url}: {reason_of(details)}")
    return reason

"""The connections of one client: made when first needed, greeted once, shared by all its requests.

It asks small questions, of every endpoint in its course, and hands out connections for answers.
It does not know streams, prompts or event loops: what it is given makes the connections.
"""

from __future__ import annotations

import os
import threading
import time
import weakref
from collections import Counter
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
    TotalTimeout,
    from_status,
    why_not_connected,
)
from .replies import Reply
from .security import Passport
from .timeouts import Timeout, in_words
from .transport import Bell, Connection, Failed, Status, keep_for_good, settle

_POLL_FIRST, _POLL_MOST = 0.05, 1.0  # seconds between questions for readiness, doubling from the first to the most
_NO_ANSWER = frozenset({"DEADLINE_EXCEEDED", "UNAVAILABLE", "CANCELLED"})
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
        self._greeters: Counter[Connection] = Counter()  # how many greet, or are about to
        self._left: list[Connection] = []  # given up, and still in use
        self._forks: int | None = None  # how many there had been when the connections were made

    @property
    def inherited(self) -> bool:
        """Whether the connections are those of a parent process: whatever is done to them here is done to its own."""
        return self._forks is not None and self._forks != _Lineage.forks

    def check_process(self) -> None:
        """RuntimeError in a child of the process that made the connections."""
        if self.inherited:
            raise RuntimeError("this client has connections of the parent process: make a client after the fork")

    def check_open(self) -> None:
        """RuntimeError if the client is closed, or another process's."""
        self.check_process()
        if self.closed:
            raise RuntimeError("this client is closed")

    def course(self, *, retries: int, deadline: float | None, pause: Callable[[float], Awaitable[None]]) -> Course:
        """The way of a request through the endpoints."""
        return Course(self.endpoints, self._budget, retries=retries, deadline=deadline, pause=pause)

    async def connect(self, url: str, limit: float | None, bell: Bell) -> Connection:
        """The connection to `url`, once its server has answered on it. ConnectionFailed, ConnectTimeout and others.

        Nobody watches a connection between two calls, so that one from before may be dead, or repeat how a dial of long
        ago ended: if it cannot be used, a new one dials now, within the same `limit`. Ends at once when `bell` rings.
        """
        self.check_process()  # before the lock, which another thread may have held at a fork
        if self._left:
            await self._sweep()
        end = None if limit is None else time.monotonic() + limit
        left, again = limit, True
        while True:
            connection, new, greeted = self._at(url)
            if greeted or (failure := await self._greet(connection, url, left, bell)) is None:
                return connection
            left = None if end is None else end - time.monotonic()
            stale = again and not new and failure.name == "UNAVAILABLE"
            if not stale or self.closed or (left is not None and left <= 0):
                raise _not_connected(url, failure, limit)
            again = False

    def doubt(self, url: str) -> None:
        """Greet the server anew before the next request."""
        self._greeted.discard(url)

    async def close(self) -> None:
        """Cancel what is running and hang up; in a child process nothing, as the connections are its parent's."""
        if self.inherited:
            return
        with self._lock:
            self.closed = True
            connections = [*self._connections.values(), *self._left]
            self._connections.clear()
            self._left.clear()
        for connection in connections:
            await connection.close()

    async def ask(self, method: str, request: Any, timeout: Timeout, retries: int) -> Any:
        """The answer to one small request, from the first endpoint that gives one."""

        async def once(url: str) -> Any:
            connection = await self._live(url, timeout)
            metadata, bell = self.passport.stamp({}), self._bell()
            return await connection.ask(method, request, limit=timeout.idle, metadata=metadata, bell=bell)

        return await self._anywhere(once, retries)

    async def operate(self, request: pb.ModelInferRequest, timeout: Timeout, retries: int) -> Reply:
        """The answer to a request that needs no seat, from the first endpoint that gives one."""

        async def once(url: str) -> Reply:
            connection = await self._live(url, timeout)
            limit = timeout.total or timeout.idle
            call = await connection.open(request, deadline=limit, metadata=self.passport.stamp({}))
            answer = None
            try:
                while (reply := (arrival := await call.receive(None)).reply) is not None:
                    if reply.error is not None:
                        if reply.final:
                            await settle(call)
                        raise reply.error
                    answer = reply if reply.data else answer
            finally:
                call.cancel()
            if arrival.failure is not None:
                if arrival.failure.name == "DEADLINE_EXCEEDED" and limit is not None:
                    raise TotalTimeout(f"{url} gave no answer within {in_words(limit)}")
                raise Failed(arrival.failure)
            if answer is None:
                raise IncompleteStream(f"{url} ended a request without an answer", request_id=request.id)
            return answer

        return await self._anywhere(once, retries)

    async def ready(self, model: str, timeout: Timeout) -> bool:
        """Whether any endpoint says that the model can be asked."""
        for url in self.endpoints.in_order():
            try:
                connection = await self._live(url, timeout)
                bell, question, metadata = self._bell(), pb.ModelReadyRequest(name=model), self.passport.stamp({})
                answer = await connection.ask(
                    "ModelReady", question, limit=timeout.connect, metadata=metadata, bell=bell
                )
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

    async def _live(self, url: str, timeout: Timeout) -> Connection:
        """The connection to `url`, whose server has answered on it now: a small question is to see a dead line soon."""
        self.doubt(url)
        return await self.connect(url, timeout.connect, self._bell())

    def _at(self, url: str) -> tuple[Connection, bool, bool]:
        """The connection to `url`, whether it is new, and whether its server has answered on it; if not, greet it."""
        with self._lock:
            self.check_open()
            new = url not in self._connections
            if new:
                if self._forks is None:
                    self._forks = _Lineage.forks
                    weakref.finalize(self, _spare_the_parent, self._connections, self._left, self._forks)
                self._connections[url] = self._make(url)
            connection, greeted = self._connections[url], url in self._greeted
            if not greeted:
                self._greeters[connection] += 1
            return connection, new, greeted

    async def _greet(self, connection: Connection, url: str, limit: float | None, bell: Bell) -> Status | None:
        """One small question, because a stream gives no sign of life before the first token. None: it was answered.

        A connection without an answer is given up, and is not asked again.
        """
        answered = False
        try:
            metadata = self.passport.stamp({})
            await connection.ask("ServerLive", pb.ServerLiveRequest(), limit=limit, metadata=metadata, bell=bell)
            answered = True
        except Failed as failed:
            if failed.status.name in _NO_ANSWER:
                return failed.status
            answered = True  # the health service may be closed to us and the model open
        finally:
            self._note_greeting(url, connection, answered=answered)
            if self._left:
                await self._sweep()
        self.endpoints.reached(url)
        return None

    def _note_greeting(self, url: str, connection: Connection, *, answered: bool) -> None:
        """Without an answer whoever asks next dials anew. What runs on it goes on: a server that drains ends that."""
        with self._lock:
            self._greeters -= Counter([connection])  # which drops what is 0
            if self._connections.get(url) is not connection:
                return
            if answered:
                self._greeted.add(url)
            else:
                del self._connections[url]
                self._greeted.discard(url)
                self._left.append(connection)

    async def _sweep(self) -> None:
        """Hang up where nothing is running any more."""
        with self._lock:
            idle = [one for one in self._left if not (one in self._greeters or one.busy)]
            self._left[:] = [connection for connection in self._left if connection not in idle]
        for connection in idle:
            await connection.close()


def meaning(status: Status, url: str) -> TokenstreamError:
    """The exception for the end of an RPC to `url`."""
    return from_status(status.name, status.details, url, status.retry_after)


class _Lineage:
    """How many forks lie between this process and the one that loaded this module: cheaper to ask for than its id."""

    forks = 0

    @classmethod
    def forked(cls) -> None:
        cls.forks += 1


os.register_at_fork(after_in_child=_Lineage.forked)


def _spare_the_parent(connections: dict[str, Connection], left: list[Connection], forks: int) -> None:
    if forks != _Lineage.forks:
        keep_for_good(connections)
        keep_for_good(left)


def _not_connected(url: str, failure: Status, limit: float | None) -> TokenstreamError:
    if failure.name == "DEADLINE_EXCEEDED":
        return ConnectTimeout(f"{url} did not answer within {'its own time' if limit is None else in_words(limit)}")
    reason = from_status(failure.name, failure.details, url)
    if isinstance(reason, IncompleteStream):  # nothing had begun
        return ConnectionFailed(f"cannot connect to {url}: {why_not_connected(failure.details)}")
    return reason

"""One request followed to its end: sent, asked again while nothing has come, taken up elsewhere when it is cut.

Written once for both clients, as coroutines over the interfaces of `transport`. A cut answer goes on from the tokens it
has, with the same seed, template time and fingerprint, so that what the caller reads shows neither a gap nor a repeat.
It logs (INFO) each time that it asks again. It does not know threads, tasks or gRPC, nor how endpoints are chosen.
"""

from __future__ import annotations

import logging
import threading
import time
from dataclasses import dataclass

from tritonclient.grpc import service_pb2 as pb

from .answer import Answer
from .connections import Connections, meaning
from .course import Course, Verdict, judge
from .errors import (
    Cancelled,
    ConnectionFailed,
    ConnectTimeout,
    FirstTokenTimeout,
    IdleTimeout,
    IncompleteStream,
    ResumeMismatch,
    StreamTimeout,
    TokenstreamError,
    TotalTimeout,
)
from .params import Resume
from .protocol import Begun, attempt
from .replies import Reply
from .results import Chunk
from .security import Headers
from .timeouts import Timeout, in_words
from .transport import Bell, Call, Failed, Late, Status, keep_for_good, settle

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Travel:
    """How a request travels: its clocks, its own headers, and what is done about failures."""

    clocks: Timeout
    headers: Headers
    retries: int
    resume: Resume
    max_resumes: int

    def __post_init__(self) -> None:
        """Refuse counts below 0 and an unknown `resume`: ValueError naming it; TypeError for a count that is none."""
        for name in ("retries", "max_resumes"):
            count = getattr(self, name)
            if isinstance(count, bool) or not isinstance(count, int):
                raise TypeError(f"{name} must be an integer, got {type(count).__name__}")
            if count < 0:
                raise ValueError(f"{name} must be 0 or more, got {count}")
        if not (isinstance(self.resume, bool) or self.resume == "best_effort"):
            raise ValueError(f'resume must be True, False or "best_effort", got {self.resume!r}')


class Pursuit:
    """The life of one request. For one consumer; `cancel` from any thread."""

    def __init__(
        self, connections: Connections, asked: pb.ModelInferRequest, answer: Answer, travel: Travel, bell: Bell
    ) -> None:
        self.answer = answer
        self._connections = connections
        self._asked = asked
        self._travel = travel
        self._bell = bell
        self._course: Course | None = None
        self._deadline: float | None = None
        self._call: Call | None = None
        self._sent_at = 0.0
        self._flowing = False  # whether the running call has brought part of the answer
        self._broken: TokenstreamError | None = None  # what cut the answer, until another call goes on with it
        self._cancelled = False
        self._settled = False
        self._failure: TokenstreamError | None = None
        self._reading = threading.Lock()

    async def begin(self) -> None:
        """Connect and send the request, unless that was done.

        Raises what `next_chunk` raises, and RuntimeError if the client is closed.
        """
        if self._course is not None:
            return
        self._connections.check_open()
        total = self._travel.clocks.total
        self._deadline = None if total is None else time.monotonic() + total
        try:
            await self._open()
        except BaseException as error:
            self._fail(error)
            raise

    async def next_chunk(self) -> Chunk | None:
        """The next chunk as soon as it arrives; None behind the last one.

        Raises an exception of `errors` with what had arrived; every further call raises it again. RuntimeError for a
        second reader beside the first, and in a child process; neither harms the answer.
        """
        if not self._reading.acquire(blocking=False):
            raise RuntimeError("this stream is being read by another thread or task: each needs a stream of its own")
        try:
            if self._failure is not None:
                raise self._failure
            self._connections.check_process()
            if self._course is None:
                await self.begin()
            try:
                while not self.answer.final:
                    if (chunk := await self._advance()) is not None:
                        return chunk
            except BaseException as error:
                self._fail(error)
                raise
            await self._settle()
            return None
        finally:
            self._reading.release()

    def cancel(self) -> None:
        """Stop the answer on the server. No effect once it has ended, nor in a child process: it is the parent's."""
        if self._connections.inherited:
            keep_for_good(self)
        elif not self.answer.final:
            self._cancelled = True
            self._bell.ring()
            if (call := self._call) is not None:
                call.cancel()

    async def leave(self) -> None:
        """End in order: cancel what has not ended."""
        if self.answer.final and not self._connections.inherited:
            await self._settle()
        self.cancel()

    async def _settle(self) -> None:
        """Let the RPC end by itself behind the last response."""
        if not self._settled and self._call is not None:
            self._settled = True
            await settle(self._call)

    def _fail(self, error: BaseException) -> None:
        """End the pursuit and its call, whatever was raised, even if it is a task's cancellation."""
        if isinstance(error, TokenstreamError):
            self._failure = self.answer.complete(error)
        else:
            self._cancelled = True
        self._drop_call()

    async def _advance(self) -> Chunk | None:
        """Take in one response, or do what can be done about its failure to come."""
        self._check()
        if self._call is None:
            await self._open()
            return None
        try:
            arrival = await self._call.receive(self._limit())
            reply = arrival.reply
            if reply is None:
                self._take_end(arrival.failure)
                return None
            if reply.final and reply.error is not None:
                await self._settle()
            return self._take(reply, arrival.at)
        except Late:
            await self._recover(self._late())
        except TokenstreamError as error:
            await self._recover(error)
        return None

    async def _open(self) -> None:
        """Send the request, or what is left of it, to the first endpoint that takes it."""
        self._course = self._course or self._new_course()
        while self._call is None:
            self._check()
            try:
                await self._send(self._course.endpoint)
            except Failed as failed:
                await self._recover(meaning(failed.status, self._course.endpoint))
            except TokenstreamError as error:
                await self._recover(error)
        self._check()

    async def _send(self, url: str) -> None:
        limit, left = self._travel.clocks.connect, self._time_left()
        total_is_first = left is not None and (limit is None or left < limit)
        try:
            connection = await self._connections.connect(url, left if total_is_first else limit, self._bell)
        except ConnectTimeout:
            if total_is_first:
                raise self._total_is_over() from None
            raise
        left = self._time_left()
        request = attempt(self._asked, timeout=left, begun=self._begun())
        self._sent_at = time.monotonic()
        self.answer.sent_at = self.answer.sent_at or self._sent_at
        self._flowing = self._settled = False
        self._call = await connection.open(
            request, deadline=left, metadata=self._connections.passport.stamp(self._travel.headers)
        )

    def _take(self, reply: Reply, at: float) -> Chunk | None:
        chunk = self.answer.feed(reply, at)
        if chunk is not None and not self._flowing:
            self._flowing = True
            self._connections.endpoints.praise(self._running().endpoint)
            self.answer.resumes += self._broken is not None
            self._broken = None
        if self.answer.final and self._call is not None:
            self._call.release()
        return chunk

    def _take_end(self, failure: Status | None) -> None:
        self._check()
        if failure is not None and self.answer.finish_reason is None:
            error = meaning(failure, self._running().endpoint)
            if isinstance(error, TotalTimeout):
                error = self._total_is_over()
            if self._flowing and isinstance(error, ConnectionFailed | ConnectTimeout):
                error = IncompleteStream(f"the stream was cut: {error.message}")
            raise error
        self._settled = True
        self.answer.end()

    async def _recover(self, error: TokenstreamError) -> None:
        """Arrange for another call behind `error`; raise if there shall be none."""
        self._drop_call()
        self._check()
        course, hopeless = self._running(), judge(error) is Verdict.STOP
        self._connections.doubt(course.endpoint)
        if self.answer.finish_reason is not None and not hopeless:
            self.answer.end()  # it is whole: only the mark behind it is missing
        elif not self._flowing:
            try:
                await course.after(error)
            except TokenstreamError as last:
                if (verdict := self._verdict(last)) is last:
                    raise
                raise verdict from last
            log.info("request %s is asked again at %s: %s", self.answer.request_id, course.endpoint, error.message)
        elif hopeless or not self._may_resume():
            raise error
        else:
            self._flowing = False
            self._broken = error
            self._connections.endpoints.set_aside(course.endpoint)
            self._course = self._new_course()
            at, name = len(self.answer.token_ids), self.answer.request_id
            log.info("request %s goes on from token %d at %s: %s", name, at, self._course.endpoint, error.message)

    def _verdict(self, last: TokenstreamError) -> TokenstreamError:
        """What the caller hears when nobody goes on: what cut the answer, not what came of asking around."""
        broken = self._broken
        if broken is None or isinstance(last, TotalTimeout):
            return last
        if isinstance(last, ResumeMismatch):
            message = f"{broken.message}; nobody could go on with the same answer ({last.message})"
            return IncompleteStream(message)
        broken.add_note(f"nobody could go on: {last.message}")
        return broken

    def _may_resume(self) -> bool:
        if not self._travel.resume or self.answer.resumes >= self._travel.max_resumes:
            return False
        known = bool(self.answer.fingerprint) or self._travel.resume == "best_effort"
        return known and bool(self.answer.token_ids or not self.answer.text)

    def _begun(self) -> Begun | None:
        if not self.answer.token_ids:
            return None
        exact = self._travel.resume != "best_effort"
        return Begun(self.answer.token_ids, self.answer.fingerprint if exact else None)

    def _new_course(self) -> Course:
        return self._connections.course(retries=self._travel.retries, deadline=self._deadline, pause=self._bell.pause)

    def _running(self) -> Course:
        if self._course is None:
            raise RuntimeError("the request was not sent")
        return self._course

    def _check(self) -> None:
        """Cancelled if the caller wants no more."""
        if self._cancelled:
            raise Cancelled("the request was cancelled by this client")
        if self._connections.closed:
            raise Cancelled("the client was closed")

    def _drop_call(self) -> None:
        call, self._call = self._call, None
        if call is not None and not self._settled:
            call.cancel()

    def _time_left(self) -> float | None:
        """Seconds of the total clock; TotalTimeout if there are none."""
        if self._deadline is None:
            return None
        left = self._deadline - time.monotonic()
        if left <= 0:
            raise self._total_is_over()
        return left

    def _total_is_over(self) -> TotalTimeout:
        total, endpoint = self._travel.clocks.total, self._running().endpoint
        of = "" if total is None else f" of {in_words(total)}"  # without one the deadline is somebody else's
        return TotalTimeout(f"the answer from {endpoint} took longer than its total time{of}")

    def _limit(self) -> float | None:
        """How long the running clock allows to wait. The total clock is the RPC's deadline."""
        if self._flowing:
            return self._travel.clocks.idle
        limit = self._travel.clocks.first_token
        return None if limit is None else max(0.0, limit - (time.monotonic() - self._sent_at))

    def _late(self) -> StreamTimeout:
        url, clocks = self._running().endpoint, self._travel.clocks
        if self._flowing:
            return IdleTimeout(f"{url} sent no token for {in_words(clocks.idle or 0.0)}")
        return FirstTokenTimeout(f"{url} sent no first token within {in_words(clocks.first_token or 0.0)}")

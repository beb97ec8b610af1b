"""One answer as it grows: feed it replies, and it gives chunks and knows when and how the answer ended.

The state that a blocking and an asynchronous stream share; it checks that no token is missing or repeated.
It does no I/O and reads no clock: arrival times are handed in.
"""

from __future__ import annotations

import itertools

from .errors import IncompleteStream, InternalError, ResumeMismatch, TokenstreamError
from .replies import Reply
from .results import Chunk, Completion, Stats, Timings, TokenLogprob, Usage


class Answer:
    """What has arrived of one answer, from one server or several in turn.

    `sent_at` and arrival times are seconds of one monotonic clock. With `any_fingerprint` a server may go on with the
    answer whose own would differ.
    """

    def __init__(self, request_id: str, seed: int, *, any_fingerprint: bool = False) -> None:
        self.request_id = request_id
        self.seed = seed
        self.sent_at = 0.0
        self.fingerprint = ""
        self.token_ids: list[int] = []
        self.logprobs: list[TokenLogprob] = []
        self.finish_reason: str | None = None
        self.timings: Timings | None = None
        self.final = False
        self.resumes = 0
        self._any_fingerprint = any_fingerprint
        self._texts: list[str] = []
        self._arrivals: list[float] = []
        self._first_tokens = 0
        self._input_tokens = 0

    def feed(self, reply: Reply, at: float) -> Chunk | None:
        """Take in one response; None for a final mark without data.

        Raises the ServerError it carries, InternalError if tokens are missing or repeated, ResumeMismatch if it goes on
        with an answer of another fingerprint, IncompleteStream if it is final and no reason was given.
        """
        if reply.error is not None:
            raise reply.error
        chunk = self._append(reply, at) if reply.data else None
        if reply.final:
            self.end()
        return chunk

    def end(self) -> None:
        """Nothing follows. Raises IncompleteStream if the answer has no finish reason."""
        if self.finish_reason is None:
            raise IncompleteStream("the stream ended before the answer did, without a reason")
        self.final = True

    def complete(self, error: TokenstreamError) -> TokenstreamError:
        """Put what has arrived into `error`."""
        error.text, error.token_ids = self.text, tuple(self.token_ids)
        error.request_id = error.request_id or self.request_id
        return error

    @property
    def text(self) -> str:
        """All text so far."""
        return "".join(self._texts)

    @property
    def usage(self) -> Usage:
        """Tokens so far; the prompt's are known from the first response on."""
        return Usage(self._input_tokens, len(self.token_ids))

    @property
    def stats(self) -> Stats:
        """The client's clocks so far."""
        times = self._arrivals
        if not times:
            return Stats(None, (), 0.0)
        gaps = tuple(later - earlier for earlier, later in itertools.pairwise(times))
        seconds = times[-1] - times[0]
        rate = (len(self.token_ids) - self._first_tokens) / seconds if seconds > 0 else 0.0
        return Stats(times[0] - self.sent_at, gaps, rate)

    def completion(self) -> Completion:
        """The whole answer; IncompleteStream if it has not ended."""
        if self.finish_reason is None:
            raise self.complete(IncompleteStream("the answer has not ended"))
        return Completion(
            request_id=self.request_id,
            text=self.text,
            token_ids=tuple(self.token_ids),
            finish_reason=self.finish_reason,
            usage=self.usage,
            timings=self.timings,
            seed=self.seed,
            fingerprint=self.fingerprint,
            logprobs=tuple(self.logprobs),
            stats=self.stats,
            resumes=self.resumes,
        )

    def _append(self, reply: Reply, at: float) -> Chunk:
        expected = len(self.token_ids)
        index = expected if reply.index is None else reply.index
        if self.finish_reason is not None:
            raise InternalError("the server sent more after the answer had ended")
        if index != expected:
            raise InternalError(f"the server sent token {index} where token {expected} was due")
        if reply.fingerprint is not None:
            self._compare(reply.fingerprint)
        self._texts.append(reply.text)
        self.token_ids.extend(reply.token_ids)
        if reply.logprobs:
            self.logprobs.extend(reply.logprobs)
        if reply.token_ids:
            self._first_tokens = self._first_tokens if self._arrivals else len(reply.token_ids)
            self._arrivals.append(at)
        self.finish_reason = reply.finish_reason
        self.seed = self.seed if reply.seed is None else reply.seed
        self.timings = reply.timings or self.timings
        self._input_tokens = reply.num_input_tokens or self._input_tokens
        return Chunk(reply.text, reply.token_ids, index, reply.logprobs, reply.finish_reason)

    def _compare(self, fingerprint: str) -> None:
        self.fingerprint = self.fingerprint or fingerprint
        if fingerprint and fingerprint != self.fingerprint and not self._any_fingerprint:
            raise ResumeMismatch(f"begun with fingerprint {self.fingerprint}, this server's is {fingerprint}")

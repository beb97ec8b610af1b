"""A blocking stream of one answer: iterator, context manager, cancel.

A thin face of `Pursuit`, which does everything; `AnswerView` is what it shares with the asynchronous one.
It does not know how a request is built, nor how a response is read.
"""

from __future__ import annotations

import weakref
from types import TracebackType
from typing import Self

from .pursuit import Pursuit
from .results import Chunk, Completion, Stats, Timings, Usage
from .transport import run


class AnswerView:
    """What there is of an answer, at any time."""

    def __init__(self, pursuit: Pursuit) -> None:
        self._pursuit = pursuit
        self._answer = pursuit.answer
        weakref.finalize(self, pursuit.cancel)  # which does not know this object: it can be collected

    def cancel(self) -> None:
        """Stop the answer on the server; iterating then raises Cancelled. No effect once the answer has ended."""
        self._pursuit.cancel()

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
        """What the answer depends on besides request and seed, as a digest; "" until the first chunk.

        Of the server that began it, whoever went on.
        """
        return self._answer.fingerprint

    @property
    def resumes(self) -> int:
        """How often the answer was cut and taken up again."""
        return self._answer.resumes


class TokenStream(AnswerView):
    """The answer to one request, chunk by chunk; made by `Client.stream`. For one consumer; `cancel` from any thread.

    Leaving the `with` block, or dropping the last reference, cancels what has not ended. When a chunk cannot be had,
    iterating raises an exception of `tokenstream.errors`, which holds what had arrived.
    """

    def __init__(self, pursuit: Pursuit) -> None:
        super().__init__(pursuit)
        run(pursuit.begin())

    def __iter__(self) -> Self:
        """The stream itself: it can be read once."""
        return self

    def __next__(self) -> Chunk:
        """The next chunk as soon as it arrives."""
        chunk = run(self._pursuit.next_chunk())
        if chunk is None:
            raise StopIteration
        return chunk

    def __enter__(self) -> Self:
        """The stream itself."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """Cancel what has not ended."""
        run(self._pursuit.leave())

    def final(self) -> Completion:
        """Read what is left and return the whole answer. Raises as iterating does."""
        for _ in self:
            pass
        return self._answer.completion()

"""Asks this project's server through its own client, over gRPC: one client, thus one connection, for all requests.

It waits without limits, which are its callers' to set. It does not know when requests are sent.
"""

from __future__ import annotations

import json
from types import TracebackType
from typing import Self

from tokenstream import (
    AsyncClient,
    AsyncTokenStream,
    ConnectionFailed,
    ConnectTimeout,
    Draining,
    IncompleteStream,
    InvalidRequest,
    ModelNotFound,
    NotReady,
    Overloaded,
    StreamTimeout,
    Timeout,
    TokenstreamError,
    Unauthorized,
)
from tokenstream import Cancelled as CancelledThere

from .records import Outcome
from .requests import Request
from .targets import Failed, Seen, TargetOptions

_TIMEOUT = Timeout(connect=10.0, first_token=None, idle=None)
# The first that fits; kinds come before their bases.
_OUTCOMES: tuple[tuple[type[TokenstreamError], Outcome], ...] = (
    (ConnectionFailed, "connection"),
    (ConnectTimeout, "connection"),
    (StreamTimeout, "timeout"),
    (IncompleteStream, "incomplete"),
    (CancelledThere, "incomplete"),
    (InvalidRequest, "invalid"),
    (ModelNotFound, "invalid"),
    (Unauthorized, "unauthorized"),
    (Overloaded, "overloaded"),
    (NotReady, "overloaded"),
    (Draining, "overloaded"),
)


class TokenstreamTarget:
    """The model at HOST:PORT, or at several with commas between, of which the first is preferred."""

    def __init__(self, url: str, model: str, options: TargetOptions) -> None:
        self._client = AsyncClient(
            url,
            model=model,
            timeout=_TIMEOUT,
            retries=0,
            resume=options.resume,
            tls=options.tls,
            headers=dict(options.headers),
            allow_insecure_credentials=options.allow_insecure_credentials,
        )

    async def __aenter__(self) -> Self:
        """The target itself."""
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """Hang up."""
        await self._client.close()

    async def describe(self) -> dict[str, str]:
        """Everything that the model says of itself, by its own names."""
        try:
            info = await self._client.info()
        except TokenstreamError as error:
            raise _failed(error) from error
        return {
            name: value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
            for name, value in info.details.items()
        }

    async def ask(self, request: Request, request_id: str, seen: Seen) -> None:
        """See `Target.ask`."""
        stream = None
        try:
            stream = self._stream(request, request_id)
            async with stream:
                await _read(stream, seen)
        except TokenstreamError as error:
            raise _failed(error) from error
        except ValueError as error:
            raise Failed("invalid", str(error)) from error
        finally:
            if stream is not None:
                _note_words(stream, seen)

    def _stream(self, request: Request, request_id: str) -> AsyncTokenStream:
        messages = [{"role": message.role, "content": message.content} for message in request.messages]
        return self._client.stream(
            request.prompt,
            messages=messages or None,
            request_id=request_id,
            max_tokens=request.max_tokens,
            ignore_eos=request.ignore_eos,
            temperature=request.temperature,
            seed=request.seed,
            priority=request.priority,
        )


async def _read(stream: AsyncTokenStream, seen: Seen) -> None:
    if seen.unwanted:
        return
    async for chunk in stream:
        if chunk.token_ids and seen.note(len(chunk.token_ids)):
            return
        await seen.pause()


def _note_words(stream: AsyncTokenStream, seen: Seen) -> None:
    """Keep what the server has said of the answer."""
    usage, timings = stream.usage, stream.timings
    seen.input_tokens = usage.input_tokens or None
    seen.output_tokens = usage.output_tokens
    seen.resumes = stream.resumes
    if timings is not None:
        seen.queue, seen.cached_tokens, seen.preemptions = timings.queue, timings.cached_tokens, timings.preemptions


def _failed(error: TokenstreamError) -> Failed:
    outcome: Outcome = next((outcome for kind, outcome in _OUTCOMES if isinstance(error, kind)), "internal")
    return Failed(outcome, error.message)

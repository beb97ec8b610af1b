"""The asynchronous client and its stream. Thin faces: `base` makes requests, `pursuit` follows them.

It does not know the model, its tokenizer or its limits: the server checks values.
"""

from __future__ import annotations

from collections.abc import Sequence
from types import TracebackType
from typing import Any, Self, Unpack

from ._grpc import grpc
from .asynchronous import AsyncBell, AsyncConnection
from .base import BaseClient
from .params import Options
from .protocol import Message, Prompt, server_info
from .results import Chunk, Completion, ModelStatus, ServerInfo
from .stream import AnswerView


class AsyncTokenStream(AnswerView):
    """The answer to one request, chunk by chunk; made by `AsyncClient.stream`. For one consumer; `cancel` anywhere.

    The request is sent when the block is entered or the first chunk is wanted. Leaving the `async with` block, dropping
    the last reference, or cancelling the task that waits for a chunk cancels what has not ended: bound a wait with
    `Timeout`, not from outside.
    """

    def __aiter__(self) -> Self:
        """The stream itself: it can be read once."""
        return self

    async def __anext__(self) -> Chunk:
        """The next chunk as soon as it arrives."""
        chunk = await self._pursuit.next_chunk()
        if chunk is None:
            raise StopAsyncIteration
        return chunk

    async def __aenter__(self) -> Self:
        """The stream itself, its request sent. ConnectionFailed or ConnectTimeout."""
        await self._pursuit.begin()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """Cancel what has not ended."""
        await self._pursuit.leave()

    async def final(self) -> Completion:
        """Read what is left and return the whole answer. Raises as iterating does."""
        async for _ in self:
            pass
        return self._answer.completion()


class AsyncClient(BaseClient):
    """The asynchronous client, safe to share between the tasks of one event loop. Close it, or use it in a block."""

    async def __aenter__(self) -> Self:
        """The client itself."""
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """Close."""
        await self.close()

    async def close(self) -> None:
        """Cancel what is running and hang up. The client cannot be used again."""
        await self._connections.close()

    def stream(
        self,
        prompt: str | None = None,
        *,
        messages: Sequence[Message] | None = None,
        input_ids: Sequence[int] | None = None,
        **options: Unpack[Options],
    ) -> AsyncTokenStream:
        """An answer that is asked for when its block is entered or its first chunk is wanted.

        Exactly one of `prompt` (text as it is), `messages` (through the model's chat template) and `input_ids` must be
        given. Raises TypeError for an unknown keyword or a wrong type, ValueError or InvalidRequest for a value that
        cannot be meant or sent.
        """
        return AsyncTokenStream(self._pursue(Prompt(prompt, messages, input_ids), options))

    def chat(self, messages: Sequence[Message], **options: Unpack[Options]) -> AsyncTokenStream:
        """`stream` for chat messages: `[{"role": "user", "content": "..."}]`."""
        return self.stream(messages=messages, **options)

    async def generate(
        self,
        prompt: str | None = None,
        *,
        messages: Sequence[Message] | None = None,
        input_ids: Sequence[int] | None = None,
        **options: Unpack[Options],
    ) -> Completion:
        """The whole answer at once; what had arrived is in the exception if there is one."""
        async with self.stream(prompt, messages=messages, input_ids=input_ids, **options) as stream:
            return await stream.final()

    async def tokenize(self, text: str) -> list[int]:
        """The token ids of `text`, by the server's tokenizer."""
        return list((await self._operate("tokenize", text=text)).token_ids)

    async def detokenize(self, ids: Sequence[int]) -> str:
        """The text of token ids, by the server's tokenizer."""
        return (await self._operate("detokenize", input_ids=ids)).text

    async def info(self) -> ServerInfo:
        """What the server says of its model: limits, dtype, exactness, versions."""
        return server_info((await self._operate("info")).text)

    async def models(self) -> tuple[ModelStatus, ...]:
        """The models in the server's repository."""
        return await self._models()

    async def ready(self) -> bool:
        """Whether a server says that the model can be asked. Never raises for a server that is not there."""
        return await self._connections.ready(self.model, self.timeout)

    async def wait_until_ready(self, timeout: float = 60.0) -> None:
        """Return as soon as the model is ready; NotReady if it is not within `timeout` seconds."""
        await self._connections.wait_until_ready(self.model, self.timeout, timeout)

    def _new_connection(
        self, url: str, options: list[tuple[str, Any]], credentials: grpc.ChannelCredentials | None
    ) -> AsyncConnection:
        return AsyncConnection(url, options, credentials)

    def _bell(self) -> AsyncBell:
        return AsyncBell()

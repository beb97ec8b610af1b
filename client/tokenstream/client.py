"""The blocking client. A thin face: `base` makes requests, `pursuit` follows them, `TokenStream` shows answers.

It does not know the model, its tokenizer or its limits: the server checks values.
"""

from __future__ import annotations

from collections.abc import Sequence
from types import TracebackType
from typing import Any, Self, Unpack

from ._grpc import grpc
from .base import BaseClient
from .blocking import BlockingBell, BlockingConnection
from .params import Options
from .protocol import Message, Prompt, server_info
from .results import Completion, ModelStatus, ServerInfo
from .stream import TokenStream
from .transport import run


class Client(BaseClient):
    """The blocking client, safe to share between threads. Close it, or use it in a `with` block."""

    def __enter__(self) -> Self:
        """The client itself."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """Close."""
        self.close()

    def close(self) -> None:
        """Cancel what is running and hang up. The client cannot be used again."""
        run(self._connections.close())

    def stream(
        self,
        prompt: str | None = None,
        *,
        messages: Sequence[Message] | None = None,
        input_ids: Sequence[int] | None = None,
        **options: Unpack[Options],
    ) -> TokenStream:
        """Ask for an answer and return at once; iterate the result for its chunks.

        Exactly one of `prompt` (text as it is), `messages` (through the model's chat template) and `input_ids` must be
        given. Raises TypeError for an unknown keyword or a wrong type, ValueError or InvalidRequest for a value that
        cannot be meant or sent, ConnectionFailed or ConnectTimeout; what the server refuses is raised by iterating.
        """
        return TokenStream(self._pursue(Prompt(prompt, messages, input_ids), options))

    def chat(self, messages: Sequence[Message], **options: Unpack[Options]) -> TokenStream:
        """`stream` for chat messages: `[{"role": "user", "content": "..."}]`."""
        return self.stream(messages=messages, **options)

    def generate(
        self,
        prompt: str | None = None,
        *,
        messages: Sequence[Message] | None = None,
        input_ids: Sequence[int] | None = None,
        **options: Unpack[Options],
    ) -> Completion:
        """The whole answer at once. Arguments and exceptions as in `stream`; what had arrived is in the exception."""
        with self.stream(prompt, messages=messages, input_ids=input_ids, **options) as stream:
            return stream.final()

    def tokenize(self, text: str) -> list[int]:
        """The token ids of `text`, by the server's tokenizer."""
        return list(run(self._operate("tokenize", text=text)).token_ids)

    def detokenize(self, ids: Sequence[int]) -> str:
        """The text of token ids, by the server's tokenizer."""
        return run(self._operate("detokenize", input_ids=ids)).text

    def info(self) -> ServerInfo:
        """What the server says of its model: limits, dtype, exactness, versions."""
        return server_info(run(self._operate("info")).text)

    def models(self) -> tuple[ModelStatus, ...]:
        """The models in the server's repository."""
        return run(self._models())

    def ready(self) -> bool:
        """Whether a server says that the model can be asked. Never raises for a server that is not there."""
        return run(self._connections.ready(self.model, self.timeout))

    def wait_until_ready(self, timeout: float = 60.0) -> None:
        """Return as soon as the model is ready; NotReady if it is not within `timeout` seconds."""
        run(self._connections.wait_until_ready(self.model, self.timeout, timeout))

    def _new_connection(
        self, url: str, options: list[tuple[str, Any]], credentials: grpc.ChannelCredentials | None
    ) -> BlockingConnection:
        return BlockingConnection(url, options, credentials)

    def _bell(self) -> BlockingBell:
        return BlockingBell()

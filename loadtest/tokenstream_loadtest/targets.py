"""What is asked: servers behind one interface, whatever protocol they speak, and what their callers saw of an answer.

    async with open_target("tokenstream", "127.0.0.1:8001", "llm") as target:
        await target.ask(request, "request-1", seen := Seen(request))

A protocol has its own module, which alone imports what it needs. None of them asks again or goes on with a cut answer
unless it is told to: a load test must not hide faults. They do not know when requests are sent, nor why.
"""

from __future__ import annotations

import asyncio
import importlib
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from types import TracebackType
from typing import Protocol, Self

from tokenstream import TLS

from .pulse import Pulse
from .records import Outcome
from .requests import Request

_CLASSES = {
    "tokenstream": ("target_tokenstream", "TokenstreamTarget"),
    "openai": ("target_openai", "OpenAITarget"),
    "triton": ("target_triton", "TritonTarget"),
}
KINDS = tuple(_CLASSES)
_LONGEST_LINE = 300  # characters of an error that are kept


class Failed(Exception):  # noqa: N818  (an outcome that a record tells, not an error of this program)
    """A request that ended as nobody had planned; `line` says how in one line."""

    def __init__(self, outcome: Outcome, line: str) -> None:
        super().__init__(outcome, line)
        self.outcome = outcome
        self.line = " ".join(line.split())[:_LONGEST_LINE]

    def __str__(self) -> str:
        """The line."""
        return self.line


class Seen:
    """What one caller has seen so far of the answer to `request`, and how it behaves.

    `times` and `tokens`: of each response with tokens. What the server itself says stays None where it says nothing.
    """

    __slots__ = (
        "_left",
        "_pause",
        "_pulse",
        "cached_tokens",
        "input_tokens",
        "output_tokens",
        "preemptions",
        "queue",
        "resumes",
        "times",
        "tokens",
    )

    def __init__(self, request: Request, pulse: Pulse | None = None) -> None:
        self.times: list[float] = []
        self.tokens: list[int] = []
        self.input_tokens: int | None = None
        self.cached_tokens: int | None = None
        self.output_tokens: int | None = None
        self.queue: float | None = None
        self.preemptions: int | None = None
        self.resumes = 0
        self._pulse = pulse
        self._pause = request.pause
        self._left = request.abandon_after

    @property
    def unwanted(self) -> bool:
        """Whether the caller wants no more and should leave."""
        return self._left is not None and self._left <= 0

    def note(self, count: int) -> bool:
        """A response with `count` tokens was read just now; whether the caller should leave."""
        now = time.perf_counter()
        self.times.append(now)
        self.tokens.append(count)
        if self._pulse is not None:
            self._pulse.hear(count, now)
        if self._left is None:
            return False
        self._left -= count
        return self._left <= 0

    async def pause(self) -> None:
        """What a slow reader does before it reads on."""
        if not self._pause:
            return
        if self._pulse is not None:
            self._pulse.rest()
        try:
            await asyncio.sleep(self._pause)
        finally:
            if self._pulse is not None:
                self._pulse.wait()


class Target(Protocol):
    """A model of a server, safe to share between the tasks of one event loop. Used as an asynchronous context."""

    async def __aenter__(self) -> Self:
        """Open what is shared by all requests. Failed if that cannot be."""

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """Hang up."""

    async def describe(self) -> dict[str, str]:
        """What the server says of itself and its model. Failed if it cannot be reached; {} if it says nothing."""

    async def ask(self, request: Request, request_id: str, seen: Seen) -> None:
        """Send a request and read its answer into `seen`, to the end or until the caller leaves.

        Failed if it ended otherwise. Leaving, like cancelling the task, cancels the request on the server.
        """


@dataclass(frozen=True, slots=True)
class TargetOptions:
    """How a target is asked; what a protocol has no use for it passes over.

    `resume`: take up cut answers ("tokenstream"). `headers`: sent with every request, credentials for instance, which
    must not go unencrypted to another machine unless `allow_insecure_credentials`. `tls`: encrypt ("tokenstream"), or
    trust its authority ("openai"). `chat`: send bare prompts as one user message ("openai"). `knows_ignore_eos`:
    whether the server has that extension of OpenAI's interface. `extra`: more fields of the body ("openai") or
    parameters ("triton"). `batched`: the model has a batch dimension ("triton").
    """

    resume: bool = False
    headers: Mapping[str, str] = field(default_factory=dict)
    allow_insecure_credentials: bool = False
    tls: TLS | None = None
    chat: bool = False
    knows_ignore_eos: bool = True
    extra: Mapping[str, object] = field(default_factory=dict)
    batched: bool = False


def open_target(kind: str, url: str, model: str, options: TargetOptions | None = None) -> Target:
    """A target of one of KINDS, to be entered. ValueError for another kind, or for a url that it cannot have.

    `url`: HOST:PORT of a gRPC endpoint for "tokenstream" and "triton", http://HOST:PORT for "openai".
    """
    if kind not in _CLASSES:
        raise ValueError(f"the kind of target must be one of {', '.join(KINDS)}, got {kind!r}")
    module, name = _CLASSES[kind]
    target: Target = getattr(importlib.import_module(f".{module}", __package__), name)(
        url, model, options or TargetOptions()
    )
    return target

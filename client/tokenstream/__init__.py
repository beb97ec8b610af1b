"""tokenstream: stream the tokens of a language model served by NVIDIA Triton.

    with Client() as client, client.stream("Once upon a time", max_tokens=50) as stream:
        for chunk in stream:
            print(chunk.text, end="", flush=True)

`AsyncClient` is the same with `await`. Every name is loaded on first use, so that the command line starts at once.
"""

from __future__ import annotations

import importlib

TYPE_CHECKING = False  # typing's own costs more to load than all that is here

if TYPE_CHECKING:
    from .aio import AsyncClient, AsyncTokenStream
    from .client import Client
    from .errors import (
        Cancelled,
        ConnectionFailed,
        ConnectTimeout,
        Draining,
        FirstTokenTimeout,
        IdleTimeout,
        IncompleteStream,
        InternalError,
        InvalidRequest,
        ModelNotFound,
        NotReady,
        Overloaded,
        ResumeMismatch,
        ServerError,
        StreamTimeout,
        TokenstreamError,
        TotalTimeout,
        Unauthorized,
    )
    from .params import Options, Sampling
    from .results import Chunk, Completion, ModelStatus, ServerInfo, Stats, Timings, TokenLogprob, Usage
    from .security import TLS
    from .stream import TokenStream
    from .timeouts import Timeout

__version__ = "0.1.0"

__all__ = [
    "TLS",
    "AsyncClient",
    "AsyncTokenStream",
    "Cancelled",
    "Chunk",
    "Client",
    "Completion",
    "ConnectTimeout",
    "ConnectionFailed",
    "Draining",
    "FirstTokenTimeout",
    "IdleTimeout",
    "IncompleteStream",
    "InternalError",
    "InvalidRequest",
    "ModelNotFound",
    "ModelStatus",
    "NotReady",
    "Options",
    "Overloaded",
    "ResumeMismatch",
    "Sampling",
    "ServerError",
    "ServerInfo",
    "Stats",
    "StreamTimeout",
    "Timeout",
    "Timings",
    "TokenLogprob",
    "TokenStream",
    "TokenstreamError",
    "TotalTimeout",
    "Unauthorized",
    "Usage",
    "__version__",
]

_MODULES = ("errors", "results", "params", "timeouts", "security", "client", "stream", "aio")  # those with gRPC last


def __dir__() -> list[str]:
    """The public names alone."""
    return list(__all__)


def __getattr__(name: str) -> object:
    """Load a public name from its module when it is first asked for."""
    if name in __all__:
        for module in _MODULES:
            found = importlib.import_module(f".{module}", __name__)
            if hasattr(found, name):
                return getattr(found, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")

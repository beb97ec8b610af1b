"""tokenstream: stream the tokens of a language model served by NVIDIA Triton.

    with Client() as client, client.stream("Once upon a time", max_tokens=50) as stream:
        for chunk in stream:
            print(chunk.text, end="", flush=True)

`Client` and `TokenStream` are loaded on first use, so that the command line starts without gRPC.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

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
)
from .params import Sampling
from .results import Chunk, Completion, ServerInfo, Stats, Timings, TokenLogprob, Usage
from .timeouts import Timeout

if TYPE_CHECKING:
    from .client import Client
    from .stream import TokenStream

__version__ = "0.1.0"

__all__ = [
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
    "NotReady",
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
    "Usage",
    "__version__",
]


def __getattr__(name: str) -> object:
    """Load what needs gRPC when it is first asked for."""
    if name == "Client":
        return importlib.import_module(".client", __name__).Client
    if name == "TokenStream":
        return importlib.import_module(".stream", __name__).TokenStream
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")

"""What a server serves: every model of its repository, and what ours say of themselves.

A model that does not know the operation `info` is another backend's, and listed without it. It does not know how the
list is shown.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from .client import Client
from .errors import IncompleteStream, ServerError, StreamTimeout
from .results import ModelStatus
from .timeouts import Timeout

_SECONDS = 5.0


@dataclass(frozen=True, slots=True)
class Served:
    """A model of the repository. `info`: what one of ours says of itself; None if not ready or not ours."""

    status: ModelStatus
    info: Mapping[str, object] | None


def list_models(url: str) -> list[Served]:
    """Everything in the repository of the server at `url`, in its order.

    Raises ConnectionFailed or ConnectTimeout if nobody answers there, ServerError if it is no Triton server.
    """
    with Client(url, timeout=Timeout(total=_SECONDS)) as client:
        models = client.models()
    return [Served(status, _info(url, status.name) if status.ready else None) for status in models]


def _info(url: str, model: str) -> Mapping[str, object] | None:
    with Client(url, model=model, timeout=Timeout(total=_SECONDS)) as client:
        try:
            return client.info().details
        except (ServerError, StreamTimeout, IncompleteStream):
            return None

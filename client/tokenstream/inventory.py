"""What a server serves: every model of its repository, and what ours say of themselves.

A model that does not know the operation `info` is another backend's, and listed without it. It does not know how the
list is shown.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from .errors import IncompleteStream, ServerError, StreamTimeout
from .results import ModelStatus

if TYPE_CHECKING:
    from .client import Client

_SECONDS = 5.0


@dataclass(frozen=True, slots=True)
class Served:
    """A model of the repository. `info`: what one of ours says of itself; None if not ready or not ours."""

    status: ModelStatus
    info: Mapping[str, object] | None


def list_models(connect: Callable[[str, float], Client]) -> list[Served]:
    """Everything in the repository of a server, in its order; `connect` makes clients of it from model and seconds.

    Raises ConnectionFailed or ConnectTimeout if nobody answers there, ServerError if it is no Triton server.
    """
    with connect("", _SECONDS) as client:
        models = client.models()
    return [Served(status, _info(connect, status.name) if status.ready else None) for status in models]


def _info(connect: Callable[[str, float], Client], model: str) -> Mapping[str, object] | None:
    with connect(model, _SECONDS) as client:
        try:
            return client.info().details
        except (ServerError, StreamTimeout, IncompleteStream):
            return None

"""Fixtures of more than one module here: a scripted server with its client, and one thread for torch."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from tokenstream import Client
from unit.scripted_triton import Script, ScriptedTriton

Serve = Callable[..., tuple[ScriptedTriton, Client]]


@pytest.fixture
def serve() -> Iterator[Serve]:
    """Start a scripted server and a client for it; both are closed after the test."""
    open_now: list[ScriptedTriton | Client] = []

    def start(script: Script, **options: Any) -> tuple[ScriptedTriton, Client]:
        server = ScriptedTriton(script)
        client = Client(server.url, **options)
        open_now[:0] = [client, server]
        return server, client

    yield start
    for one in open_now:
        one.close()


@pytest.fixture
def one_thread() -> None:
    import torch  # here, so that the client's tests run without it

    torch.set_num_threads(1)

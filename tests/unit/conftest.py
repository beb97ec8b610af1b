"""Fixtures of more than one module here: a scripted server with its client, Triton's module, one thread for torch."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Iterator
from types import SimpleNamespace
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
def replies(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The adapter's module `replies`, over a stand-in for the one that only a stub process has."""
    codes = {code: number for number, code in enumerate(("INTERNAL", "INVALID_ARG", "UNAVAILABLE", "CANCELLED"), 1)}
    error = type("TritonError", (), {**codes, "__init__": lambda self, text, code: setattr(self, "text", text)})
    backend = SimpleNamespace(
        TRITONSERVER_RESPONSE_COMPLETE_FINAL=1,
        TritonError=error,
        InferenceResponse=lambda tensors, failure=None: SimpleNamespace(tensors=tensors, error=failure),
        Tensor=lambda name, array: (name, array),
    )
    monkeypatch.setitem(sys.modules, "triton_python_backend_utils", backend)
    for name in ("replies", "watcher", "model"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    return importlib.import_module("replies")


@pytest.fixture
def one_thread() -> None:
    import torch  # here, so that the client's tests run without it

    torch.set_num_threads(1)

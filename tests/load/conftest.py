"""The load tests' own tests use the server of the other real-server tests, and scripted ones."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from server.conftest import client, info, server
from unit.locust_runs import Serve, introduced
from unit.scripted_triton import Script, ScriptedTriton

__all__ = ["client", "info", "server", "triton"]


@pytest.fixture
def triton() -> Iterator[Serve]:
    open_now: list[ScriptedTriton] = []

    def start(script: Script, workers: int = 24) -> ScriptedTriton:
        open_now.append(ScriptedTriton(introduced(script), workers=workers))
        return open_now[-1]

    yield start
    for one in open_now:
        one.close()

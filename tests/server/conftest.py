"""One real server with the real model for all tests here; those that must break or crowd one start their own."""

from __future__ import annotations

import re
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import cast

import pytest

from server.raw import Wire
from tokenstream import Client, ServerInfo
from tokenstream.server import ServerFailed, TritonServer, find_repository


@contextmanager
def running(repository: Path) -> Iterator[TritonServer]:
    """A server that is ready; when it does not become so, the last lines of its log are the failure.

    Behind the `with` it has ended in order: nothing that a test sent may keep it from that.
    """
    server = TritonServer(repository)
    try:
        server.__enter__()
    except ServerFailed as error:
        pytest.fail("\n".join((str(error), *error.tail)), pytrace=False)
    try:
        yield server
    finally:
        code = server.stop()
    assert code == 0, f"the server did not end in order (exit code {code}): a request or a stream was left on it"


def copied(folder: Path, changes: Mapping[str, str]) -> Path:
    """The model repository copied to `folder`, each `pattern` of `changes` replaced in config.pbtxt exactly once."""
    shutil.copytree(find_repository(), folder, ignore=shutil.ignore_patterns("__pycache__"))
    config = folder / "llm" / "config.pbtxt"
    content = config.read_text()
    for pattern, replacement in changes.items():
        content, count = re.subn(pattern, replacement, content)
        assert count == 1, f"{pattern!r} occurs {count} times in config.pbtxt"
    config.write_text(content)
    return folder


def eos_token_ids(info: ServerInfo) -> list[int]:
    """The tokens that end an answer."""
    return cast(list[int], info.details["eos_token_ids"])


@pytest.fixture(scope="session")
def server() -> Iterator[TritonServer]:
    with running(find_repository()) as server:
        yield server


@pytest.fixture(scope="session")
def wire(server: TritonServer) -> Iterator[Wire]:
    wire = Wire(server.grpc_url)
    yield wire
    wire.close()


@pytest.fixture(scope="session")
def client(server: TritonServer) -> Iterator[Client]:
    with Client(server.grpc_url) as client:
        yield client


@pytest.fixture(scope="session")
def info(client: Client) -> ServerInfo:
    return client.info()

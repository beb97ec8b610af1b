"""One real server with the real model for all tests here; those that must break or crowd one start their own.

What a request computed shows in the prefix cache: the same prompt, asked again, says how many tokens it found there.
How it ended shows in the server's log, even where its client has left.
"""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import pytest

from server.raw import Call, Wire, infer
from tokenstream import Client, ServerInfo
from tokenstream.runfolder import RUN_ID
from tokenstream.server import ServerFailed, TritonServer, find_repository
from waiting import eventually

SEATS, QUEUE = 2, 2  # of a small server
LONG: dict[str, Any] = {"max_tokens": 4000, "ignore_eos": True, "temperature": 0.0}
REFUSED_WITHIN = 0.15  # seconds: three times what is promised, for a machine that does other things too


@contextmanager
def running(repository: Path, model_names: Sequence[str] | None = None) -> Iterator[TritonServer]:
    """A server that is ready; when it does not become so, the last lines of its log are the failure.

    Behind the `with` it has ended in order: nothing that a test sent may keep it from that. With `model_names` models
    can be loaded and unloaded.
    """
    server = TritonServer(repository, model_names=model_names)
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


def parameters(**values: object) -> dict[str, str]:
    """Changes for `copied` that set parameters."""
    return {rf'(key: "{name}" value \{{ string_value: )"[^"]*"': rf'\1"{value}"' for name, value in values.items()}


def prompt(seed: int, length: int) -> list[int]:
    """Token ids that no other seed gives."""
    return [100 + (seed * 7919 + i * 104729) % 40000 for i in range(length)]


def run_id(server: TritonServer) -> str:
    """The mark that all processes and shared memory of a server bear."""
    entries = Path(f"/proc/{server.pid}/environ").read_bytes().split(b"\0")
    return dict(entry.split(b"=", 1) for entry in entries if entry)[RUN_ID.encode()].decode()


def ends(server: TritonServer) -> list[dict[str, Any]]:
    """What the log says of all requests that were sent their FINAL response, in this order."""
    lines = server.log_path.read_text(errors="replace").splitlines()
    return [json.loads(line) for line in lines if line.startswith('{"time": ')]


@dataclass(frozen=True, slots=True)
class Small:
    """A server of few seats, and two ways to it."""

    server: TritonServer
    wire: Wire
    client: Client

    def occupancy(self) -> tuple[int, int]:
        """Requests that have a seat, and those that wait for one, as the model tells."""
        told = json.loads(self.wire.ask(operation="info")[0]["text_output"])
        return told["running"], told["waiting"]

    def waiting(self) -> int:
        """Requests in the queue."""
        return self.occupancy()[1]

    def send(self, text: str = "Next", max_tokens: int = 1, **parts: Any) -> Call:
        """A short request."""
        return self.wire.call(infer(text_input=text, max_tokens=max_tokens, ignore_eos=True, **parts))

    def holder(self) -> Call:
        """A request that keeps a seat until it is left; it has begun."""
        call = self.wire.call(infer(text_input="Once upon a time", **LONG))
        assert call.next()
        return call

    def next_one(self, behind: int = 0, **parts: Any) -> Call:
        """A short request that finds no seat and waits in the queue, behind so many others."""
        call = self.send(**parts)
        eventually(lambda: self.waiting() == behind + 1)
        assert call.silent
        return call

    def cached(self, prompt: list[int]) -> int:
        """Tokens of `prompt` that the server has computed for another request; asking makes it compute the rest."""
        return int(json.loads(self.wire.ask(input_ids=prompt, max_tokens=1)[-1]["timings"])["cached_tokens"])


def assert_refused_at_once(calls: Sequence[Call]) -> None:
    """A full queue's refusal is all there is. Of several the fastest counts: any may meet a machine that is busy."""
    delays = []
    for call in calls:
        (response,) = call.rest()
        assert "Exceeds maximum queue size" in response.error
        delays.append(response.at - call.sent_at)
    assert min(delays) < REFUSED_WITHIN


def assert_expires_in_the_queue(small: Small, unwanted: list[int], within: float) -> None:
    """A request that may wait for a second is refused then, `within` seconds at the latest, and never computed."""
    with small.holder() as one, small.holder() as two:
        call = small.wire.call(infer(input_ids=unwanted, max_tokens=1, parameters={"timeout": 1_000_000}))
        (response,) = call.rest()
        assert "Request timeout expired" in response.error
        assert 0.99 < response.at - call.sent_at < within
        assert one.next()
        assert two.next()
    assert small.cached(unwanted) == 0


@contextmanager
def small_server(folder: Path, changes: Mapping[str, str]) -> Iterator[Small]:
    """A server whose long prompts take many steps, with further `changes` of config.pbtxt."""
    repository = copied(folder / "repository", {**parameters(max_step_tokens=64), **changes})
    with running(repository) as server, closing(Wire(server.grpc_url)) as wire, Client(server.grpc_url) as client:
        yield Small(server, wire, client)


@pytest.fixture(scope="module")
def started(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Small]:
    """A small server whose model keeps the queue."""
    changes = parameters(max_sequences=SEATS, max_queue_size=QUEUE)
    with small_server(tmp_path_factory.mktemp("small"), changes) as small:
        yield small


@pytest.fixture
def small(started: Small) -> Iterator[Small]:
    """The small server, idle before and behind each test."""
    yield started
    eventually(lambda: started.occupancy() == (0, 0))


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

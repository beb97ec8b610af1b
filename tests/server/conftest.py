"""One real server for all tests here, with the tiny model; those that must break or crowd one start their own.

The default model is served to tests that are about it: WITH_THE_DEFAULT_MODEL.

What a request computed shows in the prefix cache: the same prompt, asked again, says how many tokens it found there.
How it ended shows in the server's log, even where its client has left.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import pytest

from server import tiny
from server.raw import Call, Web, Wire, infer
from server.tiny import parameters
from tokenstream import Client, ServerInfo
from tokenstream.runfolder import RUN_ID
from tokenstream.server import ServerFailed, TritonServer, find_repository
from waiting import eventually

SEATS, QUEUE = 2, 2  # of a small server
LONG: dict[str, Any] = {"max_tokens": 8000, "ignore_eos": True, "temperature": 0.0}  # 80 s at least


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
    """The tiny model's repository copied to `folder`, with `changes` of config.pbtxt; see `tiny.copied`."""
    return tiny.copied(tiny.repository(), folder, changes)


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

    def held(self) -> AbstractContextManager[None]:
        """Have the model compute nothing inside the `with`: what happens there waits for no step."""
        return self.paced(3600.0)

    def paced(self, seconds: float) -> AbstractContextManager[None]:
        """Have each step take so long inside the `with`."""
        return tiny.paced(self.server.log_path.parent, seconds)

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


def assert_refused(calls: Sequence[Call]) -> None:
    """A full queue's refusal is all there is."""
    for call in calls:
        (response,) = call.rest()
        assert "Exceeds maximum queue size" in response.error


def assert_expires_in_the_queue(small: Small, unwanted: list[int]) -> None:
    """A request that may wait for a second is refused then, although no seat was freed, and never computed."""
    with small.holder() as one, small.holder() as two:
        call = small.wire.call(infer(input_ids=unwanted, max_tokens=1, parameters={"timeout": 1_000_000}))
        (response,) = call.rest()
        assert "Request timeout expired" in response.error
        assert response.at - call.sent_at > 0.99
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


WITH_THE_DEFAULT_MODEL = pytest.mark.parametrize(
    "server", [pytest.param(find_repository, id="default-model")], indirect=True
)


@pytest.fixture(scope="session")
def server(request: pytest.FixtureRequest) -> Iterator[TritonServer]:
    find: Callable[[], Path] = getattr(request, "param", tiny.repository)
    with running(find()) as server:
        yield server


@pytest.fixture(scope="session")
def wire(server: TritonServer) -> Iterator[Wire]:
    wire = Wire(server.grpc_url)
    yield wire
    wire.close()


@pytest.fixture(scope="session")
def web(server: TritonServer) -> Web:
    return Web(server.http_url.removeprefix("http://"))


@pytest.fixture(scope="session")
def client(server: TritonServer) -> Iterator[Client]:
    with Client(server.grpc_url) as client:
        yield client


@pytest.fixture(scope="session")
def info(client: Client) -> ServerInfo:
    return client.info()

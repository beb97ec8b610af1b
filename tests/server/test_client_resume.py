"""Answers whose server ends while it speaks: another one goes on, and nothing shows it.

What the answers would have been is asked of the second server alone.
"""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from server import tiny
from tokenstream import AsyncClient, Chunk, Client, Completion, IncompleteStream, ServerInfo, Timeout
from tokenstream.server import TritonServer

CUT_AT, TOKENS = 9, 60
PACE = 0.1  # seconds per step of the server that is killed: its answers are far from their end
QUESTION = [{"role": "user", "content": "Tell me of the sea \N{WATER WAVE} and of mountains."}]
WAYS: tuple[dict[str, Any], ...] = (
    {"temperature": 0.0},
    {"temperature": 1.2, "seed": 2**63 + 5, "top_p": 0.9},
    {"temperature": 0.8, "seed": 11, "repetition_penalty": 1.3, "logprobs": 1},
)


@pytest.fixture
def doomed() -> Iterator[TritonServer]:
    """A server that is to be killed: nothing is asked of how it ends."""
    with TritonServer(tiny.repository()) as server, tiny.paced(server.log_path.parent, PACE):
        yield server


def asked(way: int) -> dict[str, Any]:
    return {"max_tokens": TOKENS, "ignore_eos": True, **WAYS[way % len(WAYS)]}


@pytest.fixture(scope="module")
def uncut(client: Client) -> list[Completion]:
    """The answer to each of WAYS."""
    return [client.chat(QUESTION, **asked(way)).final() for way in range(len(WAYS))]


def check(chunks: list[Chunk], said: Completion, uncut: Completion, info: ServerInfo) -> None:
    assert [chunk.index for chunk in chunks] == list(range(TOKENS))
    assert "".join(chunk.text for chunk in chunks) == said.text
    assert tuple(token for chunk in chunks for token in chunk.token_ids) == said.token_ids
    assert (said.usage, said.fingerprint) == (uncut.usage, uncut.fingerprint)
    assert len(said.logprobs) == len(uncut.logprobs)
    if info.exact == "bitwise":
        assert (said.token_ids, said.text, said.logprobs) == (uncut.token_ids, uncut.text, uncut.logprobs)


def power_cut(server: TritonServer) -> None:
    """Every process of the server is gone at once."""
    server.kill()


def drain(server: TritonServer) -> None:
    """The server is told to go: it ends its answers, and then itself."""
    assert server.stop() == 0


def stub_dies(server: TritonServer) -> None:
    """Triton stays, and says nothing: its streams hang."""
    for task in Path(f"/proc/{server.pid}/task").iterdir():
        for child in (task / "children").read_text().split():
            if "python_backend_stub" in Path(f"/proc/{child}/cmdline").read_text():
                os.kill(int(child), signal.SIGKILL)


@pytest.mark.parametrize("end", [power_cut, drain, stub_dies])
def test_a_server_that_ends_in_mid_answer_leaves_no_trace_in_it(
    doomed: TritonServer,
    server: TritonServer,
    uncut: list[Completion],
    info: ServerInfo,
    end: Callable[[TritonServer], None],
) -> None:
    with Client([doomed.grpc_url, server.grpc_url], timeout=Timeout(idle=5.0)) as both, ExitStack() as stack:
        streams = [stack.enter_context(both.chat(QUESTION, **asked(way))) for way in range(len(WAYS))]
        begun = [[next(stream) for _ in range(CUT_AT)] for stream in streams]
        end(doomed)
        for way, (stream, chunks) in enumerate(zip(streams, begun, strict=True)):
            check(chunks + list(stream), stream.final(), uncut[way], info)
            assert stream.resumes == 1
        assert both.generate("Hello", max_tokens=1).finish_reason == "length"


def test_twelve_tasks_lose_their_server_and_none_of_them_notices(
    doomed: TritonServer, server: TritonServer, uncut: list[Completion], info: ServerInfo
) -> None:
    crowd = 12
    arrived, killed = asyncio.Event(), asyncio.Event()
    waiting = set(range(crowd))

    async def listen(client: AsyncClient, number: int) -> tuple[list[Chunk], Completion, int]:
        async with client.chat(QUESTION, **asked(number)) as stream:
            chunks = [await anext(stream) for _ in range(CUT_AT)]
            waiting.discard(number)
            if not waiting:
                arrived.set()
            await killed.wait()
            chunks += [chunk async for chunk in stream]
            return chunks, await stream.final(), stream.resumes

    async def strike() -> None:
        await arrived.wait()
        await asyncio.to_thread(doomed.kill)
        killed.set()

    async def main() -> list[Any]:
        async with AsyncClient([doomed.grpc_url, server.grpc_url]) as client:
            listeners = [listen(client, number) for number in range(crowd)]
            return await asyncio.gather(*listeners, strike())

    for number, (chunks, said, resumes) in enumerate(asyncio.run(main())[:crowd]):
        assert resumes == 1
        check(chunks, said, uncut[number % len(WAYS)], info)


def test_a_killed_server_without_another_leaves_an_incomplete_stream(doomed: TritonServer) -> None:
    with Client(doomed.grpc_url, retries=1) as client, client.chat(QUESTION, **asked(0)) as stream:
        chunks = [next(stream) for _ in range(CUT_AT)]
        doomed.kill()
        with pytest.raises(IncompleteStream) as caught:
            stream.final()
    assert caught.value.text.startswith("".join(chunk.text for chunk in chunks))
    assert len(caught.value.token_ids) >= CUT_AT
    assert "could go on" in caught.value.__notes__[0]

"""The asynchronous client against a real server: crowds, cancelled tasks, and what is left of them; TLS; clocks."""

from __future__ import annotations

import asyncio
import gc
import threading
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from server import tiny
from server.conftest import LONG
from tokenstream import TLS, AsyncClient, Client, ConnectionFailed, FirstTokenTimeout, ServerInfo, Timeout
from tokenstream.server import TritonServer
from unit.certificates import Authority
from waiting import WAIT, eventually

CROWD, SEATS = 50, 32
Talk = Callable[[AsyncClient], Awaitable[Any]]


def talk(server: TritonServer, conversation: Talk, **options: Any) -> Any:
    """Have a conversation in a loop of its own; no task but the one that talked may be left in it."""

    async def main() -> Any:
        async with AsyncClient(server.grpc_url, **options) as client:
            result = await conversation(client)
        async with asyncio.timeout(WAIT):
            while others := asyncio.all_tasks() - {asyncio.current_task()}:
                await asyncio.wait(others)
        return result

    return asyncio.run(main())


def occupancy(client: Client) -> tuple[int, int]:
    details: Any = client.info().details
    return details["running"], details["waiting"]


def idle(client: Client) -> bool:
    return occupancy(client) == (0, 0)


def test_fifty_streams_at_once_are_the_answers_of_fifty_one_by_one(
    server: TritonServer, client: Client, info: ServerInfo
) -> None:
    def asked(number: int) -> dict[str, Any]:
        return {"max_tokens": 8, "seed": number, "temperature": float(number % 2), "ignore_eos": True}

    async def conversation(client: AsyncClient) -> list[tuple[int, ...]]:
        async def listen(number: int) -> tuple[int, ...]:
            async with client.stream(f"Number {number} says", **asked(number)) as stream:
                assert [chunk.index async for chunk in stream] == list(range(8))
                return stream.token_ids

        return await asyncio.gather(*(listen(number) for number in range(CROWD)))

    threads = set(threading.enumerate())
    together = talk(server, conversation)
    assert not {thread for thread in set(threading.enumerate()) - threads if thread.name.startswith("tokenstream")}
    assert len(together) == CROWD
    if info.exact == "bitwise":
        alone = [client.generate(f"Number {number} says", **asked(number)).token_ids for number in range(0, CROWD, 7)]
        assert together[::7] == alone


def test_a_cancelled_task_frees_its_seat_and_its_place_in_the_queue(server: TritonServer, client: Client) -> None:
    eventually(lambda: idle(client))

    async def conversation(asking: AsyncClient) -> None:
        async def listen() -> None:
            async for _ in asking.stream("Tell me everything", **LONG):
                pass

        tasks = [asyncio.create_task(listen()) for _ in range(SEATS + 3)]
        await asyncio.to_thread(eventually, lambda: occupancy(client) == (SEATS, 3))
        for task in tasks:
            task.cancel()
        ends = await asyncio.gather(*tasks, return_exceptions=True)
        assert all(isinstance(end, asyncio.CancelledError) for end in ends)
        await asyncio.to_thread(eventually, lambda: idle(client))

    talk(server, conversation)


def test_a_stream_that_is_left_or_forgotten_frees_its_seat(server: TritonServer, client: Client) -> None:
    eventually(lambda: idle(client))

    async def conversation(asking: AsyncClient) -> None:
        async with asking.stream("Tell me", **LONG) as stream:
            await anext(stream)
            assert (await asking.info()).details["running"] == 1
        await asyncio.to_thread(eventually, lambda: idle(client))
        forgotten = asking.stream("Tell me", **LONG)
        await anext(forgotten)
        del forgotten
        gc.collect()
        await asyncio.to_thread(eventually, lambda: idle(client))

    talk(server, conversation)


def test_small_questions_have_the_answers_that_the_blocking_client_gets(server: TritonServer, client: Client) -> None:
    async def conversation(asking: AsyncClient) -> None:
        ids = await asking.tokenize("Hello, world")
        assert ids == client.tokenize("Hello, world")
        assert await asking.detokenize(ids) == "Hello, world"
        assert [(model.name, model.ready) for model in await asking.models()] == [("llm", True)]
        assert await asking.models() == client.models()
        await asking.wait_until_ready(WAIT)
        assert not await AsyncClient(server.grpc_url, model="nobody").ready()

    talk(server, conversation)


def test_the_total_clock_travels_and_ends_what_waits_for_a_seat(server: TritonServer, client: Client) -> None:
    eventually(lambda: idle(client))

    async def conversation(asking: AsyncClient) -> None:
        streams = [asking.stream("Tell me everything", **LONG) for _ in range(SEATS)]
        for stream in streams:
            await anext(stream)
        late = Timeout(total=0.4)
        with pytest.raises(TimeoutError):
            await asking.generate("Next", timeout=late)
        with pytest.raises(FirstTokenTimeout):
            await asking.generate("Next", timeout=Timeout(first_token=0.2))
        await asyncio.to_thread(eventually, lambda: occupancy(client) == (SEATS, 0))
        for stream in streams:
            stream.cancel()
        await asyncio.to_thread(eventually, lambda: idle(client))

    talk(server, conversation)


def test_trace_context_and_headers_do_not_disturb_an_answer(server: TritonServer, client: Client) -> None:
    said = client.generate(
        "Hello",
        max_tokens=2,
        headers={"x-tenant": "blue"},
        traceparent="00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01",
    )
    assert said.usage.output_tokens == 2


def test_a_server_with_mutual_tls_serves_those_who_prove_themselves(tmp_path: Path) -> None:
    authority = Authority(tmp_path)
    host, caller = authority.sign("server", "IP:127.0.0.1"), authority.sign("caller")
    flags = [
        "--grpc-use-ssl-mutual=1",
        f"--grpc-server-cert={host.certificate}",
        f"--grpc-server-key={host.key}",
        f"--grpc-root-cert={authority.root}",
    ]
    with TritonServer(tiny.repository(), extra_args=flags) as server:
        known = TLS(authority.root, caller.key, caller.certificate)
        with Client(server.grpc_url, tls=known) as client:
            said = client.generate("Hello", max_tokens=4, temperature=0, ignore_eos=True)

        async def conversation(asking: AsyncClient) -> tuple[int, ...]:
            return (await asking.generate("Hello", max_tokens=4, temperature=0, ignore_eos=True)).token_ids

        assert talk(server, conversation, tls=known) == said.token_ids
        for stranger in (None, TLS(authority.root), TLS()):
            with Client(server.grpc_url, tls=stranger, retries=0) as client, pytest.raises(ConnectionFailed):
                client.generate("Hello")

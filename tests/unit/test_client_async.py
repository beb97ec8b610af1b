"""The asynchronous client against a scripted server: it does what the blocking one does, and leaves no task behind."""

from __future__ import annotations

import asyncio
import gc
import socket
import threading
from collections.abc import Awaitable, Callable, Iterator
from typing import Any

import pytest

from tokenstream import (
    AsyncClient,
    Cancelled,
    ConnectionFailed,
    ConnectTimeout,
    NotReady,
    Timeout,
)
from unit.scripted_triton import WAIT, Script, ScriptedTriton, answer, failure, inputs, token

Talk = Callable[[ScriptedTriton, AsyncClient], Awaitable[Any]]


def talk(script: Script, conversation: Talk, *, workers: int = 8, **options: Any) -> Any:
    """Have a conversation with a scripted server in a loop of its own, which no task outlives."""
    server = ScriptedTriton(script, workers=workers)

    async def main() -> Any:
        async with asyncio.timeout(WAIT), AsyncClient(server.url, **options) as client:
            result = await conversation(server, client)
            await settled({asyncio.current_task()})
            return result

    try:
        return asyncio.run(main())
    finally:
        server.close()


async def settled(expected: set[Any]) -> None:
    """Let tasks end that are about to; none but `expected` may stay."""
    async with asyncio.timeout(1):
        while others := asyncio.all_tasks() - expected:
            await asyncio.wait(others)


async def over(server: ScriptedTriton, number: int = 0) -> bool:
    """Whether the server has seen a call end, or does within the time a test has."""
    return await asyncio.to_thread(server.calls[number].over.wait, WAIT)


def hold(request, call) -> Iterator:
    yield token(0, "one", 100)
    call.over.wait(WAIT)


def test_chunks_come_in_order_and_add_up():
    async def conversation(server, client):
        async with client.stream("tell", max_tokens=3, request_id="mine") as stream:
            chunks = [chunk async for chunk in stream]
        assert [(chunk.index, chunk.text, chunk.token_ids) for chunk in chunks] == [
            (0, "Once", (100,)),
            (1, " upon", (101,)),
        ]
        assert (stream.text, stream.finish_reason, stream.usage.output_tokens) == ("Once upon", "stop", 2)
        assert inputs(server.requests[0])["sampling_parameters"] == {"max_tokens": 3, "seed": stream.seed}
        assert await over(server)
        assert not server.calls[0].cancelled

    talk(answer("Once", " upon"), conversation)


def test_the_answer_is_over_on_the_server_when_it_is_sent_and_not_when_it_is_read():
    async def conversation(server, client):
        async with client.stream("x") as stream:
            await anext(stream)
            assert await over(server)
            assert [chunk.text async for chunk in stream] == ["b", "c"]
        assert not server.calls[0].cancelled

    talk(answer("a", "b", "c"), conversation)


def test_a_stream_forgotten_behind_its_last_chunk_is_not_cancelled():
    async def conversation(server, client):
        stream = client.stream("x")
        async for chunk in stream:
            if chunk.finish_reason:
                break
        del stream
        gc.collect()
        assert await over(server)
        assert not server.calls[0].cancelled

    talk(answer("a", "b"), conversation)


def test_generate_and_the_small_questions_are_answered():
    def script(request, call):
        asked = inputs(request)
        if asked.get("operation") == "tokenize":
            yield token(0, "", 4, 5, final=True)
        elif asked.get("operation") == "detokenize":
            yield token(0, "<7>", final=True)
        elif asked.get("operation") == "info":
            yield token(0, '{"model": "tiny"}', final=True)
        else:
            yield from answer("a", "b")(request, call)

    async def conversation(server, client):
        assert (await client.generate("x")).text == "ab"
        assert (await client.chat([{"role": "user"}]).final()).text == "ab"
        assert await client.tokenize("a b") == [4, 5]
        assert await client.detokenize([7]) == "<7>"
        assert (await client.info()).model == "tiny"
        assert [(model.name, model.ready) for model in await client.models()] == [("llm", True)]
        assert await client.ready()
        await client.wait_until_ready(WAIT)
        server.ready = False
        with pytest.raises(NotReady):
            await client.wait_until_ready(0.1)

    talk(script, conversation)


def test_a_port_that_says_nothing_and_one_that_is_closed_are_told_apart():
    async def main():
        with socket.create_server(("127.0.0.1", 0)) as mute:
            url = f"127.0.0.1:{mute.getsockname()[1]}"
            async with AsyncClient(url, timeout=Timeout(connect=0.2), retries=0) as client:
                with pytest.raises(ConnectTimeout):
                    await client.generate("x")
        async with AsyncClient(url, retries=0) as client:
            with pytest.raises(ConnectionFailed, match="connection refused"):
                async with client.stream("x"):
                    pass
            assert not await client.ready()

    asyncio.run(main())


def test_cancelling_a_task_cancels_its_request_at_once():
    async def conversation(server, client):
        async def listen():
            async for _ in client.stream("x"):  # no block: the cancellation alone must do
                begun.set()

        begun = asyncio.Event()
        task = asyncio.create_task(listen())
        await begun.wait()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert await over(server)
        assert server.calls[0].cancelled

    talk(hold, conversation)


def test_cancelling_a_task_while_it_connects_leaves_nothing():
    async def main(mute: socket.socket):
        async with AsyncClient(f"127.0.0.1:{mute.getsockname()[1]}") as client:
            task = asyncio.create_task(client.generate("x"))
            connection, _ = await asyncio.to_thread(mute.accept)
            with connection, pytest.raises(asyncio.CancelledError):
                task.cancel()
                await task
            await settled({asyncio.current_task()})

    with socket.create_server(("127.0.0.1", 0)) as mute:
        asyncio.run(main(mute))


def test_leaving_the_block_cancels_and_so_does_forgetting_the_stream():
    async def conversation(server, client):
        async with client.stream("x") as stream:
            assert (await anext(stream)).text == "one"
        assert await over(server)
        with pytest.raises(Cancelled):
            await anext(stream)
        stream = client.stream("x")
        await anext(stream)
        del stream
        gc.collect()
        assert await over(server, 1)

    talk(hold, conversation)


def test_cancel_from_a_thread_or_a_task_wakes_the_consumer():
    async def conversation(server, client):
        for number, cancel in enumerate(("thread", "task")):
            stream = client.stream("x")
            await anext(stream)
            if cancel == "thread":
                threading.Timer(0.05, stream.cancel).start()
            else:
                asyncio.get_running_loop().call_later(0.05, stream.cancel)
            with pytest.raises(Cancelled) as caught:
                await anext(stream)
            assert caught.value.text == "one"
            assert await over(server, number)

    talk(hold, conversation)


def test_cancel_ends_the_pause_before_another_attempt():
    def script(request, call):
        yield failure("the queue is full [request=r tokens=0 code=UNAVAILABLE retry_after=30]")

    async def conversation(server, client):
        stream = client.stream("x")
        asyncio.get_running_loop().call_later(0.2, stream.cancel)
        with pytest.raises(Cancelled):
            await anext(stream)

    talk(script, conversation)


def test_closing_the_client_ends_its_streams_and_refuses_new_ones():
    async def conversation(server, client):
        stream = client.stream("x")
        await anext(stream)
        await client.close()
        with pytest.raises(Cancelled):
            await anext(stream)
        with pytest.raises(RuntimeError, match="closed"):
            await anext(client.stream("x"))

    talk(hold, conversation)


def test_a_client_belongs_to_one_event_loop():
    server = ScriptedTriton(answer("a"))
    client = AsyncClient(server.url)

    async def ask() -> str:
        return (await client.generate("x")).text

    async def ask_and_close() -> str:
        async with client:
            return await ask()

    first = asyncio.new_event_loop()
    assert first.run_until_complete(ask()) == "a"
    with pytest.raises(RuntimeError, match="another event loop"):
        asyncio.run(ask())
    assert first.run_until_complete(ask_and_close()) == "a"
    first.close()
    server.close()


def test_fifty_streams_at_once_are_each_their_own():
    def script(request, call):
        for index in range(20):
            yield token(index, f"{request.id}:{index} ", index, final=index == 19, finish_reason="stop" * (index == 19))

    async def conversation(server, client):
        said = await asyncio.gather(*(client.generate("x", request_id=f"r{number}") for number in range(50)))
        for number, completion in enumerate(said):
            assert completion.text == "".join(f"r{number}:{index} " for index in range(20))

    talk(script, conversation, workers=60)

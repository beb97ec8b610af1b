"""Small questions that fail, through the blocking and the asynchronous client: the same exceptions as for answers."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import grpc
import pytest

from tokenstream import AsyncClient, Client, errors
from tokenstream.errors import TokenstreamError
from unit.scripted_triton import WAIT
from unit.test_client_matrix import ERRORS, chain, clocks, served, silent

ASKED_TOO = (
    *("invalid", "unknown model", "no credentials", "full", "dead stub", "failed step"),
    *("garbage", "other status", "cut", "reset"),
)
Call = Callable[[Any], Any]
QUESTIONS: dict[str, Call] = {
    "tokenize": lambda client: client.tokenize("x"),
    "detokenize": lambda client: client.detokenize([1]),
    "info": lambda client: client.info(),
}


def ask_blocking(url: str, call: Call, **options: Any) -> TokenstreamError | None:
    with Client(url, **options) as client:
        return raised_by(lambda: call(client))


def ask_asynchronous(url: str, call: Call, **options: Any) -> TokenstreamError | None:
    async def main() -> TokenstreamError | None:
        async with AsyncClient(url, **options) as client:
            return await araised_by(call(client))

    return asyncio.run(main())


def raised_by(call: Callable[[], Any]) -> TokenstreamError | None:
    try:
        call()
    except TokenstreamError as error:
        return error
    return None


async def araised_by(awaited: Awaitable[Any]) -> TokenstreamError | None:
    try:
        await awaited
    except TokenstreamError as error:
        return error
    return None


@pytest.mark.parametrize("ask", [ask_blocking, ask_asynchronous])
@pytest.mark.parametrize("question", QUESTIONS)
@pytest.mark.parametrize("name", ASKED_TOO)
def test_small_questions_fail_in_the_same_words(ask: Callable[..., Any], question: str, name: str) -> None:
    end, kind, words = ERRORS[name]
    with served(end) as server:
        error = ask(server.url, QUESTIONS[question], retries=0)
    assert type(error) is kind
    assert words in str(error)
    assert all(not isinstance(cause, grpc.RpcError) for cause in chain(error))


@pytest.mark.parametrize("ask", [ask_blocking, ask_asynchronous])
@pytest.mark.parametrize("clock", ["idle", "total"])
def test_small_questions_are_waited_for_no_longer_than_a_clock_allows(ask: Callable[..., Any], clock: str) -> None:
    with served(silent) as server:
        error = ask(server.url, QUESTIONS["info"], timeout=clocks(**{clock: 0.1}), retries=0)
        assert isinstance(error, errors.StreamTimeout)
        assert all(not isinstance(cause, grpc.RpcError) for cause in chain(error))
        assert server.calls[0].over.wait(WAIT)

"""The line to a healthy server is cut, at any byte and behind every message of either way: no answer shows it.

What the answers would have been is asked without a cut. The two clients take turns. The server is not asked to end in
order: Triton 2.51 keeps a model whose last response met a line that was cut just behind it.
"""

from __future__ import annotations

import asyncio
import itertools
import random
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest

from server import tiny
from tokenstream import AsyncClient, Chunk, Client, Completion, IncompleteStream
from tokenstream.server import TritonServer
from unit.breaking_line import Cut, Line, Way, messages

TOKENS, CUTS = 12, 40
QUESTION = [{"role": "user", "content": "Tell me of the sea \N{WATER WAVE} and of mountains."}]
WAYS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0, "seed": 3},
    "sampled": {"temperature": 1.1, "seed": 2**63 + 5, "top_p": 0.9},
}
Read = Callable[..., tuple[list[Chunk], Completion, int]]


def read(url: str, **asked: Any) -> tuple[list[Chunk], Completion, int]:
    """The chunks of an answer, all of it, and how often it was taken up."""
    with Client(url) as client, client.chat(QUESTION, max_tokens=TOKENS, ignore_eos=True, **asked) as stream:
        return list(stream), stream.final(), stream.resumes


def read_async(url: str, **asked: Any) -> tuple[list[Chunk], Completion, int]:
    """The same with `AsyncClient`."""

    async def main() -> tuple[list[Chunk], Completion, int]:
        async with (
            AsyncClient(url) as client,
            client.chat(QUESTION, max_tokens=TOKENS, ignore_eos=True, **asked) as stream,
        ):
            return [chunk async for chunk in stream], await stream.final(), stream.resumes

    return asyncio.run(main())


@pytest.fixture(scope="module")
def server() -> Iterator[TritonServer]:
    with TritonServer(tiny.repository(), exit_timeout=2) as server:
        yield server


@pytest.fixture(scope="module")
def bitwise(server: TritonServer) -> bool:
    """Whether the server promises the very tokens."""
    with Client(server.grpc_url) as client:
        return client.info().exact == "bitwise"


@pytest.fixture(params=WAYS)
def sampling(request: pytest.FixtureRequest) -> dict[str, Any]:
    return WAYS[request.param]


@pytest.fixture
def uncut(server: TritonServer, sampling: dict[str, Any]) -> tuple[Completion, Line]:
    """The answer, and the line that has carried it."""
    line = Line(server.grpc_url)
    _, said, resumes = read(line.url, **sampling)
    line.close()
    assert resumes == 0
    return said, line


def readers() -> Iterator[Read]:
    """Two of one kind, then two of the other: each meets both ways."""
    return itertools.cycle((read, read, read_async, read_async))


def everywhere(line: Line) -> list[Cut]:
    """Behind every message of either way, the greeting's too, and before the first."""
    counts = {way: len(messages(line.traffic.of(way))) for way in Way}
    assert counts[Way.DOWN] == 1 + TOKENS
    assert counts[Way.UP] >= 2
    return [Cut(way, messages=number) for way in Way for number in range(counts[way] + 1)]


def anywhere(line: Line) -> list[Cut]:
    """A random place in each of as many stretches of the traffic, its first byte and its last; each way in turn."""
    chance = random.Random(20)
    places = [0.0, *((number + chance.random()) / (CUTS - 2) for number in range(CUTS - 2)), 1.0]
    ways = [way for _, way in zip(places, 2 * CUTS * tuple(Way), strict=False)]
    return [Cut(way, bytes=round(len(line.traffic.of(way)) * place)) for way, place in zip(ways, places, strict=True)]


@pytest.mark.parametrize("places", [everywhere, anywhere])
def test_an_answer_whose_line_is_cut_is_the_uncut_answer(
    server: TritonServer,
    bitwise: bool,
    sampling: dict[str, Any],
    uncut: tuple[Completion, Line],
    places: Callable[[Line], Sequence[Cut]],
) -> None:
    expected, carried = uncut
    torn = resumed = 0
    for cut, reader in zip(places(carried), readers(), strict=False):
        line = Line(server.grpc_url, cut)
        chunks, said, resumes = reader(line.url, **sampling)
        torn += line.torn.is_set()
        resumed += resumes
        line.close()
        assert [chunk.index for chunk in chunks] == list(range(TOKENS)), cut
        assert "".join(chunk.text for chunk in chunks) == said.text
        assert tuple(token for chunk in chunks for token in chunk.token_ids) == said.token_ids
        assert (said.usage, said.fingerprint, said.seed) == (expected.usage, expected.fingerprint, sampling["seed"])
        if bitwise:
            assert (said.text, said.token_ids) == (expected.text, expected.token_ids), cut
    assert torn > 10
    assert resumed > 5


def test_without_resume_a_cut_answer_is_incomplete_and_one_not_begun_is_asked_again(
    server: TritonServer, bitwise: bool, sampling: dict[str, Any], uncut: tuple[Completion, Line]
) -> None:
    expected, carried = uncut
    incomplete = whole = 0
    for cut, reader in zip(everywhere(carried) + anywhere(carried), readers(), strict=False):
        line = Line(server.grpc_url, cut)
        try:
            _, said, resumes = reader(line.url, resume=False, **sampling)
        except IncompleteStream as error:
            incomplete += 1
            assert 0 < len(error.token_ids) < TOKENS, "a cut before the first token is asked again"
            text, tokens = error.text, tuple(error.token_ids)
        else:
            whole += 1
            assert resumes == 0
            assert len(said.token_ids) == TOKENS
            text, tokens = said.text, said.token_ids
        line.close()
        if bitwise:
            assert expected.text.startswith(text), cut
            assert expected.token_ids[: len(tokens)] == tokens, cut
    assert incomplete > 10
    assert whole > 10

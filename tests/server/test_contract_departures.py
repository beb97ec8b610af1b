"""Clients that leave at any moment, in any way: nobody else notices, and nothing of theirs is left.

An HTTP client that leaves before its first token is heard by Triton only then.
"""

from __future__ import annotations

import http.client
import json
import random
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing
from dataclasses import dataclass
from queue import Empty
from typing import Any

import pytest

from server.conftest import Small, ends, parameters, prompt, run_id, small_server
from server.raw import Wire, infer, tokens
from server.supervised import regions
from waiting import eventually

SEATS = 4
CLIENTS = 2 * SEATS
GREEDY = {"text_input": "The capital of France is", "max_tokens": 12, "temperature": 0.0, "ignore_eos": True}


@dataclass(frozen=True, slots=True)
class Departure:
    """A request with a prompt of `length` tokens that no other request has, left after `seconds`."""

    number: int
    length: int
    seconds: float

    @staticmethod
    def drawn(number: int) -> Departure:
        """From the number alone."""
        rng = random.Random(number)
        return Departure(number, rng.choice((4, 200, 600)), rng.uniform(0.0, 0.3))

    @property
    def name(self) -> str:
        """The request's id."""
        return f"left-{self.number}"

    def inputs(self) -> dict[str, object]:
        """What the request asks for."""
        return {"input_ids": prompt(1000 + self.number, self.length), "max_tokens": 1000, "ignore_eos": True}


Way = Callable[[Small, Departure], None]


def cancel(small: Small, departure: Departure) -> None:
    """Cancel the stream on a channel that others use too."""
    with small.wire.call(infer(name=departure.name, **departure.inputs())) as call:
        deadline = call.sent_at + departure.seconds
        try:
            while response := call.next(max(0.0, deadline - time.monotonic())):
                assert not response.error
        except Empty:
            return  # the moment has come


def close_channel(small: Small, departure: Departure) -> None:
    """Close the connection below the stream."""
    with closing(Wire(small.server.grpc_url)) as wire:
        call = wire.call(infer(name=departure.name, **departure.inputs()))
        try:
            while call.next(max(0.0, call.sent_at + departure.seconds - time.monotonic())):
                pass
        except Empty:
            return


def close_socket(small: Small, departure: Departure) -> None:
    """Close an HTTP stream's socket."""
    deadline = time.monotonic() + departure.seconds
    address = small.server.http_url.removeprefix("http://")
    with closing(http.client.HTTPConnection(address, timeout=max(0.001, departure.seconds))) as web:
        try:
            web.request(
                "POST", "/v2/models/llm/generate_stream", json.dumps({"id": departure.name, **departure.inputs()})
            )
            response = web.getresponse()
            while time.monotonic() < deadline and response.readline():
                pass
            response.close()
        except TimeoutError:
            return


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Small]:
    with small_server(tmp_path_factory.mktemp("small"), parameters(max_sequences=SEATS)) as small:
        small.wire.together([infer(**GREEDY)] * CLIENTS)
        yield small


def phase_of(end: dict[str, Any]) -> str:
    """Where a cancelled request was."""
    if end["tokens"]:
        return "decode"
    return "prefill" if end["prefill"] else "queue"


def nothing_is_left(small: Small, names: set[str], answer: list[int], shared: list[str]) -> None:
    eventually(lambda: small.occupancy() == (0, 0))
    assert tokens(small.wire.ask(**GREEDY)) == answer
    assert regions(run_id(small.server)) == shared
    ended = Counter(end["id"] for end in ends(small.server) if end["id"] in names)
    assert set(ended.values()) == {1}


def test_200_clients_that_leave_at_random_moments_leave_nothing_behind(small: Small) -> None:
    answer, shared = tokens(small.wire.ask(**GREEDY)), regions(run_id(small.server))
    ways: tuple[Way, ...] = (cancel, close_channel, close_socket)
    departures = [Departure.drawn(number) for number in range(200)]
    with ThreadPoolExecutor(CLIENTS) as pool:
        list(pool.map(lambda numbered: ways[numbered[0] % 3](small, numbered[1]), enumerate(departures)))
    nothing_is_left(small, {departure.name for departure in departures}, answer, shared)
    seen = [end for end in ends(small.server) if end["id"].startswith("left-")]
    assert {end["outcome"] for end in seen} == {"CANCELLED"}


@pytest.mark.parametrize("phase", ["queue", "prefill", "decode"])
def test_a_client_may_leave_in_any_phase(small: Small, phase: str) -> None:
    answer, shared = tokens(small.wire.ask(**GREEDY)), regions(run_id(small.server))
    name = f"left-in-{phase}"
    with ExitStack() as holders:
        for _ in range(SEATS if phase == "queue" else SEATS - 1):
            holders.enter_context(small.holder())
        leaving = infer(name=name, input_ids=prompt(sum(map(ord, phase)), 1800), max_tokens=100, ignore_eos=True)
        with small.paced(0.1), small.wire.call(leaving) as call:  # the prompt takes 28 steps
            eventually(lambda: small.occupancy() == ((SEATS, 1) if phase == "queue" else (SEATS, 0)))
            if phase == "decode":
                assert call.next()
        eventually(lambda: any(end["id"] == name for end in ends(small.server)))
    nothing_is_left(small, {name}, answer, shared)
    (end,) = (end for end in ends(small.server) if end["id"] == name)
    assert end["outcome"] == "CANCELLED"
    assert phase_of(end) == phase


def test_500_deadlines_of_1_to_50_ms_leave_nothing_behind(small: Small) -> None:
    answer, shared = tokens(small.wire.ask(**GREEDY)), regions(run_id(small.server))
    names = [f"late-{number}" for number in range(500)]

    def run_late(number: int) -> None:
        seconds = random.Random(number).uniform(0.001, 0.05)
        request = infer(name=names[number], text_input="Tell me", max_tokens=1000, ignore_eos=True)
        assert not any(response.final for response in small.wire.call(request, deadline=seconds).rest())

    with ThreadPoolExecutor(CLIENTS) as pool:
        list(pool.map(run_late, range(len(names))))
    nothing_is_left(small, set(names), answer, shared)

"""A full server of two seats: who waits, who overtakes, who is refused, and what a cancel sets free.

What a request computed shows in the prefix cache: the same prompt, asked again, says how many tokens it found there.
"""

from __future__ import annotations

import http.client
import json
import time
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, closing, contextmanager
from dataclasses import dataclass
from typing import Any

import pytest

from server.conftest import copied, running
from server.raw import WAIT, Call, Wire, infer, tokens
from tokenstream import Client, Overloaded, Timeout, TotalTimeout
from tokenstream.server import TritonServer

SEATS, QUEUE = 2, 2
LONG: dict[str, Any] = {"max_tokens": 4000, "ignore_eos": True, "temperature": 0.0}


@dataclass(frozen=True, slots=True)
class Small:
    """The server and two ways to it."""

    server: TritonServer
    wire: Wire
    client: Client

    def waiting(self) -> int:
        """Requests in Triton's queue."""
        with urllib.request.urlopen(self.server.metrics_url, timeout=WAIT) as page:
            lines = page.read().decode().splitlines()
        (line,) = (line for line in lines if line.startswith('nv_inference_pending_request_count{model="llm"'))
        return int(float(line.split()[-1]))

    def holder(self) -> Call:
        """A request that keeps a seat until it is left; it has begun."""
        call = self.wire.call(infer(text_input="Once upon a time", **LONG))
        assert call.next()
        return call

    def next_one(self, behind: int = 0) -> Call:
        """A short request that finds no seat and waits in the queue, behind so many others."""
        call = self.wire.call(infer(text_input="Next", max_tokens=1))
        # Several looks: a request that is only passing through the queue is seen in it too.
        until(lambda: all(self.waiting() == behind + 1 for _ in range(8)))
        assert call.silent
        return call

    def cached(self, prompt: list[int]) -> int:
        """Tokens of `prompt` that the server has computed for another request; asking makes it compute the rest."""
        return int(json.loads(self.wire.ask(input_ids=prompt, max_tokens=1)[-1]["timings"])["cached_tokens"])


def until(condition: Callable[[], bool], seconds: float = WAIT) -> None:
    """Wait for what no event tells."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it did not happen"
        time.sleep(0.02)


@pytest.fixture(scope="module")
def started(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Small]:
    changes = {
        r"max_queue_size: \d+": f"max_queue_size: {QUEUE}",
        r'(key: "max_sequences" value \{ string_value: )"\d+"': rf'\1"{SEATS}"',
        r'(key: "max_step_tokens" value \{ string_value: )"\d+"': r'\1"64"',  # long prompts take many steps
    }
    repository = copied(tmp_path_factory.mktemp("small") / "repository", changes)
    with running(repository) as server, closing(Wire(server.grpc_url)) as wire, Client(server.grpc_url) as client:
        yield Small(server, wire, client)


@pytest.fixture
def small(started: Small) -> Iterator[Small]:
    yield started
    until(lambda: started.waiting() == 0)


def prompt(seed: int, length: int) -> list[int]:
    """Token ids that no other test sends."""
    return [100 + (seed * 7919 + i * 104729) % 40000 for i in range(length)]


@contextmanager
def cancelled(small: Small) -> Iterator[None]:
    with small.wire.call(infer(text_input="Tell me", **LONG)) as call:
        assert call.next()
        yield


@contextmanager
def out_of_time(small: Small) -> Iterator[None]:
    call = small.wire.call(infer(text_input="Tell me", **LONG), deadline=4.0)
    assert call.next()
    yield
    assert not call.rest()[-1].final


@contextmanager
def unstreamed(small: Small) -> Iterator[None]:
    with small.wire.call(infer(text_input="Tell me", stream=False, **LONG)) as call:
        yield
        assert call.silent


@contextmanager
def left_by_our_client(small: Small) -> Iterator[None]:
    with small.client.stream("Tell me", max_tokens=4000, ignore_eos=True) as stream:
        assert next(stream).index == 0
        yield


@contextmanager
def out_of_our_clients_time(small: Small) -> Iterator[None]:
    stream = small.client.stream("Tell me", max_tokens=4000, ignore_eos=True, timeout=Timeout(total=4.0))
    assert next(stream).index == 0
    yield
    with pytest.raises(TotalTimeout):
        stream.final()


@contextmanager
def hung_up_over_http(small: Small) -> Iterator[None]:
    with closing(http.client.HTTPConnection(small.server.http_url.removeprefix("http://"), timeout=WAIT)) as web:
        web.request("POST", "/v2/models/llm/generate_stream", json.dumps({"text_input": "Tell me", **LONG}))
        response = web.getresponse()
        assert response.readline().startswith(b"data: ")
        yield
        response.close()


@pytest.mark.parametrize(
    "way",
    [cancelled, out_of_time, unstreamed, left_by_our_client, out_of_our_clients_time, hung_up_over_http],
    ids=lambda way: way.__name__,
)
def test_an_answer_that_nobody_wants_any_more_gives_up_its_seat(
    small: Small, way: Callable[[Small], AbstractContextManager[None]]
) -> None:
    with small.holder() as other:
        with way(small):
            waiting = small.next_one()
        assert len(tokens(waiting.rest())) == 1
        assert other.next()


def test_a_prompt_that_nobody_wants_any_more_is_not_computed_to_its_end(small: Small) -> None:
    long = prompt(1, 1200)
    with small.holder() as other:
        with small.wire.call(infer(input_ids=long, **LONG)) as call:
            waiting = small.next_one()
            while not other.silent:
                assert other.next()
            for _ in range(6):
                assert other.next()  # one step each, with a piece of the long prompt
            assert call.silent
            assert small.waiting() == 1  # the short one: the long one has its seat
        assert len(tokens(waiting.rest())) == 1
        assert small.cached(long) == 0  # a prompt is found once it was computed to its end
        assert small.cached(long) == 1184


def test_a_request_cancelled_in_the_queue_is_never_computed(small: Small) -> None:
    unwanted = prompt(2, 100)
    with small.holder(), small.holder() as leaving:
        queued = small.wire.call(infer(input_ids=unwanted, **LONG))
        until(lambda: small.waiting() == 1)
        behind = small.next_one(behind=1)
        queued.cancel()
        assert queued.next() is None
        leaving.cancel()
        assert len(tokens(behind.rest())) == 1
        assert small.cached(unwanted) == 0
        assert small.cached(unwanted) == 96


def test_a_request_whose_time_runs_out_in_the_queue_is_refused_and_never_computed(small: Small) -> None:
    late = prompt(3, 100)
    with small.holder() as one, small.holder() as two:
        (response,) = small.wire.ask(input_ids=late, max_tokens=1, parameters={"timeout": 500_000})
        assert "Request timeout expired" in response.error
        assert one.next()
        assert two.next()
    assert small.cached(late) == 0


def test_a_full_queue_refuses_at_once_and_keeps_what_it_has(small: Small) -> None:
    with small.holder() as one, small.holder() as two:
        calls = [small.wire.call(infer(text_input="Burst", max_tokens=1)) for _ in range(6)]
        until(lambda: small.waiting() + sum(not call.silent for call in calls) == len(calls))
        refused = [call for call in calls if not call.silent]
        kept = [call for call in calls if call not in refused]
        assert QUEUE <= len(kept) <= QUEUE + 1  # Triton may hold one more at its door
        for call in refused:
            (response,) = call.rest()
            assert "Exceeds maximum queue size" in response.error
        with pytest.raises(Overloaded):
            small.client.generate("One more", max_tokens=1)
        assert one.next()
        two.cancel()
        assert [len(tokens(call.rest())) for call in kept] == [1] * len(kept)


def test_a_request_of_high_priority_overtakes_those_that_wait(small: Small) -> None:
    with small.holder(), small.holder() as leaving:
        low = []
        for _ in range(2):
            low.append(
                small.wire.call(infer(text_input="Low", max_tokens=40, ignore_eos=True, parameters={"priority": 3}))
            )
            until(lambda: small.waiting() == len(low))
        high = small.wire.call(infer(text_input="High", max_tokens=1, parameters={"priority": 1}))
        until(lambda: small.waiting() == 3)
        leaving.cancel()
        assert len(tokens(high.rest())) == 1
        assert low[-1].silent
        assert [len(tokens(call.rest())) for call in low] == [40, 40]

"""Two instances of two seats on one machine's CPU cores: requests go where there is room, whoever keeps the queue.

An instance's own queue is its alone. Triton's is before all instances, and only there the next seat that frees, on
whichever instance, is for the first that waits.
"""

from __future__ import annotations

import json
import os
import queue
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import pytest

from server.conftest import LONG, Small, parameters, small_server
from server.raw import Call, infer, tokens
from waiting import eventually

POLICY = "preferred_batch_size: [ 1 ] default_queue_policy { max_queue_size: 8 } "
SEATS = 2
TWO = {**parameters(max_sequences=SEATS), "KIND_CPU, count: 1": "KIND_CPU, count: 2"}


@dataclass(frozen=True, slots=True)
class Two:
    """The server, and how many long requests must leave until a seat is free for whoever waits."""

    small: Small
    leavers: int

    def heartbeats(self) -> list[dict[str, Any]]:
        """What each instance last told of itself, at most half a second ago."""
        folder = self.small.server.log_path.parent
        return [json.loads(path.read_text()) for path in sorted(folder.glob("heartbeat-*.json"))]

    def live(self) -> list[int]:
        """Requests in each instance."""
        return [beat["live"] for beat in self.heartbeats()]

    def fill(self, leaving: ExitStack) -> list[Call]:
        """As many long requests at once as there are seats; each has begun."""
        request = infer(text_input="Hi", **LONG)
        calls = [leaving.enter_context(self.small.wire.call(request)) for _ in range(2 * SEATS)]
        assert all(call.next() for call in calls)
        return calls


@pytest.fixture(scope="module", params=["own", "tritons"])
def started(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Two]:
    own = request.param == "own"
    changes = TWO if own else {**TWO, r"preferred_batch_size: \[ 1 \] ": POLICY}
    with small_server(tmp_path_factory.mktemp("two"), changes) as small:
        yield Two(small, SEATS + 1 if own else 1)  # of an instance's own queue: all of the other's seats and one more


@pytest.fixture
def two(started: Two) -> Iterator[Two]:
    yield started
    eventually(lambda: started.live() == [0, 0])


def test_the_cores_are_divided_among_the_instances(two: Two) -> None:
    assert len({beat["pid"] for beat in two.heartbeats()}) == 2
    told = json.loads(two.small.wire.ask(operation="info")[0]["text_output"])
    assert told["cpu_share"] == 2
    assert told["threads"] == max(1, len(os.sched_getaffinity(0)) // 2)


def test_four_requests_run_at_once_two_on_each(two: Two) -> None:
    with ExitStack() as leaving:
        calls = two.fill(leaving)
        eventually(lambda: two.live() == [SEATS, SEATS])
        for _ in range(30):
            assert all(call.next() for call in calls)


def test_a_fifth_request_waits_and_gets_a_seat_that_frees(two: Two) -> None:
    with ExitStack() as leaving:
        calls = two.fill(leaving)
        eventually(lambda: two.live() == [SEATS, SEATS])
        fifth = two.small.send("Fifth")
        with pytest.raises(queue.Empty):
            fifth.next(0.5)
        for call in calls[: two.leavers]:
            call.cancel()
        assert len(tokens(fifth.rest())) == 1

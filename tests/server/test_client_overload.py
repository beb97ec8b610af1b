"""A full server says when to come again, and our client does as it is told, within its own clocks."""

from __future__ import annotations

import re
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from datetime import datetime

import pytest

from server.conftest import QUEUE, Small, ends
from server.raw import infer
from tokenstream import Client, Overloaded, Timeout
from tokenstream.course import pause_before
from waiting import WAIT, eventually

LEAST, MOST = 0.1, 30.0  # seconds that a server asks for


@contextmanager
def crowded(small: Small) -> Iterator[list]:
    """All seats are taken for long, and the queue is full; the calls that hold the seats."""
    with small.holder() as one, small.holder() as two:
        queued = [small.next_one(behind=i) for i in range(QUEUE)]
        yield [one, two]
        for call in (one, two, *queued):
            call.cancel()


def tries(small: Small, request_id: str) -> list[tuple[float, str]]:
    """When the server ended each request of this id, in seconds, and how."""
    lines = [line for line in ends(small.server) if line["id"] == request_id]
    return [(datetime.fromisoformat(line["time"]).timestamp(), line["outcome"]) for line in lines]


def test_a_full_queue_says_in_its_refusal_when_to_come_again(small: Small) -> None:
    with crowded(small), Client(small.server.grpc_url, retries=0) as client:
        refusal = small.wire.refusal(infer(name="raw", text_input="No room", max_tokens=1))
        said = re.search(r"\[request=raw tokens=0 code=UNAVAILABLE retry_after=([0-9.]+)\]$", refusal)
        assert said is not None, refusal
        assert LEAST <= float(said[1]) <= MOST
        with pytest.raises(Overloaded) as caught:
            client.generate("No room", max_tokens=1)
        assert caught.value.retry_after is not None
        assert LEAST <= caught.value.retry_after <= MOST
        assert "retry_after" not in str(caught.value)


def test_a_client_comes_again_no_sooner_than_it_was_told_and_is_served_then(
    small: Small, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[float] = []

    def heard(earlier: int, wait: float) -> float:
        asked.append(wait)
        return pause_before(earlier, wait)

    monkeypatch.setattr("tokenstream.course.pause_before", heard)
    with ThreadPoolExecutor(1) as pool:
        with crowded(small) as holders:
            again = pool.submit(small.client.generate, "Me too", max_tokens=1, request_id="patient", retries=1)
            eventually(lambda: bool(asked))
            for holder in holders:
                holder.cancel()
        assert len(again.result(WAIT).token_ids) == 1
    ((first, refused), (second, served)) = tries(small, "patient")
    assert (refused, served) == ("UNAVAILABLE", "length")
    assert second - first > asked[0] - 0.001  # the log's clock has milliseconds
    assert LEAST <= asked[0] <= MOST


def test_a_client_without_that_much_time_does_not_wait_for_nothing(small: Small) -> None:
    with crowded(small):
        eventually(lambda: told(small) > 1.0)  # seconds; it grows while no seat is freed
        began = time.monotonic()
        with pytest.raises(Overloaded) as caught:
            small.client.generate("No time", max_tokens=1, request_id="hasty", timeout=Timeout(total=1.0))
        assert time.monotonic() - began < 1.0
        assert caught.value.retry_after is not None
        assert caught.value.retry_after > 1.0
    assert [outcome for _, outcome in tries(small, "hasty")] == ["UNAVAILABLE"]


def told(small: Small) -> float:
    refusal = small.wire.refusal(infer(text_input="No room", max_tokens=1))
    said = re.search(r"retry_after=([0-9.]+)", refusal)
    assert said is not None
    return float(said[1])

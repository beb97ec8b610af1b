"""A full server of two seats whose queue is Triton's, as a policy in config.pbtxt asks for: the same promises hold.

Triton looks at its queue when an instance is free, and else every half second, so that a timeout fires that much later.
"""

from __future__ import annotations

import urllib.request
from collections.abc import Iterator

import pytest

from server.conftest import (
    LONG,
    QUEUE,
    SEATS,
    Small,
    assert_expires_in_the_queue,
    assert_refused,
    ends,
    parameters,
    prompt,
    small_server,
)
from server.raw import Web, infer, tokens
from tokenstream import Overloaded
from waiting import WAIT, eventually

POLICY = (
    f"preferred_batch_size: [ 1 ] priority_levels: 3 default_priority_level: 2 default_queue_policy {{ "
    f"max_queue_size: {QUEUE} default_timeout_microseconds: 60000000 allow_timeout_override: true }}"
)


def pending(small: Small) -> int:
    """Requests in Triton's queue; the model could not tell, for a question would wait in it too."""
    with urllib.request.urlopen(small.server.metrics_url, timeout=WAIT) as page:
        lines = page.read().decode().splitlines()
    (line,) = (line for line in lines if line.startswith('nv_inference_pending_request_count{model="llm"'))
    return int(float(line.split()[-1]))


def settled(small: Small, count: int) -> None:
    """Wait until so many are in the queue, and not only on their way through it."""
    eventually(lambda: all(pending(small) == count for _ in range(8)))


@pytest.fixture(scope="module")
def started(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Small]:
    changes = {**parameters(max_sequences=SEATS), r"preferred_batch_size: \[ 1 \] ": POLICY}
    with small_server(tmp_path_factory.mktemp("small"), changes) as small:
        yield small


@pytest.fixture
def small(started: Small) -> Iterator[Small]:
    yield started
    settled(started, 0)
    eventually(lambda: started.occupancy() == (0, 0))


def test_a_seat_that_is_given_up_goes_to_the_next_in_the_queue(small: Small) -> None:
    with small.holder() as other:
        with small.holder():
            waiting = small.send()
            settled(small, 1)
            assert waiting.silent
        assert len(tokens(waiting.rest())) == 1
        assert other.next()


def test_a_request_cancelled_in_the_queue_is_never_computed(small: Small) -> None:
    unwanted = prompt(2, 100)
    with small.holder(), small.holder() as leaving:
        queued = small.wire.call(infer(name="queued", input_ids=unwanted, **LONG))
        settled(small, 1)
        behind = small.send()
        settled(small, 2)
        queued.cancel()
        assert queued.next() is None
        leaving.cancel()
        assert len(tokens(behind.rest())) == 1
        assert small.cached(unwanted) == 0
        assert small.cached(unwanted) == 96
    assert sum(end["id"] == "queued" for end in ends(small.server)) <= 1  # Triton may have ended it itself


def test_cancelled_requests_leave_the_queue_when_a_seat_is_free(small: Small) -> None:
    with small.holder() as leaving:
        with small.holder():
            queued = [small.send("Queued", max_tokens=8000) for _ in range(QUEUE)]
            settled(small, QUEUE)
            for call in queued:
                call.cancel()
            # Triton looks at nobody in its queue while no seat is free: their places are still taken.
            assert "Exceeds maximum queue size" in small.wire.refusal(infer(text_input="No room", max_tokens=1))
        settled(small, 0)
        with small.holder():
            newcomers = [small.send() for _ in range(QUEUE)]
            settled(small, QUEUE)
            assert all(call.silent for call in newcomers)
            leaving.cancel()
            assert [len(tokens(call.rest())) for call in newcomers] == [1] * QUEUE


def test_a_request_whose_time_runs_out_in_the_queue_is_refused_and_never_computed(small: Small) -> None:
    assert_expires_in_the_queue(small, prompt(3, 100))


def test_a_full_queue_refuses_the_overflow_at_once_and_keeps_what_it_has(small: Small) -> None:
    with small.holder() as one, small.holder() as two:
        with small.held():
            calls = [small.send("Burst") for _ in range(QUEUE + 4)]
            eventually(lambda: pending(small) + sum(not call.silent for call in calls) == len(calls))
            refused = [call for call in calls if not call.silent]
            kept = [call for call in calls if call not in refused]
            assert QUEUE <= len(kept) <= QUEUE + 1  # Triton may hold one more at its door
            assert_refused(refused)
        with pytest.raises(Overloaded):
            small.client.generate("One more", max_tokens=1)
        assert Web(small.server.http_url.removeprefix("http://")).post("generate", text_input="One more").status == 503
        assert one.next()
        two.cancel()
        assert [len(tokens(call.rest())) for call in kept] == [1] * len(kept)


def test_a_request_of_high_priority_overtakes_those_that_wait(small: Small) -> None:
    with small.holder(), small.holder() as leaving:
        low = []
        for _ in range(2):
            low.append(small.send("Low", max_tokens=40, parameters={"priority": 3}))
            settled(small, len(low))
        high = small.send("High", parameters={"priority": 1})
        settled(small, 3)
        leaving.cancel()
        answered = high.rest()
        assert len(tokens(answered)) == 1
        lows = [call.rest() for call in low]
        assert [len(tokens(answer)) for answer in lows] == [40, 40]
        assert answered[-1].at < lows[-1][0].at

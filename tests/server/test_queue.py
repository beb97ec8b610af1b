"""A full server of two seats that keeps its queue itself: who waits, who overtakes, who is refused, who makes room."""

from __future__ import annotations

import http.client
import json
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, closing, contextmanager

import pytest

from server.conftest import (
    LONG,
    QUEUE,
    SEATS,
    Small,
    assert_expires_in_the_queue,
    assert_refused,
    ends,
    prompt,
)
from server.raw import Web, infer, tokens
from tokenstream import Overloaded, Timeout, TotalTimeout
from waiting import WAIT, eventually


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
        eventually(lambda: small.occupancy() == (SEATS, 0))
        yield
        assert call.silent


@contextmanager
def left_by_our_client(small: Small) -> Iterator[None]:
    with small.client.stream("Tell me", **LONG) as stream:
        assert next(stream).index == 0
        yield


@contextmanager
def out_of_our_clients_time(small: Small) -> Iterator[None]:
    stream = small.client.stream("Tell me", **LONG, timeout=Timeout(total=4.0))
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


def test_a_cancelled_prompt_is_not_computed_to_its_end_and_ends_once(small: Small) -> None:
    long = prompt(1, 1200)
    with small.holder() as other:
        leaving = infer(name="prefill", input_ids=long, **LONG)
        with small.paced(0.5), small.wire.call(leaving) as call:  # the prompt takes 19 steps
            eventually(lambda: small.occupancy() == (SEATS, 0))
            waiting = small.next_one()
            while not other.silent:
                assert other.next()
            for _ in range(3):
                assert other.next()  # one step each, with a piece of the long prompt
            assert call.silent
        assert len(tokens(waiting.rest())) == 1
        assert other.next()
    assert [(end["outcome"], end["tokens"]) for end in ends(small.server) if end["id"] == "prefill"] == [
        ("CANCELLED", 0)
    ]
    assert small.cached(long) == 0  # a prompt is found once it was computed to its end
    assert small.cached(long) == 1184


def test_a_cancelled_answer_ends_once(small: Small) -> None:
    with small.wire.call(infer(name="decode", text_input="Tell me", **LONG)) as call:
        seen = [call.next() for _ in range(5)]
    eventually(lambda: small.occupancy() == (0, 0))
    small.cached(prompt(2, 4))  # its FINAL is sent behind that of the cancelled one
    (end,) = (end for end in ends(small.server) if end["id"] == "decode")
    assert end["outcome"] == "CANCELLED"
    assert end["tokens"] >= len(seen)


def test_a_request_cancelled_in_the_queue_is_never_computed_and_ends_once(small: Small) -> None:
    unwanted = prompt(3, 100)
    with small.holder(), small.holder() as leaving:
        queued = small.wire.call(infer(name="queued", input_ids=unwanted, **LONG))
        eventually(lambda: small.waiting() == 1)
        behind = small.next_one(behind=1)
        queued.cancel()
        assert queued.next() is None
        eventually(lambda: small.waiting() == 1)
        assert behind.silent
        leaving.cancel()
        assert len(tokens(behind.rest())) == 1
        assert small.cached(unwanted) == 0
        assert small.cached(unwanted) == 96
    assert [(end["outcome"], end["tokens"]) for end in ends(small.server) if end["id"] == "queued"] == [
        ("CANCELLED", 0)
    ]


def test_the_place_of_a_cancelled_request_in_the_queue_goes_to_a_newcomer(small: Small) -> None:
    with small.holder(), small.holder() as leaving:
        queued = [small.next_one(behind=i) for i in range(QUEUE)]
        assert "Exceeds maximum queue size" in small.wire.refusal(infer(text_input="No room", max_tokens=1))
        for call in queued:
            call.cancel()
            eventually(lambda: small.waiting() == QUEUE - 1)
            newcomer = small.next_one(behind=QUEUE - 1)
        assert "Exceeds maximum queue size" in small.wire.refusal(infer(text_input="No room", max_tokens=1))
        leaving.cancel()
        assert len(tokens(newcomer.rest())) == 1


def test_a_request_whose_time_runs_out_in_the_queue_is_refused_then_and_never_computed(small: Small) -> None:
    assert_expires_in_the_queue(small, prompt(4, 100))


@pytest.mark.parametrize("priority", [1, 2, 3])
def test_a_full_queue_refuses_the_overflow_at_once_and_keeps_what_it_has(small: Small, priority: int) -> None:
    overflow = 4
    with small.holder() as one, small.holder() as two:
        with small.held():
            calls = [small.send("Burst", parameters={"llm_priority": priority}) for _ in range(QUEUE + overflow)]
            eventually(lambda: sum(not call.silent for call in calls) == overflow)
            refused = [call for call in calls if not call.silent]
            kept = [call for call in calls if call not in refused]
            assert_refused(refused)
            assert small.occupancy() == (SEATS, QUEUE)
        assert one.next()
        two.cancel()
        assert [len(tokens(call.rest())) for call in kept] == [1] * QUEUE


def test_over_http_a_full_queue_is_a_400_that_names_its_code(small: Small) -> None:
    web = Web(small.server.http_url.removeprefix("http://"))
    with small.holder(), small.holder() as leaving:
        queued = [small.next_one(behind=i) for i in range(QUEUE)]
        for method in ("generate", "generate_stream"):
            page = web.post(method, text_input="No room", max_tokens=1, stream=False)
            error = json.loads(page.body.removeprefix("data: "))["error"]
            assert "Exceeds maximum queue size" in error
            assert "code=UNAVAILABLE" in error
            assert page.status == 400  # what Triton 2.51 makes of every error of a model
        leaving.cancel()
        assert [len(tokens(call.rest())) for call in queued] == [1] * QUEUE


def test_each_priority_has_a_queue_of_its_own(small: Small) -> None:
    with small.holder(), small.holder() as leaving:
        calls = [small.send(parameters={"llm_priority": 1 + i % 3}) for i in range(3 * QUEUE)]
        eventually(lambda: small.waiting() == 3 * QUEUE)
        with pytest.raises(Overloaded):
            small.client.generate("One more", max_tokens=1)
        leaving.cancel()
        assert [len(tokens(call.rest())) for call in calls] == [1] * len(calls)


def test_requests_of_high_priority_overtake_those_that_wait(small: Small) -> None:
    with small.holder(), small.holder() as leaving:
        calls = {}
        for waiting, level in enumerate((3, 2, 1)):
            calls[level] = small.next_one(behind=waiting, max_tokens=4, parameters={"llm_priority": level})
        with small.paced(0.2):  # what is a step apart is also read in this order
            leaving.cancel()
            answers = {level: call.rest() for level, call in calls.items()}
        assert [len(tokens(answer)) for answer in answers.values()] == [4] * 3
        assert answers[1][-1].at < answers[2][0].at < answers[2][-1].at < answers[3][0].at

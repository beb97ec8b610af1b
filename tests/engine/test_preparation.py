"""A request whose preparation is long: it has its place and its clocks from the start, and nobody waits for it."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from engine import scripted, tiny_models
from engine.driver import WAIT, Answer, CheckedEngine, serving
from llm_engine.request import Code, Request, RequestError, SamplingParams

PROMPT = tiny_models.prompt(9)
THREE = SamplingParams(max_tokens=3)


class Preparation:
    """A request in preparation on a thread of its own, which goes on when the test lets it."""

    def __init__(self, engine: CheckedEngine, name: str = "long", **fields: Any) -> None:
        self.answer = Answer(Request(name, [], THREE, **fields))
        self.begun, self._go = threading.Event(), threading.Event()
        self._fault: Exception | None = None
        engine.enter(self.answer.request, self.answer.emit)
        self._thread = threading.Thread(target=engine.complete, args=(self.answer.request, self._prepare))
        self._thread.start()

    def _prepare(self, request: Request) -> None:
        self.begun.set()
        assert self._go.wait(WAIT)
        if self._fault is not None:
            raise self._fault
        request.prompt_ids = PROMPT

    def end(self, fault: Exception | None = None) -> None:
        """Let it end, with a fault perhaps."""
        self._fault = fault
        self._go.set()
        self._thread.join(WAIT)
        assert not self._thread.is_alive()


@contextmanager
def preparing(engine: CheckedEngine, name: str = "long", **fields: Any) -> Iterator[Preparation]:
    """A preparation that is under way; behind the `with` its thread has ended."""
    preparation = Preparation(engine, name, **fields)
    try:
        assert preparation.begun.wait(WAIT)
        yield preparation
    finally:
        preparation.end()


def test_others_are_admitted_and_answered_while_a_request_is_prepared() -> None:
    with serving(scripted.load()) as engine:
        running = engine.ask(PROMPT, SamplingParams(max_tokens=40))
        assert running.first.wait(WAIT)
        with preparing(engine) as long:
            assert engine.ask(PROMPT, THREE).wait().tokens == scripted.expected(PROMPT, 3)
            assert running.wait().tokens == scripted.expected(PROMPT, 40)
            assert long.answer.deltas == []
            assert engine.info()["waiting"] == 1
            long.end()
            assert long.answer.wait().tokens == scripted.expected(PROMPT, 3)
    assert engine.metrics.limited == 3
    assert engine.metrics.prompt_tokens == 3 * len(PROMPT)


def test_a_request_in_preparation_has_a_place_in_the_queue() -> None:
    with serving(scripted.load(max_sequences=1, max_queue_size=1)) as engine:
        with preparing(engine, "a"), preparing(engine, "b"), preparing(engine, "c", priority=1):
            with pytest.raises(RequestError, match="Exceeds maximum queue size") as refused:
                Preparation(engine, "d")
            assert refused.value.code is Code.UNAVAILABLE
        assert engine.metrics.rejected == 1


@pytest.mark.parametrize("way", ["cancel", "drain", "close"])
def test_what_ends_a_request_in_preparation_is_told_at_once_and_once(way: str) -> None:
    code = {"cancel": "CANCELLED", "drain": "UNAVAILABLE", "close": "UNAVAILABLE"}[way]
    with serving(scripted.load()) as engine, preparing(engine, resume_token_ids=PROMPT) as long:
        {"cancel": lambda: engine.cancel("long"), "drain": lambda: engine.drain(60.0), "close": engine.close}[way]()
        assert long.answer.wait().code == code
        assert not engine.live
        long.end()
        if way == "cancel":  # it takes part in nothing any more, and its place is another's
            engine.ask(PROMPT, THREE).wait()
        assert len(long.answer.deltas) == 1


def test_the_clocks_of_a_request_in_preparation_run_in_an_engine_without_other_work() -> None:
    with serving(scripted.load()) as engine, preparing(engine, queue_seconds=0.01) as long:
        assert "Request timeout expired" in str(long.answer.wait().last.error)
        assert engine.metrics.expired == 1


def test_an_engine_that_waits_for_a_preparation_does_not_look_stalled() -> None:
    with serving(scripted.load()) as engine, preparing(engine) as long:
        turned = threading.Event()
        engine.on_turn = lambda _turn: turned.set()
        assert turned.wait(WAIT)
        assert engine.metrics.waiting == 1
        turned.clear()
        engine.heartbeat = before = 0.0
        assert turned.wait(WAIT)
        assert engine.heartbeat > before
        long.end()
        long.answer.wait()


@pytest.mark.parametrize(
    ("fault", "code", "counted"),
    [(RequestError, "INVALID_ARG", "invalid"), (KeyError, "INTERNAL", "failed")],
)
def test_a_preparation_that_fails_ends_its_request_alone(fault: type[Exception], code: str, counted: str) -> None:
    with serving(scripted.load()) as engine:
        running = engine.ask(PROMPT, SamplingParams(max_tokens=40))
        with preparing(engine) as long:
            long.end(fault("secret"))
            assert long.answer.wait().code == code
            assert ("secret" in str(long.answer.last.error)) == (fault is RequestError)
        running.wait()
        assert getattr(engine.metrics, counted) == 1


def test_an_answer_that_had_ended_before_it_was_resumed_ends_with_its_preparation() -> None:
    resumed = scripted.expected(PROMPT, 3)
    with serving(scripted.load()) as engine, preparing(engine, resume_token_ids=resumed) as long:
        long.end()
        assert long.answer.wait().code == "length"
        assert (long.answer.tokens, long.answer.last.index) == ([], 3)
    assert engine.metrics.limited == 1


def test_a_cancelled_request_is_not_prepared() -> None:
    with serving(scripted.load()) as engine:
        answer = Answer(Request("long", [], THREE))
        engine.enter(answer.request, answer.emit)
        engine.cancel("long")
        assert answer.wait().code == "CANCELLED"
        engine.complete(answer.request, lambda _request: pytest.fail("nobody waits for it"))

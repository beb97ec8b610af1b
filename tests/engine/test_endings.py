"""Every request ends exactly once and holds nothing afterwards, be it cancelled, too old or struck by a fault."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from engine import driver, scripted, tiny_models
from engine.driver import CheckedEngine, serving
from llm_engine import engine as engine_module
from llm_engine.request import Code, Delta, Request, RequestError, SamplingParams
from waiting import WAIT

LONG = SamplingParams(max_tokens=200, temperature=0.0, ignore_eos=True)
SHORT = replace(LONG, max_tokens=6)
PROMPT = tiny_models.prompt(30)

overlapped = pytest.mark.parametrize("asynchronous", [False, True])


class Broken(RuntimeError):
    """What the tests inject."""


def assert_serves(engine: CheckedEngine) -> None:
    """The engine still answers, rightly."""
    assert engine.ask(PROMPT, SHORT).wait().tokens == scripted.expected(PROMPT, 6)


# Cancel


@overlapped
@pytest.mark.parametrize("turn", [0, 1, 2, 3, 4, 5, 9])
def test_a_cancelled_request_frees_everything_within_a_step(turn: int, asynchronous: bool) -> None:
    """Turns 0 to 3 fall into the prefill of 60 tokens by 16, the others into decode."""
    held: list[tuple[int, int]] = []
    with serving(scripted.load(max_step_tokens=16), asynchronous=asynchronous, begin=False) as engine:
        victim = engine.ask(tiny_models.prompt(60), LONG)

        def cancel(now: int) -> None:
            if now == turn:
                engine.cancel(victim.request.id)
            if now >= turn + 1:
                held.append((len(victim.request.blocks), victim.request.seat))

        engine.on_turn = cancel
        if turn == 0:
            engine.cancel(victim.request.id)
        engine.begin()
        assert victim.wait().code == Code.CANCELLED
        assert len(victim.tokens) <= max(0, turn - 2)
        assert_serves(engine)
    assert set(held) == {(0, -1)}
    assert engine.metrics.cancelled == 1


@overlapped
def test_a_cancelled_waiting_request_is_never_computed(asynchronous: bool) -> None:
    with serving(scripted.load(max_sequences=1), asynchronous=asynchronous, begin=False) as engine:
        running, waiting = engine.ask(PROMPT, replace(LONG, max_tokens=20)), engine.ask(PROMPT, LONG)
        engine.on_turn = lambda turn: engine.cancel(waiting.request.id) if turn == 5 else None
        engine.begin()
        assert waiting.wait().code == Code.CANCELLED
        assert (waiting.tokens, waiting.request.computed) == ([], 0)
        assert running.wait().tokens == scripted.expected(PROMPT, 20)


def test_a_request_cancelled_before_the_engine_has_read_it_ends_once() -> None:
    with serving(scripted.load(), begin=False) as engine:
        engine.cancel("overtaken")  # reaches the inbox first, as from another thread
        answer = engine.ask(PROMPT, SHORT, id="overtaken")
        engine.begin()
        assert answer.wait().code == Code.CANCELLED
        assert answer.tokens == []
        assert_serves(engine)


def test_cancelling_what_is_unknown_or_has_ended_changes_nothing() -> None:
    with serving(scripted.load()) as engine:
        answer = engine.ask(PROMPT, SHORT).wait()
        engine.cancel(answer.request.id)
        engine.cancel("nobody")
        assert_serves(engine)
        assert len(answer.deltas) == 6
        assert engine.metrics.cancelled == 0


# Faults


class Fault:
    """Raises at its nth call and lets the others through."""

    def __init__(self, inner: Callable[..., Any], nth: int, then: Callable[[], None] = lambda: None) -> None:
        self.inner, self.left, self.then = inner, nth, then

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        self.left -= 1
        if self.left == 0:
            self.then()
            raise Broken("injected\nwith a second line")
        return self.inner(*args, **kwargs)


PLACES = ("launch", "collect")


def break_at(engine: CheckedEngine, place: str, nth: int) -> None:
    runner: Any = engine._runner
    setattr(runner, place, Fault(getattr(runner, place), nth))


@overlapped
@pytest.mark.parametrize("nth", [1, 2, 3, 7])
@pytest.mark.parametrize("place", PLACES)
def test_a_failed_step_ends_its_requests_once_and_the_engine_goes_on(place: str, nth: int, asynchronous: bool) -> None:
    with serving(scripted.load(max_sequences=2), asynchronous=asynchronous, begin=False) as engine:
        break_at(engine, place, nth)
        answers = [engine.ask(tiny_models.prompt(20 + i), SHORT) for i in range(7)]
        engine.begin()
        for answer in answers:
            answer.wait()
        failed = [answer for answer in answers if answer.code == Code.INTERNAL]
        for answer in failed:
            assert answer.last.error
            assert answer.last.error.message == f"the step failed: {Broken.__name__}"
        assert 1 <= len(failed) <= 2, "only those that were in it"
        assert engine.metrics.failed == len(failed)
        for answer in answers:
            if answer not in failed:
                assert answer.tokens == scripted.expected(list(answer.request.prompt_ids), 6)
        assert_serves(engine)


@given(place=st.sampled_from(PLACES), nth=st.integers(1, 30), asynchronous=st.booleans(), pool=st.integers(9, 20))
def test_a_fault_anywhere_in_a_crowd_leaks_nothing(place: str, nth: int, asynchronous: bool, pool: int) -> None:
    with serving(
        scripted.load(kv_tokens=8 * pool, max_step_tokens=24), asynchronous=asynchronous, begin=False
    ) as engine:
        break_at(engine, place, nth)
        answers = [engine.ask(tiny_models.prompt(5 * i + 1), replace(SHORT, max_tokens=25)) for i in range(7)]
        engine.begin()
        for answer in answers:
            assert answer.wait().code in ("length", Code.INTERNAL)
            if answer.code == "length":
                assert answer.tokens == scripted.expected(list(answer.request.prompt_ids), 25)


@overlapped
def test_a_failed_text_ends_its_own_request_and_no_other(asynchronous: bool) -> None:
    params = replace(SHORT, max_tokens=1)
    with serving(scripted.load(), asynchronous=asynchronous, begin=False) as engine:
        ends_beside, struck, goes_on = engine.ask(PROMPT, params), engine.ask(PROMPT, SHORT), engine.ask(PROMPT, SHORT)
        text: Any = struck.request.text
        text.push = Fault(text.push, 1)
        engine.begin()
        assert struck.wait().code == Code.INTERNAL
        assert ends_beside.wait().tokens == scripted.expected(PROMPT, 1)
        assert goes_on.wait().tokens == scripted.expected(PROMPT, 6)


def test_a_reader_that_fails_hurts_itself_alone() -> None:
    with serving(scripted.load(), begin=False) as engine:
        refused = threading.Event()

        def refuse(deltas: list[Delta]) -> None:
            if any(delta.terminal for delta in deltas):
                refused.set()
            raise Broken

        other = engine.ask(PROMPT, SHORT)
        engine.submit(Request("refused", PROMPT, SHORT), refuse)
        engine.begin()
        assert other.wait().tokens == scripted.expected(PROMPT, 6)
        assert refused.wait(WAIT)
        assert_serves(engine)


# NaN


@overlapped
def test_nan_ends_its_own_row_and_leaves_nothing_in_the_prefix_cache(asynchronous: bool) -> None:
    """The third answer token of one request has NaN behind it; a block was full of good tokens before."""
    poison = scripted.expected(PROMPT, 3)[-1]
    model = scripted.load()
    with serving(model, asynchronous=asynchronous, begin=False) as engine:
        model.stage.poisoned = frozenset({poison})
        other = tiny_models.prompt(17, seed=4)
        assert poison not in (*other, *scripted.expected(other, 12))
        struck, neighbour = engine.ask(PROMPT, SHORT), engine.ask(other, replace(SHORT, max_tokens=12))
        engine.begin()
        assert struck.wait().code == Code.INTERNAL
        assert struck.tokens == scripted.expected(PROMPT, 3)
        assert struck.last.error
        assert "NaN" in struck.last.error.message
        assert neighbour.wait().tokens == scripted.expected(other, 12)
        model.stage.poisoned = frozenset()
        again = engine.ask(PROMPT, SHORT).wait()
        assert again.tokens == scripted.expected(PROMPT, 6)
        assert again.last.timings
        assert again.last.timings.cached_tokens == 0
        assert engine.metrics.failed == 1


def test_nan_of_a_real_model_stays_in_its_row() -> None:
    params = SamplingParams(max_tokens=12, seed=1, ignore_eos=True)
    sick, healthy = tiny_models.prompt(20), tiny_models.prompt(21, seed=1)
    loaded = driver.load("llama", kernels="torch")  # whose embedding can be changed behind its back
    model: Any = loaded.model
    with serving(loaded) as engine:
        expected = engine.ask(healthy, params).wait().tokens
    poisoned = next(token for token in sick if token not in (*healthy, *expected))
    with torch.no_grad():
        model.get_input_embeddings().weight[poisoned] = torch.nan
    with serving(loaded, begin=False) as engine:
        struck, neighbour = engine.ask(sick, params), engine.ask(healthy, params)
        engine.begin()
        assert struck.wait().code == Code.INTERNAL
        assert neighbour.wait().tokens == expected
        assert engine.ask(healthy, params).wait().tokens == expected


# Limits of time, and close


@overlapped
def test_a_request_older_than_max_request_seconds_ends(asynchronous: bool) -> None:
    with serving(scripted.load(max_request_seconds=50.0), asynchronous=asynchronous, begin=False) as engine:
        young = engine.ask(PROMPT, SHORT)
        old = Request("old", PROMPT, LONG)
        answer = engine.start(old)
        engine.on_turn = lambda turn: setattr(old, "arrived_at", old.arrived_at - 60.0) if turn == 4 else None
        engine.begin()
        assert answer.wait().code == Code.CANCELLED
        assert answer.last.error
        assert "max_request_seconds (50)" in answer.last.error.message
        assert 2 <= len(answer.tokens) <= 4
        assert young.wait().code == "length"
        assert engine.metrics.expired == 1


def test_a_request_too_old_before_it_was_read_ends_once() -> None:
    with serving(scripted.load(max_request_seconds=50.0), begin=False) as engine:
        old = Request("old", PROMPT, SHORT)
        old.arrived_at -= 60.0
        answer = engine.start(old)
        engine.begin()
        assert answer.wait().code == Code.CANCELLED
        assert answer.tokens == []


class Clock:
    """Stands in for the engine's `time`; a test may put it ahead."""

    def __init__(self) -> None:
        self.ahead = 0.0

    def monotonic(self) -> float:
        return time.monotonic() + self.ahead


@overlapped
def test_a_drain_ends_queued_requests_at_once_refuses_new_ones_and_lets_live_ones_end(asynchronous: bool) -> None:
    with serving(scripted.load(max_sequences=1), asynchronous=asynchronous, begin=False) as engine:
        live, queued = engine.ask(PROMPT, replace(LONG, max_tokens=20)), engine.ask(PROMPT, LONG)
        ended: list[bool] = []

        def drain(turn: int) -> None:
            if turn == 3:
                engine.drain(WAIT)
            if turn in (3, 4):
                ended.append(queued.done.is_set())

        engine.on_turn = drain
        engine.begin()
        assert queued.wait().code == Code.UNAVAILABLE
        assert (queued.tokens, queued.request.computed) == ([], 0)
        assert live.wait().tokens == scripted.expected(PROMPT, 20)
        with pytest.raises(RequestError, match="draining") as refused:
            engine.ask(PROMPT, SHORT)
        assert refused.value.code == Code.UNAVAILABLE
        assert ended == [False, True]
        assert (engine.metrics.rejected, engine.metrics.cancelled, engine.metrics.limited) == (2, 0, 1)


@overlapped
@pytest.mark.parametrize("orders", [(100.0, 300.0), (300.0, 100.0)])
def test_of_two_drains_the_earlier_deadline_ends_live_requests_with_cancelled(
    orders: tuple[float, float], asynchronous: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = Clock()
    monkeypatch.setattr(engine_module, "time", clock)
    with serving(scripted.load(), asynchronous=asynchronous, begin=False) as engine:
        answers = [engine.ask(PROMPT, LONG), engine.ask(PROMPT, LONG)]
        ended: list[bool] = []

        def drain(turn: int) -> None:
            if turn in (3, 4):
                engine.drain(orders[turn - 3])
            if turn == 6:
                clock.ahead = 70.0
            if turn == 8:
                ended.extend(answer.done.is_set() for answer in answers)
                clock.ahead = 130.0

        engine.on_turn = drain
        engine.begin()
        for answer in answers:
            assert answer.wait().code == Code.CANCELLED
            assert answer.last.error
            assert "draining" in answer.last.error.message
            assert answer.tokens == scripted.expected(PROMPT, len(answer.tokens))
        assert ended == [False, False]
        assert (engine.metrics.cancelled, engine.metrics.rejected) == (2, 0)


@overlapped
def test_close_ends_all_live_requests_once(asynchronous: bool) -> None:
    with serving(scripted.load(max_sequences=2), asynchronous=asynchronous) as engine:
        answers = [engine.ask(tiny_models.prompt(10 + i), LONG) for i in range(5)]
        assert answers[0].first.wait(WAIT)
        engine.close()
        for answer in answers:
            assert answer.wait().code == Code.UNAVAILABLE
        with pytest.raises(RequestError) as refused:
            engine.ask(PROMPT, SHORT)
        assert refused.value.code == Code.UNAVAILABLE
        engine.close()


def test_an_engine_that_was_idle_for_long_is_not_stalled_by_its_next_request() -> None:
    model = scripted.load()
    entered, leave = threading.Event(), threading.Event()

    def hold(*_step: torch.Tensor) -> None:
        entered.set()
        assert leave.wait(WAIT)

    with serving(model) as engine:
        engine.ask(PROMPT, SHORT).wait()
        engine.heartbeat -= 1000.0
        assert not engine.stalled
        model.stage.before = hold
        answer = engine.ask(PROMPT, SHORT)
        assert entered.wait(WAIT)
        assert not engine.stalled
        engine.heartbeat -= 1000.0
        assert engine.stalled
        leave.set()
        assert answer.wait().code == "length"

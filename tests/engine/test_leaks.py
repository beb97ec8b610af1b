"""Ten thousand requests leave nothing behind, and none of them waits for ever."""

from __future__ import annotations

import gc
import threading
from dataclasses import replace
from random import Random

import pytest

from engine import scripted, tiny_models
from engine.driver import Answer, CheckedEngine, serving
from llm_engine.request import Code, Delta, Request, SamplingParams
from waiting import WAIT

REQUESTS = 5_000  # in each of the two loops
ENDLESS = 1_000
IN_ENGINE = 24  # a few more than seats, so that some always wait
SHORT = SamplingParams(max_tokens=3, temperature=0.0, ignore_eos=True)


class Crowd:
    """Keeps `IN_ENGINE` requests alive until `total` have ended; every fifth is cancelled after its first token."""

    def __init__(self, engine: CheckedEngine, total: int) -> None:
        self.engine = engine
        self.total = total
        self.begun = 0
        self.ended = 0
        self.codes: dict[str, int] = {}
        self.done = threading.Event()
        self._random = Random(0)
        self._started: set[str] = set()

    def emit(self, deltas: list[Delta]) -> None:
        """On the engine thread: replace those that ended."""
        for delta in deltas:
            if not delta.terminal:
                if delta.request_id not in self._started and int(delta.request_id) % 5 == 0:
                    self.engine.cancel(delta.request_id)
                self._started.add(delta.request_id)
                continue
            self._started.discard(delta.request_id)
            code = str(delta.error.code if delta.error else delta.finish_reason)
            self.codes[code] = self.codes.get(code, 0) + 1
            self.ended += 1
            if self.begun < self.total:
                self.add()
        if self.ended == self.total:
            self.done.set()

    def add(self) -> None:
        """Submit the next request; prompts share beginnings now and then."""
        shared = tiny_models.prompt(16, seed=self._random.randrange(4))
        prompt = shared[: self._random.randrange(1, 17)] + tiny_models.prompt(self._random.randrange(1, 6), self.begun)
        stop = ("e", "zq") if self.begun % 7 == 0 else ()
        params = replace(SHORT, max_tokens=1 + self.begun % 20, stop=stop)
        request = Request(str(self.begun), prompt, params, priority=1 + self.begun % 3)
        self.begun += 1
        self.engine.submit(request, self.emit)

    def run(self) -> None:
        for _ in range(IN_ENGINE):
            self.add()
        self.engine.begin()
        assert self.done.wait(WAIT), f"{self.ended} of {self.total} ended"


def requests() -> int:
    """Requests in memory."""
    return sum(type(thing) is Request for thing in gc.get_objects())


@pytest.mark.parametrize("asynchronous", [False, True])
def test_ten_thousand_requests_leak_nothing(asynchronous: bool) -> None:
    model = scripted.load(max_sequences=16, max_step_tokens=64, block_size=2, kv_tokens=100, max_context=50)
    gc.collect()
    others = requests()  # what tests before this one still hold
    with serving(model, asynchronous=asynchronous, begin=False) as engine:
        threads = threading.active_count()
        warm = Crowd(engine, 200)
        warm.run()
        gc.collect()
        objects = len(gc.get_objects())
        crowd = Crowd(engine, REQUESTS)
        crowd.run()
        assert sum(crowd.codes.values()) == REQUESTS
        assert all(crowd.codes[code] > 100 for code in ("stop", "length", Code.CANCELLED))
        assert engine.metrics.preemptions > 100
        assert engine.metrics.prefix_hit_tokens > 1000
        assert threading.active_count() == threads
        engine.ask(tiny_models.prompt(3), SHORT).wait()  # the loop's own variables hold the last step
        gc.collect()
        assert requests() - others <= 1, "requests outlive their end"
        assert len(gc.get_objects()) - objects < 500, "objects stay behind"


def test_a_low_priority_request_ends_under_endless_load_of_higher_ones() -> None:
    """Whenever a request ends another of the highest priority comes, and more wait; only a bound stops them."""
    model = scripted.load(max_sequences=2, kv_tokens=96, max_context=48)
    with serving(model, begin=False) as engine:
        begun = 0

        def more(deltas: list[Delta]) -> None:
            for delta in deltas:
                if delta.terminal and not low.done.is_set() and begun < ENDLESS:
                    add()

        def add() -> None:
            nonlocal begun
            begun += 1
            prompt = tiny_models.prompt(7, seed=begun)
            engine.submit(Request(f"high {begun}", prompt, replace(SHORT, max_tokens=20), priority=1), more)

        low = Answer(Request("low", tiny_models.prompt(20), replace(SHORT, max_tokens=20), priority=3))
        for _ in range(5):
            add()
        engine.submit(low.request, low.emit)
        engine.begin()
        assert low.wait().code == "length"
        assert begun < ENDLESS, "it ended only because the load did"
        assert low.tokens == scripted.expected(tiny_models.prompt(20), 20)


def test_wait_for_room_is_true_exactly_while_a_seat_is_free() -> None:
    entered, leave = threading.Event(), threading.Event()

    def hold(*_step: object) -> None:
        entered.set()
        assert leave.wait(WAIT)

    model = scripted.load(max_sequences=2)
    with serving(model) as engine:
        model.stage.before = hold
        assert engine.wait_for_room(0.0)
        first = engine.ask(tiny_models.prompt(3), SHORT)
        assert entered.wait(WAIT)
        assert engine.wait_for_room(0.0)
        second = engine.ask(tiny_models.prompt(4), SHORT)
        assert not engine.wait_for_room(0.0)
        leave.set()
        assert engine.wait_for_room(WAIT)
        first.wait()
        second.wait()

"""What fails in the work for one request ends that request alone; a failed step ends those in it and nobody else."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine import scripted, tiny_models
from engine.driver import Answer, CheckedEngine, serving
from llm_engine import runner as runner_module
from llm_engine.metrics import Metrics
from llm_engine.request import Code, Delta, Request, RequestError, SamplingParams
from llm_engine.scheduler import Plan

PARAMS = SamplingParams(max_tokens=14, temperature=0.0, ignore_eos=True)
VICTIM = "victim"


class Broken(RuntimeError):
    """What the tests inject."""


@dataclass
class Fault:
    """Raises at the nth call that is the victim's, and at every later one; lets all others through."""

    nth: int
    fired: bool = False
    once: bool = True

    def __call__(self) -> None:
        self.nth -= 1
        if self.nth == 0 or (self.nth < 0 and not self.once):
            self.fired = True
            raise Broken("injected\nwith a second line")


@dataclass
class Reader:
    """Hands deltas to the answers they belong to; `refuses` may raise, and then none of the call's are handed on."""

    answers: dict[str, Answer] = field(default_factory=dict)
    refuses: Callable[[Delta], None] = lambda _delta: None

    def emit(self, deltas: list[Delta]) -> None:
        for delta in deltas:
            self.refuses(delta)
        for delta in deltas:
            self.answers[delta.request_id].emit([delta])


def wrap(owner: Any, name: str, fault: Fault, mine: Callable[..., bool]) -> None:
    """Have `owner.name` fail where `mine` says of its arguments that they are the victim's."""
    inner = getattr(owner, name)

    def broken(*args: Any, **kwargs: Any) -> Any:
        if mine(*args):
            fault()
        return inner(*args, **kwargs)

    setattr(owner, name, broken)


class Open(Metrics):
    """Metrics of which methods can be replaced."""


def into_metrics(name: str) -> Callable[[Any, Request, Fault], None]:
    def inject(engine: Any, victim: Request, fault: Fault) -> None:
        engine.metrics = engine._endings.metrics = Open()
        wrap(engine.metrics, name, fault, lambda request, *_: request is victim)

    return inject


def into_sampler(engine: Any, victim: Request, fault: Fault) -> None:
    fault.once = False  # the row fails again when it is drawn by itself
    wrap(engine._runner._sampler, "sample", fault, lambda _logits, seats, *_: victim.seat in seats)


def into_reader(engine: Any, victim: Request, fault: Fault) -> None:
    """The reader refuses one delta for good, whenever it is given, but not the error that takes its place."""
    refused: list[int] = []

    def refuses(delta: Delta) -> None:
        if delta.request_id == VICTIM and delta.error is None:
            if delta.index in refused:
                raise Broken
            try:
                fault()
            except Broken:
                refused.append(delta.index)
                raise

    engine.reader.refuses = refuses


PLACES: dict[str, Callable[[Any, Request, Fault], None]] = {
    "queue": lambda e, r, f: wrap(e._pool, "chain", f, lambda salt: salt == VICTIM),
    "prefix cache": lambda e, r, f: wrap(e._pool, "match", f, lambda _tokens, chain: chain is r.chain),
    "blocks": lambda e, r, f: wrap(e._pool, "grow", f, lambda blocks, _tokens: blocks is r.blocks),
    "seat": lambda e, r, f: wrap(e._runner, "admit", f, lambda request: request is r),
    "sampler's seat": lambda e, r, f: wrap(e._runner._sampler._rules, "admit", f, lambda seat, *_: seat == r.seat),
    "draw": into_sampler,
    "logprobs": lambda e, r, f: wrap(runner_module, "_logprob", f, lambda *_: True),  # only the victim wants them
    "confirmation": lambda e, r, f: wrap(e._pool, "register", f, lambda blocks, *_: blocks is r.blocks),
    "count": into_metrics("count_token"),
    "text": lambda e, r, f: wrap(r.text, "push", f, lambda *_: True),
    "end of the text": lambda e, r, f: wrap(r.text, "flush", f, lambda *_: True),
    "end": into_metrics("count_finished"),
    "reader": into_reader,
}


@dataclass(frozen=True, slots=True)
class Crowd:
    """Everything that must not matter: neighbours, how many fit, how steps are cut, and what is resumed."""

    lengths: list[int]
    seats: int
    pool: int  # blocks of 8 tokens, which the longest request needs six of
    step: int
    asynchronous: bool
    resumed: int  # answer tokens that every second request brings
    shared: bool  # one reader for all, as Triton's adapter is
    place: int  # of the victim in the order of arrival


crowds = st.builds(
    Crowd,
    lengths=st.lists(st.integers(1, 30), max_size=5),
    seats=st.integers(1, 5),
    pool=st.integers(6, 14),
    step=st.integers(8, 40),
    asynchronous=st.booleans(),
    resumed=st.integers(0, 3),
    shared=st.booleans(),
    place=st.integers(0, 5),
)


def requests(crowd: Crowd) -> list[Request]:
    lengths = [*crowd.lengths[: crowd.place], 19, *crowd.lengths[crowd.place :]]
    found = []
    for number, length in enumerate(lengths):
        mine = number == min(crowd.place, len(crowd.lengths))
        prompt = tiny_models.prompt(length, seed=number)
        begun = scripted.expected(prompt, crowd.resumed if number % 2 else 0)
        params = replace(PARAMS, logprobs=1) if mine else PARAMS
        name = VICTIM if mine else f"neighbour {number}"
        found.append(Request(name, prompt, params, begun, cache_salt=VICTIM if mine else ""))
    return found


def check(answer: Answer) -> None:
    """It has its very tokens, all of them if it ended well."""
    request = answer.wait().request
    whole = scripted.expected(list(request.prompt_ids), 14)[len(request.resume_token_ids) :]
    assert answer.tokens == whole[: len(answer.tokens)]
    if answer.code == "length":
        assert answer.tokens == whole


def submit(engine: Any, request: Request, *, shared: bool) -> Answer:
    answer = engine.reader.answers[request.id] = Answer(request)
    emit = engine.reader.emit if shared else Reader({request.id: answer}, lambda d: engine.reader.refuses(d)).emit
    engine.submit(request, emit)
    return answer


def strike(place: str, crowd: Crowd, nth: int) -> bool:
    """Answer a crowd while the victim's nth passage of a place fails, if there are so many; return whether it did."""
    fault, inner = Fault(nth), runner_module._logprob
    asked = requests(crowd)
    model = scripted.load(
        max_sequences=crowd.seats, kv_tokens=8 * crowd.pool, max_step_tokens=max(crowd.step, crowd.seats + 8)
    )
    try:
        with serving(model, asynchronous=crowd.asynchronous, begin=False) as engine:
            engine.reader = Reader()
            answers = [submit(engine, request, shared=crowd.shared) for request in asked]
            victim = engine.reader.answers[VICTIM]
            PLACES[place](engine, victim.request, fault)
            engine.begin()
            for answer in answers:
                check(answer)
                assert (answer.code == Code.INTERNAL) == (answer is victim and fault.fired)
            assert engine.metrics.failed + engine.metrics.limited == len(answers)
            if fault.fired:
                assert victim.last.error
                assert victim.last.error.own_fault
                assert victim.last.error.message.endswith(": Broken")
    finally:
        runner_module._logprob = inner
    return fault.fired


@pytest.mark.parametrize("place", PLACES)
@settings(max_examples=settings.default.max_examples // 2)
@given(crowd=crowds, nth=st.integers(1, 16))
def test_a_fault_in_the_work_for_one_request_ends_it_once_and_no_other(place: str, crowd: Crowd, nth: int) -> None:
    strike(place, crowd, nth)


@pytest.mark.parametrize("place", PLACES)
def test_every_place_is_passed_and_its_fault_felt(place: str) -> None:
    assert strike(place, Crowd([9, 20, 30], 2, 14, 40, False, 2, True, 1), 1)


def test_a_fault_while_a_request_is_submitted_is_told_to_its_caller_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: object) -> None:
        raise Broken

    with serving(scripted.load(), begin=False) as engine:
        neighbour = engine.ask([5, 6], PARAMS)
        with monkeypatch.context() as patch, pytest.raises(RequestError, match="could not be accepted: Broken") as told:
            patch.setattr(engine._admission, "admit", broken)
            engine.ask([5, 6], PARAMS)
        assert (told.value.code, told.value.own_fault) == (Code.INTERNAL, True)
        engine.begin()
        check(neighbour)
        assert (engine.metrics.failed, engine.metrics.limited) == (1, 1)


def test_a_reader_that_refuses_the_end_of_an_answer_hears_an_error_in_its_place() -> None:
    with serving(scripted.load(), begin=False) as engine:
        engine.reader = Reader()
        answer = submit(engine, Request(VICTIM, [5, 6], PARAMS), shared=True)

        def refuses(delta: Delta) -> None:
            if delta.finish_reason:
                raise Broken

        engine.reader.refuses = refuses
        engine.begin()
        check(answer)
        assert (answer.code, len(answer.tokens)) == (Code.INTERNAL, 13)


def failing_step(engine: CheckedEngine, place: str, nth: int) -> list[str]:
    """Have the nth launch or collect fail; return whose answers were open in that step, once it has."""
    runner: Any = engine._runner
    inner, left, struck = getattr(runner, place), [nth], []

    def broken(step: Any) -> Any:
        left[0] -= 1
        if left[0] == 0:
            plan: Plan = step if place == "launch" else step.plan
            struck.extend(c.request.id for c in plan.chunks if c.request.id in engine._door.live)
            raise Broken
        return inner(step)

    setattr(runner, place, broken)
    return struck


@pytest.mark.parametrize("place", ["launch", "collect"])
@given(crowd=crowds, nth=st.integers(1, 30))
def test_a_failed_step_ends_those_in_it_and_nobody_else(place: str, crowd: Crowd, nth: int) -> None:
    model = scripted.load(
        max_sequences=crowd.seats, kv_tokens=8 * crowd.pool, max_step_tokens=max(crowd.step, crowd.seats + 8)
    )
    with serving(model, asynchronous=crowd.asynchronous, begin=False) as engine:
        struck = failing_step(engine, place, nth)
        answers = [engine.start(request) for request in requests(crowd)]
        engine.begin()
        for answer in answers:
            check(answer)
        failed = [answer for answer in answers if answer.code == Code.INTERNAL]
        assert {answer.request.id for answer in failed} == set(struck)
        for answer in failed:
            assert answer.last.error
            assert (answer.last.error.message, answer.last.error.own_fault) == ("the step failed: Broken", False)


@pytest.mark.parametrize("asynchronous", [False, True])
def test_a_step_that_ends_an_answer_is_heard_although_the_next_one_fails(asynchronous: bool) -> None:
    """The step behind the short answer's last token cannot be launched; overlapped, that token is then in flight."""
    with serving(scripted.load(), asynchronous=asynchronous, begin=False) as engine:
        failing_step(engine, "launch", 3)
        short = engine.ask([5, 6], replace(PARAMS, max_tokens=2))
        other = engine.ask([7, 8], PARAMS)
        engine.begin()
        assert (short.wait().code, short.tokens) == ("length", scripted.expected([5, 6], 2))
        assert other.wait().code == Code.INTERNAL


def test_a_fault_that_is_nobodys_ends_all_that_live_once_and_the_engine_goes_on() -> None:
    with serving(scripted.load(max_sequences=2), begin=False) as engine:
        fault = Fault(3)
        wrap(engine._scheduler, "plan", fault, lambda: True)
        answers = [engine.ask(tiny_models.prompt(9 + i), PARAMS) for i in range(4)]
        engine.begin()
        assert [answer.wait().code for answer in answers] == [Code.INTERNAL] * 4
        check(engine.ask([5, 6], PARAMS))


@pytest.mark.parametrize("place", ["admit", "launch", "collect", "sample"])
def test_a_lost_device_is_noticed_wherever_it_shows_and_is_no_requests_own_fault(place: str) -> None:
    def lost(*_: object) -> Any:
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    with serving(scripted.load(), begin=False) as engine:
        runner: Any = engine._runner
        setattr(runner._sampler if place == "sample" else runner, place, lost)
        answers = [engine.ask(tiny_models.prompt(9 + i), PARAMS) for i in range(3)]
        engine.begin()
        for answer in answers:
            assert answer.wait().code == Code.INTERNAL
            assert answer.last.error
            assert not answer.last.error.own_fault
        assert engine.device_lost

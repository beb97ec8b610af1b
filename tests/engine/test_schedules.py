"""Same seed, same tokens, whatever the schedule: budget, blocks, pool, prefix cache, overlap and neighbours."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from engine import driver, scripted, tiny_models
from engine.driver import Answer, CheckedEngine, Logits, serving
from llm_engine.request import Code, SamplingParams

TOLERANCE = 2e-3  # of fp32 logits between schedules; tiny models' logits reach 30
FAMILY = "mistral"  # its sliding window is shorter than the sequences
each_mode = pytest.mark.parametrize(("dtype", "kernels"), driver.modes("bfloat16", "float32"))

TARGETS: tuple[tuple[list[int], SamplingParams], ...] = (
    (tiny_models.prompt(21), SamplingParams(max_tokens=20, seed=1, ignore_eos=True)),
    (tiny_models.prompt(1), SamplingParams(max_tokens=24, temperature=0.0, min_tokens=24)),
    (
        tiny_models.prompt(90, seed=2),
        SamplingParams(max_tokens=16, seed=3, top_k=20, top_p=0.9, repetition_penalty=1.2, frequency_penalty=0.3),
    ),
)


@dataclass(frozen=True, slots=True)
class Neighbour:
    """Another request: when it comes, when it is cancelled if it still runs, its prompt's length and its priority."""

    arrives: int
    leaves: int
    length: int
    priority: int


@dataclass(frozen=True, slots=True)
class Schedule:
    """Everything that must not matter."""

    max_step_tokens: int
    block_size: int
    pool_tokens: int
    prefix_cache: bool
    asynchronous: bool
    max_sequences: int
    neighbours: tuple[Neighbour, ...]
    resident: int  # earlier requests that left their blocks in the cache


neighbours = st.builds(
    Neighbour,
    arrives=st.integers(0, 25),
    leaves=st.integers(1, 60),
    length=st.integers(1, 50),
    priority=st.integers(1, 3),
)
schedules = st.builds(
    Schedule,
    max_step_tokens=st.integers(24, 80),
    block_size=st.sampled_from([1, 3, 8, 16]),
    pool_tokens=st.integers(128, 250),
    prefix_cache=st.booleans(),
    asynchronous=st.booleans(),
    max_sequences=st.integers(1, 8),
    neighbours=st.lists(neighbours, max_size=6).map(tuple),
    resident=st.integers(0, 2),
)


def run(schedule: Schedule, dtype: str, kernels: str) -> tuple[dict[str, Answer], Logits, int]:
    """Answer the targets under a schedule; return answers and logits by target, and the number of preemptions."""
    loaded = driver.load(
        FAMILY,
        dtype,
        kernels=kernels,
        max_step_tokens=max(schedule.max_step_tokens, schedule.max_sequences + schedule.block_size),
        block_size=schedule.block_size,
        kv_tokens=schedule.pool_tokens,
        prefix_cache=schedule.prefix_cache,
        max_sequences=schedule.max_sequences,
    )
    guests: list[Answer] = []
    with serving(loaded, asynchronous=schedule.asynchronous, begin=False) as engine:
        noted = driver.record_logits(engine)
        engine.on_turn = lambda turn: _come_and_go(engine, schedule, turn, guests)
        for i in range(schedule.resident):
            prompt, _ = TARGETS[i]
            guests.append(engine.ask(prompt, SamplingParams(max_tokens=2, seed=9, ignore_eos=True)))
        answers = {str(i): engine.ask(p, params, id=str(i)) for i, (p, params) in enumerate(TARGETS)}
        engine.begin()
        for answer in answers.values():
            answer.wait()
        engine.on_turn = lambda _turn: None
        for guest in guests:
            engine.cancel(guest.request.id)
        for guest in guests:
            assert guest.wait().code in ("stop", "length", Code.CANCELLED)
        preemptions = engine.metrics.preemptions
    return answers, noted, preemptions


def _come_and_go(engine: CheckedEngine, schedule: Schedule, turn: int, guests: list[Answer]) -> None:
    for number, neighbour in enumerate(schedule.neighbours):
        name = f"neighbour {number}"
        if neighbour.arrives == turn:
            params = SamplingParams(seed=number, ignore_eos=True, presence_penalty=0.5 * (number % 2))
            prompt = TARGETS[0][0][: neighbour.length] if number % 3 == 0 else tiny_models.prompt(neighbour.length)
            guests.append(engine.ask(prompt, params, id=name, priority=neighbour.priority))
        if neighbour.leaves == turn:
            engine.cancel(name)


@cache
def quiet(dtype: str, kernels: str) -> tuple[dict[str, list[int]], Logits, str]:
    """Each target alone, prompt in one step, in a large pool."""
    with serving(driver.load(FAMILY, dtype, kernels=kernels, max_step_tokens=128)) as engine:
        noted = driver.record_logits(engine)
        tokens = {}
        for i, (prompt, params) in enumerate(TARGETS):
            tokens[str(i)] = engine.ask(prompt, params, id=str(i)).wait().tokens
        return tokens, noted, str(engine.info()["exact"])


def assert_same(answer: Answer, noted: Logits, dtype: str, kernels: str) -> None:
    """Bit for bit where the engine says so; elsewhere logits within a tolerance as far as the tokens agree."""
    name = answer.request.id
    tokens, expected, exact = quiet(dtype, kernels)
    if exact == "bitwise":
        assert answer.tokens == tokens[name]
        assert all(torch.equal(noted[name, i], expected[name, i]) for i in range(len(answer.tokens)))
        return
    for place, (token, wanted) in enumerate(zip(answer.tokens, tokens[name], strict=False)):
        torch.testing.assert_close(noted[name, place], expected[name, place], atol=TOLERANCE, rtol=0)
        if token != wanted:
            return  # two scores were closer than the tolerance
    assert len(answer.tokens) == len(tokens[name])


@each_mode
@settings(max_examples=settings.default.max_examples // 2)
@given(schedule=schedules)
def test_tokens_do_not_depend_on_the_schedule(dtype: str, kernels: str, schedule: Schedule) -> None:
    answers, noted, _ = run(schedule, dtype, kernels)
    for answer in answers.values():
        assert_same(answer, noted, dtype, kernels)


@pytest.mark.parametrize("asynchronous", [False, True])
@each_mode
def test_preempted_answers_are_the_same(dtype: str, kernels: str, asynchronous: bool) -> None:
    cramped = Schedule(24, 4, 168, True, asynchronous, 4, (Neighbour(3, 50, 30, 1), Neighbour(5, 50, 9, 1)), 0)
    answers, noted, preemptions = run(cramped, dtype, kernels)
    assert preemptions > 0
    assert any(answer.last.timings and answer.last.timings.preemptions for answer in answers.values())
    for answer in answers.values():
        assert_same(answer, noted, dtype, kernels)


@pytest.mark.parametrize(("dtype", "kernels"), driver.modes("bfloat16"))
def test_the_overlapped_loop_gives_the_same_tokens_with_stop_strings(dtype: str, kernels: str) -> None:
    prompt, params = TARGETS[0]
    texts = []
    for asynchronous in (False, True):
        with serving(driver.load(FAMILY, dtype, kernels=kernels), asynchronous=asynchronous) as engine:
            whole = engine.ask(prompt, params).wait().text
            middle = whole[len(whole) // 2 :][:2]
            stopped = SamplingParams(max_tokens=20, seed=1, ignore_eos=True, stop=(middle,))
            answer = engine.ask(prompt, stopped).wait()
            assert answer.code == "stop"
            texts.append((whole, answer.text, answer.tokens))
            assert answer.text == whole[: whole.index(middle)]
    assert texts[0] == texts[1]


@given(lengths=st.lists(st.integers(1, 70), min_size=1, max_size=4))
def test_no_step_runs_a_single_row_in_the_layers_or_in_the_head(lengths: list[int]) -> None:
    """Matrix libraries round one row otherwise than two."""
    rows: list[tuple[int, int]] = []
    model = scripted.load(max_step_tokens=16)
    with serving(model, begin=False) as engine:
        model.stage.before = lambda tokens, head: rows.append((len(tokens), len(head)))
        params = SamplingParams(max_tokens=5, seed=0, ignore_eos=True)
        answers = [engine.ask(tiny_models.prompt(length), params) for length in lengths]
        engine.begin()
        for answer in answers:
            assert answer.wait().tokens == scripted.expected(list(answer.request.prompt_ids), 5)
    assert all(count >= 2 and drawing != 1 for count, drawing in rows)

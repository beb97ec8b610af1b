"""A shared prefix is computed once, changes no token, and is shared only under one salt."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from engine import driver, tiny_models
from engine.driver import serving
from llm_engine.request import SamplingParams

PROMPT = tiny_models.prompt(35)  # four full blocks of 8 and a tail
PARAMS = SamplingParams(max_tokens=9, seed=3, ignore_eos=True)


@pytest.mark.parametrize("family", ["llama", "gemma3", "gpt2"])
def test_a_hit_gives_the_same_logits(family: str) -> None:
    with serving(driver.load(family, "bfloat16")) as engine:
        noted = driver.record_logits(engine)
        miss = engine.ask(PROMPT, PARAMS, id="miss").wait()
        hit = engine.ask(PROMPT, PARAMS, id="hit").wait()
        exact = engine.info()["exact"]
    assert miss.last.timings and hit.last.timings
    assert (miss.last.timings.cached_tokens, hit.last.timings.cached_tokens) == (0, 32)
    assert engine.metrics.prefix_hit_tokens == 32
    if exact == "bitwise":
        assert all(torch.equal(noted["miss", i], noted["hit", i]) for i in range(9))
    assert hit.tokens == miss.tokens


def test_an_answer_continued_as_a_prompt_hits_the_answers_blocks() -> None:
    with serving(driver.load("llama", "bfloat16")) as engine:
        answer = engine.ask(PROMPT, replace(PARAMS, max_tokens=15)).wait()
        chat = [*PROMPT, *answer.tokens, *tiny_models.prompt(4)]
        timings = engine.ask(chat, PARAMS).wait().last.timings
        assert timings
        assert timings.cached_tokens == 48  # 35 + 15 tokens, of which the last was drawn but never computed


def test_salts_share_nothing_and_a_salt_shares_with_itself() -> None:
    cached = []
    with serving(driver.load("llama")) as engine:
        for salt in ("a", "b", "", "a", "b", ""):
            timings = engine.ask(PROMPT, PARAMS, cache_salt=salt).wait().last.timings
            assert timings
            cached.append(timings.cached_tokens)
    assert cached == [0, 0, 0, 32, 32, 32]


def test_concurrent_requests_of_two_salts_hold_no_block_in_common() -> None:
    shared: list[set[int]] = []
    with serving(driver.load("llama"), begin=False) as engine:
        first, second = (engine.ask(PROMPT, PARAMS, cache_salt=salt) for salt in ("a", "b"))

        def note(_turn: int) -> None:
            shared.append(set(first.request.blocks) & set(second.request.blocks))

        engine.on_turn = note
        engine.begin()
        first.wait()
        second.wait()
    assert shared
    assert not any(shared)


def test_without_the_cache_nothing_is_shared() -> None:
    with serving(driver.load("llama", prefix_cache=False)) as engine:
        for _ in range(2):
            timings = engine.ask(PROMPT, PARAMS).wait().last.timings
            assert timings
            assert timings.cached_tokens == 0


def test_a_prompt_cached_whole_still_computes_its_last_token() -> None:
    with serving(driver.load("llama", "bfloat16")) as engine:
        miss, hit = (engine.ask(PROMPT[:32], PARAMS).wait() for _ in range(2))
        assert hit.last.timings
        assert hit.last.timings.cached_tokens == 24
        assert hit.tokens == miss.tokens

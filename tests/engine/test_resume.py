"""An answer cut anywhere and resumed goes on as if it had never been cut: tokens, text, index and end."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest

from engine import driver, tiny_models
from engine.driver import Answer, CheckedEngine, serving
from llm_engine.request import FinishReason, RequestError, SamplingParams

PROMPT = tiny_models.prompt(19)
STOPS = tuple(range(100, 164))

PARAMS = {
    "greedy": SamplingParams(max_tokens=24, temperature=0.0, ignore_eos=True),
    "drawn": SamplingParams(max_tokens=24, seed=4, ignore_eos=True),
    "narrow": SamplingParams(max_tokens=24, seed=5, top_k=12, top_p=0.8, min_p=0.02, temperature=1.5, ignore_eos=True),
    "penalised": SamplingParams(
        max_tokens=24, seed=6, repetition_penalty=1.3, presence_penalty=0.5, frequency_penalty=0.7, ignore_eos=True
    ),
    "banned": SamplingParams(max_tokens=24, seed=7, bad_words=("the", "a"), logit_bias=((40, 5.0), (41, -5.0))),
    "at least": SamplingParams(max_tokens=60, seed=8, min_tokens=10, stop_token_ids=STOPS),
    "logprobs": SamplingParams(max_tokens=12, seed=9, logprobs=3, ignore_eos=True),
}


@pytest.fixture(scope="module", params=driver.kernels("bfloat16"))
def engine(request: pytest.FixtureRequest) -> Iterator[CheckedEngine]:
    """One engine for the file and kernels; in bf16, where a cut must not change a bit."""
    with serving(driver.load("qwen3", "bfloat16", kernels=request.param)) as running:
        yield running


def resume(engine: CheckedEngine, whole: Answer, cut: int) -> Answer:
    first = whole.deltas[0]
    assert first.seed is not None
    return engine.ask(
        PROMPT,
        replace(whole.request.params, seed=first.seed),
        resume_token_ids=tuple(whole.tokens[:cut]),
        resume_fingerprint=first.fingerprint,
    ).wait()


def assert_goes_on(whole: Answer, resumed: Answer, cut: int) -> None:
    """`resumed` is the rest of `whole` behind `cut` tokens."""
    assert resumed.tokens == whole.tokens[cut:]
    assert resumed.text == "".join(delta.text for delta in whole.deltas[cut:])
    assert resumed.code == whole.code
    assert [d.logprobs for d in resumed.deltas] == [d.logprobs for d in whole.deltas[cut:]]
    assert resumed.last.num_input_tokens == len(PROMPT)


@pytest.mark.parametrize("kind", PARAMS)
def test_an_answer_resumed_at_any_token_goes_on_the_same(engine: CheckedEngine, kind: str) -> None:
    whole = engine.ask(PROMPT, PARAMS[kind]).wait()
    assert len(whole.tokens) > 10
    for cut in range(1, len(whole.tokens)):
        assert_goes_on(whole, resume(engine, whole, cut), cut)


def test_an_answer_resumed_inside_a_held_back_stop_string_finds_it(engine: CheckedEngine) -> None:
    whole = engine.ask(PROMPT, PARAMS["drawn"]).wait()
    stop = whole.text[8:14]
    assert len(stop) == 6
    stopped = engine.ask(PROMPT, replace(PARAMS["drawn"], stop=(stop, "never seen"))).wait()
    assert (stopped.code, stopped.text) == ("stop", whole.text[: whole.text.index(stop)])
    assert len(stopped.tokens) > 3
    for cut in range(1, len(stopped.tokens)):
        assert_goes_on(stopped, resume(engine, stopped, cut), cut)


def test_an_answer_resumed_twice_is_still_the_same(engine: CheckedEngine) -> None:
    whole = engine.ask(PROMPT, PARAMS["drawn"]).wait()
    again = resume(engine, whole, 5)
    assert_goes_on(whole, again, 5)
    assert_goes_on(whole, resume(engine, whole, 5 + len(again.tokens[:7])), 12)


def test_an_answer_resumed_on_another_server_goes_on_the_same(engine: CheckedEngine) -> None:
    whole = engine.ask(PROMPT, PARAMS["drawn"]).wait()
    with serving(
        driver.load("qwen3", "bfloat16", kernels=engine.config.kernels, block_size=3, max_step_tokens=17)
    ) as other:
        assert_goes_on(whole, resume(other, whole, 11), 11)


@pytest.mark.parametrize("kind", ["drawn", "at least"])
def test_an_ended_answer_resumed_at_its_end_is_told_the_reason_alone(engine: CheckedEngine, kind: str) -> None:
    whole = engine.ask(PROMPT, PARAMS[kind]).wait()
    resumed = resume(engine, whole, len(whole.tokens))
    assert [(d.text, d.token_ids, d.index) for d in resumed.deltas] == [("", (), len(whole.tokens))]
    assert resumed.code == whole.code
    assert resumed.last.timings is not None


def test_a_drawn_seed_is_told_and_gives_the_same_answer(engine: CheckedEngine) -> None:
    params = SamplingParams(max_tokens=10, ignore_eos=True)
    answer = engine.ask(PROMPT, params).wait()
    seed = answer.deltas[0].seed
    assert seed is not None
    assert all(delta.seed is None and delta.fingerprint is None for delta in answer.deltas[1:])
    assert engine.ask(PROMPT, replace(params, seed=seed)).wait().tokens == answer.tokens
    assert engine.ask(PROMPT, params).wait().tokens != answer.tokens


def test_a_resume_of_another_prompt_is_refused(engine: CheckedEngine) -> None:
    fingerprint = engine.ask(PROMPT, PARAMS["drawn"]).wait().deltas[0].fingerprint
    with pytest.raises(RequestError, match="resume_mismatch"):
        engine.ask(PROMPT[1:], PARAMS["drawn"], resume_token_ids=(5,), resume_fingerprint=fingerprint)


def test_a_resume_past_the_limit_is_refused_with_the_numbers(engine: CheckedEngine) -> None:
    with pytest.raises(RequestError, match="holds 25 tokens; at most 24 fit"):
        engine.ask(PROMPT, PARAMS["drawn"], resume_token_ids=(5,) * 25)


def test_min_tokens_counts_from_the_start_of_the_answer(engine: CheckedEngine) -> None:
    whole = engine.ask(PROMPT, PARAMS["at least"]).wait()
    assert whole.last.finish_reason is FinishReason.STOP
    assert len(whole.tokens) > 10
    assert not {*STOPS, tiny_models.EOS} & set(whole.tokens[:-1])

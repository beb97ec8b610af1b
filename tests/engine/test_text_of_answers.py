"""Deltas joined are the text of the tokens up to the stop; ends, logprobs and limits are told where they happen."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from engine import driver, scripted, tiny_models
from engine.driver import Answer, serving
from llm_engine.request import FinishReason, SamplingParams

PROMPT: list[int] = tiny_models.tokenizer()("the end: ")["input_ids"]
GREEDY = SamplingParams(temperature=0.0)

written = st.one_of(
    st.text("the qz\nédog😀漢", min_size=1, max_size=20).map(lambda t: list(tiny_models.tokenizer()(t)["input_ids"])),
    st.lists(st.integers(3, tiny_models.vocab_size() - 1), min_size=1, max_size=20),
)
stops = st.lists(st.text("the qz\né漢", min_size=1, max_size=4), max_size=3).map(tuple)


def decode(tokens: list[int]) -> str:
    text: str = tiny_models.tokenizer().decode(tokens, skip_special_tokens=True, clean_up_tokenization_spaces=False)
    return text


def answer_with(tokens: list[int], params: SamplingParams, *, asynchronous: bool = False) -> Answer:
    """Let the model say `tokens`, then EOS for ever."""
    model = scripted.load()
    said = torch.tensor(tokens + [tiny_models.EOS] * 100)
    model.stage.script = lambda _tokens, positions: said[(positions - len(PROMPT) + 1).clamp(min=0)]
    with serving(model, asynchronous=asynchronous) as engine:
        return engine.ask(PROMPT, params).wait()


@given(tokens=written, stop=stops, include=st.booleans(), asynchronous=st.booleans())
def test_deltas_joined_are_the_text_up_to_the_first_stop(
    tokens: list[int], stop: tuple[str, ...], include: bool, asynchronous: bool
) -> None:
    params = replace(GREEDY, stop=stop, include_stop_str_in_output=include)
    answer = answer_with(tokens, params, asynchronous=asynchronous)
    whole = decode(tokens)
    matches = [(whole.index(s) + len(s), whole.index(s)) for s in stop if s in whole]
    assert answer.code == "stop"
    if not matches:
        assert answer.tokens == [*tokens, tiny_models.EOS]
        assert answer.text == whole + ("</s>" if include and not params.skip_special_tokens else "")
        return
    end, start = min(matches)
    assert answer.text == whole[: end if include else start]
    assert answer.tokens == tokens[: len(answer.tokens)], "every token up to the match, and none behind it"
    assert whole[:end] in decode(answer.tokens)
    assert end > len(decode(answer.tokens[:-1]).rstrip("\N{REPLACEMENT CHARACTER}"))


def test_a_stop_string_that_only_the_end_of_the_answer_completes_ends_it_with_stop() -> None:
    tokens = list(tiny_models.tokenizer()("漢")["input_ids"])[:-1]
    assert decode(tokens) == "\N{REPLACEMENT CHARACTER}"  # held back until nothing more can come
    params = replace(GREEDY, max_tokens=len(tokens), stop=("\N{REPLACEMENT CHARACTER}",))
    answer = answer_with(tokens, params)
    assert (answer.code, answer.text, answer.tokens) == ("stop", "", tokens)
    with serving(scripted.load()) as engine:
        assert engine.ask(PROMPT, params, resume_token_ids=tokens).wait().code == "stop"


@given(tokens=written, limit=st.integers(1, 20))
def test_an_answer_cut_by_max_tokens_has_the_whole_text_of_its_tokens(tokens: list[int], limit: int) -> None:
    limit = min(limit, len(tokens))
    answer = answer_with(tokens, replace(GREEDY, max_tokens=limit))
    assert answer.code == "length"
    assert answer.tokens == tokens[:limit]
    assert answer.text == decode(tokens[:limit])


def test_every_token_has_its_own_delta_with_its_index() -> None:
    tokens = tiny_models.prompt(10)
    answer = answer_with(tokens, GREEDY)
    assert [delta.index for delta in answer.deltas] == list(range(11))
    assert [delta.token_ids for delta in answer.deltas] == [(token,) for token in (*tokens, tiny_models.EOS)]
    assert all(delta.num_input_tokens == len(PROMPT) for delta in answer.deltas)
    assert [delta.timings is not None for delta in answer.deltas] == [False] * 10 + [True]


def test_eos_ends_an_answer_and_is_its_last_token_without_text() -> None:
    answer = answer_with([40, 41], GREEDY)
    assert (answer.last.token_ids, answer.last.text) == ((tiny_models.EOS,), "")
    assert answer.last.finish_reason is FinishReason.STOP


def test_a_stop_token_ends_an_answer_and_ignored_eos_does_not() -> None:
    params = replace(GREEDY, ignore_eos=True, stop_token_ids=(50,))
    answer = answer_with([40, tiny_models.EOS, 41, 50, 42], params)
    assert (answer.tokens, answer.code) == ([40, tiny_models.EOS, 41, 50], "stop")
    assert answer.text == decode([40, 41])


def test_held_back_text_is_not_sent_when_an_answer_is_cancelled() -> None:
    """All from the `x` on might become the stop string; a resume will still need it."""
    held = tiny_models.tokenizer()("fox the")["input_ids"]
    model = scripted.load()
    said = torch.tensor(held + [held[-1]] * 200)
    model.stage.script = lambda _tokens, positions: said[positions - len(PROMPT) + 1]
    with serving(model, begin=False) as engine:
        answer = engine.ask(PROMPT, replace(GREEDY, stop=("x" + " the" * 60 + "!",)))
        engine.on_turn = lambda _turn: engine.cancel(answer.request.id) if len(answer.tokens) > len(held) else None
        engine.begin()
        assert answer.wait().code == "CANCELLED"
    assert answer.text == "fo"
    assert len(answer.tokens) > len(held)


@pytest.mark.parametrize("asynchronous", [False, True])
def test_logprobs_are_the_models_own(asynchronous: bool) -> None:
    prompt = tiny_models.prompt(12)
    with serving(driver.load("llama"), asynchronous=asynchronous) as engine:
        noted = driver.record_logits(engine)
        params = SamplingParams(max_tokens=6, seed=1, logprobs=4, temperature=2.0, ignore_eos=True)
        answer = engine.ask(prompt, params, id="a").wait()
    for place, delta in enumerate(answer.deltas):
        (told,) = delta.logprobs
        expected = noted["a", place].float().log_softmax(-1)
        best = expected.topk(4)
        assert told.token_id == delta.token_ids[0]
        assert told.logprob == pytest.approx(float(expected[told.token_id]), abs=1e-5)
        assert told.rank == int((expected > expected[told.token_id]).sum()) + 1
        assert [token for token, _ in told.top] == best.indices.tolist()
        assert [value for _, value in told.top] == pytest.approx(best.values.tolist(), abs=1e-5)

"""Heads, embeddings and tokenizers of different sizes: what can be drawn, what a prompt may hold, what is refused."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch
from torch import nn

from engine import driver, tiny_models
from engine.driver import serving
from llm_engine import loading
from llm_engine.loading import LoadedModel
from llm_engine.request import Code, RequestError, SamplingParams

KNOWN = tiny_models.vocab_size()
LAST = KNOWN - 1
PARAMS = SamplingParams(max_tokens=12, seed=1, ignore_eos=True)
NEIGHBOUR = (tiny_models.prompt(17, seed=5), replace(PARAMS, seed=7))
each_mode = pytest.mark.parametrize(("dtype", "kernels"), driver.modes("float32", "bfloat16"))


def resized(rows: Any, count: int) -> nn.Parameter:
    """A table cut off or grown, by copies of its first rows."""
    return nn.Parameter(torch.cat([rows, rows])[:count].clone(), requires_grad=False)


@cache
def load(embedded: int, drawn: int, dtype: str, kernels: str) -> LoadedModel:
    """A model with tables of these sizes that likes to draw the last token it has a logit for."""
    model = tiny_models.build("llama", getattr(torch, dtype))
    inside, head = model.get_input_embeddings(), model.get_output_embeddings()
    inside.weight, head.weight = resized(inside.weight, embedded), resized(head.weight, drawn)
    inside.num_embeddings, head.out_features = embedded, drawn
    head.weight[-1] *= 20
    return loading.attach(model, tiny_models.tokenizer(), driver.config(dtype, kernels=kernels), "digest")


@cache
def alone(embedded: int, drawn: int, dtype: str, kernels: str) -> list[int]:
    """The neighbour's answer."""
    with serving(load(embedded, drawn, dtype, kernels)) as engine:
        return engine.ask(*NEIGHBOUR).wait().tokens


@each_mode
@pytest.mark.parametrize(("embedded", "drawn"), [(KNOWN, KNOWN - 9), (KNOWN - 9, KNOWN), (KNOWN + 9, KNOWN + 20)])
def test_every_token_drawn_can_be_embedded_and_every_rule_is_kept(
    embedded: int, drawn: int, dtype: str, kernels: str
) -> None:
    """The rules name tokens without a logit; the prompt holds all that can be embedded."""
    word = tiny_models.tokenizer().decode([LAST])
    assert tiny_models.tokenizer()(word)["input_ids"] == [LAST]
    params = SamplingParams(max_tokens=12, seed=1, min_tokens=12, bad_words=(word,), repetition_penalty=1.1)
    loaded = replace(load(embedded, drawn, dtype, kernels), eos_token_ids=(tiny_models.EOS, LAST, KNOWN + 30))
    assert (loaded.vocab_size, loaded.embedding_size) == (min(embedded, drawn), embedded)
    prompt = [*tiny_models.prompt(5)[:5], embedded - 1]
    with serving(loaded, begin=False) as engine:
        answer, neighbour = engine.ask([t for t in prompt if t < embedded], params), engine.ask(*NEIGHBOUR)
        engine.begin()
        assert answer.wait().code == "length"
        assert max(answer.tokens) < min(embedded, drawn)
        assert not {LAST, tiny_models.EOS} & set(answer.tokens)
        assert neighbour.wait().tokens == alone(embedded, drawn, dtype, kernels)


@pytest.mark.parametrize(
    ("told", "prompt", "fields"),
    [
        (f"input_ids must hold token ids from 0 to {KNOWN - 1}, got {KNOWN}", [KNOWN], {}),
        (f"resume_token_ids must hold token ids from 0 to {LAST - 9}, got {LAST}", [5], {"resume_token_ids": [LAST]}),
        (f"stop_token_ids .* to {LAST - 9}, got {LAST}", [5], {"params": SamplingParams(stop_token_ids=(LAST,))}),
        (f"logit_bias .* to {LAST - 9}, got {LAST}", [5], {"params": SamplingParams(logit_bias=((LAST, 1.0),))}),
    ],
)
def test_ids_that_a_client_gives_and_no_answer_can_hold_are_refused(
    told: str, prompt: list[int], fields: dict[str, Any]
) -> None:
    with serving(load(KNOWN, KNOWN - 9, "float32", "torch")) as engine:
        with pytest.raises(RequestError, match=told) as refused:
            engine.ask(prompt, **fields)
        assert refused.value.code is Code.INVALID_ARG


def test_a_prompt_beyond_the_embedding_is_refused_although_the_head_knows_the_token() -> None:
    with (
        serving(load(KNOWN - 9, KNOWN, "float32", "torch")) as engine,
        pytest.raises(RequestError, match=f"input_ids must hold token ids from 0 to {LAST - 9}, got {LAST}"),
    ):
        engine.ask([LAST], PARAMS)

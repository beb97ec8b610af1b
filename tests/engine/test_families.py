"""Every verified family gives the tokens that transformers' own generate gives."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from engine import driver, tiny_models
from engine.driver import serving
from llm_engine.request import SamplingParams

MARGIN = 1e-3  # best and second best closer than this may change places by rounding
ANSWER = 24


def reference(model: Any, prompt: list[int]) -> tuple[list[int], torch.Tensor]:
    """The greedy answer of transformers and its logits [tokens, vocabulary]."""
    out = model.generate(
        torch.tensor([prompt]),
        attention_mask=torch.ones(1, len(prompt), dtype=torch.int64),
        do_sample=False,
        max_new_tokens=ANSWER,
        output_logits=True,
        return_dict_in_generate=True,
    )
    return out.sequences[0, len(prompt) :].tolist(), torch.cat(out.logits).float()


def assert_equal_by_margin(tokens: list[int], expected: list[int], logits: torch.Tensor, margin: float) -> None:
    """Equal up to a place, if any, where the two best logits are too close to tell."""
    for place, (token, wanted) in enumerate(zip(tokens, expected, strict=False)):
        if token != wanted:
            best = logits[place].topk(2).values
            assert best[0] - best[1] < margin, f"token {place} is {token}, not {wanted}"
            return
    assert len(tokens) == len(expected)


@pytest.mark.parametrize(("dtype", "kernels"), driver.modes("float32"))
@pytest.mark.parametrize("family", tiny_models.FAMILIES)
def test_greedy_answers_equal_generate(family: str, dtype: str, kernels: str) -> None:
    prompts = [tiny_models.prompt(length) for length in (1, 5, 11, 40, 150)]
    model = tiny_models.build(family)
    model.set_attn_implementation("eager")
    references = [reference(model, prompt) for prompt in prompts]
    assert len({token for tokens, _ in references for token in tokens}) > 10, "the answers are too dull to tell"

    params = SamplingParams(max_tokens=ANSWER, temperature=0.0)
    with serving(driver.load(family, dtype, kernels=kernels, max_step_tokens=20), begin=False) as engine:
        answers = [engine.ask(prompt, params) for prompt in prompts]
        engine.begin()
        for answer, (tokens, logits) in zip(answers, references, strict=True):
            assert_equal_by_margin(answer.wait().tokens, tokens, logits, MARGIN)


@pytest.mark.parametrize(("dtype", "kernels"), driver.modes("bfloat16"))
@pytest.mark.parametrize("family", tiny_models.FAMILIES)
def test_where_bitwise_is_declared_logits_do_not_depend_on_company_or_chunks(
    family: str, dtype: str, kernels: str
) -> None:
    params = SamplingParams(max_tokens=12, seed=5, ignore_eos=True)
    prompts = [tiny_models.prompt(length) for length in (80, 1, 17)]
    alone, company = (driver.load(family, dtype, kernels=kernels, max_step_tokens=n) for n in (128, 14))
    with serving(alone) as engine:
        exact = engine.info()["exact"]
        expected = driver.record_logits(engine)
        for i, prompt in enumerate(prompts):
            engine.ask(prompt, params, id=str(i)).wait()
    with serving(company, begin=False) as engine:
        noted = driver.record_logits(engine)
        answers = [engine.ask(prompt, params, id=str(i)) for i, prompt in enumerate(prompts)]
        engine.begin()
        for answer in answers:
            answer.wait()
    assert exact in ("bitwise", "sampled")
    if exact == "bitwise":
        assert noted.keys() == expected.keys()
        assert all(torch.equal(noted[key], expected[key]) for key in expected)

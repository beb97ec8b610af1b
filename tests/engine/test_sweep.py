"""Every causal LM type of transformers is proven equal to its eager attention or refused in one line; none crashes.

A quick run takes the important types and a fixed choice of the others, a deep one (`HYPOTHESIS_PROFILE=deep`) all, and
PyTorch's kernels and bfloat16 besides.
"""

from __future__ import annotations

import os
from zlib import crc32

import pytest

from engine import sweep_models, sweep_outcomes
from engine.sweep_outcomes import SERVED, TOLERANCE

IMPORTANT = {
    "afmoe", "deepseek_v3", "diffllama", "doge", "falcon", "gemma", "gemma2", "gemma3", "gemma3_text", "gemma4_text",
    "glm4", "gpt2", "gpt_oss", "granite", "llama", "llama4_text", "mamba", "ministral", "mistral", "mixtral",
    "nemotron", "olmo2", "olmo3", "phi3", "phimoe", "qwen2", "qwen2_moe", "qwen3", "qwen3_moe", "qwen3_next",
    "smollm3", "starcoder2",
}  # fmt: skip
QUICK = [name for name in sweep_models.TYPES if name in IMPORTANT or crc32(name.encode()) % 5 == 0]
DEEP = os.environ.get("HYPOTHESIS_PROFILE") == "deep"  # as `make soak` sets it
RUN = sweep_models.TYPES if DEEP else QUICK
TOLD = sweep_outcomes.told()
MODES = [("float32", "auto"), ("float32", "torch"), ("bfloat16", "auto")]


@pytest.mark.parametrize(("dtype", "kernels"), MODES if DEEP else MODES[:1])
@pytest.mark.parametrize("model_type", RUN)
def test_a_model_type_has_the_outcome_that_the_table_tells(model_type: str, dtype: str, kernels: str) -> None:
    assert sweep_outcomes.outcome(model_type, dtype, kernels) == TOLD[model_type]


@pytest.mark.parametrize("kernels", ["auto", "torch"] if DEEP else ["auto"])
@pytest.mark.parametrize("model_type", [name for name in RUN if TOLD[name].verdict == SERVED])
def test_answers_of_a_busy_engine_have_the_logits_of_eager_attention(model_type: str, kernels: str) -> None:
    assert sweep_outcomes.distance_of_answers(model_type, kernels) < TOLERANCE


def test_the_table_names_every_type_in_order() -> None:
    assert tuple(TOLD) == sweep_models.TYPES


def test_a_quick_run_takes_a_third_of_the_types() -> None:
    assert set(QUICK) >= IMPORTANT
    assert len(sweep_models.TYPES) <= 3 * len(QUICK) <= 1.5 * len(sweep_models.TYPES)

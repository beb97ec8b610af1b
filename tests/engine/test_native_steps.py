"""Whole native steps of a loaded model: how close to float32 they are, what they hold, refuse and tell."""

from __future__ import annotations

import weakref
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor

from engine import driver, tiny_models
from llm_engine.batch import Batch, BatchBuilder
from llm_engine.config import cache_folder
from llm_engine.loading import LoadedModel
from llm_engine.loading.steps import NativeSteps
from llm_engine.request import Request, SamplingParams
from llm_engine.scheduler import Chunk, Plan
from llm_kernels.decoder import PARTS
from llm_kernels.objects import load_object
from llm_tools.limits import Work

pytestmark = driver.needs_native()
# qwen2 has biases, qwen3 norms its queries and keys, mistral, gemma2 and gemma3 have windows, gpt2 has other layers.
FAMILIES = ("llama", "qwen2", "qwen3", "mistral", "gemma2", "gemma3", "phi3", "gpt2")


def arithmetics() -> list[str]:
    """Those that multiply bfloat16 weights on this CPU."""
    if driver.native_lack():
        return ["fma32"]
    return ["fma32", "dpbf16"] if load_object(cache_folder())[0].ts_has_dpbf16() else ["fma32"]


def batch_of(loaded: LoadedModel, ids: list[int], start: int, count: int) -> Batch:
    """Some rows of the sequence `ids`, whose blocks are those at the front of the cache, in reverse."""
    request = Request("r", ids, SamplingParams(), tokens=ids, prompt_len=len(ids))
    request.blocks = list(reversed(range(-(-len(ids) // loaded.config.block_size))))
    builder = BatchBuilder(loaded.config.block_size, loaded.scratch_slot, torch.zeros(1, dtype=torch.int64))
    return builder.build(Plan((Chunk(request, start, count, samples=False),)))


def logits_of(loaded: LoadedModel, ids: list[int], *sizes: int) -> Tensor:
    """Logits of every row, float32 [rows, vocabulary], computed in steps of `sizes` rows; the rest in one."""
    out: list[Tensor] = []
    start = 0
    for count in (*sizes, len(ids) - sum(sizes)):
        out.append(loaded.forward(batch_of(loaded, ids, start, count), torch.arange(count)))
        start += count
    return torch.cat(out)


def steps_of(loaded: LoadedModel) -> NativeSteps:
    assert loaded.steps is not None
    return loaded.steps


@pytest.mark.parametrize("family", FAMILIES)
def test_a_model_is_as_close_to_float32_as_transformers_bfloat16_is(family: str) -> None:
    ids = tiny_models.prompt(150)

    def of_transformers(dtype: torch.dtype) -> Tensor:
        model = tiny_models.build(family, torch.bfloat16).to(dtype)  # the same rounded weights in both
        model.set_attn_implementation("eager")
        with torch.inference_mode():
            logits: Tensor = model(torch.tensor([ids])).logits[0].float()
        return logits

    exact = of_transformers(torch.float32)
    theirs = (of_transformers(torch.bfloat16) - exact).abs()
    assert exact.abs().mean() > 1
    for arithmetic in arithmetics():
        loaded = driver.load(family, "bfloat16", arithmetic=arithmetic, weight_format="bfloat16")
        assert (steps_of(loaded).weight_format, steps_of(loaded).arithmetic) == ("bfloat16", arithmetic)
        ours = (logits_of(loaded, ids) - exact).abs()
        assert ours.mean() < 1.1 * theirs.mean()
        assert ours.max() < 1.5 * theirs.max()
        assert torch.equal(logits_of(loaded, ids, 1, 2, 3, 5, 7, 13, 16, 17), logits_of(loaded, ids))


def wide_model(*, tied: bool) -> Any:
    """A Qwen2 whose weights are some MiB, so that one held twice is seen."""
    config = tiny_models.FAMILIES["qwen2"](tiny_models.vocab_size())
    config.hidden_size, config.intermediate_size, config.tie_word_embeddings = 256, 512, tied
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config)
    return model.eval().requires_grad_(requires_grad=False).bfloat16()


def attach(model: Any, **values: Any) -> LoadedModel:
    return driver.loading.attach(model, tiny_models.tokenizer(), driver.config("bfloat16", **values), "digest")


@pytest.mark.parametrize("tied", [False, True])
def test_weights_are_held_once(tied: bool) -> None:
    model = wide_model(tied=tied)
    numbers = sum(parameter.numel() for parameter in model.parameters())  # each once: of tied ones there is one
    theirs = [weakref.ref(parameter) for parameter in model.parameters()]
    loaded = attach(model)
    assert [ref() for ref in theirs] == [None] * len(theirs)
    assert all(parameter.is_meta for parameter in model.parameters())
    assert loaded.model is model
    assert loaded.caches == ()
    packed = steps_of(loaded).decoder.weight_bytes
    assert 0.98 * 2 * numbers < packed < 1.02 * 2 * numbers  # vectors are held apart, panels are of 16 columns
    assert loaded.resources.weights_mib == round(packed / 2**20, 1) > 2
    assert loaded.resources.weights_form == "packed as bfloat16 for the native kernels"
    assert loaded.vocab_size == tiny_models.vocab_size()

    ours, plain = Work.of(loaded), Work.of(attach(wide_model(tied=tied), kernels="torch"))
    assert ours.linear_parameters == plain.linear_parameters
    assert ours.head_parameters == plain.head_parameters
    assert ours.weight_bytes == pytest.approx(plain.weight_bytes, rel=0.02)


@cache
def small_model() -> LoadedModel:
    """Of 32 blocks of 16 tokens and a context of 256."""
    return driver.load("qwen3", "bfloat16", block_size=16)


def of(*values: int) -> Tensor:
    return torch.tensor(values, dtype=torch.int64)


WRONG: tuple[tuple[str, dict[str, Any]], ...] = (
    ("token_ids must be from 0 to {last_token}, got 5 to 1000000", {"token_ids": of(5, 6, 10**6)}),
    ("token_ids must be from 0 to {last_token}, got -6 to 7", {"token_ids": of(5, -6, 7)}),
    ("positions must be from 0 to 255, got 2 to 256", {"positions": of(2, 3, 256)}),
    ("positions must be from 0 to 255, got -1 to 3", {"positions": of(2, 3, -1)}),
    ("slot_mapping must be from 0 to 511, got 2 to 512", {"slot_mapping": of(2, 3, 512)}),
    ("slot_mapping must be from 0 to 511, got -1 to 3", {"slot_mapping": of(-1, 2, 3)}),
    ("head_rows must be from 0 to 2, got 3 to 3", {"head_rows": of(3)}),
    ("head_rows must be from 0 to 2, got -1 to 2", {"head_rows": of(2, -1)}),
    ("block_table must be from 0 to 31, got 32 to 32", {"blocks": (32,)}),
    ("block_table must be from 0 to 31, got -1 to -1", {"blocks": (-1,)}),
    ("context_len must be from 0 to 16, got 17 to 17", {"start": 14}),
)


@pytest.mark.parametrize(("refusal", "changed"), WRONG)
def test_an_index_out_of_range_is_refused_by_name_and_computes_nothing(refusal: str, changed: dict[str, Any]) -> None:
    loaded = small_model()
    batch = batch_of(loaded, tiny_models.prompt(5), 2, 3)
    (name, value), *_ = changed.items()
    head_rows = of(2)
    if name == "head_rows":
        head_rows = value
    elif name in ("blocks", "start"):
        batch = replace(batch, spans=(replace(batch.spans[0], **changed),))
    else:
        batch = replace(batch, **changed)
    before = steps_of(loaded).decoder.seconds.copy()
    with pytest.raises(RuntimeError, match=f"^{refusal.format(last_token=tiny_models.vocab_size() - 1)}$"):
        steps_of(loaded).forward(batch, head_rows)
    assert (steps_of(loaded).decoder.seconds == before).all()


def test_the_seconds_of_a_step_are_told_by_its_parts() -> None:
    loaded = small_model()
    batch = batch_of(loaded, tiny_models.prompt(5), 2, 3)
    decoder = steps_of(loaded).decoder
    before = decoder.seconds.copy()
    assert len(before) == len(PARTS)
    loaded.forward(batch, of(2))
    after = decoder.seconds.copy()
    assert (after > before).all()
    assert loaded.forward(batch, of()).shape == (0, tiny_models.vocab_size())
    assert (decoder.seconds[:3] > after[:3]).all()
    assert decoder.seconds[PARTS.index("head")] == after[PARTS.index("head")]  # nobody asked for logits

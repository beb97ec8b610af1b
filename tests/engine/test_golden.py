"""The golden check and the discovery before it: a model whose batched pass is not its eager pass is refused at load."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import transformers

from engine import driver, sweep_models, sweep_outcomes, tiny_models
from engine.driver import serving
from llm_engine import attention, loading
from llm_engine.config import ConfigError
from llm_engine.loading import golden
from llm_engine.loading.shape import Heads, discover_attention
from llm_engine.request import SamplingParams
from llm_tools.limits import Work

CPU = torch.device("cpu")
RIGHT = attention.attention_forward
OTHER = "gives other logits in a batch than under transformers' eager attention: off by"


@pytest.fixture(autouse=True)
def _attention_is_put_back() -> Iterator[None]:
    yield
    attention.register()


def twice_the_scale(*args: Any, scaling: float, **kwargs: Any) -> Any:
    return RIGHT(*args, scaling=2 * scaling, **kwargs)


def a_window_of_one_less(*args: Any, sliding_window: int | None, **kwargs: Any) -> Any:
    return RIGHT(*args, sliding_window=sliding_window and sliding_window - 1, **kwargs)


def no_softcap(*args: Any, softcap: float, **kwargs: Any) -> Any:
    return RIGHT(*args, **kwargs)


def no_sinks(*args: Any, s_aux: torch.Tensor, **kwargs: Any) -> Any:
    return RIGHT(*args, **kwargs)


def wrong_only_in_single_rows(module: Any, query: torch.Tensor, key: Any, value: Any, *args: Any, **kwargs: Any) -> Any:
    worse = 1.5 * query if query.shape[2] <= 3 else query
    return RIGHT(module, worse, key, value, *args, **kwargs)


def nothing_but_zeros(*args: Any, **kwargs: Any) -> Any:
    out, _ = RIGHT(*args, **kwargs)
    return torch.zeros_like(out), None


def not_a_number(*args: Any, **kwargs: Any) -> Any:
    out, _ = RIGHT(*args, **kwargs)
    return out * torch.nan, None


WRONG = [
    ("llama", "float32", twice_the_scale),
    ("qwen2", "bfloat16", twice_the_scale),
    ("gpt2", "float16", twice_the_scale),
    ("mistral", "float32", a_window_of_one_less),
    ("gemma2", "float32", no_softcap),
    ("gemma2", "float16", no_softcap),
    ("gpt_oss", "float32", no_sinks),
    ("gpt_oss", "bfloat16", no_sinks),
    ("phi3", "float32", wrong_only_in_single_rows),
    ("phi3", "bfloat16", wrong_only_in_single_rows),
    ("llama", "float32", nothing_but_zeros),
    ("llama", "float32", not_a_number),
]


@pytest.mark.parametrize(("family", "dtype", "wrong"), WRONG)
def test_a_wrong_attention_is_refused_with_the_number(
    monkeypatch: pytest.MonkeyPatch, family: str, dtype: str, wrong: Any
) -> None:
    monkeypatch.setattr(attention, "attention_forward", wrong)
    with pytest.raises(ConfigError, match=OTHER) as refused:
        driver.load(family, dtype, kernels="torch")
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("family", tiny_models.FAMILIES)
def test_rounding_alone_leaves_half_of_the_tolerance(family: str, dtype: str) -> None:
    model = tiny_models.build(family, getattr(torch, dtype))
    loaded = driver.load(family, dtype)
    heads = discover_attention(model, CPU).values()
    assert golden.check(loaded, golden.reference(model, heads, ())) < golden.TOLERANCE[dtype] / 2


@driver.needs_native()
def test_wrong_packed_weights_are_refused() -> None:
    model = tiny_models.build("llama", torch.bfloat16)
    loaded = driver.load("llama", "bfloat16", kernels="native")
    assert loaded.steps is not None
    loaded.steps.decoder.norms["model.layers.0.input_layernorm"] *= 0.5
    with pytest.raises(ConfigError, match=OTHER):
        golden.check(loaded, golden.reference(model, discover_attention(model, CPU).values(), ()))


@pytest.mark.parametrize("values", [{"kv_tokens": 8}, {"kv_tokens": 40}, {"max_context": 5}, {"block_size": 60}])
def test_a_small_cache_is_checked_with_what_fits(monkeypatch: pytest.MonkeyPatch, values: dict[str, int]) -> None:
    driver.load("llama", **values)
    monkeypatch.setattr(attention, "attention_forward", nothing_but_zeros)
    with pytest.raises(ConfigError, match=OTHER):
        driver.load("llama", kernels="torch", **values)


def test_sequences_cross_a_small_window_and_hold_no_special_token() -> None:
    model = tiny_models.build("llama")
    heads = [Heads(2, 8, 8, window) for window in (None, 200, 4096)]
    special = range(100)
    lengths = []
    for ids in golden.reference(model, heads, special).sequences:
        assert not set(ids) & set(special)
        assert len(set(ids)) > len(ids) // 2
        lengths.append(len(ids))
    assert lengths == [9, 23, 216]


# What is seen before anything is computed


def asking_for(**kwargs: Any) -> Any:
    """A llama whose layers hand more to their attention."""
    model = tiny_models.build("llama")
    for layer in model.model.layers:
        layer.self_attn.register_forward_pre_hook(lambda _module, args, kw: (args, {**kw, **kwargs}), with_kwargs=True)
    return model


@pytest.mark.parametrize(
    ("told", "kwargs"),
    [
        ("asks its attention for 'position_bias'", {"position_bias": torch.zeros(1, 4, 2, 2)}),
        ("asks its attention for 'head_mask'", {"head_mask": torch.ones(4)}),
        ("asks its attention for 'sinks'", {"sinks": torch.ones(4)}),
        ("asks its attention for 'block_mask'", {"block_mask": object()}),
        ("attends to later tokens too", {"is_causal": False}),
        ("attends through a mask of its own", {"attention_mask": torch.zeros(1, 1, 2, 2)}),
        ("has a mask that shows 256 tokens to a row and asks its attention for 7", {"sliding_window": 7}),
    ],
)
def test_what_our_attention_would_not_honour_is_refused(told: str, kwargs: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=told):
        discover_attention(asking_for(**kwargs), CPU)


def test_what_says_nothing_of_the_attention_is_not_refused() -> None:
    assert len(discover_attention(asking_for(position_bias=None, output_attentions=False), CPU)) == 2


@pytest.mark.parametrize("window", [12, 4096])
def test_a_window_of_any_size_that_only_the_mask_knows_is_refused(window: int) -> None:
    shape = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    config = transformers.PhimoeConfig(
        **shape, num_key_value_heads=2, vocab_size=300, max_position_embeddings=8192, sliding_window=window
    )
    model = transformers.AutoModelForCausalLM.from_config(config).eval()
    with pytest.raises(ConfigError, match=f"a mask that shows {window} tokens to a row and asks .* for 8192"):
        loading.attach(model, tiny_models.tokenizer(), driver.config(), "digest")


def test_what_transformers_raises_is_told_in_one_line_and_the_attention_is_restored() -> None:
    model = tiny_models.build("llama")
    heads = discover_attention(model, CPU).values()
    model.set_attn_implementation(attention.NAME)

    def fails(*_: Any) -> None:
        raise AttributeError("no such thing\nand a second line")

    hook = model.model.layers[1].mlp.register_forward_pre_hook(fails)
    told = "'llama' does not run under eager attention: AttributeError: no such thing; choose another model"
    with pytest.raises(ConfigError, match=told) as refused:
        golden.reference(model, heads, ())
    assert "\n" not in str(refused.value)
    with pytest.raises(ConfigError, match="'llama' does not run as a step of a batch: AttributeError: no such thing"):
        discover_attention(model, CPU)
    hook.remove()
    assert model.config._attn_implementation == attention.NAME


# Heads that the native kernels do not take


def test_keys_and_values_of_different_sizes_are_counted_as_they_are_kept() -> None:
    loaded = sweep_outcomes.attach(sweep_models.build("deepseek_v3"))
    assert {(cache.key.shape[2], cache.value.shape[2]) for cache in loaded.caches} == {(16, 8)}
    assert loaded.config.kernels == "torch"
    kept = sum(cache.key[0].nbytes + cache.value[0].nbytes for cache in loaded.caches)
    assert Work.of(loaded).kv_bytes_per_token == kept


def wide_llama() -> Any:
    shape = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
    config = transformers.LlamaConfig(
        **shape, head_dim=514, vocab_size=tiny_models.vocab_size(), max_position_embeddings=256, eos_token_id=None
    )
    return transformers.AutoModelForCausalLM.from_config(config).eval()


def test_heads_too_wide_for_the_native_kernels_are_served_by_pytorch() -> None:
    loaded = loading.attach(wide_llama(), tiny_models.tokenizer(), driver.config(), "digest")
    assert loaded.config.kernels == "torch"
    with serving(loaded) as engine:
        assert len(engine.ask(tiny_models.prompt(9), SamplingParams(max_tokens=5, ignore_eos=True)).wait().tokens) == 5


def test_heads_too_wide_are_refused_where_native_kernels_are_demanded() -> None:
    with pytest.raises(ConfigError, match="kernels is 'native', but they take heads of at most 512, not 514"):
        loading.attach(wide_llama(), tiny_models.tokenizer(), driver.config(kernels="native"), "digest")

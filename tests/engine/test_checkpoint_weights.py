"""A model is served only if every weight came out of its files, and nothing of the files was left over."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor

from engine import checkpoints, driver, sweep_models, tiny_models
from llm_engine import loading
from llm_engine.config import ConfigError

Tensors = dict[str, Tensor]
DOWN = "model.layers.1.mlp.down_proj.weight"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return checkpoints.save(tmp_path / "model")


def load(folder: Path) -> loading.LoadedModel:
    return loading.load(driver.config(model=str(folder), kernels="torch"))


def without(name: str) -> Callable[[Tensors], Tensors]:
    return lambda tensors: {key: tensor for key, tensor in tensors.items() if key != name}


SPOILED: dict[str, tuple[str, Callable[[Tensors], Tensors]]] = {
    "a tensor is missing": (f"lacks 1 tensor, first '{DOWN}'", without(DOWN)),
    "the head is missing and not tied": ("lacks 1 tensor, first 'lm_head.weight'", without("lm_head.weight")),
    "a shape differs": (
        f"1 tensor of another shape, first '{DOWN}'.*32, 63.*not.*32, 64",
        lambda t: {**t, DOWN: t[DOWN][:, :63].contiguous()},
    ),
    "a layer too many": (
        "holds 1 tensor without a place in it, first 'model.layers.2.mlp",
        lambda t: {**t, DOWN.replace("1", "2"): t[DOWN].clone()},
    ),
    "a bias that the configuration denies": (
        "without a place in it, first 'model.layers.0.self_attn.q_proj.bias'",
        lambda t: {**t, "model.layers.0.self_attn.q_proj.bias": torch.ones(32)},
    ),
    "a wrong prefix": (
        "lacks 21 tensors, first 'lm_head.weight' .and holds 21 without a place, first '(model.)?_orig_mod",
        lambda t: {f"_orig_mod.{key}": tensor for key, tensor in t.items()},
    ),
    "a tensor with and without prefix": (
        "holds tensor 'model.layers.1.mlp.down_proj.weight' twice, once without 'model.'",
        lambda t: {**t, DOWN.removeprefix("model."): t[DOWN] * 2},
    ),
}


@pytest.mark.parametrize("fault", SPOILED)
def test_weights_that_do_not_fit_are_refused_with_the_first_name_and_the_count(folder: Path, fault: str) -> None:
    told, change = SPOILED[fault]
    checkpoints.rewrite(folder, change)
    with pytest.raises(ConfigError, match=told) as refused:
        load(folder)
    assert "\n" not in str(refused.value)


HARMLESS: dict[str, Callable[[Tensors], Tensors]] = {
    "nothing changed": lambda t: t,
    "frequencies that old checkpoints stored": lambda t: {
        **t,
        "model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(4),
    },
    "saved without the head's prefix": lambda t: {key.removeprefix("model."): tensor for key, tensor in t.items()},
}


@pytest.mark.parametrize("change", HARMLESS)
def test_what_changes_no_answer_is_served_with_the_same_weights(folder: Path, change: str) -> None:
    checkpoints.rewrite(folder, HARMLESS[change])
    wanted = tiny_models.build("llama").state_dict()
    found = load(folder).model.state_dict()
    assert all(torch.equal(found[name], tensor) for name, tensor in wanted.items())


@pytest.mark.parametrize("family", tiny_models.FAMILIES)
def test_every_family_comes_back_as_it_was_saved(tmp_path: Path, family: str) -> None:
    wanted = tiny_models.build(family).state_dict()
    found = load(checkpoints.save(tmp_path / "model", family)).model.state_dict()
    assert found.keys() == wanted.keys()
    assert all(torch.equal(found[name], tensor) for name, tensor in wanted.items())


def test_a_mixture_is_refused_where_an_experts_number_is_wrong(tmp_path: Path) -> None:
    folder = tmp_path / "model"
    sweep_models.build("mixtral").save_pretrained(folder)
    tiny_models.tokenizer().save_pretrained(folder)
    load(folder)
    name = "model.layers.1.block_sparse_moe.experts.1.w2.weight"
    checkpoints.rewrite(folder, lambda t: {key.replace(name, name.replace("1.w2", "9.w2")): w for key, w in t.items()})
    with pytest.raises(ConfigError, match=f"lacks 1 tensor of experts, first '{name}' .and holds 1 .*experts.9.w2"):
        load(folder)


class Panic(BaseException):
    """What a Rust library raises when it gives up: no Exception, so that nobody catches it unawares."""


@pytest.mark.parametrize("failure", [Panic("a\nb"), MemoryError(), ImportError("\nneeds x\n"), RuntimeError("r")])
@pytest.mark.parametrize("library", ["AutoConfig", "AutoModelForCausalLM", "AutoTokenizer"])
def test_no_failure_of_a_library_leaves_loading_bare(
    folder: Path, monkeypatch: pytest.MonkeyPatch, library: str, failure: BaseException
) -> None:
    def fail(*_args: object, **_kwargs: object) -> None:
        raise failure

    (folder / "tokenizer.json").rename(folder / "tokenizer.model")
    monkeypatch.setattr(getattr(transformers, library), "from_pretrained", fail)
    with pytest.raises(ConfigError) as refused:
        load(folder)
    assert "\n" not in str(refused.value)


def test_a_request_to_end_is_no_failure(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(*_args: object, **_kwargs: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(transformers.AutoTokenizer, "from_pretrained", interrupt)
    with pytest.raises(KeyboardInterrupt):
        load(folder)


def test_a_tied_head_needs_no_tensor_of_its_own(tmp_path: Path) -> None:
    folder = checkpoints.save(tmp_path / "tied")
    checkpoints.edit(folder / "config.json", tie_word_embeddings=True)
    checkpoints.rewrite(folder, without("lm_head.weight"))
    model = load(folder).model
    assert model.lm_head.weight is model.model.embed_tokens.weight


def test_the_masks_that_old_gpt2_checkpoints_stored_are_harmless(tmp_path: Path) -> None:
    folder = checkpoints.save(tmp_path / "gpt2", "gpt2")
    checkpoints.rewrite(folder, lambda t: {**t, "transformer.h.0.attn.bias": torch.ones(1, 1, 8, 8)})
    load(folder)


def test_code_of_a_folders_own_is_never_run_nor_asked_for(folder: Path) -> None:
    evil = "raise SystemExit('foreign code ran')"
    (folder / "own.py").write_text(evil)
    checkpoints.edit(folder / "config.json", auto_map={"AutoConfig": "own.C", "AutoModelForCausalLM": "own.M"})
    checkpoints.edit(folder / "tokenizer_config.json", auto_map={"AutoTokenizer": ["own.T", None]})
    load(folder)  # transformers knows a llama
    checkpoints.edit(folder / "config.json", model_type="own")
    with pytest.raises(ConfigError, match=r"needs Python code of its own .auto_map"):
        load(folder)
    checkpoints.edit(folder / "config.json", auto_map=None)
    with pytest.raises(ConfigError, match=r"of type .own., which transformers .* does not know"):
        load(folder)


@pytest.mark.parametrize(
    ("file", "content"),
    [
        ("config.json", '{"model_type": "llama", "hidden_size": "many"}'),
        ("config.json", '{"model_type": "llama", "num_attention_heads": 0}'),
        ("generation_config.json", "[]"),
        ("generation_config.json", '{"temperature": "hot"}'),
        ("model.safetensors", "x" * 64),
    ],
)
def test_whatever_fails_while_a_model_is_loaded_is_one_line(folder: Path, file: str, content: str) -> None:
    (folder / file).write_text(content)
    with pytest.raises(ConfigError) as refused:
        load(folder)
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize(
    ("values", "told"),
    [
        ({"hidden_act": "foo"}, "cannot be used: KeyError: 'foo'; check config.json"),
        ({"rope_parameters": {"rope_type": "foo", "rope_theta": 1e4}}, "KeyError: 'foo'; check config.json"),
        ({"model_type": ["llama"]}, r"model_type in .*/config.json must be text, got \['llama'\]"),
        ({"max_position_embeddings": -1}, "max_position_embeddings of this model is -1, .* correct it in config.json"),
        ({"max_position_embeddings": 1}, "max_position_embeddings of this model is 1, .* correct it in config.json"),
    ],
)
def test_a_wrong_configuration_is_told_as_one(folder: Path, values: dict[str, Any], told: str) -> None:
    checkpoints.edit(folder / "config.json", **values)
    with pytest.raises(ConfigError, match=told) as refused:
        load(folder)
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_weights_that_are_not_finite_are_told_as_the_weights_fault(folder: Path, value: float) -> None:
    checkpoints.rewrite(folder, lambda t: {**t, DOWN: torch.full_like(t[DOWN], value)})
    with pytest.raises(ConfigError, match=r"the weights give NaN or infinity .* in float32; fetch them again$"):
        load(folder)

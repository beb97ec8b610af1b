"""Tiny models of the families whose GGUF files are used as they are, each written as llama.cpp's converter would.

It knows what the converter changes in each family, and nothing of how such a file is read here.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
import transformers

from engine import gguf_files, tiny_models

Array = np.ndarray[Any, Any]
TYPES = gguf.GGMLQuantizationType

_GEMMA = {"attention.key_length": 16, "attention.value_length": 16, "attention.sliding_window": tiny_models.WINDOW}
_KEYS: dict[str, dict[str, Any]] = {
    "llama": {},
    "qwen2": {},
    "qwen3": {"rope.dimension_count": 128, "attention.key_length": 128, "attention.value_length": 128},
    "phi3": {},
    "gemma2": {
        **_GEMMA,
        "rope.dimension_count": 16,
        "attn_logit_softcapping": 5.0,
        "final_logit_softcapping": 10.0,
    },
    "gemma3": {**_GEMMA, "rope.dimension_count": 16},
    "gpt2": {
        "context_length": 1024,
        "attention.layer_norm_epsilon": 1e-5,
        "attention.layer_norm_rms_epsilon": None,
        "attention.head_count_kv": None,
        "feed_forward_length": 128,
        "rope.dimension_count": None,
        "rope.freq_base": None,
    },
}
FAMILIES = sorted(_KEYS)
_ALWAYS_TIED = {"gemma2"}  # in the format
_TRANSPOSED = ("attn_qkv.weight", "attn_output.weight", "ffn_up.weight", "ffn_down.weight")


def model(family: str, *, tied: bool = False) -> Any:
    """A random model of `family`, with the sizes that transformers takes for granted where files do not state them."""
    config = tiny_models.FAMILIES[family](tiny_models.vocab_size())
    config.tie_word_embeddings = tied
    if family == "qwen3":
        config.head_dim = 128
    if family == "gpt2":
        config.n_positions = 1024
    torch.manual_seed(0)
    made = transformers.AutoModelForCausalLM.from_config(config)
    with torch.no_grad():
        for parameter in made.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.1)
    return made.eval().requires_grad_(requires_grad=False)


def tensors(family: str, *, tied: bool = False) -> dict[str, Array]:
    """The tensors of the family's model in float32, under the names and in the order of its GGUF file."""
    architecture = next(key for key, name in gguf.MODEL_ARCH_NAMES.items() if name == family)
    names = gguf.get_tensor_name_map(architecture, 2)
    found = {}
    for name, tensor in model(family, tied=tied).state_dict().items():
        if tied and name == "lm_head.weight":
            continue
        stem, _, suffix = name.rpartition(".")
        stored, array = f"{names.get_name(stem)}.{suffix}", tensor.numpy()
        heads = {"attn_q": gguf_files.HEADS, "attn_k": gguf_files.KV_HEADS}.get(stored.split(".")[-2])
        if family == "llama" and heads:
            array = array.reshape(heads, 2, -1, array.shape[1]).swapaxes(1, 2).reshape(array.shape)
        if family.startswith("gemma") and stored.endswith("norm.weight"):
            array = array + np.float32(1)
        if family == "gpt2" and stored.endswith(_TRANSPOSED):
            array = array.T
        found[stored] = np.ascontiguousarray(array)
    return found


def packed(values: Mapping[str, Array], kind: gguf.GGMLQuantizationType) -> dict[str, gguf_files.Value]:
    """The same tensors with matrices in blocks of `kind`, vectors as they are."""
    return {
        name: (gguf.quants.quantize(array, kind), kind) if array.ndim == 2 else array for name, array in values.items()
    }


def write(file: Path, family: str, kind: gguf.GGMLQuantizationType = TYPES.F32, *, tied: bool = False) -> Path:
    """Write the family's model to `file`, its matrices in `kind`."""
    values = tensors(family, tied=tied or family in _ALWAYS_TIED)
    keys = {f"{family}.{key}": value for key, value in _KEYS[family].items()}
    return gguf_files.write(file, values if kind == TYPES.F32 else packed(values, kind), kind=family, keys=keys)

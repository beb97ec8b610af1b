"""Which decoder models the kernels compute whole: from a transformers configuration to a `Family`.

It reads attributes of a configuration, and imports neither torch nor transformers. What it does not know it refuses:
such a model keeps transformers' layers.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .decoder import Family, LayerNames, UnsupportedError

_LLAMAS = ("llama", "mistral", "qwen2", "qwen3", "smollm3")
_GEMMAS = ("gemma2", "gemma3_text")
MODEL_TYPES = (*_LLAMAS, *_GEMMAS, "phi3", "gpt2")
_ACTIVATIONS = {"silu": "silu", "gelu_pytorch_tanh": "gelu_tanh", "gelu_new": "gelu_tanh"}
_DEFAULT_THETA = 10000.0


def family_of(config: Any, windows: Sequence[int | None]) -> Family:
    """The shape of a causal model. `windows`: keys that each layer's rows see, None or 0 for all.

    Raises UnsupportedError naming what the kernels lack.
    """
    kind = config.model_type
    if kind not in MODEL_TYPES:
        raise UnsupportedError(f"model type {kind!r} has no native kernels; it runs through transformers")
    family = _gpt2(config) if kind == "gpt2" else _rotary_family(config, windows)
    if family.heads % family.kv_heads:
        what = f"heads ({family.heads}) that are a multiple of kv heads ({family.kv_heads})"
        raise UnsupportedError(f"the native kernels take {what}")
    return family


def _activation(name: str) -> str:
    if name not in _ACTIVATIONS:
        raise UnsupportedError(f"the native kernels know the activations {', '.join(_ACTIVATIONS)}, not {name!r}")
    return _ACTIVATIONS[name]


def _rotary_family(config: Any, windows: Sequence[int | None]) -> Family:
    kind = config.model_type
    dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    gemma = kind in _GEMMAS
    ropes = _ropes(config, dim)
    layers = tuple(
        replace(_layer(kind, i), window=windows[i] or 0, rope=_rope_of(config, i, ropes))
        for i in range(config.num_hidden_layers)
    )
    embedding = "model.embed_tokens"
    return Family(
        layers=layers,
        embedding=embedding,
        norm="model.norm",
        head=embedding if config.tie_word_embeddings else "lm_head",
        hidden=config.hidden_size,
        heads=config.num_attention_heads,
        kv_heads=getattr(config, "num_key_value_heads", None) or config.num_attention_heads,
        dim=dim,
        eps=config.rms_norm_eps,
        scale=(config.query_pre_attn_scalar if gemma else dim) ** -0.5,
        ropes=ropes,
        activation=_activation(getattr(config, "hidden_activation", None) or config.hidden_act),
        norm_offset=1.0 if gemma else 0.0,
        softcap=(getattr(config, "attn_logit_softcapping", None) or 0.0) if gemma else 0.0,
        final_softcap=(getattr(config, "final_logit_softcapping", None) or 0.0) if gemma else 0.0,
        embedding_scale=config.hidden_size**0.5 if gemma else 1.0,
    )


def _layer(kind: str, number: int) -> LayerNames:
    prefix = f"model.layers.{number}."
    attention, mlp = f"{prefix}self_attn.", f"{prefix}mlp."
    names = LayerNames(
        input_norm=f"{prefix}input_layernorm",
        qkv=tuple(f"{attention}{name}_proj" for name in "qkv"),
        o=f"{attention}o_proj",
        post_norm=f"{prefix}post_attention_layernorm",
        gate=f"{mlp}gate_proj",
        up=f"{mlp}up_proj",
        down=f"{mlp}down_proj",
    )
    if kind == "phi3":
        return replace(names, qkv=(f"{attention}qkv_proj",), gate="", up="", gate_up=f"{mlp}gate_up_proj")
    if kind in ("qwen3", "gemma3_text"):
        names = replace(names, q_norm=f"{attention}q_norm", k_norm=f"{attention}k_norm")
    if kind in _GEMMAS:
        names = replace(
            names,
            after_attention=f"{prefix}post_attention_layernorm",
            post_norm=f"{prefix}pre_feedforward_layernorm",
            after_mlp=f"{prefix}post_feedforward_layernorm",
        )
    return names


def _gpt2(config: Any) -> Family:
    if config.scale_attn_by_inverse_layer_idx or not config.scale_attn_weights or config.add_cross_attention:
        raise UnsupportedError("the native kernels take GPT-2 with its own scale of scores and without cross-attention")
    layers = tuple(
        LayerNames(
            input_norm=f"{prefix}ln_1",
            qkv=(f"{prefix}attn.c_attn",),
            o=f"{prefix}attn.c_proj",
            post_norm=f"{prefix}ln_2",
            up=f"{prefix}mlp.c_fc",
            down=f"{prefix}mlp.c_proj",
            rope="",
        )
        for prefix in (f"transformer.h.{i}." for i in range(config.n_layer))
    )
    dim = config.n_embd // config.n_head
    return Family(
        layers=layers,
        embedding="transformer.wte",
        norm="transformer.ln_f",
        head="transformer.wte" if config.tie_word_embeddings else "lm_head",
        hidden=config.n_embd,
        heads=config.n_head,
        kv_heads=config.n_head,
        dim=dim,
        eps=config.layer_norm_epsilon,
        scale=dim**-0.5,
        positions="transformer.wpe",
        activation=_activation(config.activation_function),
        layer_norm=True,
        transposed=True,
    )


def _rope_of(config: Any, layer: int, ropes: dict[str, NDArray[np.float32]]) -> str:
    """The name of the table that rotates a layer; "" where nothing does."""
    no_rope = getattr(config, "no_rope_layers", None)
    if no_rope and not no_rope[layer]:  # SmolLM3: 1 where a layer has rope
        return ""
    if "default" in ropes:
        return "default"
    return str(config.layer_types[layer])


def _ropes(config: Any, dim: int) -> dict[str, NDArray[np.float32]]:
    """Inverse frequencies by the name of their table, as transformers computes them, in float32."""
    given = getattr(config, "rope_parameters", None) or {}
    if any(isinstance(value, dict) for value in given.values()):
        return {name: _frequencies(config, dim, rope) for name, rope in given.items()}
    return {"default": _frequencies(config, dim, given)}


def _frequencies(config: Any, dim: int, rope: dict[str, Any]) -> NDArray[np.float32]:
    kind = rope.get("rope_type") or "default"
    theta = float(rope.get("rope_theta") or getattr(config, "rope_theta", None) or _DEFAULT_THETA)
    share = rope.get("partial_rotary_factor") or getattr(config, "partial_rotary_factor", None) or 1.0
    rotary = int(dim * share)
    if rotary % 2:
        raise UnsupportedError(f"the native kernels rotate an even number of dimensions, not {rotary}")
    exponents = np.arange(0, rotary, 2, dtype=np.float32) / np.float32(rotary)
    plain = np.array([np.float32(1.0) / np.float32(theta ** float(e)) for e in exponents], np.float32)
    if kind == "default":
        return plain
    if kind == "linear":
        return plain / np.float32(rope["factor"])
    if kind == "llama3":
        return np.array([_llama3(float(f), rope) for f in plain], np.float32)
    raise UnsupportedError(f"the native kernels do not know rope type {kind!r}")


def _llama3(frequency: float, rope: dict[str, Any]) -> float:
    """Llama 3's: short waves as they are, long ones stretched, those between in part."""
    factor, trained = float(rope["factor"]), float(rope["original_max_position_embeddings"])
    low, high = float(rope["low_freq_factor"]), float(rope["high_freq_factor"])
    wave = 2 * math.pi / frequency
    if wave < trained / high:
        return frequency
    if wave > trained / low:
        return frequency / factor
    smooth = (trained / wave - low) / (high - low)
    return (1 - smooth) * frequency / factor + smooth * frequency

"""Whether a model's attention, rope and layers may be batched: what could give wrong tokens is refused with the reason.

It reads configurations, and runs a model once to see where it attends. It does not know weights, nor files.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from .. import attention
from ..config import ConfigError

_ROPE_REFUSED = {
    "dynamic": "its frequencies change with the longest sequence of the batch",
    "longrope": "its factors are chosen by the longest sequence of the batch",
}
_LAYER_TYPES = {"full_attention", "sliding_attention"}


def refuse_unsafe(config: Any) -> None:
    """Raise ConfigError for a model whose tokens would depend on its neighbours in a packed batch, or be wrong."""
    kind = config.model_type
    if getattr(config, "is_encoder_decoder", False):
        raise ConfigError(f"model type {kind!r} is an encoder-decoder; only causal language models are served")
    for rope in _rope_types(config):
        if rope in _ROPE_REFUSED:
            raise ConfigError(
                f"model type {kind!r} uses rope type {rope!r}: {_ROPE_REFUSED[rope]}; choose another model"
            )
    layer_types = set(getattr(config, "layer_types", None) or ())
    if unknown := sorted(layer_types - _LAYER_TYPES):
        raise ConfigError(f"model type {kind!r} has layers of kind {unknown[0]!r}, which cannot be batched here")
    if getattr(config, "attention_chunk_size", None):
        raise ConfigError(f"model type {kind!r} attends in chunks, which cannot be batched here")


def _rope_types(config: Any) -> Iterator[str]:
    rope = getattr(config, "rope_parameters", None) or getattr(config, "rope_scaling", None) or {}
    for entry in (rope, *(v for v in rope.values() if isinstance(v, dict))):
        yield str(entry.get("rope_type") or entry.get("type") or "default")


def discover_attention(model: Any, device: torch.device) -> dict[nn.Module, tuple[int, int]]:
    """Run two tokens and note every attention module with its (kv_heads, head_dim), in the layers' order."""
    from transformers import AttentionInterface

    found: dict[nn.Module, tuple[int, int]] = {}

    def note(module: nn.Module, query: Tensor, key: Tensor, value: Tensor, *_: Any, **__: Any) -> tuple[Tensor, None]:
        if getattr(module, "is_causal", True) is False:
            raise ConfigError(f"{type(module).__name__} attends to later tokens too; only causal models are served")
        if key.shape != value.shape:
            raise ConfigError(f"{type(module).__name__} has keys and values of different sizes, which is not supported")
        found[module] = (key.shape[1], key.shape[3])
        return query.transpose(1, 2), None

    AttentionInterface.register(attention.NAME, note)
    try:
        ids = torch.zeros(1, 2, dtype=torch.int64, device=device)
        with torch.inference_mode():
            model(input_ids=ids, position_ids=torch.arange(2, device=device)[None], use_cache=False)
    finally:
        attention.register()
    return found

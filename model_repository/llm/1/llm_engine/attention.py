"""Attention as the engine sees it: the KV cache of a layer, what a module asks for, and who computes it.

It is registered with transformers' `AttentionInterface`, so modelling code stays unchanged; keys and values live in
tensors that hang on the attention module, in slots that the batch names. It does not know how attention is computed:
`llm_kernels.tiles` does it in PyTorch, `llm_kernels.native` in C++.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol, cast

import torch
from torch import Tensor, nn

NAME = "tokenstream"
# What transformers may hand to `attention_forward`: what it honours, and what says nothing of the attention itself.
HEARD = {"scaling", "sliding_window", "softcap", "s_aux", "layout", "is_causal", "position_ids", "use_cache"} | {
    "logits_to_keep",
    "output_attentions",
    "output_router_logits",
}


@dataclass(slots=True)
class KVCache:
    """Keys [slots + 2, kv_heads, key_dim] and values [slots + 2, kv_heads, value_dim] of one layer.

    The last two slots are no request's: `zero_slot` is never written and pads a context to whole key tiles,
    `scratch_slot` takes what the scratch row writes.
    """

    key: Tensor
    value: Tensor

    @classmethod
    def empty(
        cls,
        slots: int,
        kv_heads: int,
        key_dim: int,
        dtype: torch.dtype,
        device: torch.device,
        value_dim: int | None = None,
    ) -> KVCache:
        """Allocate for `slots` tokens, and write zeros: memory that is not there is missed now, not under load.

        value_dim None: as key_dim.
        """
        dims = (key_dim, key_dim if value_dim is None else value_dim)
        key, value = (torch.zeros(slots + 2, kv_heads, dim, dtype=dtype, device=device) for dim in dims)
        return cls(key, value)

    @property
    def zero_slot(self) -> int:
        """The slot that always holds zeros."""
        return self.key.shape[0] - 2

    @property
    def scratch_slot(self) -> int:
        """The slot that the scratch row writes."""
        return self.key.shape[0] - 1


def register() -> None:
    """Make the function below selectable as attn_implementation=NAME."""
    from transformers import AttentionInterface

    AttentionInterface.register(NAME, attention_forward)


class Layout(Protocol):
    """How an implementation wants one batch laid out, and the implementation itself."""

    def attend(self, query: Tensor, key: Tensor, value: Tensor, cache: KVCache, mask: Mask) -> Tensor:
        """Write key and value [rows, kv_heads, dim] into the cache, then attend for query [rows, heads, key_dim].

        Returns [rows, heads, value_dim] in query's dtype; rows that belong to no sequence are zero.
        """


@dataclass(frozen=True, slots=True)
class Mask:
    """What an attention module asks for besides causality.

    window: keys visible to a row, itself included. softcap: tanh bound of the scores. sinks: [heads], keys with a score
    and without a value.
    """

    scale: float
    window: int | None = None
    softcap: float | None = None
    sinks: Tensor | None = None


def attention_forward(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,  # noqa: ARG001 - some models give it by name; it is causality, or refused at load
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """What transformers calls: query [1, heads, rows, key_dim], key and value [1, kv_heads, rows, dim].

    `layout` (a Layout) comes through the model's forward. Returns [1, rows, heads, value_dim]. A model that asks for
    what is not HEARD is refused at load.
    """
    layout: Layout = kwargs["layout"]
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    q, k, v = (x[0].transpose(0, 1) for x in (query, key, value))
    mask = Mask(scale, sliding_window, softcap, s_aux)
    return layout.attend(q, k, v, cast(KVCache, module.kv_cache), mask)[None], None

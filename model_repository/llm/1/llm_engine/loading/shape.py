"""Whether a model's attention, rope and layers may be batched: what could give wrong tokens is refused with the reason.

It reads configurations, and runs a model once to see where it attends. It does not know weights, nor files.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from .. import attention
from ..config import ConfigError

_ROPE_REFUSED = {
    "dynamic": "its frequencies change with the longest sequence of the batch",
    "longrope": "its factors are chosen by the longest sequence of the batch",
}
_DISCOVERY = f"{attention.NAME}-discovery"
_MARK = torch.float64  # of masks that hold how many keys they show; no model makes such masks
_SHORTEST = 2  # tokens of a context: one of a prompt, one of an answer
_FAR = 1 << 20  # tokens, for a model that does not name its longest context
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


def refuse_short(config: Any) -> None:
    """Raise ConfigError for a longest context that holds no prompt and a token of its answer."""
    longest = getattr(config, "max_position_embeddings", None)
    if isinstance(longest, int) and longest < _SHORTEST:
        raise ConfigError(
            f"max_position_embeddings of this model is {longest}, and must be at least {_SHORTEST} tokens; "
            f"correct it in config.json, or fetch that again"
        )


def _rope_types(config: Any) -> Iterator[str]:
    rope = getattr(config, "rope_parameters", None) or getattr(config, "rope_scaling", None) or {}
    for entry in (rope, *(v for v in rope.values() if isinstance(v, dict))):
        yield str(entry.get("rope_type") or entry.get("type") or "default")


@dataclass(frozen=True, slots=True)
class Heads:
    """What one attention module keeps of a token, and how far back it sees (None: to the beginning)."""

    kv_heads: int
    key_dim: int
    value_dim: int
    window: int | None

    @property
    def values(self) -> int:
        """Numbers of KV per token."""
        return self.kv_heads * (self.key_dim + self.value_dim)


@contextmanager
def told_as_config_error(model: Any, how: str) -> Iterator[None]:
    """Tell whatever the modelling code of transformers raises as one line: a model that it cannot run is refused."""
    try:
        yield
    except ConfigError:
        raise
    except Exception as error:
        kind = model.config.get_text_config().model_type
        first = (str(error).strip().splitlines() or [""])[0]
        raise ConfigError(
            f"model type {kind!r} does not run {how}: {type(error).__name__}: {first}; choose another model"
        ) from error


def discover_attention(model: Any, device: torch.device) -> dict[nn.Module, Heads]:
    """Run two tokens as a step would, and note every attention module with its heads, in the layers' order.

    ConfigError for a module that attends in a way that our attention would not honour, or not once. What the model's
    masks let a row see is compared with what its modules say, far behind any window that a pass could cross.
    """
    from transformers import AttentionInterface, AttentionMaskInterface

    config = model.config.get_text_config()
    last = (getattr(config, "max_position_embeddings", None) or _FAR) - 1
    found: dict[nn.Module, Heads] = {}

    def note(
        module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **kwargs: Any
    ) -> tuple[Tensor, None]:
        name = type(module).__name__
        if module in found:
            raise ConfigError(f"{name} attends more than once for a token, which cannot be batched here")
        _refuse_unheard(module, kwargs)
        window = kwargs.get("sliding_window")
        _refuse_other_mask(name, attention_mask, min(window or last + 1, last + 1))
        if key.shape[:3] != value.shape[:3] or query.shape[2] != key.shape[2]:
            raise ConfigError(f"{name} attends to other tokens than those of the text, which cannot be batched here")
        found[module] = Heads(key.shape[1], key.shape[3], value.shape[3], window)
        return query.new_zeros(1, query.shape[2], query.shape[1], value.shape[3]), None

    def mask(q_length: int, kv_length: int, mask_function: Any, **_: Any) -> Tensor:
        shown = _visible(mask_function, last, device)
        return torch.full((1, 1, q_length, kv_length), shown, dtype=_MARK, device=device)

    AttentionInterface.register(_DISCOVERY, note)
    AttentionMaskInterface.register(_DISCOVERY, mask)
    model.set_attn_implementation(_DISCOVERY)
    rows = torch.arange(2, device=device)
    try:
        with torch.inference_mode(), told_as_config_error(model, "as a step of a batch"):
            out = model(
                input_ids=rows[None], position_ids=rows[None], use_cache=False, logits_to_keep=rows[1:], layout=None
            )
            head = model.get_output_embeddings().weight.shape[0]
            if tuple(out.logits.shape) != (1, 1, head):
                raise ConfigError(
                    f"{type(model).__name__} gives logits of shape {tuple(out.logits.shape)} where one row of {head} "
                    f"was asked for, which is not supported"
                )
    finally:
        model.set_attn_implementation(attention.NAME)
    return found


def _visible(mask_function: Any, last: int, device: torch.device) -> int:
    """How many keys a mask shows to the row at position `last`, itself included; -1 unless they are the newest.

    0 for a mask that looks at the tokens of this pass (which of them are an image), so that nothing is known far away.
    """
    if _holds_tensor(mask_function):
        return 0
    zero, row = torch.zeros((), dtype=torch.int64, device=device), torch.tensor(last, device=device)
    shown = mask_function(zero, zero, row, torch.arange(last + 2, device=device)).expand(last + 2)
    count = int(shown.sum())
    return count if bool(shown[last + 1 - count : last + 1].all()) and not shown[-1] else -1


def _holds_tensor(function: Any) -> bool:
    """Whether a function, or one that it is made of, has a tensor of several elements in its closure."""
    held = [cell.cell_contents for cell in getattr(function, "__closure__", None) or ()]
    parts = [part for value in held for part in (value if isinstance(value, tuple) else (value,))]
    return any(part.numel() > 1 if isinstance(part, Tensor) else _holds_tensor(part) for part in parts)


def _refuse_other_mask(name: str, mask: Tensor | None, window: int) -> None:
    """Raise ConfigError if a mask that `_visible` measured, or one of the model's own, is not causal with `window`."""
    if mask is None:
        return
    if mask.dtype is not _MARK or not bool((mask == mask.flatten()[0]).all()):
        raise ConfigError(f"{name} attends through a mask of its own, which is not supported; choose another model")
    if (visible := int(mask.flatten()[0])) < 0:
        raise ConfigError(f"{name} attends to later tokens too; only causal models are served")
    if visible not in (0, window):
        raise ConfigError(
            f"{name} has a mask that shows {visible} tokens to a row and asks its attention for {window}; "
            f"such a model is not served"
        )


def _refuse_unheard(module: nn.Module, kwargs: dict[str, Any]) -> None:
    """Raise ConfigError for what a module asks of its attention and ours does not do."""
    name = type(module).__name__
    if getattr(module, "is_causal", True) is False or kwargs.get("is_causal") is False:
        raise ConfigError(f"{name} attends to later tokens too; only causal models are served")
    if "layout" not in kwargs:
        raise ConfigError(f"{name} does not hand a step's layout to its attention; choose another model")
    for key, value in kwargs.items():
        if key not in attention.HEARD and value is not None and not (key == "dropout" and value == 0.0):
            raise ConfigError(f"{name} asks its attention for {key!r}, which is not supported; choose another model")

"""From a transformers model in memory to one that is safe to batch: its KV cache, its kernels, its limits."""

from __future__ import annotations

import logging
from collections.abc import Collection
from dataclasses import replace
from typing import Any, cast

import torch

from llm_kernels import native
from llm_kernels.build import NativeUnavailableError
from llm_kernels.native import NativeLlama

from .. import attention
from ..attention import KVCache
from ..config import ConfigError, EngineConfig, cache_folder
from . import golden
from .generation import defaults, eos_token_ids
from .loaded import LoadedModel
from .resources import resolve_sizes, resolve_threads
from .shape import Heads, discover_attention, refuse_unsafe

log = logging.getLogger(__name__)


def attach(model: Any, tokenizer: Any, config: EngineConfig, digest: str) -> LoadedModel:
    """Give a transformers model its KV cache and prove it. `config` must name a dtype; ConfigError if it is unsafe."""
    attention.register()
    text_config = model.config.get_text_config()
    refuse_unsafe(text_config)
    if not getattr(model, "_supports_attention_backend", False):
        raise ConfigError(
            f"model type {text_config.model_type!r} does not let its attention be replaced; choose another"
        )
    model.set_attn_implementation(attention.NAME)
    device = next(model.parameters()).device
    config = resolve_threads(config, device)
    dtype = getattr(torch, config.dtype)
    shapes = discover_attention(model, device)
    if len(shapes) != text_config.num_hidden_layers:
        raise ConfigError(
            f"model type {text_config.model_type!r} has {text_config.num_hidden_layers} layers, {len(shapes)} of them "
            f"with attention; layers with another kind of state cannot be batched here"
        )
    reference = golden.reference(model, shapes.values(), tokenizer.all_special_ids)  # before weights are packed
    per_token = sum(heads.values for heads in shapes.values()) * dtype.itemsize
    config = resolve_sizes(config, text_config, per_token, device)
    config, llama = _choose_kernels(model, config, device, shapes.values())
    slots = config.kv_tokens
    for module, h in shapes.items():
        cast(Any, module).kv_cache = KVCache.empty(slots, h.kv_heads, h.key_dim, dtype, device, h.value_dim)
    loaded = LoadedModel(
        config=config,
        model=model,
        tokenizer=tokenizer,
        device=device,
        vocab_size=model.get_output_embeddings().weight.shape[0],
        eos_token_ids=eos_token_ids(model, tokenizer),
        defaults=defaults(model.generation_config),
        caches=tuple(cast(Any, module).kv_cache for module in shapes),
        exact="sampled",
        digest=f"{digest}-{config.kernels}",
        llama=llama,
    )
    off = golden.check(loaded, reference)
    log.info("golden check: logits off by %.2g of their spread", off)
    log.info("KV cache: %d tokens, %.1f MiB on %s", slots, slots * per_token / 2**20, device)
    return loaded


def _choose_kernels(
    model: Any, config: EngineConfig, device: torch.device, shapes: Collection[Heads]
) -> tuple[EngineConfig, NativeLlama | None]:
    """Settle `config.kernels`; with the native ones, also the whole model in native form if it has the shape."""
    if device.type != "cpu" or config.kernels == "torch":
        return replace(config, kernels="torch"), None
    try:
        for heads in shapes:
            native.refuse_heads(heads.key_dim, heads.value_dim)
        native.load(cache_folder(), config.dtype)
    except NativeUnavailableError as error:
        if config.kernels == "native":
            raise ConfigError(f"kernels is 'native', but {error}") from None
        times = "one and a half times" if config.dtype == "float32" else "two to five times"
        log.warning("native kernels are off: %s. PyTorch's take their place; a step takes %s as long", error, times)
        return replace(config, kernels="torch"), None
    config = replace(config, kernels="native")
    try:
        llama = NativeLlama.from_model(model, config.max_context)
    except NativeUnavailableError as error:
        log.info("native attention in transformers' layers: %s", error)
        return config, None
    log.info("native kernels for whole steps")
    return config, llama

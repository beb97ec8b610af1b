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
from . import golden, machine
from .generation import defaults, eos_token_ids
from .identity import digest_of_model, name_arithmetic
from .loaded import LoadedModel
from .machine import MIB, Memory
from .resources import Demand, Resources, resolve_sizes, resolve_threads, scratch_bytes
from .shape import Heads, discover_attention, refuse_short, refuse_unsafe

_FORM = "as transformers holds them"
_PACKED_FORM = "packed for the native kernels, transformers' copy dropped"
log = logging.getLogger(__name__)


def attach(model: Any, tokenizer: Any, config: EngineConfig, digest: str, memory: Memory | None = None) -> LoadedModel:
    """Give a transformers model its KV cache and kernels, and prove it. ConfigError if it is unsafe.

    `config` must name a dtype. `digest` is that of the weights. `memory`: what was left before they were read; unset,
    they are in memory by themselves. A model that the kernels compute in whole steps loses its weights to their form.
    """
    attention.register()
    text_config = model.config.get_text_config()
    refuse_unsafe(text_config)
    if not getattr(model, "_supports_attention_backend", False):
        raise ConfigError(
            f"model type {text_config.model_type!r} does not let its attention be replaced; choose another"
        )
    refuse_short(text_config)
    model.set_attn_implementation(attention.NAME)
    device = next(model.parameters()).device
    config, threads_from = resolve_threads(config, device)
    dtype = getattr(torch, config.dtype)
    shapes = discover_attention(model, device)
    if len(shapes) != text_config.num_hidden_layers:
        raise ConfigError(
            f"model type {text_config.model_type!r} has {text_config.num_hidden_layers} layers, {len(shapes)} of them "
            f"with attention; layers with another kind of state cannot be batched here"
        )
    reference = golden.reference(model, shapes.values(), tokenizer.all_special_ids)  # before weights are packed
    per_token = sum(heads.values for heads in shapes.values()) * dtype.itemsize
    demand = _demand(model, config, device, memory, per_token)
    config, kv_cache_from = resolve_sizes(config, text_config, demand, device)
    config, llama = _choose_kernels(model, config, device, shapes.values())
    slots = config.kv_tokens
    for module, h in shapes.items():
        cast(Any, module).kv_cache = KVCache.empty(slots, h.kv_heads, h.key_dim, dtype, device, h.value_dim)
    embedded, drawn = (e.weight.shape[0] for e in (model.get_input_embeddings(), model.get_output_embeddings()))
    loaded = LoadedModel(
        config=config,
        model=model,
        tokenizer=tokenizer,
        device=device,
        vocab_size=min(embedded, drawn),  # what is drawn is embedded in the next step
        embedding_size=embedded,
        eos_token_ids=eos_token_ids(model, tokenizer),
        defaults=defaults(model.generation_config),
        caches=tuple(cast(Any, module).kv_cache for module in shapes),
        exact="sampled",
        digest=digest,
        llama=llama,
        arithmetic=name_arithmetic(config, device, whole_steps=llama is not None),
        resources=Resources(
            threads_from=threads_from,
            kv_cache_mib=round(slots * per_token / MIB, 1),
            kv_cache_from=kv_cache_from,
            weights_mib=round(_held(model, llama) / MIB, 1),
            weights_form=_FORM if llama is None else _PACKED_FORM,
        ),
    )
    off = golden.check(loaded, reference)
    log.info("golden check: logits off by %.2g of their spread", off)
    _log(loaded)
    return replace(loaded, digest=digest_of_model(digest, loaded))


def _demand(model: Any, config: EngineConfig, device: torch.device, memory: Memory | None, per_token: int) -> Demand:
    if device.type == "cuda":
        return Demand.on_cuda(device, per_token)
    weights = _held(model)
    if memory is None:
        found = machine.memory()
        memory = replace(found, left=found.left + weights)
    head = model.get_output_embeddings().weight
    tied = sum(p is head for _, p in model.named_parameters(remove_duplicate=False)) > 1
    if tied and config.dtype == "bfloat16" and config.kernels != "torch":
        weights += head.nbytes  # the packed head is no longer the embedding
    return Demand.on_cpu(memory, per_token, weights, scratch_bytes(config, head))


def _held(model: Any, llama: NativeLlama | None = None) -> int:
    """Bytes of weights in memory, in both forms."""
    own = {p.data_ptr(): p.nbytes for p in model.parameters() if not p.is_meta}
    packed = {t.data_ptr(): t.nbytes for t in llama.weights} if llama else {}
    return sum((own | packed).values())


def _log(loaded: LoadedModel) -> None:
    taken, config = loaded.resources, loaded.config
    log.info("KV cache: %d tokens, %.1f MiB (%s)", config.kv_tokens, taken.kv_cache_mib, taken.kv_cache_from)
    log.info("weights: %.1f MiB (%s)", taken.weights_mib, taken.weights_form)
    log.info("arithmetic: %s", loaded.arithmetic)


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

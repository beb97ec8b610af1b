"""From a transformers model in memory to one that is safe to batch: its KV cache, its kernels, its limits."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, cast

import torch

from llm_kernels import native
from llm_kernels.compiling import NativeUnavailableError
from llm_kernels.decoder import UnsupportedError
from llm_kernels.families import family_of
from llm_kernels.native import NativeAttention
from llm_kernels.objects import load_object
from llm_kernels.packed import PackError
from llm_tools.sources import TensorSource

from .. import attention
from ..attention import KVCache
from ..config import ConfigError, EngineConfig, cache_folder
from . import golden, machine
from .generation import defaults, eos_token_ids
from .identity import digest_of_model, name_arithmetic
from .loaded import LoadedModel
from .machine import MIB, Memory
from .resources import Demand, Resources, resolve_dtype, resolve_sizes, resolve_threads, scratch_bytes
from .shape import Heads, discover_attention, refuse_short, refuse_unsafe
from .steps import NativeSteps, Plan, put_unpacked

_FORM = "as transformers holds them"
log = logging.getLogger(__name__)


def attach(
    model: Any,
    tokenizer: Any,
    config: EngineConfig,
    digest: str,
    memory: Memory | None = None,
    source: TensorSource | None = None,
) -> LoadedModel:
    """Give a transformers model its KV cache and kernels, and prove it. ConfigError if it is unsafe.

    `digest` is that of the weights. `memory`: what was left before they were read; unset, they are in memory by
    themselves. A model that the kernels compute in whole steps takes its weights from `source`, if there is one, and
    loses its own.
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
    shapes = discover_attention(model, device)
    if len(shapes) != text_config.num_hidden_layers:
        raise ConfigError(
            f"model type {text_config.model_type!r} has {text_config.num_hidden_layers} layers, {len(shapes)} of them "
            f"with attention; layers with another kind of state cannot be batched here"
        )
    config, plan, kernels = _choose_kernels(model, config, device, shapes, source)
    dtype = getattr(torch, config.dtype)
    per_token = plan.kv_bytes if plan else sum(heads.values for heads in shapes.values()) * dtype.itemsize
    if plan is None:
        model.to(dtype)
    demand = _demand(model, config, device, memory, per_token, plan)
    config, kv_cache_from = resolve_sizes(config, text_config, demand, device)
    steps = None if plan is None else _pack(plan, config, model)
    reference = golden.reference(model, shapes.values(), tokenizer.all_special_ids)
    embedded, drawn = (e.weight.shape[0] for e in (model.get_input_embeddings(), model.get_output_embeddings()))
    weights = _held(model) if steps is None else steps.decoder.weight_bytes
    if steps is None:
        for module, h in shapes.items():
            cast(Any, module).kv_cache = _cache(config, h, dtype, device, kernels)
    else:
        model.to("meta")
    loaded = LoadedModel(
        config=config,
        model=model,
        tokenizer=tokenizer,
        device=device,
        vocab_size=min(embedded, drawn),  # what is drawn is embedded in the next step
        embedding_size=embedded,
        eos_token_ids=eos_token_ids(model, tokenizer),
        defaults=defaults(model.generation_config),
        caches=() if steps else tuple(cast(Any, module).kv_cache for module in shapes),
        exact="sampled",
        digest=digest,
        steps=steps,
        attention=kernels,
        arithmetic=name_arithmetic(config, device, steps),
        resources=Resources(
            threads_from=threads_from,
            kv_cache_mib=round(config.kv_tokens * per_token / MIB, 1),
            kv_cache_from=kv_cache_from,
            weights_mib=round(weights / MIB, 1),
            weights_form=_FORM if steps is None else f"packed as {steps.weight_format} for the native kernels",
        ),
    )
    off = golden.check(loaded, reference)
    log.info("golden check: logits off by %.2g of their spread", off)
    _log(loaded)
    return replace(loaded, digest=digest_of_model(digest, loaded))


def _cache(
    config: EngineConfig, heads: Heads, dtype: torch.dtype, device: torch.device, kernels: NativeAttention | None
) -> KVCache:
    if kernels is not None:
        return kernels.cache(config.kv_tokens, heads.kv_heads, heads.key_dim, dtype)
    return KVCache.empty(config.kv_tokens, heads.kv_heads, heads.key_dim, dtype, device, heads.value_dim)


def _pack(plan: Plan, config: EngineConfig, model: Any) -> NativeSteps:
    """Pack the weights; where that rounds them, the model gets what they became, so that both are the same model."""
    try:
        steps = plan.steps(config)
    except PackError as error:
        raise ConfigError(f"weight {error}; fetch the model again, or choose another weight_format") from None
    except UnsupportedError as error:
        raise ConfigError(f"{error}; set the parameter 'kernels' to torch for this model") from None
    put_unpacked(model, steps)
    return steps


def _demand(
    model: Any, config: EngineConfig, device: torch.device, memory: Memory | None, per_token: int, plan: Plan | None
) -> Demand:
    if device.type == "cuda":
        return Demand.on_cuda(device, per_token)
    held = _held(model)
    if memory is None:
        found = machine.memory()
        memory = replace(found, left=found.left + held)
    scratch = scratch_bytes(config, model.get_output_embeddings().weight)
    return Demand.on_cpu(memory, per_token, held if plan is None else plan.weight_bytes, scratch)


def _held(model: Any) -> int:
    """Bytes of weights in memory."""
    return sum({p.data_ptr(): p.nbytes for p in model.parameters()}.values())


def _log(loaded: LoadedModel) -> None:
    taken, config = loaded.resources, loaded.config
    log.info("KV cache: %d tokens, %.1f MiB (%s)", config.kv_tokens, taken.kv_cache_mib, taken.kv_cache_from)
    log.info("weights: %.1f MiB (%s)", taken.weights_mib, taken.weights_form)
    log.info("arithmetic: %s", loaded.arithmetic)


def _choose_kernels(
    model: Any, config: EngineConfig, device: torch.device, shapes: Mapping[Any, Heads], source: TensorSource | None
) -> tuple[EngineConfig, Plan | None, NativeAttention | None]:
    """Settle `kernels` and `dtype`: the native kernels compute whole steps, or else the attention."""
    asked = {"weight_format": config.weight_format, "arithmetic": config.arithmetic}
    told = [f"{name} is {value!r}, which whole native steps alone honour" for name, value in asked.items()]
    told = [line for line, value in zip(told, asked.values(), strict=True) if value != "auto"]
    if device.type != "cpu" or config.kernels == "torch":
        if told:
            raise ConfigError(f"{told[0]}, and PyTorch's kernels were asked for; set it to auto")
        return resolve_dtype(replace(config, kernels="torch"), device), None, None
    try:
        family = family_of(model.config.get_text_config(), [heads.window for heads in shapes.values()])
        plan = Plan.of(config, family, model, source)
        log.info("native kernels for whole steps, instructions of %s", plan.level)
        return replace(config, kernels="native", dtype="bfloat16" if plan.bfloat16_kv else "float32"), plan, None
    except (UnsupportedError, NativeUnavailableError) as error:
        reason = error
        log.info("transformers' layers: %s", error)
    if told:
        raise ConfigError(f"{told[0]}, but {reason}")
    config = resolve_dtype(config, device)
    try:
        for heads in shapes.values():
            native.refuse(heads.key_dim, heads.value_dim, config.dtype)
        library, _ = load_object(cache_folder())
    except NativeUnavailableError as error:
        if config.kernels == "native":
            raise ConfigError(f"kernels is 'native', but {error}") from None
        log.warning("native kernels are off: %s. PyTorch's take their place, and steps take longer", error)
        return replace(config, kernels="torch"), None, None
    kernels = NativeAttention(library, config.threads, config.block_size)
    return replace(config, kernels="native"), None, kernels

"""How much of the machine an engine takes: dtype, threads, and the size of the KV cache.

Every 0 and `auto` of the configuration that depends on machine or model is resolved here, once.
"""

from __future__ import annotations

import logging
import os
from dataclasses import replace
from typing import Any

import torch

from ..config import ConfigError, EngineConfig

log = logging.getLogger(__name__)

CPU_KV_TOKENS = 32768
CUDA_KV_SHARE = 0.8


def resolve_dtype(config: EngineConfig, device: torch.device) -> EngineConfig:
    """Settle `dtype`."""
    dtype = choose_dtype(device) if config.dtype == "auto" else config.dtype
    log.info("dtype %s (asked: %s)", dtype, config.dtype)
    return replace(config, dtype=dtype)


def choose_dtype(device: torch.device) -> str:
    """bfloat16 where the device computes with it, else float16 on CUDA, else float32."""
    if device.type == "cuda":
        return "bfloat16" if torch.cuda.is_bf16_supported(including_emulation=False) else "float16"
    capabilities = torch.cpu.get_capabilities()
    native = ("avx512_bf16", "amx_bf16", "bf16")
    return "bfloat16" if any(capabilities.get(name) for name in native) else "float32"


def resolve_threads(config: EngineConfig, device: torch.device) -> EngineConfig:
    """Settle `threads`, and have torch use as many on a CPU."""
    threads = config.threads or max(1, len(os.sched_getaffinity(0)) // config.cpu_share)
    if device.type == "cpu":
        torch.set_num_threads(threads)
    log.info("device %s, %d threads", device, threads)
    return replace(config, threads=threads)


def resolve_sizes(config: EngineConfig, model: Any, per_token: int, device: torch.device) -> EngineConfig:
    """Settle `kv_tokens` and `max_context`. `per_token`: bytes of KV. ConfigError with the numbers."""
    block = config.block_size
    kv_tokens = config.kv_tokens
    if not kv_tokens and device.type == "cuda":
        kv_tokens = int(CUDA_KV_SHARE * torch.cuda.mem_get_info(device)[0]) // per_token
    kv_tokens = (kv_tokens or CPU_KV_TOKENS) // block * block
    limit = getattr(model, "max_position_embeddings", None) or kv_tokens
    if config.max_context > limit:
        raise ConfigError(f"max_context {config.max_context} is more than the model's limit of {limit} tokens")
    if config.max_context > kv_tokens:
        raise ConfigError(f"max_context {config.max_context} is more than the KV cache holds ({kv_tokens} tokens)")
    max_context = config.max_context or min(limit, kv_tokens)
    if max_context < 2:
        raise ConfigError(f"the KV cache holds {kv_tokens} tokens, too few for any request; raise kv_tokens")
    return replace(config, kv_tokens=kv_tokens, max_context=max_context)

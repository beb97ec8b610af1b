"""How much of the machine an engine takes: dtype, threads, and the size of the KV cache.

Every 0 and `auto` of the configuration that depends on machine or model is resolved here, once.
"""

from __future__ import annotations

import logging
import os
from dataclasses import dataclass, replace
from typing import Any

import torch

from llm_kernels.cpu_level import VARIABLE, choose_level

from ..config import ConfigError, EngineConfig
from . import machine
from .machine import MIB, Memory

log = logging.getLogger(__name__)

CPU_KV_TOKENS = 32768
LEAST_KV_TOKENS = 2048  # fewer are refused, where the model's context is longer and nobody asked for less
CUDA_KV_SHARE = 0.8
ROOM = 256 * MIB  # libraries, tokenizer and text; 170 were measured with a vocabulary of 49,152
_ROW_WIDTHS = 16  # scratch memory of a row in a step, by the model's width
_PROBE_ROWS = 512  # whose logits are held at once, at load


@dataclass(frozen=True, slots=True)
class Resources:
    """What an engine has taken, and why so much; sizes in MiB."""

    threads_from: str = ""
    kv_cache_mib: float = 0.0
    kv_cache_from: str = ""
    weights_mib: float = 0.0
    weights_form: str = ""


@dataclass(frozen=True, slots=True)
class Demand:
    """Memory that an engine takes from `memory`: bytes of weights and room, and of each token's keys and values."""

    memory: Memory
    per_token: int
    weights: int = 0
    room: int = 0

    @classmethod
    def on_cpu(cls, memory: Memory, per_token: int, weights: int, scratch: int = 0) -> Demand:
        """Of an engine whose `weights` are not in memory yet, or were not when `memory` was measured."""
        return cls(memory, per_token, weights, ROOM + scratch)

    @classmethod
    def on_cuda(cls, device: torch.device, per_token: int) -> Demand:
        """Of an engine whose weights are on the device already."""
        left, total = torch.cuda.mem_get_info(device)
        return cls(Memory(left, total, f"device {device}"), per_token)

    def tokens(self, share: int = 1) -> int:
        """How many tokens' KV fit beside the rest; into one of `share` equal parts of the memory."""
        return max(0, self.memory.left // share - self.weights - self.room) // self.per_token

    def refusal(self, tokens: int) -> ConfigError:
        """Why a KV cache of `tokens` cannot be had: the sum, and what there is."""
        parts = {"weights": self.weights, f"KV cache of {tokens:,} tokens": tokens * self.per_token, "room": self.room}
        terms = " + ".join(f"{name} {size / MIB:,.0f} MiB" for name, size in parts.items() if size)
        return ConfigError(
            f"the model does not fit into memory: {terms} = {sum(parts.values()) / MIB:,.0f} MiB, and there are left "
            f"{self.memory}; raise that limit, lower kv_tokens or max_context, or choose a smaller model"
        )


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
    native = {"avx512_bf16", "amx_bf16", "bf16"}
    if os.environ.get(VARIABLE):
        native &= choose_level().needs  # it caps torch as well, which tells what the processor has
    return "bfloat16" if any(capabilities.get(name) for name in native) else "float32"


def resolve_threads(config: EngineConfig, device: torch.device) -> tuple[EngineConfig, str]:
    """Settle `threads`, and have torch use as many on a CPU. Also says why so many."""
    found = machine.processors(len(os.sched_getaffinity(0)))
    threads, source = config.threads, "as configured"
    if not threads:
        threads = max(1, found.count // config.cpu_share)
        source = found.source + (f", for {config.cpu_share} instances" if config.cpu_share > 1 else "")
    if device.type == "cpu":
        torch.set_num_threads(threads)
    log.info("device %s, threads: %d (%s)", device, threads, source)
    return replace(config, threads=threads), source


def refuse_too_large(weights: int, memory: Memory) -> None:
    """Raise ConfigError if weights of so many bytes do not fit, before they are read: the kernel would kill us."""
    demand = Demand.on_cpu(memory, 1, weights)
    if not demand.tokens():
        raise demand.refusal(0)


def scratch_bytes(config: EngineConfig, head: torch.Tensor) -> int:
    """About what a step of `max_step_tokens` rows, and the probe's logits, take; `head` is [vocabulary, width]."""
    vocabulary, width = head.shape
    return head.itemsize * (config.max_step_tokens * width * _ROW_WIDTHS + _PROBE_ROWS * vocabulary)


def resolve_sizes(config: EngineConfig, model: Any, demand: Demand, device: torch.device) -> tuple[EngineConfig, str]:
    """Settle `kv_tokens` and `max_context`, and say why so many. `model` is its configuration.

    ConfigError with the numbers. Instances that share the machine (`cpu_share`) take no more than their part of what
    is left, unless they could not serve with it.
    """
    block = config.block_size
    limit = getattr(model, "max_position_embeddings", None)
    if limit and config.max_context > limit:
        raise ConfigError(f"max_context {config.max_context} is more than the model's limit of {limit} tokens")
    kv_tokens, source = config.kv_tokens, "as configured"
    if not kv_tokens:
        kv_tokens, source = _choose_kv_tokens(config, limit, demand, device)
    kv_tokens = kv_tokens // block * block
    if kv_tokens > demand.tokens():
        raise demand.refusal(kv_tokens)
    if config.max_context > kv_tokens:
        raise ConfigError(f"max_context {config.max_context} is more than the KV cache holds ({kv_tokens} tokens)")
    max_context = config.max_context or min(limit or kv_tokens, kv_tokens)
    if max_context < 2:
        raise ConfigError(f"the KV cache holds {kv_tokens} tokens, too few for any request; raise kv_tokens")
    if limit and not config.max_context and max_context < limit:
        log.warning("max_context is %d of the model's %d tokens: raise kv_tokens for more", max_context, limit)
    return replace(config, kv_tokens=kv_tokens, max_context=max_context), source


def _choose_kv_tokens(config: EngineConfig, limit: int | None, demand: Demand, device: torch.device) -> tuple[int, str]:
    """As many tokens as are wanted, or fit; never fewer than a request needs. Whether those fit is not looked at."""
    fitting = demand.tokens(config.cpu_share)
    if device.type == "cuda":
        return int(CUDA_KV_SHARE * fitting), f"{CUDA_KV_SHARE:.0%} of what was left on {demand.memory.source}"
    least = config.max_context or min(limit or LEAST_KV_TOKENS, LEAST_KV_TOKENS)
    least = -(-least // config.block_size) * config.block_size
    wanted = max(CPU_KV_TOKENS, least)
    if wanted <= fitting:
        return wanted, "as many as an engine takes where there is room"
    chosen = max(fitting, least)
    log.warning("KV cache of %d instead of %d tokens: there are left %s", chosen, wanted, demand.memory)
    return chosen, f"what fits: there are left {demand.memory}"

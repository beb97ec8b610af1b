"""What a machine can do at most, and what a step of a model must do at least: the limits beside measured times.

Rates are measured, on CPU; work is counted from the modules of a loaded model. It does not know how a step is computed.
"""

from __future__ import annotations

import platform
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.nn import functional

from llm_engine.loading import LoadedModel
from llm_engine.loading.steps import NativeSteps

READ_BYTES = 256 << 20
MATRIX_ROWS, MATRIX_SIZE = 512, 2048


@dataclass(frozen=True, slots=True)
class Limits:
    """What the machine reaches with this many threads and this dtype: bytes read and floating point operations."""

    bytes_per_second: float
    flops_per_second: float


@dataclass(frozen=True, slots=True)
class AttentionWork:
    """One layer's attention: query heads times head_dim, bytes of a token's keys and values, keys seen (None: all).

    Where keys and values differ in size, head_dim is their mean.
    """

    width: int
    kv_bytes: int
    window: int | None


@dataclass(frozen=True, slots=True)
class Work:
    """What a model must do at least. Of experts, a row multiplies those it is routed to, and a step reads no others.

    `dtype` is that of the products which the machine's limit is measured in; 8-bit ones are held against float32.
    """

    linear_parameters: int
    head_parameters: int
    weight_bytes: int
    attention: tuple[AttentionWork, ...]
    dtype: torch.dtype

    @classmethod
    def of(cls, loaded: LoadedModel) -> Work:
        """Read from the modules of a loaded model; embeddings are looked up, and count only where they are the head."""
        model: Any = loaded.model
        config = model.config.get_text_config()
        head = model.get_output_embeddings().weight
        if loaded.steps is not None:
            return _work_of_steps(loaded.steps, head.numel())
        looked_up = {id(m.weight) for m in model.modules() if isinstance(m, torch.nn.Embedding)} | {id(head)}
        experts = getattr(config, "num_local_experts", None) or getattr(config, "num_experts", None)
        share = config.num_experts_per_tok / experts if experts else 1.0
        body = [(p, share if p.dim() == 3 else 1.0) for p in model.parameters() if id(p) not in looked_up]
        modules = [m for m in model.modules() if hasattr(m, "kv_cache")]
        return cls(
            linear_parameters=int(sum(part * p.numel() for p, part in body if p.dim() > 1)),
            head_parameters=head.numel(),
            weight_bytes=int(sum(part * p.nbytes for p, part in body)) + head.nbytes,
            attention=tuple(_attention_work(m, config.num_attention_heads) for m in modules),
            dtype=head.dtype,
        )

    @property
    def kv_bytes_per_token(self) -> int:
        """Keys and values of one token in all layers."""
        return sum(layer.kv_bytes for layer in self.attention)

    def flops(self, contexts: Sequence[int], new: int) -> float:
        """Of a step over sequences that end at `contexts` tokens, the last `new` of each computed, one logit row each.

        Two for each parameter of a linear and row; in attention four for each query value and key that its row sees.
        """
        total = 2.0 * len(contexts) * (new * self.linear_parameters + self.head_parameters)
        for layer in self.attention:
            window = layer.window or max(contexts)
            seen = sum(min(row, window) for end in contexts for row in range(end - new + 1, end + 1))
            total += 4.0 * layer.width * seen
        return total

    def read_bytes(self, contexts: Sequence[int], new: int) -> float:
        """Of the same step: all weights once, and the keys and values of each sequence once."""
        total = float(self.weight_bytes)
        for layer in self.attention:
            reach = max(contexts) if layer.window is None else layer.window + new - 1
            total += layer.kv_bytes * sum(min(end, reach) for end in contexts)
        return total


def _work_of_steps(steps: NativeSteps, head: int) -> Work:
    family, decoder = steps.decoder.family, steps.decoder
    width = family.heads * family.dim
    per_token = 2 * family.kv_heads * family.dim * (2 if steps.kv_dtype == "bfloat16" else 4)
    return Work(
        linear_parameters=decoder.linear_parameters - head,
        head_parameters=head,
        weight_bytes=decoder.linear_bytes + sum(norm.nbytes for norm in decoder.norms.values()),
        attention=tuple(AttentionWork(width, per_token, layer.window or None) for layer in family.layers),
        dtype=torch.bfloat16 if "dpbf16" in steps.arithmetic else torch.float32,
    )


def _attention_work(module: Any, heads: int) -> AttentionWork:
    cache = module.kv_cache
    kv_heads = cache.key.shape[1]
    key_dim, value_dim = cache.key.shape[2], cache.value.shape[-1]
    window = getattr(module, "sliding_window", getattr(module.config, "sliding_window", None))
    per_token = kv_heads * (key_dim + value_dim) * cache.key.itemsize
    return AttentionWork(heads * (key_dim + value_dim) // 2, per_token, window or None)


def measure_limits(dtype: torch.dtype, seconds: float) -> Limits:
    """The best of many passes: a float32 sum over 256 MiB, and a product [512, 2048] x [2048, 2048] in `dtype`."""
    memory = torch.ones(READ_BYTES // 4)
    read = _best_seconds(memory.sum, seconds)
    x, w = torch.ones(MATRIX_ROWS, MATRIX_SIZE, dtype=dtype), torch.ones(MATRIX_SIZE, MATRIX_SIZE, dtype=dtype)
    multiply = _best_seconds(lambda: functional.linear(x, w), seconds)
    return Limits(memory.nbytes / read, 2 * MATRIX_ROWS * MATRIX_SIZE**2 / multiply)


def _best_seconds(run: Callable[[], object], seconds: float) -> float:
    run()  # touches memory, prepares kernels
    times: list[float] = []
    end = time.perf_counter() + seconds
    while len(times) < 3 or time.perf_counter() < end:
        started = time.perf_counter()
        run()
        times.append(time.perf_counter() - started)
    return min(times)


def cpu_name() -> str:
    """The processor's name, as Linux knows it."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()

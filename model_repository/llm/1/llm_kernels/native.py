"""Loads the C++ kernels, lays out batches for them, and gives a Llama-shaped model the packed form that they run.

In bfloat16 they compute whole steps of such a model; in float32, and for other models, the attention alone. It does not
know requests, how the kernels are compiled, or whether a model should run natively.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn

from llm_engine import sampling
from llm_engine.attention import KVCache, Mask
from llm_engine.batch import Batch

from .build import NativeUnavailableError, Toolchain, build

PARTS = ("linears", "attention", "norms and rope", "head")
MAX_HEAD_DIM = 256  # as kMaxDim in paging_cpu.h
_PANEL = 32  # columns of a packed panel, as in linear_cpu.h
_MODEL_TYPES = ("llama", "mistral", "qwen2", "qwen3")


def load(cache: Path, dtype: str) -> None:
    """Make the operators for `dtype` available as `torch.ops.tokenstream`, compiled into `cache` if need be.

    bfloat16 has all of them, float32 attention alone. Raises NativeUnavailableError.
    """
    if dtype not in ("bfloat16", "float32"):
        raise NativeUnavailableError(f"they compute in bfloat16 or float32, and dtype is {dtype}")
    if hasattr(torch.ops.tokenstream, "llama_forward" if dtype == "bfloat16" else "paged_attention"):
        return  # a process can load them once
    toolchain = Toolchain.found()
    if dtype == "bfloat16":
        toolchain.require_bf16()
    path = build(cache, toolchain)
    try:
        cast(Any, torch.ops).load_library(path)
    except OSError as error:
        raise NativeUnavailableError(f"{path} cannot be loaded ({error}); delete it") from None


def arithmetic() -> str:
    """Name what decides the bits that the loaded kernels compute; see Toolchain.arithmetic."""
    return cast(str, torch.ops.tokenstream.arithmetic())


def refuse_heads(key_dim: int, value_dim: int) -> None:
    """Raise NativeUnavailableError for an attention whose heads the kernels do not take."""
    if key_dim != value_dim:
        raise NativeUnavailableError(f"they take keys and values of one size, not {key_dim} and {value_dim}")
    if key_dim % 2 or key_dim > MAX_HEAD_DIM:
        raise NativeUnavailableError(f"they take even head sizes of at most {MAX_HEAD_DIM}, not {key_dim}")


def row_max(scores: Tensor) -> tuple[Tensor, Tensor]:
    """As sampling.row_max, four times as fast for bfloat16, which is what greedy decoding needs."""
    if scores.dtype is not torch.bfloat16:
        return sampling.row_max(scores)
    return cast(tuple[Tensor, Tensor], torch.ops.tokenstream.row_max(scores.contiguous()))


def panels(columns: int) -> int:
    """How many panels hold `columns`."""
    return -(-columns // _PANEL)


def pack(weight: Tensor) -> Tensor:
    """Pack a bf16 weight [columns, depth] into bf16 [panels, depth / 2, 32, 2]."""
    out = torch.empty(panels(weight.shape[0]), weight.shape[1] // 2, _PANEL, 2, dtype=torch.bfloat16)
    torch.ops.tokenstream.pack_linear(weight.contiguous(), out)
    return out


@dataclass(frozen=True, slots=True)
class NativeLlama:
    """A model's weights in the form of `llama_forward`, and the numbers that it needs.

    weights: nine tensors per layer (input norm, q|k|v, its bias, q norm, k norm, o, post norm, gate|up, down; empty
    where the model has none), then norm and head. cos, sin: bf16 [positions, head_dim / 2]. windows: 0 for none.
    seconds: float64 [4], the time spent so far in each of PARTS.
    """

    embedding: Tensor
    cos: Tensor
    sin: Tensor
    weights: list[Tensor]
    heads: int
    kv_heads: int
    head_dim: int
    windows: list[int]
    scale: float
    eps: float
    seconds: Tensor = field(default_factory=lambda: torch.zeros(len(PARTS), dtype=torch.float64))

    @classmethod
    def from_model(cls, model: Any, positions: int) -> NativeLlama:
        """Pack a transformers model for contexts of up to `positions`. Raises NativeUnavailableError.

        The model gives its weights away: what is packed keeps its shape alone (its parameters are on the meta device),
        and the rest is copied out of the files that it may be mapped from.
        """
        refuse_unsupported(model)
        config, inner = model.config, model.model
        rows = torch.arange(positions)[None]
        cos, sin = inner.rotary_emb(inner.embed_tokens.weight[:1], rows)
        attention = inner.layers[0].self_attn
        half = attention.head_dim // 2
        packed = iter(_pack_all([g for layer in inner.layers for g in _groups(layer)] + [(model.lm_head,)]))
        for parameter in model.parameters():
            if not parameter.is_meta:
                parameter.data = parameter.data.clone()
        weights = [t for layer in inner.layers for t in _layer(layer, packed)] + [inner.norm.weight, next(packed)]
        return cls(
            embedding=inner.embed_tokens.weight,
            cos=cos[0, :, :half].contiguous(),
            sin=sin[0, :, :half].contiguous(),
            weights=weights,
            heads=config.num_attention_heads,
            kv_heads=config.num_key_value_heads,
            head_dim=attention.head_dim,
            windows=[_window(layer.self_attn) for layer in inner.layers],
            scale=attention.scaling,
            eps=config.rms_norm_eps,
        )

    def forward(self, batch: Batch, head_rows: Tensor, layout: PagedLayout, caches: Sequence[KVCache]) -> Tensor:
        """Logits, bf16 [head rows, vocabulary]; writes the KV of every row. head_rows: int64 [heads].

        Raises RuntimeError naming an input that is out of range.
        """
        logits = torch.ops.tokenstream.llama_forward(
            batch.token_ids, batch.positions, batch.slot_mapping,
            layout.block_table, layout.query_start, layout.context_len, head_rows,
            self.embedding, self.cos, self.sin, self.weights, [c.key for c in caches], [c.value for c in caches],
            self.heads, self.windows, layout.block_size, self.scale, self.eps, layout.threads, self.seconds,
        )  # fmt: skip
        return cast(Tensor, logits)


@dataclass(frozen=True, slots=True)
class PagedLayout:
    """A batch as the kernels read it: they walk the block table.

    slot_mapping: int64 [rows]. block_table: int32 [sequences, blocks]. query_start: int32 [sequences + 1], first rows.
    context_len: int32 [sequences], after this step. rows: those of sequences, without a scratch row.
    """

    slot_mapping: Tensor
    block_table: Tensor
    query_start: Tensor
    context_len: Tensor
    rows: int
    block_size: int
    threads: int

    @classmethod
    def of(cls, batch: Batch, block_size: int, threads: int) -> PagedLayout:
        """Lay out a batch."""
        spans = batch.spans
        width = max(len(span.blocks) for span in spans)
        return cls(
            slot_mapping=batch.slot_mapping,
            block_table=_int32([[*span.blocks, *[0] * (width - len(span.blocks))] for span in spans]),
            query_start=_int32([*(span.first for span in spans), spans[-1].first + spans[-1].count]),
            context_len=_int32([span.end for span in spans]),
            rows=spans[-1].first + spans[-1].count,
            block_size=block_size,
            threads=threads,
        )

    def attend(self, query: Tensor, key: Tensor, value: Tensor, cache: KVCache, mask: Mask) -> Tensor:
        """See attention.Layout; bfloat16 or float32."""
        rows = self.rows  # the scratch row, if there is one, belongs to no sequence
        out = torch.ops.tokenstream.paged_attention(
            query[:rows].contiguous(), key[:rows].contiguous(), value[:rows].contiguous(), cache.key, cache.value,
            self.slot_mapping[:rows], self.block_table, self.query_start, self.context_len, self.block_size,
            mask.scale, mask.window or 0, mask.softcap or 0.0,
            None if mask.sinks is None else mask.sinks.float().contiguous(), self.threads,
        )  # fmt: skip
        return cast(Tensor, out if rows == query.shape[0] else torch.cat([out, out.new_zeros(1, *out.shape[1:])]))


def _int32(values: list[int] | list[list[int]]) -> Tensor:
    return torch.tensor(values, dtype=torch.int32)


def refuse_unsupported(model: Any) -> None:
    """Raise NativeUnavailableError for a model that is not a bf16 Llama, or has parts that the kernels lack."""
    config = model.config
    if config.model_type not in _MODEL_TYPES:
        raise NativeUnavailableError(
            f"model type {config.model_type!r} has no native kernels; it runs through transformers"
        )
    if any(p.dtype != torch.bfloat16 for p in model.parameters()):
        raise NativeUnavailableError("whole steps are native in bfloat16 only")
    if config.hidden_act != "silu":
        raise NativeUnavailableError(f"the native kernels know the activation silu, not {config.hidden_act!r}")
    if config.hidden_size % 2 or config.intermediate_size % 16:
        raise NativeUnavailableError("hidden_size must be even and intermediate_size a multiple of 16")
    for layer in model.model.layers:
        plain = (layer.self_attn.o_proj, layer.mlp.gate_proj, layer.mlp.up_proj, layer.mlp.down_proj, model.lm_head)
        if any(linear.bias is not None for linear in plain):
            raise NativeUnavailableError("the native kernels take a bias on q, k and v only")


def _window(attention: Any) -> int:
    """Keys that a row of this layer sees, 0 for all. Some families decide by layer, others have one in the config."""
    config = attention.config
    return int(getattr(attention, "sliding_window", getattr(config, "sliding_window", None)) or 0)


def _groups(layer: Any) -> list[tuple[nn.Linear, ...]]:
    """The layer's linears in the order in which a step reads them, together where they share an input."""
    attention, mlp = layer.self_attn, layer.mlp
    return [
        (attention.q_proj, attention.k_proj, attention.v_proj),
        (attention.o_proj,),
        (mlp.gate_proj, mlp.up_proj),
        (mlp.down_proj,),
    ]


def _take(group: tuple[nn.Linear, ...]) -> Tensor:
    """The weights of a group as one [columns, depth]; gate and up take turns of 16 columns. The linears lose them."""
    weights = [linear.weight.data for linear in group]
    for linear in group:  # a parameter of its own: the head's may be the embedding's too, which keeps it
        linear.weight = nn.Parameter(torch.empty_like(linear.weight, device="meta"), requires_grad=False)
    if len(group) == 2:
        depth = weights[0].shape[1]
        return torch.stack([weight.view(-1, 16, depth) for weight in weights], dim=1).view(-1, depth)
    return torch.cat(weights) if len(group) > 1 else weights[0].contiguous()


def _pack_all(groups: list[tuple[nn.Linear, ...]]) -> list[Tensor]:
    """Pack into one piece of memory, in order, so that huge pages serve all and one weight's end fetches the next.

    Each group gives its weights away when it is packed, so that at no time both forms of all are there.
    """
    shapes = [(panels(sum(linear.weight.shape[0] for linear in g)), g[0].weight.shape[1]) for g in groups]
    sizes = [count * _PANEL * depth for count, depth in shapes]
    memory = torch.empty(sum(sizes), dtype=torch.bfloat16)
    torch.ops.tokenstream.advise_huge_pages(memory)
    packed = []
    for group, (_, depth), piece in zip(groups, shapes, torch.split(memory, sizes), strict=True):
        out = piece.view(-1, depth // 2, _PANEL, 2)
        torch.ops.tokenstream.pack_linear(_take(group), out)
        packed.append(out)
    return packed


def _layer(layer: Any, packed: Any) -> list[Tensor]:
    none = torch.empty(0, dtype=torch.bfloat16)
    attention = layer.self_attn
    q_norm, k_norm = (getattr(attention, name, None) for name in ("q_norm", "k_norm"))
    biases = [linear.bias for linear in (attention.q_proj, attention.k_proj, attention.v_proj)]
    qkv, o, gate_up, down = (next(packed) for _ in range(4))
    return [
        layer.input_layernorm.weight,
        qkv,
        none if biases[0] is None else torch.cat(biases),
        none if q_norm is None else q_norm.weight,
        none if k_norm is None else k_norm.weight,
        o,
        layer.post_attention_layernorm.weight,
        gate_up,
        down,
    ]

"""Attention by the C++ kernels, for models whose other parts transformers computes.

It lays batches out for them, and keeps their KV cache. It does not know requests, nor whether a model should run so.
"""

from __future__ import annotations

import ctypes
import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from llm_engine.attention import KVCache, Mask
from llm_engine.batch import Batch, Span

from .compiling import NativeUnavailableError
from .decoder import MAX_HEAD_DIM, StepStruct, padded

_KINDS = {torch.float32: 0, torch.bfloat16: 1}
_void = ctypes.c_void_p


class _Shape(ctypes.Structure):
    """`AttentionShape` of attention.h."""

    _fields_ = (
        *((name, ctypes.c_int32) for name in ("heads", "kv_heads", "dim", "block_size", "window")),
        ("scale", ctypes.c_float),
        ("softcap", ctypes.c_float),
    )


class _Attention(ctypes.Structure):
    _fields_ = (
        ("shape", _Shape),
        ("kv_kind", ctypes.c_int32),
        *((name, _void) for name in ("q", "k", "v", "sinks", "key", "value", "out")),
    )


def refuse(key_dim: int, value_dim: int, dtype: str) -> None:
    """Raise NativeUnavailableError for an attention that the kernels do not take."""
    if dtype not in ("bfloat16", "float32"):
        raise NativeUnavailableError(f"they compute in bfloat16 or float32, and dtype is {dtype}")
    if key_dim != value_dim:
        raise NativeUnavailableError(f"they take keys and values of one size, not {key_dim} and {value_dim}")
    if key_dim > MAX_HEAD_DIM:
        raise NativeUnavailableError(f"they take heads of at most {MAX_HEAD_DIM}, not {key_dim}")


class NativeAttention:
    """The kernels' attention on `threads` threads, over blocks of `block_size` tokens."""

    def __init__(self, library: Any, threads: int, block_size: int) -> None:
        self._library = library
        self._block_size = block_size
        library.ts_open_pool.restype = _void
        self._pool = _void(library.ts_open_pool(threads))
        weakref.finalize(self, library.ts_close_pool, self._pool)  # its threads end with whoever held them

    def cache(self, slots: int, kv_heads: int, dim: int, dtype: torch.dtype) -> KVCache:
        """Zeros for `slots` tokens of one layer; see attention.h for their order."""
        blocks = slots // self._block_size
        return KVCache(
            torch.zeros(blocks, kv_heads, dim, self._block_size, dtype=dtype),
            torch.zeros(blocks, self._block_size, kv_heads, padded(dim), dtype=dtype),
        )

    def layout(self, batch: Batch, slots: int) -> PagedLayout:
        """Lay out a batch for all layers, whose caches hold `slots` tokens. RuntimeError: an index is not in them."""
        table, query_start, context = lay_out(batch.spans)
        mapping = batch.slot_mapping.numpy()
        check_layout(table, context, mapping, slots // self._block_size, self._block_size)
        return PagedLayout(self, mapping, table, query_start, context, int(query_start[-1]))

    def attend(
        self, layout: PagedLayout, query: Tensor, key: Tensor, value: Tensor, cache: KVCache, mask: Mask
    ) -> Tensor:
        """See attention.Layout; of the rows that sequences have."""
        q, k, v = (t.float().contiguous() for t in (query, key, value))
        sinks = None if mask.sinks is None else mask.sinks.float().contiguous()
        out = torch.empty_like(q)
        shape = _Shape(
            q.shape[1], k.shape[1], q.shape[2], self._block_size, mask.window or 0, mask.scale, mask.softcap or 0.0
        )
        pointers = [None if t is None else t.data_ptr() for t in (q, k, v, sinks, cache.key, cache.value, out)]
        attention = _Attention(shape, _KINDS[cache.key.dtype], *pointers)
        step = StepStruct(
            rows=q.shape[0],
            sequences=len(layout.context),
            slots=layout.slots.ctypes.data,
            query_start=layout.query_start.ctypes.data,
            context=layout.context.ctypes.data,
            block_table=layout.table.ctypes.data,
            table_stride=layout.table.shape[1],
        )
        self._library.ts_attend(ctypes.byref(attention), ctypes.byref(step), self._pool)
        return out.to(query.dtype)


@dataclass(frozen=True, slots=True)
class PagedLayout:
    """A batch as the kernels read it: they walk the block table.

    slots: int64 [rows]. table: int32 [sequences, blocks]. query_start: int32 [sequences + 1], first rows. context:
    int32 [sequences], after this step. rows: those of sequences, without a scratch row.
    """

    attention: NativeAttention
    slots: NDArray[np.int64]
    table: NDArray[np.int32]
    query_start: NDArray[np.int32]
    context: NDArray[np.int32]
    rows: int

    def attend(self, query: Tensor, key: Tensor, value: Tensor, cache: KVCache, mask: Mask) -> Tensor:
        """See attention.Layout; bfloat16 or float32."""
        rows = self.rows  # the scratch row, if there is one, belongs to no sequence
        out = self.attention.attend(self, query[:rows], key[:rows], value[:rows], cache, mask)
        return out if rows == query.shape[0] else torch.cat([out, out.new_zeros(1, *out.shape[1:])])


def lay_out(spans: Sequence[Span]) -> tuple[NDArray[np.int32], NDArray[np.int32], NDArray[np.int32]]:
    """The block table [sequences, blocks], first rows [sequences + 1] and contexts [sequences] of spans; all int32."""
    table = np.zeros((len(spans), max(len(span.blocks) for span in spans)), np.int32)
    for row, span in zip(table, spans, strict=True):
        row[: len(span.blocks)] = span.blocks
    start = np.array([*(span.first for span in spans), spans[-1].first + spans[-1].count], np.int32)
    return table, start, np.array([span.end for span in spans], np.int32)


def check_layout(
    table: NDArray[np.int32], context: NDArray[np.int32], slots: NDArray[np.int64], blocks: int, block_size: int
) -> None:
    """Raise RuntimeError for a block, slot or context that is not in a KV cache of `blocks`."""
    check_range("block_table", table, blocks)
    check_range("slot_mapping", slots, blocks * block_size)
    check_range("context_len", context, table.shape[1] * block_size + 1)


def check_range(name: str, values: NDArray[Any], end: int) -> None:
    """Raise RuntimeError unless all values are from 0 to end - 1."""
    if values.size and not 0 <= int(values.min()) <= int(values.max()) < end:
        raise RuntimeError(f"{name} must be from 0 to {end - 1}, got {int(values.min())} to {int(values.max())}")

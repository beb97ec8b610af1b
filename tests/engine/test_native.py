"""The C++ kernels' attention against the oracle: the same numbers, bits that depend on the context alone, no crash."""

from __future__ import annotations

from collections.abc import Sequence as Several
from dataclasses import dataclass, replace
from functools import cache

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from engine import driver
from llm_engine.attention import KVCache, Layout, Mask
from llm_engine.batch import Batch, Span
from llm_engine.config import cache_folder
from llm_kernels import native, tiles
from llm_kernels.compiling import NativeUnavailableError
from llm_kernels.native import NativeAttention
from llm_kernels.objects import load_object

# Both compute in float32 and differ in the order of sums alone; a bfloat16 result may then round to its neighbour.
ABSOLUTE, RELATIVE = 3e-5, {"float32": 0.0, "bfloat16": 2**-7}
BLOCK_SIZES = (1, 5, 16, 24, 32, 48, 64)  # tiles of keys lie ready where 16 divides them, else they are copied
each_size = pytest.mark.parametrize("size", [16, 20])
each_dtype = pytest.mark.parametrize("dtype", driver.native_dtypes())


@cache
def attention(threads: int, block_size: int) -> NativeAttention:
    return NativeAttention(load_object(cache_folder())[0], threads, block_size)


@dataclass(frozen=True, slots=True)
class Layer:
    """One layer's attention and where it keeps its cache."""

    kv_heads: int
    group: int
    dim: int
    block_size: int
    window: int | None = None
    softcap: float | None = None
    sinks: bool = False

    def mask(self) -> Mask:
        sinks = torch.linspace(-2, 2, self.kv_heads * self.group) if self.sinks else None
        return Mask(self.dim**-0.5, self.window, self.softcap, sinks)

    def blocks(self, length: int) -> int:
        """Blocks that hold a context."""
        return -(-length // self.block_size)


layers = st.builds(
    Layer,
    kv_heads=st.integers(1, 3),
    group=st.sampled_from([1, 3, 4, 7, 8]),
    dim=st.sampled_from([16, 18, 20, 33, 64, 80, 96, 128, 256, 512]),
    block_size=st.sampled_from(BLOCK_SIZES),
    window=st.sampled_from([None, None, 1, 5, 64, 70]),
    softcap=st.sampled_from([None, None, 5.0]),
    sinks=st.booleans(),
)
starts = st.sampled_from([0, 0, 1, 3, 63, 64, 130])
counts = st.sampled_from([1, 1, 1, 2, 5, 40, 70, 200])


@dataclass(frozen=True, slots=True)
class Sequence:
    """Queries, keys and values of every position: [length, heads, dim]; and the blocks that hold the context."""

    query: Tensor
    key: Tensor
    value: Tensor
    blocks: tuple[int, ...]


Chunk = tuple[Sequence, int, int]  # and the first position of the rows that are computed, and their number


class Memory:
    """A KV cache full of NaN, of the kernels or the `oracle`, and sequences at random places in it.

    Two of one seed hold the same.
    """

    def __init__(self, layer: Layer, dtype: str, seed: int, blocks: int, *, oracle: bool = False) -> None:
        self.layer = layer
        self.oracle = oracle
        self.dtype: torch.dtype = getattr(torch, dtype)
        self._generator = torch.Generator().manual_seed(seed)
        slots = blocks * layer.block_size
        if oracle:
            self.cache = KVCache.empty(slots, layer.kv_heads, layer.dim, self.dtype, torch.device("cpu"))
        else:
            self.cache = attention(1, layer.block_size).cache(slots, layer.kv_heads, layer.dim, self.dtype)
        for memory in (self.cache.key, self.cache.value):
            memory.fill_(float("nan"))
            if oracle:
                memory[self.cache.zero_slot] = 0
        self._free: list[int] = torch.randperm(blocks, generator=self._generator).tolist()

    def sequence(self, length: int) -> Sequence:
        layer = self.layer
        heads = (layer.kv_heads * layer.group, layer.kv_heads, layer.kv_heads)
        q, k, v = (torch.randn(length, h, layer.dim, generator=self._generator).to(self.dtype) for h in heads)
        return self.place(Sequence(2 * q, k, v, ()))

    def place(self, sequence: Sequence) -> Sequence:
        needed = self.layer.blocks(len(sequence.query))
        return replace(sequence, blocks=tuple(self._free.pop() for _ in range(needed)))

    def chunk(self, start: int, count: int) -> Chunk:
        """The last `count` rows of a new sequence, whose context earlier steps have written."""
        sequence = self.sequence(start + count)
        if start:
            self.step([(sequence, 0, start)])
        return sequence, start, count

    def step(self, chunks: Several[Chunk], *, threads: int = 1, scratch: bool = False) -> list[Tensor]:
        """Attend for the rows of each chunk; return them by chunk."""
        layer = self.layer
        spans: list[Span] = []
        slots: list[int] = []
        for sequence, start, count in chunks:
            spans.append(Span(len(slots), start, count, sequence.blocks))
            slots += self._slots(sequence, start, start + count)
        inputs = [torch.cat([getattr(s, name)[a : a + n] for s, a, n in chunks]) for name in ("query", "key", "value")]
        if scratch:
            slots.append(self.cache.scratch_slot)
            inputs = [torch.cat([x, torch.full_like(x[:1], float("nan"))]) for x in inputs]
        batch = batch_of(slots, spans)
        layout: Layout
        if self.oracle:
            layout = tiles.tile_layout(batch, layer.block_size, self.cache.zero_slot)
        else:
            held = self.cache.key.shape[0] * layer.block_size
            layout = attention(threads, layer.block_size).layout(batch, held)
        query, key, value = inputs
        out = layout.attend(query, key, value, self.cache, layer.mask())
        assert out.shape == query.shape
        assert out.dtype == self.dtype
        assert not scratch or not out[-1].any()
        return [out[span.first : span.first + span.count] for span in spans]

    def _slots(self, sequence: Sequence, start: int, end: int) -> list[int]:
        size = self.layer.block_size
        return [sequence.blocks[p // size] * size + p % size for p in range(start, end)]


def batch_of(slots: list[int], spans: Several[Span]) -> Batch:
    """A batch, of which attention reads slots and spans."""
    mapping = torch.tensor(slots)
    return Batch(mapping, mapping, mapping, tuple(spans), mapping, 0, (), mapping, mapping)


@each_dtype
@given(
    layer=layers,
    spans=st.lists(st.tuples(starts, counts), min_size=1, max_size=6),
    threads=st.integers(1, 3),
    scratch=st.booleans(),
    seed=st.integers(0, 1000),
)
def test_attention_equals_the_oracle(
    dtype: str, layer: Layer, spans: list[tuple[int, int]], threads: int, scratch: bool, seed: int
) -> None:
    blocks = sum(layer.blocks(start + count) for start, count in spans)
    found: list[list[Tensor]] = []
    for oracle in (False, True):
        memory = Memory(layer, dtype, seed, blocks, oracle=oracle)
        chunks = [memory.chunk(start, count) for start, count in spans]
        found.append(memory.step(chunks, threads=threads, scratch=scratch))
    for row, wanted in zip(*found, strict=True):
        torch.testing.assert_close(row, wanted, atol=ABSOLUTE, rtol=RELATIVE[dtype])


@dataclass(frozen=True, slots=True)
class Step:
    """How many rows of the watched sequence are computed, and by how many threads, beside whom, before it or after."""

    count: int
    threads: int
    neighbours: tuple[tuple[int, int], ...]  # context before the step, rows
    last: bool


steps = st.builds(
    Step,
    count=st.sampled_from([1, 1, 2, 3, 7, 16, 33, 64, 100]),
    threads=st.integers(1, 3),
    neighbours=st.lists(st.tuples(starts, st.sampled_from([1, 1, 2, 40])), max_size=4).map(tuple),
    last=st.booleans(),
)


@each_dtype
@given(layer=layers, plan=st.lists(steps, min_size=1, max_size=8), block_size=st.sampled_from(BLOCK_SIZES))
def test_a_row_has_the_same_bits_under_any_chunks_company_place_and_threads(
    dtype: str, layer: Layer, plan: list[Step], block_size: int
) -> None:
    length = sum(step.count for step in plan)
    quiet = Memory(layer, dtype, 0, layer.blocks(length))
    sequence = quiet.sequence(length)
    whole = quiet.step([(sequence, 0, length)])[0]
    assert whole.isfinite().all()

    layer = replace(layer, block_size=block_size)
    neighbours = [neighbour for step in plan for neighbour in step.neighbours]
    crowded = Memory(layer, dtype, 1, layer.blocks(length) + sum(layer.blocks(a + n) for a, n in neighbours))
    sequence = crowded.place(sequence)
    start = 0
    for step in plan:
        chunks = [crowded.chunk(*neighbour) for neighbour in step.neighbours]
        at = len(chunks) if step.last else 0
        chunks.insert(at, (sequence, start, step.count))
        rows = crowded.step(chunks, threads=step.threads)[at]
        assert torch.equal(rows, whole[start : start + step.count])
        start += step.count


@each_dtype
@each_size
def test_nan_in_one_sequence_stays_there(size: int, dtype: str) -> None:
    memory = Memory(Layer(2, 3, 64, size), dtype, 0, 20)
    ill, sound = memory.sequence(70), memory.sequence(70)
    ill.query[5] = float("nan")
    rows = memory.step([(ill, 0, 70), (sound, 0, 70)])
    assert rows[0][5].isnan().all()
    assert rows[0][:5].isfinite().all()
    assert rows[0][6:].isfinite().all()
    assert rows[1].isfinite().all()


@each_dtype
@each_size
def test_nan_in_a_cache_does_not_reach_who_is_computed_next(size: int, dtype: str) -> None:
    """A thread's memory still holds what the sequence before has left there."""
    memory = Memory(Layer(2, 3, 64, size), dtype, 0, 20)
    ill, *sound = (memory.sequence(length) for length in (128, 1, 9, 40, 65))
    ill.key[60:] = float("nan")
    ill.value[60:] = float("nan")
    rows = memory.step([(ill, 0, 128), *((sequence, 0, len(sequence.query)) for sequence in sound)])
    assert rows[0][-1].isnan().all()
    assert all(row.isfinite().all() for row in rows[1:])


@each_dtype
def test_scores_of_any_size_give_finite_answers(dtype: str) -> None:
    """The softmax works on differences to the largest score, however large that is."""
    found: list[Tensor] = []
    for oracle in (False, True):
        memory = Memory(Layer(1, 2, 32, 16, window=5), dtype, 0, 10, oracle=oracle)
        sequence = memory.sequence(100)
        sequence.query.mul_(1e6)
        found += memory.step([(sequence, 0, 100)])
    torch.testing.assert_close(*found, atol=ABSOLUTE, rtol=RELATIVE[dtype])


WRONG = (
    ("block_table must be from 0 to 3, got 1 to 4", [21, 22, 23], Span(0, 5, 3, (1, 4))),
    ("block_table must be from 0 to 3, got -1 to 2", [21, 22, 23], Span(0, 5, 3, (2, -1))),
    ("block_table must be from 0 to 3, got 1 to 2147483647", [21, 22, 23], Span(0, 5, 3, (1, 2**31 - 1))),
    ("slot_mapping must be from 0 to 63, got 21 to 64", [21, 22, 64], Span(0, 5, 3, (1, 2))),
    ("slot_mapping must be from 0 to 63, got -1 to 22", [21, 22, -1], Span(0, 5, 3, (1, 2))),
    ("context_len must be from 0 to 32, got 33 to 33", [21, 22, 23], Span(0, 30, 3, (1, 2))),
    ("context_len must be from 0 to 32, got -2 to -2", [21, 22, 23], Span(0, -5, 3, (1, 2))),
)


@driver.needs_native()
@pytest.mark.parametrize(("refusal", "slots", "span"), WRONG)
def test_an_index_out_of_range_is_refused_by_name_and_nothing_is_written(
    refusal: str, slots: list[int], span: Span
) -> None:
    ours = attention(1, 16)
    held = ours.cache(4 * 16, 2, 16, torch.float32)
    with pytest.raises(RuntimeError, match=f"^{refusal}$"):
        ours.layout(batch_of(slots, [span]), 4 * 16).attend(
            torch.ones(3, 4, 16), torch.ones(3, 2, 16), torch.ones(3, 2, 16), held, Mask(0.25)
        )
    assert not held.key.any()
    assert not held.value.any()


@pytest.mark.parametrize(
    ("values", "refusal"),
    [
        ((64, 64, "float16"), "they compute in bfloat16 or float32, and dtype is float16"),
        ((64, 32, "float32"), "they take keys and values of one size, not 64 and 32"),
        ((528, 528, "float32"), "they take heads of at most 512, not 528"),
    ],
)
def test_what_the_kernels_do_not_take_is_refused_in_one_line(values: tuple[int, int, str], refusal: str) -> None:
    native.refuse(512, 512, "bfloat16")
    with pytest.raises(NativeUnavailableError, match=f"^{refusal}$"):
        native.refuse(*values)

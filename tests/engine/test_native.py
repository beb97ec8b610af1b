"""The C++ kernels against the oracle and torch: the same numbers, bits that depend on the context alone, no crash."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from engine import driver
from llm_engine.attention import KVCache, Layout, Mask
from llm_engine.batch import Batch, Span
from llm_kernels import tiles
from llm_kernels.native import PagedLayout

TOLERANCE = {"float32": 3e-5, "bfloat16": 0.03}  # absolute, of values around 1; bf16 rounds weights and results
each_dtype = pytest.mark.parametrize("dtype", driver.native_dtypes())
OPS = torch.ops.tokenstream


@dataclass(frozen=True, slots=True)
class Layer:
    """One layer's attention and where it keeps its cache."""

    kv_heads: int
    group: int
    dim: int
    block_size: int
    window: int | None
    softcap: float | None
    sinks: bool

    def mask(self) -> Mask:
        sinks = torch.linspace(-2, 2, self.kv_heads * self.group) if self.sinks else None
        return Mask(self.dim**-0.5, self.window, self.softcap, sinks)


layers = st.builds(
    Layer,
    kv_heads=st.integers(1, 3),
    group=st.sampled_from([1, 3, 4, 8]),
    dim=st.sampled_from([16, 18, 32, 64, 80, 96, 128, 256]),
    block_size=st.sampled_from([1, 3, 8, 32, 64]),
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


class Memory:
    """A KV cache full of NaN, and sequences at random places in it."""

    def __init__(self, layer: Layer, dtype: str, seed: int, blocks: int) -> None:
        self.layer = layer
        self.dtype: torch.dtype = getattr(torch, dtype)
        self._generator = torch.Generator().manual_seed(seed)
        slots = blocks * layer.block_size
        self.cache = KVCache.empty(slots, layer.kv_heads, layer.dim, self.dtype, torch.device("cpu"))
        for memory in (self.cache.key, self.cache.value):
            memory.fill_(float("nan"))
            memory[self.cache.zero_slot] = 0
        self._free: list[int] = torch.randperm(blocks, generator=self._generator).tolist()

    def sequence(self, length: int) -> Sequence:
        layer = self.layer
        heads = (layer.kv_heads * layer.group, layer.kv_heads, layer.kv_heads)
        q, k, v = (torch.randn(length, h, layer.dim, generator=self._generator).to(self.dtype) for h in heads)
        return self.place(Sequence(2 * q, k, v, ()))

    def place(self, sequence: Sequence) -> Sequence:
        needed = -(-sequence.query.shape[0] // self.layer.block_size)
        return replace(sequence, blocks=tuple(self._free.pop() for _ in range(needed)))

    def fill(self, sequence: Sequence, count: int) -> None:
        """Write the context that earlier steps would have written."""
        slots = self._slots(sequence, 0, count)
        self.cache.key[slots] = sequence.key[:count]
        self.cache.value[slots] = sequence.value[:count]

    def step(
        self, chunks: list[tuple[Sequence, int, int]], *, threads: int = 1, oracle: bool = False, scratch: bool = False
    ) -> list[Tensor]:
        """Attend for positions start to start + count of each sequence; return them by sequence."""
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
        mapping = torch.tensor(slots)
        batch = Batch(mapping, mapping, mapping, tuple(spans), mapping, 0, (), mapping, mapping)
        layout: Layout = PagedLayout.of(batch, layer.block_size, threads)
        if oracle:
            layout = tiles.tile_layout(batch, layer.block_size, self.cache.zero_slot)
        query, key, value = inputs
        out = layout.attend(query, key, value, self.cache, layer.mask())
        assert out.shape == query.shape
        assert out.dtype == self.dtype
        assert not scratch or not out[-1].any()
        return [out[span.first : span.first + span.count] for span in spans]

    def _slots(self, sequence: Sequence, start: int, end: int) -> list[int]:
        size = self.layer.block_size
        return [sequence.blocks[p // size] * size + p % size for p in range(start, end)]


@each_dtype
@given(
    layer=layers,
    spans=st.lists(st.tuples(starts, counts), min_size=1, max_size=6),
    threads=st.integers(1, 2),
    scratch=st.booleans(),
    seed=st.integers(0, 1000),
)
def test_paged_attention_equals_the_oracle(
    dtype: str, layer: Layer, spans: list[tuple[int, int]], threads: int, scratch: bool, seed: int
) -> None:
    blocks = sum(-(-(start + count) // layer.block_size) for start, count in spans)
    memory = Memory(layer, dtype, seed, blocks)
    chunks = [(memory.sequence(start + count), start, count) for start, count in spans]
    for sequence, start, _ in chunks:
        memory.fill(sequence, start)
    expected = memory.step(chunks, oracle=True, scratch=scratch)
    got = memory.step(chunks, threads=threads, scratch=scratch)
    for row, wanted in zip(got, expected, strict=True):
        torch.testing.assert_close(row, wanted, atol=TOLERANCE[dtype], rtol=0)


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
    threads=st.integers(1, 2),
    neighbours=st.lists(st.tuples(starts, st.sampled_from([1, 1, 2, 40])), max_size=4).map(tuple),
    last=st.booleans(),
)


@each_dtype
@given(layer=layers, plan=st.lists(steps, min_size=1, max_size=8), block_size=st.sampled_from([1, 5, 32]))
def test_a_row_has_the_same_bits_under_any_chunks_company_place_and_threads(
    dtype: str, layer: Layer, plan: list[Step], block_size: int
) -> None:
    length = sum(step.count for step in plan)
    quiet = Memory(layer, dtype, 0, -(-length // layer.block_size))
    sequence = quiet.sequence(length)
    whole = quiet.step([(sequence, 0, length)])[0]
    assert whole.isfinite().all()

    crowded = Memory(replace(layer, block_size=block_size), dtype, 1, 4 * len(plan) * 200)
    sequence = crowded.place(sequence)
    start = 0
    for step in plan:
        chunks = [(crowded.sequence(a + n), a, n) for a, n in step.neighbours]
        for neighbour, a, _ in chunks:
            crowded.fill(neighbour, a)
        at = len(chunks) if step.last else 0
        chunks.insert(at, (sequence, start, step.count))
        rows = crowded.step(chunks, threads=step.threads)[at]
        assert torch.equal(rows, whole[start : start + step.count])
        start += step.count


@each_dtype
def test_nan_in_one_sequence_stays_there(dtype: str) -> None:
    layer = Layer(2, 3, 64, 8, None, None, sinks=False)
    memory = Memory(layer, dtype, 0, 40)
    ill, sound = memory.sequence(70), memory.sequence(70)
    ill.query[5] = float("nan")
    rows = memory.step([(ill, 0, 70), (sound, 0, 70)])
    assert rows[0][5].isnan().all()
    assert rows[0][:5].isfinite().all()
    assert rows[0][6:].isfinite().all()
    assert rows[1].isfinite().all()


@each_dtype
def test_nan_in_a_cache_does_not_reach_who_is_computed_next(dtype: str) -> None:
    """A thread's memory still holds the keys and values of the sequence before."""
    layer = Layer(2, 3, 64, 8, None, None, sinks=False)
    memory = Memory(layer, dtype, 0, 40)
    ill, *sound = (memory.sequence(length) for length in (128, 1, 9, 40, 65))
    ill.key[60:] = float("nan")
    ill.value[60:] = float("nan")
    rows = memory.step([(ill, 0, 128), *((sequence, 0, len(sequence.query)) for sequence in sound)])
    assert rows[0][-1].isnan().all()
    assert all(row.isfinite().all() for row in rows[1:])


@each_dtype
def test_scores_of_any_size_give_finite_answers(dtype: str) -> None:
    """The softmax works on differences to the largest score, however large that is."""
    layer = Layer(1, 2, 32, 8, 5, None, sinks=False)
    memory = Memory(layer, dtype, 0, 40)
    sequence = memory.sequence(100)
    sequence.query.mul_(1e6)
    expected = memory.step([(sequence, 0, 100)], oracle=True)[0]
    torch.testing.assert_close(memory.step([(sequence, 0, 100)])[0], expected, atol=TOLERANCE[dtype], rtol=0)


def arguments(dtype: str, **changed: Any) -> dict[str, Any]:
    """Sound arguments of paged_attention: 3 rows of one sequence of 5, blocks of 4; some of them `changed`."""
    kind = getattr(torch, dtype)
    sound = {
        "q": torch.randn(3, 4, 16).to(kind),
        "k": torch.randn(3, 2, 16).to(kind),
        "v": torch.randn(3, 2, 16).to(kind),
        "key_cache": torch.zeros(16, 2, 16, dtype=kind),
        "value_cache": torch.zeros(16, 2, 16, dtype=kind),
        "slot_mapping": torch.tensor([6, 7, 8]),
        "block_table": torch.tensor([[1, 2]], dtype=torch.int32),
        "query_start": torch.tensor([0, 3], dtype=torch.int32),
        "context_len": torch.tensor([5], dtype=torch.int32),
        "block_size": 4,
        "scale": 0.25,
        "window": 0,
        "softcap": 0.0,
        "sinks": None,
        "threads": 1,
    }
    return {**sound, **changed}


def int32(*values: int) -> Tensor:
    return torch.tensor(values, dtype=torch.int32)


WRONG: tuple[tuple[str, dict[str, Any]], ...] = (
    ("slot_mapping must be from 0", {"slot_mapping": torch.tensor([6, 7, 16])}),
    ("slot_mapping must be from 0", {"slot_mapping": torch.tensor([6, -1, 8])}),
    ("slot_mapping", {"slot_mapping": torch.tensor([6, 7])}),
    ("slot_mapping", {"slot_mapping": int32(6, 7, 8)}),
    ("block_table names block 4", {"block_table": int32(1, 4)[None]}),
    ("block_table names block -1", {"block_table": int32(-1, 2)[None]}),
    ("block_table names block 2147483647", {"block_table": int32(1, 2**31 - 1)[None]}),
    ("block_table is too short", {"block_table": int32(1)[None]}),
    ("block_table", {"block_table": torch.tensor([[1, 2]])}),
    ("block_table", {"block_table": torch.zeros(2, 2, dtype=torch.int32)}),
    ("block_table is too short", {"context_len": int32(2**31 - 1)}),
    ("context_len", {"context_len": int32(2)}),
    ("context_len", {"context_len": int32(-1)}),
    ("query_start", {"query_start": int32(0, 4)}),
    ("query_start", {"query_start": int32(1, 3)}),
    ("query_start", {"query_start": int32(0)}),
    ("block_size", {"block_size": 0}),
    ("block_size", {"block_size": 2**40}),
    ("window", {"window": -1}),
    ("softcap", {"softcap": -1.0}),
    ("threads", {"threads": 0}),
    ("threads", {"threads": 2**33}),
    ("sinks", {"sinks": torch.zeros(3)}),
    ("sinks", {"sinks": torch.zeros(4, dtype=torch.float64)}),
    ("q, k, v", {"q": torch.zeros(2, 4, 16)}),
    ("q, k, v", {"k": torch.zeros(3, 1, 16)}),
    ("head_dim", {name: torch.zeros(16, 2, 258) for name in ("key_cache", "value_cache")}),
    ("heads", {name: torch.zeros(16, 0, 16) for name in ("key_cache", "value_cache")}),
    ("heads", {name: torch.zeros(16, 3, 16) for name in ("key_cache", "value_cache")}),
    ("value cache disagree", {"value_cache": torch.zeros(15, 2, 16)}),
    ("value cache", {"value_cache": torch.zeros(16, 2, 16, dtype=torch.float64)}),
    ("key cache", {"key_cache": torch.zeros(16, 2, 32)[..., ::2]}),
    ("k must be", {"k": torch.zeros(3, 2, 16, dtype=torch.int32)}),
    ("q must be", {name: torch.zeros(16, 2, 16, dtype=torch.float64) for name in ("q", "k", "v", "key_cache")}),
)


@driver.needs_native("float32")
@pytest.mark.parametrize(("named", "changed"), WRONG)
def test_an_input_out_of_range_is_refused_by_name(named: str, changed: dict[str, Any]) -> None:
    with pytest.raises(RuntimeError, match=named):
        OPS.paged_attention(**arguments("float32", **changed))


@each_dtype
def test_idle_sequences_and_an_empty_batch_are_no_work(dtype: str) -> None:
    alone = arguments(dtype)
    beside_an_idle_one = {
        "query_start": int32(0, 0, 3),
        "context_len": int32(4, 5),
        "block_table": torch.stack([int32(3, 0), int32(1, 2)]),
    }
    expected = OPS.paged_attention(**alone)
    assert torch.equal(OPS.paged_attention(**{**alone, **beside_an_idle_one}), expected)
    nothing = {name: alone[name][:0] for name in ("q", "k", "v", "slot_mapping", "context_len", "block_table")}
    assert OPS.paged_attention(**{**alone, **nothing, "query_start": int32(0)}).shape == (0, 4, 16)


@each_dtype
def test_paged_attention_is_a_sound_operator(dtype: str) -> None:
    torch.library.opcheck(OPS.paged_attention.default, tuple(arguments(dtype).values()))
    torch.library.opcheck(OPS.paged_attention.default, tuple(arguments(dtype, sinks=torch.zeros(4)).values()))


@driver.needs_native("float32")
def test_huge_pages_are_advice() -> None:
    memory = torch.arange(3 << 20)
    torch.library.opcheck(OPS.advise_huge_pages.default, (memory,))
    OPS.advise_huge_pages(memory)
    OPS.advise_huge_pages(torch.empty(0))
    assert torch.equal(memory, torch.arange(3 << 20))

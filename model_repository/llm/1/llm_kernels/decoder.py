"""Whole steps of decoder models on the CPU: what a family's layers are made of, and the kernels that compute them.

A family is described by the names of its tensors and some numbers of its configuration; the weights themselves come
from a `Tensors`, in whatever form the checkpoint has them. The module does not know how a checkpoint is read, nor
requests. The structures are those of `cpu/decoder.h`.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from .packed import Arithmetic, Format, PackedWeight, Rows, WeightStruct, aligned

PARTS = ("linears", "attention", "norms and rope", "head")
MAX_HEAD_DIM = 512  # as kMaxDim in attention.h
LANES = 16

_EXACT = {  # of GGUF's kinds of rows, with the format that holds their values: BF16, Q4_0, Q4_1, Q5_0, Q5_1, Q8_0
    (30, Format.BFLOAT16),
    *((2, Format.INT4), (3, Format.INT4), (6, Format.INT5), (7, Format.INT5), (8, Format.INT8)),
}

_void = ctypes.c_void_p
_int = ctypes.c_int32
_float = ctypes.c_float


class UnsupportedError(ValueError):
    """A model has a part that the kernels lack. The message is one line: which."""


class Tensors(Protocol):
    """A checkpoint's tensors by their Hugging Face names."""

    def rows(self, name: str) -> Rows:
        """A weight [columns, depth], in the checkpoint's own form; see Rows."""

    def vector(self, name: str) -> NDArray[np.float32] | None:
        """A vector or table in float32; None if the checkpoint has none of this name."""


def refuse_sizes(family: Family, block_size: int) -> None:
    """Raise UnsupportedError for sizes that the kernels do not take."""
    if family.dim > MAX_HEAD_DIM:
        raise UnsupportedError(f"the native kernels take heads of at most {MAX_HEAD_DIM}, not {family.dim}")
    if block_size % LANES:
        raise UnsupportedError(f"the native kernels take a block_size that {LANES} divides, not {block_size}")


def padded(dim: int) -> int:
    """Numbers of a head's values in the KV cache."""
    return -(-dim // LANES) * LANES


class _Norm(ctypes.Structure):
    _fields_ = (("weight", _void), ("bias", _void))


class _Linear(ctypes.Structure):
    _fields_ = (("part", WeightStruct * 3), ("parts", _int), ("bias", _void))


class _Layer(ctypes.Structure):
    _fields_ = (
        *((name, _Norm) for name in ("input_norm", "q_norm", "k_norm", "after_attention", "post_norm", "after_mlp")),
        *((name, _Linear) for name in ("qkv", "o", "gate", "up", "down")),
        ("cos", _void),
        ("sin", _void),
        ("window", _int),
        ("key", _void),
        ("value", _void),
    )


class _Model(ctypes.Structure):
    _fields_ = (
        ("layers", ctypes.POINTER(_Layer)),
        *((name, _int) for name in ("layer_count", "hidden", "heads", "kv_heads", "dim", "rotary", "block_size")),
        *((name, _int) for name in ("norm_kind", "activation", "kv_kind")),
        *((name, _float) for name in ("eps", "scale", "softcap", "final_softcap", "embedding_scale")),
        ("embedding", WeightStruct),
        ("positions", _void),
        ("norm", _Norm),
        ("head", _Linear),
    )


class StepStruct(ctypes.Structure):
    """`Step` of decoder.h."""

    _fields_ = (
        *((name, _int) for name in ("rows", "sequences", "heads")),
        *((name, _void) for name in ("token_ids", "positions", "slots", "query_start", "context", "block_table")),
        ("table_stride", ctypes.c_int64),
        ("head_rows", _void),
    )


@dataclass(frozen=True, slots=True)
class LayerNames:
    """Names of one layer's tensors; "" where the family has none.

    qkv and gate_up: one name where the checkpoint holds them as one. A bias has its weight's name with `.bias`.
    """

    input_norm: str
    qkv: tuple[str, ...]
    o: str
    post_norm: str
    up: str
    down: str
    gate: str = ""
    gate_up: str = ""
    q_norm: str = ""
    k_norm: str = ""
    after_attention: str = ""
    after_mlp: str = ""
    window: int = 0
    rope: str = "default"  # which table of `Family.ropes`; "" for none


@dataclass(frozen=True, slots=True)
class Family:
    """One model's shape in the kernels' terms.

    ropes: for each table its inverse frequencies, float32 [rotary / 2]. norm_offset: what a norm's weight lacks (1 for
    Gemma). transposed: transformers holds its layers' linears as [depth, columns].
    """

    layers: tuple[LayerNames, ...]
    embedding: str
    norm: str
    head: str  # the embedding's name where they are tied
    hidden: int
    heads: int
    kv_heads: int
    dim: int
    vocabulary: int
    eps: float
    scale: float
    ropes: Mapping[str, NDArray[np.float32]] = field(default_factory=dict)
    positions: str = ""
    activation: str = "silu"
    layer_norm: bool = False
    norm_offset: float = 0.0
    softcap: float = 0.0
    final_softcap: float = 0.0
    embedding_scale: float = 1.0
    transposed: bool = False


Choice = Callable[[Rows], tuple[Format, Arithmetic]]
"""From rows to the format that they are packed in, and the arithmetic that multiplies them."""


class Decoder:
    """A model whose steps the kernels compute.

    `bfloat16_kv`: keys and values are kept in bfloat16, else float32. `slots` tokens of KV in blocks of `block_size`, a
    multiple of 16. seconds: float64 [4], the time spent so far in each of PARTS. Raises UnsupportedError, and PackError
    naming a tensor.
    """

    def __init__(
        self,
        library: Any,
        family: Family,
        tensors: Tensors,
        choice: Choice,
        *,
        slots: int,
        block_size: int,
        positions: int,
        threads: int,
        bfloat16_kv: bool,
    ) -> None:
        self._workspace = _void(None)
        refuse_sizes(family, block_size)
        self._library = library
        self._keep: list[Any] = []  # whatever the structures point to
        self._tensors = tensors
        self._choice = choice
        self.family = family
        self.slots = slots
        self.weight_bytes = 0  # of all weights
        self.linear_bytes = 0  # and numbers: of those that every step multiplies, the head's included
        self.linear_parameters = 0
        self.formats: set[tuple[Format, Arithmetic]] = set()
        self.seconds = np.zeros(len(PARTS))
        self.norms: dict[str, NDArray[np.float32]] = {}  # what each norm multiplies by, by name
        self._packed: dict[str, PackedWeight] = {}
        self._rounded: set[str] = set()
        tables = {name: self._rope(frequencies, positions) for name, frequencies in family.ropes.items()}
        kv_type = np.dtype(np.uint16 if bfloat16_kv else np.float32)
        width = padded(family.dim)
        blocks = -(-slots // block_size)
        self.kv_bytes = 0
        layers = (_Layer * len(family.layers))()
        for layer, names in zip(layers, family.layers, strict=True):
            self._fill(layer, names, tables)
            sizes = [blocks * family.kv_heads * dim * block_size for dim in (family.dim, width)]
            layer.key, layer.value = (self._pointer(aligned(size * kv_type.itemsize)) for size in sizes)
            self.kv_bytes += sum(sizes) * kv_type.itemsize
        self._layers = layers
        embedding = self._weight(family.embedding)
        rotary = 2 * max((len(f) for f in family.ropes.values()), default=0)
        self._model = _Model(
            ctypes.cast(layers, ctypes.POINTER(_Layer)), len(layers), family.hidden, family.heads, family.kv_heads,
            family.dim, rotary, block_size, int(family.layer_norm), ("silu", "gelu_tanh").index(family.activation),
            int(bfloat16_kv), family.eps, family.scale, family.softcap, family.final_softcap, family.embedding_scale,
            embedding.struct, self._vector(family.positions), self._norm(family.norm), self._linear((family.head,)),
        )  # fmt: skip
        library.ts_open.restype = _void
        self._workspace = _void(library.ts_open(ctypes.byref(self._model), threads))

    def close(self) -> None:
        """End the threads. No step may follow."""
        workspace, self._workspace = self._workspace, _void(None)
        if workspace:
            self._library.ts_close(workspace)

    def __del__(self) -> None:
        """End the threads with whoever held them."""
        self.close()

    @property
    def embedded(self) -> int:
        """Token ids that have an embedding."""
        return int(self._model.embedding.columns)

    def forward(
        self,
        token_ids: NDArray[np.int64],
        positions: NDArray[np.int64],
        slots: NDArray[np.int64],
        query_start: NDArray[np.int32],
        context: NDArray[np.int32],
        block_table: NDArray[np.int32],
        head_rows: NDArray[np.int64],
        logits: NDArray[np.float32],
    ) -> None:
        """Compute one step: write the KV of every row, and logits [head rows, vocabulary].

        token_ids, positions, slots: [rows]. query_start: [sequences + 1], first rows. context: [sequences], tokens
        after this step. block_table: [sequences, blocks]. All contiguous; every index must be in range.
        """
        if not len(token_ids):
            return
        step = StepStruct(
            len(token_ids), len(context), len(head_rows), token_ids.ctypes.data, positions.ctypes.data,
            slots.ctypes.data, query_start.ctypes.data, context.ctypes.data, block_table.ctypes.data,
            block_table.shape[1], head_rows.ctypes.data,
        )  # fmt: skip
        self._library.ts_forward(
            ctypes.byref(self._model), ctypes.byref(step), self._workspace, _void(logits.ctypes.data),
            _void(self.seconds.ctypes.data),
        )  # fmt: skip

    def rounded(self) -> Iterator[tuple[str, NDArray[np.float32]]]:
        """Names of the weights that packing has rounded, and the values that steps compute with [columns, depth].

        Those of one tensor that is packed in two parts come as one.
        """
        parts: dict[str, list[PackedWeight]] = {}
        for key, weight in self._packed.items():
            parts.setdefault(key.partition("[")[0], []).append(weight)
        for name, weights in parts.items():
            if name in self._rounded:
                yield name, np.concatenate([w.columns(self._library, 0, w.struct.columns) for w in weights])

    def _fill(self, layer: _Layer, names: LayerNames, tables: Mapping[str, tuple[int, int]]) -> None:
        for name in ("input_norm", "q_norm", "k_norm", "after_attention", "post_norm", "after_mlp"):
            setattr(layer, name, self._norm(getattr(names, name)))
        layer.qkv = self._linear(names.qkv)
        layer.o = self._linear((names.o,))
        if names.gate_up:
            half = self._tensors.rows(names.gate_up + ".weight").data.shape[0] // 2
            layer.gate, layer.up = (self._linear((names.gate_up,), slice(first, first + half)) for first in (0, half))
        else:
            if names.gate:
                layer.gate = self._linear((names.gate,))
            layer.up = self._linear((names.up,))
        layer.down = self._linear((names.down,))
        if names.rope:
            layer.cos, layer.sin = tables[names.rope]
        layer.window = names.window

    def _rope(self, frequencies: NDArray[np.float32], positions: int) -> tuple[int, int]:
        tables = [np.empty((positions, len(frequencies)), np.float32) for _ in range(2)]
        frequencies = np.ascontiguousarray(frequencies, np.float32)
        self._library.ts_rope_tables(
            _void(frequencies.ctypes.data), len(frequencies), positions, *(_void(t.ctypes.data) for t in tables)
        )
        cos, sin = (self._pointer(table) for table in tables)
        return cos, sin

    def _linear(self, names: Sequence[str], part: slice | None = None) -> _Linear:
        linear = _Linear(parts=len(names))
        for i, name in enumerate(names):
            weight = self._weight(name, part)
            linear.part[i] = weight.struct
            self.linear_bytes += weight.memory.nbytes
            self.linear_parameters += weight.struct.columns * weight.struct.depth
        biases = [self._tensors.vector(name + ".bias") for name in names]
        if any(bias is not None for bias in biases):
            columns = [linear.part[i].columns for i in range(len(names))]
            whole = [np.zeros(n, np.float32) if b is None else b for b, n in zip(biases, columns, strict=True)]
            bias = np.concatenate(whole)
            linear.bias = self._pointer(np.ascontiguousarray(bias if part is None else bias[part], np.float32))
        return linear

    def _weight(self, name: str, part: slice | None = None) -> PackedWeight:
        key = name if part is None else f"{name}[{part.start}]"
        if key not in self._packed:
            rows = self._tensors.rows(name + ".weight")
            if part is not None:
                rows = replace(rows, data=rows.data[part])
            weight_format, arithmetic = self._choice(rows)
            try:
                weight = PackedWeight.pack(self._library, rows, arithmetic, weight_format)
            except ValueError as error:
                raise type(error)(f"{name}.weight: {error}") from None
            self._packed[key] = weight
            if weight_format is not Format.FLOAT32 and (rows.kind, weight_format) not in _EXACT:
                self._rounded.add(name)
            self._keep.append(weight)
            self.weight_bytes += weight.memory.nbytes
            self.formats.add((weight_format, arithmetic))
        return self._packed[key]

    def _norm(self, name: str) -> _Norm:
        if not name:
            return _Norm(None, None)
        weight = self._tensors.vector(name + ".weight")
        if weight is None:
            raise UnsupportedError(f"the checkpoint has no tensor {name}.weight")
        shifted = np.ascontiguousarray(weight + np.float32(self.family.norm_offset), np.float32)
        self.norms[name] = shifted
        return _Norm(self._pointer(shifted), self._vector(name + ".bias", whole=True))

    def _vector(self, name: str, *, whole: bool = False) -> int | None:
        found = self._tensors.vector(name if whole else name + ".weight") if name else None
        return None if found is None else self._pointer(np.ascontiguousarray(found, np.float32))

    def _pointer(self, array: NDArray[Any]) -> int:
        self._keep.append(array)
        return int(array.ctypes.data)

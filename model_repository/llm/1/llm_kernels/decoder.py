"""Whole steps of decoder models on the CPU: what a family's layers are made of, and the kernels that compute them.

A family is described by the names of its tensors and some numbers of its configuration; the weights themselves come
from a `Tensors`, in whatever form the checkpoint has them. The module does not know how a checkpoint is read, nor
requests. The structures are those of `cpu/decoder.h`.
"""

from __future__ import annotations

import ctypes
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from .packed import Arithmetic, Format, PackedWeight, Rows, WeightStruct, aligned

PARTS = ("linears", "attention", "norms and rope", "head")
MAX_HEAD_DIM = 512  # as kMaxDim in attention.h
LANES = 16

_EXACT = {  # of GGUF's kinds of rows, with the format that holds their values: BF16, Q4_0, Q4_1, Q5_0, Q5_1
    (30, Format.BFLOAT16),
    *((2, Format.INT4), (3, Format.INT4), (6, Format.INT5), (7, Format.INT5)),
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


def refuse_sizes(family: Family) -> None:
    """Raise UnsupportedError for sizes that the kernels do not take."""
    if family.dim > MAX_HEAD_DIM:
        raise UnsupportedError(f"the native kernels take heads of at most {MAX_HEAD_DIM}, not {family.dim}")


def padded(dim: int) -> int:
    """Numbers of a head's values in the KV cache."""
    return -(-dim // LANES) * LANES


def _expect(name: str, found: tuple[int, ...], wanted: tuple[int, ...]) -> None:
    if tuple(found) != wanted:
        raise UnsupportedError(f"{name} is {list(found)}, and the native kernels expect {list(wanted)}")


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

    def is_transposed(self, name: str) -> bool:
        """Whether transformers holds the tensor `name` as [depth, columns]: of a weight that is no table of tokens."""
        return self.transposed and name not in (f"{self.embedding}.weight", f"{self.head}.weight")


Choice = Callable[[Rows], tuple[Format, Arithmetic]]
"""From rows to the format that they are packed in, and the arithmetic that multiplies them."""


class Decoder:
    """A model whose steps the kernels compute.

    `bfloat16_kv`: keys and values are kept in bfloat16, else float32. `slots` tokens of KV in blocks of `block_size`,
    best a multiple of 16. seconds: float64 [4], the time spent so far in each of PARTS. Raises UnsupportedError, and
    PackError naming a tensor.
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
        refuse_sizes(family)
        self._library = library
        self._keep: list[Any] = []  # whatever the structures point to
        self._tensors = tensors
        self._choice = choice
        self.family = family
        self.weight_bytes = 0  # of all weights
        self.linear_bytes = 0  # and numbers: of those that every step multiplies, the head's included
        self.linear_parameters = 0
        self.formats: set[tuple[Format, Arithmetic]] = set()
        self.seconds = np.zeros(len(PARTS))
        self.norms: dict[str, NDArray[np.float32]] = {}  # what each norm multiplies by, by name
        self._packed: dict[str, PackedWeight] = {}
        self._rounded: set[str] = set()
        self._inner = 0  # width between up and down
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
        _expect(f"{family.embedding}.weight", (embedding.struct.depth,), (family.hidden,))
        self.vocabulary = self._weight(family.head).struct.columns  # logits of a row
        head = self._linear((family.head,), self.vocabulary, family.hidden)
        rotary = 2 * max((len(f) for f in family.ropes.values()), default=0)
        if rotary > family.dim or any(2 * len(f) != rotary for f in family.ropes.values()):
            raise UnsupportedError(f"the native kernels rotate one number of at most {family.dim} dimensions")
        self._model = _Model(
            ctypes.cast(layers, ctypes.POINTER(_Layer)), len(layers), family.hidden, family.heads, family.kv_heads,
            family.dim, rotary, block_size, int(family.layer_norm), ("silu", "gelu_tanh").index(family.activation),
            int(bfloat16_kv), family.eps, family.scale, family.softcap, family.final_softcap, family.embedding_scale,
            embedding.struct, self._position_table(positions), self._norm(family.norm, family.hidden), head,
        )  # fmt: skip
        library.ts_open.restype = _void
        self._workspace = _void(library.ts_open(ctypes.byref(self._model), threads))
        weakref.finalize(self, library.ts_close, self._workspace)  # its threads end with whoever held them

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
        f = self.family
        attended = f.heads * f.dim
        for name in ("input_norm", "after_attention", "post_norm", "after_mlp"):
            setattr(layer, name, self._norm(getattr(names, name), f.hidden))
        for name in ("q_norm", "k_norm"):
            setattr(layer, name, self._norm(getattr(names, name), f.dim))
        layer.qkv = self._linear(names.qkv, attended + 2 * f.kv_heads * f.dim, f.hidden)
        layer.o = self._linear((names.o,), f.hidden, attended)
        inner = self._tensors.rows(names.down + ".weight").depth
        if self._inner not in (0, inner):
            raise UnsupportedError(f"the native kernels take layers of one width, and {names.down} takes {inner}")
        self._inner = inner
        if names.gate_up:
            layer.gate, layer.up = (
                self._linear((names.gate_up,), inner, f.hidden, slice(first, first + inner)) for first in (0, inner)
            )
        else:
            if names.gate:
                layer.gate = self._linear((names.gate,), inner, f.hidden)
            layer.up = self._linear((names.up,), inner, f.hidden)
        layer.down = self._linear((names.down,), f.hidden, inner)
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

    def _linear(self, names: Sequence[str], columns: int, depth: int, part: slice | None = None) -> _Linear:
        linear = _Linear(parts=len(names))
        for i, name in enumerate(names):
            weight = self._weight(name, part)
            linear.part[i] = weight.struct
            numbers = weight.struct.columns * weight.struct.depth
            self.linear_bytes += int(numbers * weight.format.bits / 8)
            self.linear_parameters += numbers
        found = [linear.part[i].columns for i in range(len(names))]
        for name, weight in zip(names, linear.part, strict=False):
            _expect(f"{name}.weight", (sum(found), weight.depth), (columns, depth))
        biases = [self._tensors.vector(name + ".bias") for name in names]
        if any(bias is not None for bias in biases):
            whole = [np.zeros(n, np.float32) if b is None else b for b, n in zip(biases, found, strict=True)]
            bias = np.concatenate(whole)
            bias = np.ascontiguousarray(bias if part is None else bias[part], np.float32)
            _expect(f"{names[0]}.bias", bias.shape, (columns,))
            linear.bias = self._pointer(bias)
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

    def _norm(self, name: str, width: int) -> _Norm:
        if not name:
            return _Norm(None, None)
        weight = self._vector(name + ".weight", (width,))
        if weight is None:
            raise UnsupportedError(f"the checkpoint has no tensor {name}.weight")
        self.norms[name] = weight
        weight += np.float32(self.family.norm_offset)
        bias = self._vector(name + ".bias", (width,))
        return _Norm(weight.ctypes.data, None if bias is None else bias.ctypes.data)

    def _vector(self, name: str, shape: tuple[int, ...]) -> NDArray[np.float32] | None:
        """A copy that lives as long as the decoder; None if there is no such tensor."""
        found = self._tensors.vector(name)
        if found is None:
            return None
        _expect(name, found.shape, shape)
        copied = np.array(found, np.float32, order="C")
        self._keep.append(copied)
        return copied

    def _position_table(self, positions: int) -> int | None:
        """Learned positions, if the family has them."""
        name = self.family.positions + ".weight"
        if not self.family.positions:
            return None
        found = self._tensors.vector(name)
        rows = 0 if found is None else len(found)
        if rows < positions:
            raise UnsupportedError(f"{name} has {rows} positions, and {positions} are asked for")
        table = self._vector(name, (rows, self.family.hidden))
        return None if table is None else int(table.ctypes.data)

    def _pointer(self, array: NDArray[Any]) -> int:
        self._keep.append(array)
        return int(array.ctypes.data)

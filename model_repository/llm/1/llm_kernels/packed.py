"""Weights packed for the CPU kernels, in their own format. It knows neither models nor how a product is computed.

The structures are those of `cpu/weights.h`.
"""

from __future__ import annotations

import ctypes
import enum
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

_ALIGNMENT = 2 << 20  # of a huge page
_F32, _BF16 = 0, 30
KINDS = frozenset([_F32, 1, 2, 3, 6, 7, 8, 12, 13, 14, _BF16])
"""What the kernels read, by GGUF's numbers: F32, F16, Q4_0, Q4_1, Q5_0, Q5_1, Q8_0, Q4_K, Q5_K, Q6_K, BF16."""


class Format(enum.IntEnum):
    """How a weight lies in memory; `bits` per weight include scales and minima."""

    FLOAT32 = 0
    BFLOAT16 = 1
    INT8 = 2
    INT4 = 3
    INT5 = 4

    @property
    def bits(self) -> float:
        """Bits per weight."""
        return (32.0, 16.0, 8.5, 5.0, 6.0)[self]


class Arithmetic(enum.IntEnum):
    """How products are summed; see `cpu/gemm.h`."""

    FMA32 = 0
    Q8DOT = 1
    DPBF16 = 2


class PackError(ValueError):
    """A weight holds what cannot be packed."""


class WeightStruct(ctypes.Structure):
    """`Weight` of weights.h."""

    _fields_ = (
        ("data", ctypes.c_void_p),
        ("format", ctypes.c_int32),
        ("arithmetic", ctypes.c_int32),
        ("columns", ctypes.c_int32),
        ("depth", ctypes.c_int32),
    )


@dataclass(frozen=True, slots=True)
class Rows:
    """Rows of a checkpoint's weight: uint8 [columns, bytes of a row], of a kind by GGUF's number; `depth` values each.

    `unpacked`: the checkpoint has them in blocks that the kernels do not read, and these are their values.
    """

    kind: int
    depth: int
    data: NDArray[np.uint8]
    unpacked: bool = False

    @classmethod
    def of(cls, values: NDArray[Any], *, unpacked: bool = False) -> Rows:
        """Of float32 [columns, depth], or of uint16 that are the bits of bfloat16."""
        kind = {np.dtype(np.float32): _F32, np.dtype(np.uint16): _BF16}[values.dtype]
        return cls(kind, values.shape[1], np.ascontiguousarray(values).view(np.uint8), unpacked)


@dataclass(slots=True)
class PackedWeight:
    """One weight in panels. `struct` is what the kernels read; `memory` must live as long."""

    struct: WeightStruct
    memory: NDArray[np.uint8] = field(repr=False)

    @property
    def format(self) -> Format:
        """The format of its panels."""
        return Format(self.struct.format)

    @classmethod
    def pack(cls, library: Any, rows: Rows, arithmetic: Arithmetic, weight_format: Format) -> PackedWeight:
        """Pack rows. Raises PackError for what is not finite."""
        struct = WeightStruct(None, weight_format, arithmetic, rows.data.shape[0], rows.depth)
        memory = aligned(packed_bytes(library, struct))
        struct.data = memory.ctypes.data
        data = rows.data if rows.data.flags.c_contiguous else np.ascontiguousarray(rows.data)
        sound = library.ts_pack(
            ctypes.byref(struct), ctypes.c_void_p(memory.ctypes.data), 0, rows.data.shape[0], rows.kind,
            ctypes.c_void_p(data.ctypes.data), ctypes.c_size_t(data.strides[0]),
        )  # fmt: skip
        if not sound:
            raise PackError("it holds NaN or infinity, or numbers too large for its format")
        return cls(struct, memory)

    def columns(self, library: Any, first: int, count: int) -> NDArray[np.float32]:
        """Columns of the weight (its rows in the checkpoint) as float32 [count, depth]."""
        out = np.empty((count, self.struct.depth), np.float32)
        library.ts_read_columns(ctypes.byref(self.struct), first, count, ctypes.c_void_p(out.ctypes.data))
        return out


def own_format(library: Any, rows: Rows) -> Format:
    """The format that takes rows as they are, or with the least loss."""
    return Format.INT8 if rows.unpacked else Format(library.ts_own_format(rows.kind))


def packed_bytes(library: Any, struct: WeightStruct) -> int:
    """Bytes that the panels of a weight take."""
    library.ts_weight_bytes.restype = ctypes.c_size_t
    return int(library.ts_weight_bytes(ctypes.byref(struct)))


def aligned(size: int) -> NDArray[np.uint8]:
    """Zeros that begin on a huge page; pages that nobody writes take no memory."""
    raw = np.zeros(size + _ALIGNMENT, np.uint8)
    start = -raw.ctypes.data % _ALIGNMENT
    return raw[start : start + size]


def linear(library: Any, weight: PackedWeight, x: NDArray[np.float32], threads: int) -> NDArray[np.float32]:
    """The product of float32 x [rows, depth] and a packed weight: float32 [rows, columns]."""
    x = np.ascontiguousarray(x, np.float32)
    y = np.empty((x.shape[0], weight.struct.columns), np.float32)
    library.ts_linear(
        ctypes.byref(weight.struct), ctypes.c_void_p(x.ctypes.data), x.shape[0], ctypes.c_void_p(y.ctypes.data), threads
    )
    return y

"""How numbers lie in weights files: the kinds of plain numbers and of GGUF's blocks, and their values in float32.

A tensor is handed out as rows of bytes. It does not know files, and imports the `gguf` package only to unpack blocks.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from llm_engine.config import ConfigError

Bytes = npt.NDArray[np.uint8]
Floats = npt.NDArray[np.float32]

_EXPONENT = 0x7C00  # all bits of a float16's exponent: set in infinities and NaN alone


@dataclass(frozen=True, slots=True)
class Kind:
    """`values` numbers lie in `size` bytes. `number` is ggml's, None where GGUF has no such kind.

    `scales`: where in a block its float16 scales and minima begin, in bytes; empty for plain numbers.
    """

    name: str
    number: int | None
    values: int
    size: int
    scales: tuple[int, ...] = ()

    def row_bytes(self, depth: int) -> int:
        """Bytes of a row of `depth` values, a multiple of the block's."""
        return depth // self.values * self.size


KINDS = {
    kind.name: kind
    for kind in (
        Kind("F64", 28, 1, 8),
        Kind("F32", 0, 1, 4),
        Kind("F16", 1, 1, 2),
        Kind("BF16", 30, 1, 2),
        Kind("Q4_0", 2, 32, 18, (0,)),
        Kind("Q4_1", 3, 32, 20, (0, 2)),
        Kind("Q5_0", 6, 32, 22, (0,)),
        Kind("Q5_1", 7, 32, 24, (0, 2)),
        Kind("Q8_0", 8, 32, 34, (0,)),
        Kind("Q2_K", 10, 256, 84, (80, 82)),
        Kind("Q3_K", 11, 256, 110, (108,)),
        Kind("Q4_K", 12, 256, 144, (0, 2)),
        Kind("Q5_K", 13, 256, 176, (0, 2)),
        Kind("Q6_K", 14, 256, 210, (208,)),
        Kind("IQ2_XXS", 16, 256, 66, (0,)),
        Kind("IQ2_XS", 17, 256, 74, (0,)),
        Kind("IQ3_XXS", 18, 256, 98, (0,)),
        Kind("IQ1_S", 19, 256, 50, (0,)),
        Kind("IQ4_NL", 20, 32, 18, (0,)),
        Kind("IQ3_S", 21, 256, 110, (0,)),
        Kind("IQ2_S", 22, 256, 82, (0,)),
        Kind("IQ4_XS", 23, 256, 136, (0,)),
        Kind("TQ1_0", 34, 256, 54, (52,)),
        Kind("TQ2_0", 35, 256, 66, (64,)),
    )
}
BY_NUMBER = {kind.number: kind for kind in KINDS.values()}


@dataclass(frozen=True, slots=True)
class RawMatrix:
    """A tensor as it is stored: `data`, uint8 [rows, bytes of a row], each row `depth` values of `kind`.

    A vector is one row; a tensor of more than two dimensions has its last as depth. `transposed`: the tensor is the
    transpose of what these rows hold. `data` may be read-only, a view of the mapped file, and aligned to nothing.
    """

    kind: Kind
    rows: int
    depth: int
    data: Bytes
    transposed: bool = False


def refuse_broken_scales(where: str, name: str, kind: Kind, data: Bytes) -> None:
    """Raise ConfigError if a block of tensor `name` has a scale or minimum that is infinite or NaN."""
    blocks = data.reshape(-1, kind.size)
    for at in kind.scales:
        bits = blocks[:, at : at + 2].view(np.uint16)
        if bool(((bits & _EXPONENT) == _EXPONENT).any()):
            raise ConfigError(f"{where} has a scale that is not finite in tensor {name!r}; fetch it again")


def widened(matrix: RawMatrix) -> Floats:
    """Every value in float32, [rows, depth]: exact, but for F64. F32 is a view, which may be read-only."""
    data, kind = matrix.data, matrix.kind
    found: Any
    match kind.name:
        case "F32":
            found = data.view(np.float32)
        case "F16":
            found = data.view(np.float16).astype(np.float32)
        case "F64":
            found = data.view(np.float64).astype(np.float32)
        case "BF16":
            found = (data.view(np.uint16).astype(np.uint32) << 16).view(np.float32)
        case _:
            from gguf.quants import GGMLQuantizationType, dequantize

            found = dequantize(data, GGMLQuantizationType(kind.number))
    return np.asarray(found, np.float32).reshape(matrix.rows, matrix.depth)

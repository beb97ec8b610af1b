"""Where a model's tensors come from: GGUF files or safetensors, mapped and handed out as they are stored.

Names and shapes are transformers'. What llama.cpp's conversion changed is undone: an order of rows, a 1 that was added.
Tied weights that the files lack are absent. It imports neither torch nor transformers.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from llm_engine.config import ConfigError

from .folder import CONFIG, Stored, read_json
from .folder import tensors as stored_tensors
from .gguf_header import GgufHeader, GgufTensor
from .storage import BY_NUMBER, KINDS, Bytes, Floats, Kind, RawMatrix, refuse_broken_scales, widened

# The part of a model's name that old checkpoints leave out, by model_type: for those whose steps may be native.
_PREFIXES = {
    **dict.fromkeys(("llama", "mistral", "qwen2", "qwen3", "gemma2", "gemma3_text", "phi3", "smollm3"), "model."),
    "gpt2": "transformer.",
}


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """How a tensor is stored, and its shape in transformers' order: [rows, depth] of a linear's weight."""

    kind: Kind
    shape: tuple[int, ...]


class TensorSource(Protocol):
    """The tensors of one model by transformers' names."""

    @property
    def files(self) -> Sequence[Path]:
        """What holds every byte of them."""

    def tensors(self) -> Mapping[str, TensorInfo]:
        """All tensors of numbers; those of a tied weight's other names are absent, if the files lack them."""

    def rows(self, name: str) -> RawMatrix:
        """A tensor's bytes, a view of the file where possible. ConfigError if a block's scale is not finite."""

    def float32(self, name: str) -> Floats:
        """A tensor's values in its shape, which may be a read-only view. ConfigError if a scale is not finite."""


@dataclass(frozen=True, slots=True)
class Place:
    """The tensor of a GGUF file that holds a tensor of the model, and what is to be undone.

    `heads`: rows of this many heads stand in llama.cpp's order for rotation, 0 if they do not. `raised`: the file has
    1 more than the model. `transposed`: the file has the model's columns as rows.
    """

    stored: str
    heads: int = 0
    raised: bool = False
    transposed: bool = False


class GgufSource:
    """The tensors of a GGUF file in one part or several."""

    def __init__(self, headers: Sequence[GgufHeader], places: Mapping[str, Place]) -> None:
        """Map the files. `places` holds the model's tensors by name; every one is in the files."""
        self._where = f"model file {headers[0].name}"
        self.files: Sequence[Path] = [header.file for header in headers]
        self._places = places
        maps = {header.file: np.asarray(np.memmap(header.file, np.uint8, "r")) for header in headers}
        found = {tensor.name: (header, tensor) for header in headers for tensor in header.tensors}
        self._tensors: dict[str, tuple[GgufTensor, Bytes]] = {}
        for name, place in places.items():
            header, tensor = found[place.stored]
            kind = BY_NUMBER[tensor.kind]
            start = header.data_start + tensor.offset
            data = maps[header.file][start : start + tensor.values // kind.values * kind.size]
            self._tensors[name] = tensor, data

    def tensors(self) -> Mapping[str, TensorInfo]:
        """All tensors; what is computed from the file's is in float32."""
        return {name: self._info(name) for name in self._places}

    def _info(self, name: str) -> TensorInfo:
        tensor, _ = self._tensors[name]
        shape = tensor.shape[::-1] if self._places[name].transposed else tensor.shape
        return TensorInfo(KINDS["F32"] if self._is_computed(name) else BY_NUMBER[tensor.kind], shape)

    def rows(self, name: str) -> RawMatrix:
        """A view of the file; a copy where rows are put into another order, or values are computed."""
        if self._is_computed(name):
            values = self.float32(name).reshape(1, -1)
            return RawMatrix(KINDS["F32"], 1, values.shape[1], values.view(np.uint8))
        place, matrix = self._places[name], self._stored(name)
        if place.heads:
            return replace(matrix, data=matrix.data[_order(matrix.rows, place.heads)])
        return matrix

    def float32(self, name: str) -> Floats:
        """Values as the `gguf` package unpacks them."""
        place, (tensor, _) = self._places[name], self._tensors[name]
        values = widened(self._stored(name)).reshape(tensor.shape)
        if place.heads:
            values = values[_order(len(values), place.heads)]
        if place.raised:
            values = values - np.float32(1)
        return values.T if place.transposed else values

    def _is_computed(self, name: str) -> bool:
        """Whether other values are handed out than the file holds, or single values in another order."""
        place, (tensor, _) = self._places[name], self._tensors[name]
        return place.raised or (place.heads > 0 and len(tensor.shape) == 1)

    def _stored(self, name: str) -> RawMatrix:
        """The rows as the file has them."""
        tensor, data = self._tensors[name]
        kind = BY_NUMBER[tensor.kind]
        refuse_broken_scales(self._where, tensor.name, kind, data)
        return _matrix(kind, tensor.shape, data, transposed=self._places[name].transposed)


class SafetensorsSource:
    """The tensors of a folder of safetensors.

    `is_canonical`: the names are those of transformers' model; else those of the files, which transformers may change.
    """

    def __init__(self, folder: Path) -> None:
        """Map the files. ConfigError unless each tensor's bytes are its own and as many as its shape needs."""
        prefix = _PREFIXES.get(str(read_json(folder / CONFIG).get("model_type")), "")
        self.is_canonical = bool(prefix)
        self.files: Sequence[Path] = sorted({entry.file for entry in stored_tensors(folder).values()})
        stored = {name: entry for name, entry in stored_tensors(folder).items() if entry.dtype in KINDS}
        _check_places(stored)
        maps = {file: np.asarray(np.memmap(file, np.uint8, "r")) for file in {entry.file for entry in stored.values()}}
        self._tensors: dict[str, tuple[TensorInfo, Bytes]] = {}
        for name, entry in stored.items():
            whole = name if name.startswith((prefix, "lm_head.")) else prefix + name
            if whole in self._tensors:
                raise ConfigError(f"{entry.file} holds tensor {whole!r} twice, once without {prefix!r}; fetch it again")
            info = TensorInfo(KINDS[entry.dtype], entry.shape)
            self._tensors[whole] = info, maps[entry.file][entry.begin : entry.end]

    def tensors(self) -> Mapping[str, TensorInfo]:
        """All tensors of floating-point numbers. Masks and counters, which old checkpoints hold, are left out."""
        return {name: info for name, (info, _) in self._tensors.items()}

    def rows(self, name: str) -> RawMatrix:
        """A view of the file."""
        info, data = self._tensors[name]
        return _matrix(info.kind, info.shape, data)

    def float32(self, name: str) -> Floats:
        """Values, exact but for those of float64."""
        return widened(self.rows(name)).reshape(self._tensors[name][0].shape)


def _matrix(kind: Kind, shape: tuple[int, ...], data: Bytes, *, transposed: bool = False) -> RawMatrix:
    depth = shape[-1] if shape else 1
    rows = math.prod(shape[:-1])
    return RawMatrix(kind, rows, depth, data.reshape(rows, kind.row_bytes(depth)), transposed)


def _order(rows: int, heads: int) -> np.ndarray[Any, np.dtype[np.int64]]:
    """For each row of the model, the file's: there the two halves of a head alternate."""
    return np.arange(rows).reshape(heads, -1, 2).swapaxes(1, 2).reshape(rows)


def _check_places(stored: Mapping[str, Stored]) -> None:
    end, file = 0, Path()
    for name, entry in sorted(stored.items(), key=lambda item: (item[1].file, item[1].begin)):
        if entry.file != file:
            end, file = 0, entry.file
        size = KINDS[entry.dtype].size * math.prod(entry.shape)
        if entry.begin < end or entry.end - entry.begin != size:
            raise ConfigError(
                f"weights file {entry.file} is damaged: {name!r} has {entry.end - entry.begin} bytes of {size}, "
                f"or bytes of another tensor; fetch it again"
            )
        end = entry.end

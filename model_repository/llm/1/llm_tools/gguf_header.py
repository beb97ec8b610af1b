"""The header of a GGUF file: its metadata and where its tensors lie, read in a fraction of a second.

Format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md, versions 2 and 3, little endian. It does not know
what the metadata mean.
"""

from __future__ import annotations

import math
import mmap
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from llm_engine.config import ConfigError

from .storage import BY_NUMBER

T = TypeVar("T", str, int, float, bool)

MAGIC = b"GGUF"
_LENGTH = struct.Struct("<Q")
_FORMATS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_STRING, _ARRAY = 8, 9
_MAX_ALIGNMENT = 1 << 20
_SAID = {str: "a string", int: "an integer", float: "a finite number", bool: "true or false"}
_QUOTE = 60  # characters of a value in a message


@dataclass(frozen=True, slots=True)
class GgufTensor:
    """One tensor. `kind` is ggml's number of its type; `offset` counts bytes from the start of the data."""

    name: str
    shape: tuple[int, ...]
    kind: int
    offset: int

    @property
    def values(self) -> int:
        """How many values it holds."""
        return math.prod(self.shape)


@dataclass(frozen=True, slots=True)
class GgufHeader:
    """`entries` holds each metadata key with its bytes as they stand in the file, key and type included.

    `data_start` is where the tensors' data begin, in bytes from the start of the file, and `alignment` theirs. `name`
    is the file that messages speak of: that of the user, where `file` is a copy.
    """

    file: Path
    name: Path
    version: int
    metadata: dict[str, Any]
    entries: tuple[tuple[str, bytes], ...]
    tensors: tuple[GgufTensor, ...]
    data_start: int
    alignment: int

    def stated(self, key: str, kind: type[T]) -> T | None:
        """What the file states under `key`, None if nothing. ConfigError if it is not of this kind."""
        try:
            return stated(self.metadata, key, kind)
        except ConfigError as error:
            raise ConfigError(f"model file {self.name} is not sound: {error}; fetch another") from None

    @property
    def architecture(self) -> str:
        """The architecture's name, with which its keys begin."""
        return self.stated("general.architecture", str) or ""

    def floats(self, tensor: GgufTensor) -> list[float]:
        """The values of a small float32 tensor."""
        with self.file.open("rb") as f:
            f.seek(self.data_start + tensor.offset)
            return list(struct.unpack(f"<{tensor.values}f", f.read(4 * tensor.values)))


def stated(metadata: Mapping[str, Any], key: str, kind: type[T]) -> T | None:
    """The value of `key`, None if it is absent. ConfigError if it is not of this kind; an integer is a number, too."""
    if key not in metadata:
        return None
    return _typed(key, metadata[key], kind)


def stated_list(metadata: Mapping[str, Any], key: str, kind: type[T]) -> list[T]:
    """The values of `key`, none if it is absent. ConfigError if it is no list of this kind."""
    values = metadata.get(key, [])
    if not isinstance(values, list):
        raise ConfigError(f"{key} must be a list, not {_quoted(values)}")
    return [_typed(key, value, kind) for value in values]


def _typed(key: str, value: Any, kind: type[T]) -> T:
    fits = type(value) is kind or (kind is float and type(value) is int)
    if not fits or (isinstance(value, float) and not math.isfinite(value)):
        raise ConfigError(f"{key} must be {_SAID[kind]}, not {_quoted(value)}")
    return kind(value)


def _quoted(value: Any) -> str:
    text = repr(value[:_QUOTE] if isinstance(value, str | list) else value)
    return text if len(text) <= _QUOTE else f"{text[:_QUOTE]}..."


def read_header(file: Path, name: Path | None = None) -> GgufHeader:
    """Read the header of `file`, which messages call `name`.

    ConfigError if it is no GGUF file, or is cut, damaged or of an unknown version.
    """
    try:
        with file.open("rb") as f, mmap.mmap(f.fileno(), 0, access=mmap.ACCESS_READ) as content:
            header = _Reader(content).header(file, name or file)
    except (struct.error, ValueError, KeyError, IndexError, MemoryError, OverflowError, RecursionError) as error:
        raise ConfigError(
            f"model file {file} is truncated, damaged or no GGUF file ({error}); fetch it again"
        ) from None
    _check_places(file, header)
    return header


def _check_places(file: Path, header: GgufHeader) -> None:
    """Raise ConfigError unless every tensor has a name of its own, and bytes of its own within the file."""
    end, before, names = 0, "", set[str]()
    for tensor in sorted(header.tensors, key=lambda tensor: tensor.offset):
        if tensor.name in names:
            raise ConfigError(f"model file {file} holds tensor {tensor.name!r} twice; fetch it again")
        if tensor.offset < end:
            raise ConfigError(
                f"model file {file} is damaged: tensors {before!r} and {tensor.name!r} overlap; fetch it again"
            )
        end, before = tensor.offset + _size(file, tensor), tensor.name
        names.add(before)
    if (size := file.stat().st_size) < header.data_start + end and names:
        raise ConfigError(f"model file {file} is truncated: {size} bytes of {header.data_start + end}; fetch it again")


def _size(file: Path, tensor: GgufTensor) -> int:
    """Bytes of a tensor, each row of which begins a block."""
    values, size = _block(file, tensor)
    if (depth := tensor.shape[-1] if tensor.shape else 1) % values:
        raise ConfigError(
            f"model file {file} holds {tensor.name!r} in rows of {depth} values, which blocks of {values} cannot hold; "
            f"fetch it again"
        )
    return tensor.values // values * size


def _block(file: Path, tensor: GgufTensor) -> tuple[int, int]:
    """How many values a block of the tensor's type holds, in how many bytes."""
    if kind := BY_NUMBER.get(tensor.kind):
        return kind.values, kind.size
    from gguf import GGML_QUANT_SIZES

    found = next((sizes for kind, sizes in GGML_QUANT_SIZES.items() if kind == tensor.kind), None)
    if found is None:
        raise ConfigError(f"model file {file} holds {tensor.name!r} in an unknown type ({tensor.kind}); choose another")
    return int(found[0]), int(found[1])


class _Reader:
    """Reads forward through the bytes of a file."""

    def __init__(self, content: mmap.mmap) -> None:
        self._content = content
        self._at = 0

    def header(self, file: Path, name: Path) -> GgufHeader:
        if self._content[:4] != MAGIC:
            raise ValueError("it does not begin with GGUF")
        self._at = 4
        version, tensor_count, entry_count = self._take("IQQ")
        if version not in (2, 3):
            raise ValueError(f"version {version}")
        metadata: dict[str, Any] = {}
        entries = []
        for _ in range(entry_count):
            start = self._at
            key = self._string()
            if key in metadata:
                raise ValueError(f"it states {key} twice")
            metadata[key] = self._value(*self._take("I"))
            entries.append((key, self._content[start : self._at]))
        tensors = tuple(self._tensor() for _ in range(tensor_count))
        alignment = stated(metadata, "general.alignment", int)
        alignment = 32 if alignment is None else alignment
        if not 0 < alignment <= _MAX_ALIGNMENT:
            raise ValueError(f"general.alignment is {alignment}")
        data_start = -(-self._at // alignment) * alignment
        return GgufHeader(file, name, version, metadata, tuple(entries), tensors, data_start, alignment)

    def _tensor(self) -> GgufTensor:
        name = self._string()
        (dimensions,) = self._take("I")
        shape = self._take(f"{dimensions}Q")
        kind, offset = self._take("IQ")
        return GgufTensor(name, tuple(reversed(shape)), kind, offset)

    def _value(self, kind: int) -> Any:
        if kind == _STRING:
            return self._string()
        if kind != _ARRAY:
            return self._take(_FORMATS[kind])[0]
        element, count = self._take("IQ")
        if element == _STRING:
            return self._strings(count)
        if element == _ARRAY:
            return [self._value(_ARRAY) for _ in range(count)]
        return list(self._take(f"{count}{_FORMATS[element]}"))

    def _strings(self, count: int) -> list[str]:
        """Vocabularies have half a million strings and more, so this loop calls nothing that it need not."""
        content, at, found = self._content, self._at, []
        for _ in range(count):
            (length,) = _LENGTH.unpack_from(content, at)
            start, at = at + 8, at + 8 + length
            found.append(content[start:at].decode())
        if at > len(content):
            raise ValueError("it ends within a name")
        self._at = at
        return found

    def _string(self) -> str:
        (length,) = self._take("Q")
        start, self._at = self._at, self._at + length
        if self._at > len(self._content):
            raise ValueError("it ends within a name")
        return self._content[start : self._at].decode()

    def _take(self, form: str) -> tuple[Any, ...]:
        found = struct.unpack_from("<" + form, self._content, self._at)
        self._at += struct.calcsize("<" + form)
        return found

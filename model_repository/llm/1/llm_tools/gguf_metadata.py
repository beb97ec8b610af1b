"""Reads the metadata of a GGUF file: keys and values, no tensors. It does not know what a key means."""

from __future__ import annotations

import mmap
import struct
from pathlib import Path
from typing import Any

from llm_engine.config import ConfigError

_MAGIC = b"GGUF"
_VERSIONS = (2, 3)  # the first counted in 32 bits
_STRING, _ARRAY = 8, 9
_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}


class _Reader:
    """Little-endian values one behind the other. Raises struct.error or ValueError at the end of the file."""

    def __init__(self, data: mmap.mmap) -> None:
        self._data = data
        self._at = 0

    def numbers(self, form: str, count: int = 1) -> tuple[Any, ...]:
        """Return `count` numbers of one struct format character."""
        values = struct.unpack_from(f"<{count}{form}", self._data, self._at)
        self._at += count * struct.calcsize(f"<{form}")
        return values

    def string(self) -> str:
        """Return a string in UTF-8 behind its length in bytes."""
        (length,) = self.numbers("Q")
        begin, self._at = self._at, self._at + length
        if self._at > len(self._data):
            raise ValueError("a string goes beyond the end of the file")
        return self._data[begin : self._at].decode()

    def value(self, kind: int) -> Any:
        """Return a number, a string, or a list of either."""
        if kind == _STRING:
            return self.string()
        if kind == _ARRAY:
            kind, count = (self.numbers("I")[0], self.numbers("Q")[0])
            return list(self.numbers(_SCALARS[kind], count)) if kind in _SCALARS else self._list(kind, count)
        return self.numbers(_SCALARS[kind])[0]

    def _list(self, kind: int, count: int) -> list[Any]:
        return [self.value(kind) for _ in range(count)]


def read(file: Path) -> dict[str, Any]:
    """Return all keys of `file` with their values. Raises ConfigError if it is cut, damaged or no GGUF file."""
    try:
        with file.open("rb") as f, mmap.mmap(f.fileno(), 0, access=mmap.ACCESS_READ) as data:
            reader = _Reader(data)
            if data[:4] != _MAGIC:
                raise ConfigError(f"model file {file} does not begin with {_MAGIC.decode()}; fetch it again")
            _, version, _, count = *reader.numbers("I", 2), *reader.numbers("Q", 2)
            if version not in _VERSIONS:
                raise ConfigError(f"model file {file} is GGUF version {version}; supported are {_VERSIONS}")
            return {reader.string(): reader.value(reader.numbers("I")[0]) for _ in range(count)}
    except (ValueError, KeyError, struct.error, OverflowError, MemoryError) as error:
        if isinstance(error, ConfigError):
            raise
        raise ConfigError(f"the metadata of model file {file} are cut or damaged ({error}); fetch it again") from None

"""The CPU kernels as shared objects, one for each level of CPUs: found ready, or compiled once and kept.

Looked for in this order: objects that came with the sources (`python -m llm_kernels.objects FOLDER` makes them, for a
wheel or an image), the cache, the compiler. A file's name says what it was made of and with, and its end whether it is
whole. It does not import torch, and does not know what the kernels compute.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import hashlib
import os
import platform
import sys
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from .compilers import FLAGS, Compiler
from .compiling import NativeUnavailableError, is_whole, make_once
from .cpu_level import CpuLevelError, Level, choose_level, levels

SOURCES = Path(__file__).parent / "cpu"
PREBUILT = Path(__file__).parent / "objects"
_MAIN = "api.cpp"


def source_digest(sources: Path = SOURCES) -> str:
    """What decides the bits of results: the sources, and the flags that all levels and compilers share."""
    digest = hashlib.blake2b("\0".join(FLAGS).encode(), digest_size=8)
    for source in sorted(file for file in sources.glob("*") if file.suffix in (".h", ".cpp")):
        digest.update(b"\0" + source.name.encode() + b"\0" + source.read_bytes())
    return digest.hexdigest()


@dataclass(frozen=True, slots=True)
class Objects:
    """Objects of the kernels in `sources`: those that came with them, in `prebuilt`, and those compiled, in `cache`.

    `cache` is the folder of all that is made once and kept.
    """

    cache: Path
    sources: Path = SOURCES
    prebuilt: Path = PREBUILT

    def load(self, level: Level, environ: Mapping[str, str] = os.environ) -> ctypes.CDLL:
        """Load the object of `level`, which this CPU must run; compiled if there is none. NativeUnavailableError."""
        for file in self._whole(self.prebuilt, level):
            with contextlib.suppress(OSError):  # linked against a newer C library than this machine's
                return ctypes.CDLL(str(file))
        file = self.build(level, environ)
        try:
            return ctypes.CDLL(str(file))
        except OSError as error:
            raise NativeUnavailableError(f"{file} cannot be loaded ({error}); delete it") from None

    def build(self, level: Level, environ: Mapping[str, str] = os.environ) -> Path:
        """Return the object of `level` in the cache, compiled unless it is there; the prebuilt ones do not count.

        Where no compiler is found, or it fails, what another one made of the same sources will do. Raises
        NativeUnavailableError.
        """
        folder = self.cache / "native"
        try:
            return self.build_in(folder, level, Compiler.found(environ))
        except NativeUnavailableError:
            if kept := next(self._whole(folder, level), None):
                return kept
            raise

    def build_in(self, folder: Path, level: Level, compiler: Compiler) -> Path:
        """Return the object of `level` that `compiler` makes in `folder`, or made. Raises NativeUnavailableError."""
        target = self._target(folder, level, compiler)
        make_once(target, lambda made: compiler.build(self.sources / _MAIN, made, level, self.cache))
        return target

    def is_ready(self, level: Level, environ: Mapping[str, str] = os.environ) -> bool:
        """Whether `load` compiles nothing: an object is there, or no compiler."""
        if next(self._whole(self.prebuilt, level), None):
            return True
        try:
            return is_whole(self._target(self.cache / "native", level, Compiler.found(environ)))
        except NativeUnavailableError:
            return True

    def _target(self, folder: Path, level: Level, compiler: Compiler) -> Path:
        made_with = "\0".join((*compiler.command[1:], compiler.version, *level.options))
        digest = hashlib.blake2b(made_with.encode(), digest_size=6).hexdigest()
        return folder / f"{self._prefix(level)}{digest}.so"

    def _prefix(self, level: Level) -> str:
        return f"tokenstream-{level.machine}-{level.name}-{source_digest(self.sources)}-"

    def _whole(self, folder: Path, level: Level) -> Iterator[Path]:
        """Objects in `folder` that were made for `level` of these very sources, and are whole."""
        return filter(is_whole, sorted(folder.glob(f"{self._prefix(level)}*.so")))


def load_object(cache: Path, environ: Mapping[str, str] = os.environ) -> tuple[ctypes.CDLL, Level]:
    """Load the kernels for this CPU, or for the level that $TOKENSTREAM_CPU names. Raises NativeUnavailableError."""
    try:
        level = choose_level(environ)
    except CpuLevelError as error:
        raise NativeUnavailableError(str(error)) from None
    return Objects(cache).load(level, environ), level


def build_all(
    folder: Path,
    machine: str = platform.machine(),
    environ: Mapping[str, str] = os.environ,
    sources: Path = SOURCES,
) -> list[Path]:
    """Make the objects of all levels of `machine` in `folder`, and remove others of it. NativeUnavailableError."""
    compiler = Compiler.found(environ)
    with tempfile.TemporaryDirectory() as cache:
        objects = Objects(Path(cache), sources)
        made = [objects.build_in(folder, level, compiler) for level in levels(machine)]
    for file in set(folder.glob(f"tokenstream-{machine}-*.so")) - set(made):
        file.unlink()
    (folder / ".lock").unlink()
    return made


def main() -> int:
    """Make the objects of all levels of a machine, which need not be this one, in a folder."""
    parser = argparse.ArgumentParser(prog="python -m llm_kernels.objects", description=main.__doc__)
    parser.add_argument("folder", type=Path, help=f"a start looks into {PREBUILT}")
    parser.add_argument("--machine", default=platform.machine(), help="x86_64 or aarch64; only Zig's compiles for both")
    given = parser.parse_args()
    try:
        made = build_all(given.folder, given.machine)
    except NativeUnavailableError as error:
        sys.stderr.write(f"{error}\n")
        return 1
    sys.stdout.writelines(f"{file}\n" for file in made)
    return 0


if __name__ == "__main__":
    sys.exit(main())

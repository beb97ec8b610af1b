"""Compiles the kernels of this folder for this machine, once, and keeps the shared object in a cache folder.

Its name is made of everything it depends on: sources, torch, compiler and the processor's instructions; a file that
was not written to its end, or was damaged later, is made again. It does not import torch, and does not know what the
kernels compute.
"""

from __future__ import annotations

import hashlib
import importlib.util
import os
import re
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from .compiling import NativeUnavailableError as NativeUnavailableError
from .compiling import is_whole, make_once, run

FOLDER = Path(__file__).parent
_MAIN = "native_cpu.cpp"
_FLAGS = ("-std=c++20", "-O3", "-march=native", "-fopenmp", "-fPIC", "-shared")
_BF16_INSTRUCTIONS = ("AVX512F", "AVX512BW", "AVX512DQ", "AVX512VL", "AVX512BF16")  # as native_cpu.cpp asks for
_INSTRUCTIONS = re.compile(
    r"^#define (__(?:AVX\w*|FMA\w*|F16C|SSE\w*|clang_version|VERSION|tune_\w+)__ .*)$", re.MULTILINE
)
_VERSION = re.compile(r'^#define __VERSION__ "(.*)"$', re.MULTILINE)
_TUNE = re.compile(r"^#define __tune_(\w+)__ ", re.MULTILINE)


@dataclass(frozen=True, slots=True)
class Toolchain:
    """What the kernels are made of and with.

    macros: what the compiler defines for this processor: its own version, and the instructions. torch: its folder.
    """

    compiler: str
    macros: str
    torch: Path
    sources: Path = FOLDER

    @classmethod
    def found(cls, environ: Mapping[str, str] = os.environ, sources: Path = FOLDER) -> Toolchain:
        """Look for $CXX, else g++, and for torch. Raises NativeUnavailableError."""
        name = environ.get("CXX") or "g++"
        compiler = shutil.which(name, path=environ.get("PATH"))
        if compiler is None:
            raise NativeUnavailableError(f"no C++ compiler {name!r} on PATH; install g++ 12 or newer, or set CXX")
        spec = importlib.util.find_spec("torch")
        if spec is None or spec.origin is None:
            raise NativeUnavailableError("torch is not installed here")
        macros = run([compiler, "-march=native", "-dM", "-E", "-x", "c++", os.devnull])
        return cls(compiler, macros, Path(spec.origin).parent, sources)

    def require_bf16(self) -> None:
        """Raise NativeUnavailableError if this processor, or the compiler for it, lacks what the bf16 kernels need."""
        for name in _BF16_INSTRUCTIONS:
            if f"#define __{name}__ " not in self.macros:
                raise NativeUnavailableError(
                    f"this processor has no {name}, which the bfloat16 kernels need, or {self.compiler} does not know "
                    f"it; with dtype float32 the attention is native"
                )

    @property
    def arithmetic(self) -> str:
        """A name for what decides the bits of results: sources, flags, compiler, and the processor it compiles for.

        A compiler may join a product and a sum where the processor can, so another one is another arithmetic. torch's
        version is not in it.
        """
        digest = self._digest_of_sources(6)
        digest.update("\0".join((*sorted(_INSTRUCTIONS.findall(self.macros)), *_FLAGS)).encode())
        version, tune = (found[1] if (found := r.search(self.macros)) else "unknown" for r in (_VERSION, _TUNE))
        return f"{digest.hexdigest()} ({version}, {tune})"

    def target(self, cache: Path) -> Path:
        """The place of the shared object in `cache`, the folder of all that is made once and kept."""
        digest = self._digest_of_sources(12)
        digest.update((self.torch / "version.py").read_bytes())
        digest.update("\0".join((self.macros, *_FLAGS)).encode())
        return cache / "native" / f"tokenstream-{digest.hexdigest()}.so"

    def _digest_of_sources(self, size: int) -> hashlib.blake2b:
        digest = hashlib.blake2b(digest_size=size)
        for source in sorted(file for file in self.sources.iterdir() if file.suffix in (".h", ".cpp")):
            digest.update(source.name.encode() + b"\0" + source.read_bytes() + b"\0")
        return digest


def is_built(cache: Path, toolchain: Toolchain) -> bool:
    """Whether `cache` has the shared object, whole."""
    return is_whole(toolchain.target(cache))


def build(cache: Path, toolchain: Toolchain) -> Path:
    """Return the shared object, compiled unless `cache` has it. Raises NativeUnavailableError.

    Takes some seconds. Processes that build at once do so one after the other, and the others find the first one's.
    """
    target = toolchain.target(cache)
    make_once(target, partial(_compile, toolchain))
    return target


def _compile(toolchain: Toolchain, made: Path) -> None:
    libraries = toolchain.torch / "lib"
    # torch's own OpenMP runtime: a second one in the process would bring its own threads.
    openmp = [f"-l:{file.name}" for file in sorted(libraries.glob("libgomp*.so*"))[:1]]
    run(
        [
            *(toolchain.compiler, *_FLAGS, f"-I{toolchain.torch / 'include'}", str(toolchain.sources / _MAIN)),
            f'-DTOKENSTREAM_ARITHMETIC="{toolchain.arithmetic}"',
            *(f"-L{libraries}", *openmp, "-lc10", "-ltorch_cpu", "-o", str(made)),
        ]
    )

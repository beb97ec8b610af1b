"""Finds a C++ compiler, and compiles one source with it to a shared object for one level of CPUs.

$CXX, else g++, else clang++, else Zig's out of the Python package `ziglang`. It does not know what the source computes,
nor where objects are kept. `python -m llm_kernels.compilers` prints the one that is found.
"""

from __future__ import annotations

import os
import shlex
import shutil
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

from .compiling import NativeUnavailableError, run
from .cpu_level import Level

FLAGS = ("-std=c++20", "-O3", "-ffp-contract=off", "-fno-math-errno", "-fPIC", "-pthread")
# Nothing of C++ is exported, whose names all begin so: of two objects in one process none may take the other's
# functions, nor those of another C++ runtime.
_EXPORTS = "{ global: *; local: _*; };\n"
_OLDEST_GLIBC = "2.28"  # of what Zig links against; g++ and clang++ know the machine's own alone
_PATH_NAMES = ("g++", "clang++")
_CURE = "install g++ 12 or newer, or run: pip install ziglang"


@dataclass(frozen=True, slots=True)
class Compiler:
    """A compiler and the words that start it. `version` is all that it says of itself."""

    command: tuple[str, ...]
    version: str
    is_zig: bool = False

    @classmethod
    def found(cls, environ: Mapping[str, str] = os.environ) -> Compiler:
        """The first of $CXX, which may hold arguments, g++, clang++ and `ziglang`. Raises NativeUnavailableError."""
        path = environ.get("PATH")
        if given := environ.get("CXX", "").strip():
            try:
                words = shlex.split(given)
            except ValueError:  # a quotation that does not end
                words = [given]
            program = shutil.which(words[0], path=path)
            if program is None:
                raise NativeUnavailableError(f"no C++ compiler {given!r}, which CXX names; {_CURE}, and unset CXX")
            is_zig = any(Path(word).name in ("zig", "ziglang") for word in words)
            return cls._known((program, *words[1:]), is_zig=is_zig)
        for name in _PATH_NAMES:
            if program := shutil.which(name, path=path):
                return cls._known((program,))
        spec = find_spec("ziglang")
        for folder in (spec and spec.submodule_search_locations) or ():
            if program := shutil.which(f"{folder}/zig"):  # what `python -m ziglang` becomes, whichever python
                return cls._known((program, "c++"), is_zig=True)
        raise NativeUnavailableError(f"no C++ compiler on PATH; {_CURE}")

    @classmethod
    def _known(cls, command: tuple[str, ...], *, is_zig: bool = False) -> Compiler:
        return cls(command, run([*command, "--version"]), is_zig)

    def build(self, source: Path, made: Path, level: Level, cache: Path) -> None:
        """Write the shared object `made`, and leave nothing else beside it but what the compile needed.

        Zig keeps its own C++ library, compiled at its first use within a minute, in `cache`. Raises
        NativeUnavailableError.
        """
        environ, options = dict(os.environ), level.options
        target: tuple[str, ...] = ()
        if self.is_zig:
            environ |= {"ZIG_GLOBAL_CACHE_DIR": str(cache / "zig"), "ZIG_LOCAL_CACHE_DIR": str(cache / "zig")}
            target = ("-target", f"{level.machine}-linux-gnu.{_OLDEST_GLIBC}", "-fno-sanitize=undefined")
            options = tuple(map(_zig_option, options))
        compiled, exports = made.with_suffix(".o"), made.with_suffix(".map")
        exports.write_text(_EXPORTS)
        run([*self.command, *target, *FLAGS, *options, "-c", str(source), "-o", str(compiled)], environ)
        # Linked without the level's options: Zig would compile its library once for each of them.
        link = ("-shared", "-O3", "-pthread", "-Wl,--strip-debug", f"-Wl,--version-script={exports}")
        run([*self.command, *target, *link, str(compiled), "-o", str(made)], environ)


def _zig_option(option: str) -> str:
    """The option as Zig spells it, whose names of CPUs have no dashes."""
    if option == "-march=armv8-a":
        return "-march=generic"
    name = option.removeprefix("-march=")
    return option if name == option else f"-march={name.replace('-', '_')}"


def main() -> int:
    """Print the compiler that is found, or why there is none."""
    try:
        sys.stdout.write(shlex.join(Compiler.found().command) + "\n")
    except NativeUnavailableError as error:
        sys.stderr.write(f"{error}\n")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())

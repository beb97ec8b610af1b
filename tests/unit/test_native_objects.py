"""How the kernels' objects are found, made, kept and done without; most compilers here are scripts."""

from __future__ import annotations

import ctypes
import os
import platform
import re
import shutil
import signal
import subprocess
import sys
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from pathlib import Path

import pytest

from llm_kernels import compilers, objects
from llm_kernels.compilers import Compiler
from llm_kernels.compiling import NativeUnavailableError, is_whole
from llm_kernels.cpu_level import Level, choose_level, levels, runnable
from llm_kernels.objects import Objects, build_all, load_object, source_digest
from waiting import WAIT

VERSION = Path(objects.__file__).parents[1]
LEVEL = choose_level({})
# Answers like a compiler: with a version, or with a file that names its options, which stands for an object.
SCRIPT = """#!/bin/sh
case "$*" in *--version) echo {version}; exit;; esac
echo "$*" >> {log}
{action}
while [ "$1" != -o ]; do shift; done
echo made > "$2"
"""
# What kernels need of C++ and of the system: threads, waiting for a value, an exception, instructions of the level.
PROGRAM = """
#include <atomic>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>
#ifdef __AVX2__
#include <immintrin.h>
#endif
#include "lanes.h"
static float total(const float* values) {
#ifdef __AVX2__
  __m256 sum = _mm256_fmadd_ps(_mm256_loadu_ps(values), _mm256_set1_ps(2.0f), _mm256_setzero_ps());
  alignas(32) float lanes[LANES];
  _mm256_store_ps(lanes, sum);
#else
  float lanes[LANES];
  for (int lane = 0; lane < LANES; lane++) lanes[lane] = 2.0f * values[lane];
#endif
  float all = 0.0f;
  for (float lane : lanes) all += lane;
  return all;
}
extern "C" int has_avx512(void) {
#ifdef __AVX512F__
  return 1;
#else
  return 0;
#endif
}
struct Counter { static int& count() { static int here = 0; return here; } };
extern "C" int count(void) { return ++Counter::count(); }
extern "C" float twice_the_sum(const float* values) {
  std::atomic<int> done{0};
  float result = 0.0f;
  std::thread other([&] { result = total(values); done.store(1); done.notify_one(); });
  done.wait(0);
  other.join();
  try {
    std::vector<float>(LANES).at(LANES) = 1.0f;
  } catch (const std::out_of_range& error) {
    return std::string(error.what()).empty() ? -1.0f : result;
  }
  return -1.0f;
}
"""


def program(folder: Path) -> Path:
    """The sources of a small object."""
    folder.mkdir(exist_ok=True)
    (folder / "api.cpp").write_text(PROGRAM)
    (folder / "lanes.h").write_text("#define LANES 8\n")
    return folder


def compiler(folder: Path, name: str = "g++", action: str = "", version: str = "1") -> Path:
    """A script `name` in `folder`; its log is beside it."""
    folder.mkdir(exist_ok=True)
    script = folder / name
    script.write_text(SCRIPT.format(log=folder / "log", action=action, version=version))
    script.chmod(0o755)
    return script


def commands(folder: Path) -> list[str]:
    """What the scripts in `folder` were asked to do."""
    log = folder / "log"
    return log.read_text().splitlines() if log.exists() else []


def on_path(folder: Path) -> dict[str, str]:
    return {"PATH": str(folder)}


@pytest.fixture(autouse=True)
def zig(monkeypatch: pytest.MonkeyPatch) -> ModuleSpec | None:
    """The package `ziglang` if it is installed, which is hidden: what is tested here does without it."""
    found = find_spec("ziglang")
    monkeypatch.setattr(compilers, "find_spec", lambda name: None)
    return found


@pytest.fixture
def made(tmp_path: Path) -> Objects:
    return Objects(tmp_path / "cache", program(tmp_path / "sources"), tmp_path / "prebuilt")


def called(library: ctypes.CDLL) -> float:
    """What the program computes: twice the sum of 0 to 7."""
    library.twice_the_sum.restype = ctypes.c_float
    return float(library.twice_the_sum((ctypes.c_float * 8)(*range(8))))


def test_the_first_compiler_of_all_is_taken(tmp_path: Path) -> None:
    found = []
    for name in ("clang++", "g++", "mine"):
        compiler(tmp_path, name, version=name)
        environ = {**on_path(tmp_path), **({"CXX": "mine -x"} if name == "mine" else {})}
        found.append(Compiler.found(environ))
    assert [one.version.strip() for one in found[:2]] == ["clang++", "g++"]
    assert found[2].command == (str(tmp_path / "mine"), "-x")
    assert not any(one.is_zig for one in found)


def test_without_a_compiler_the_python_package_is_one(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    package = tmp_path / "ziglang"
    compiler(package, "zig", f"echo $ZIG_GLOBAL_CACHE_DIR $ZIG_LOCAL_CACHE_DIR >> {package}/folders")
    spec = ModuleSpec("ziglang", None, is_package=True)
    spec.submodule_search_locations = [str(package)]
    monkeypatch.setattr(compilers, "find_spec", {"ziglang": spec}.get)
    found = Compiler.found(on_path(tmp_path))
    assert found.command == (str(package / "zig"), "c++")
    assert found.is_zig
    cache = tmp_path / "cache"
    found.build(tmp_path / "api.cpp", tmp_path / "made.so", LEVEL, cache)
    assert (package / "folders").read_text() == f"{cache}/zig {cache}/zig\n" * 2
    compiler(tmp_path, "g++")
    assert not Compiler.found(on_path(tmp_path)).is_zig


def test_zig_hears_its_own_names_of_levels_and_an_old_library(tmp_path: Path) -> None:
    script = compiler(tmp_path, "zig")
    zig = Compiler.found({"CXX": f"{script} c++", **on_path(tmp_path)})
    assert zig.is_zig
    for level in (*levels("x86_64"), *levels("aarch64")):
        zig.build(tmp_path / "api.cpp", tmp_path / "made.so", level, tmp_path)
    compiles = [line.split() for line in commands(tmp_path) if " -c " in line]
    assert [words[2] for words in compiles] == [*["x86_64-linux-gnu.2.28"] * 6, "aarch64-linux-gnu.2.28"]
    named = [next(word for word in words if word.startswith("-march")) for words in compiles]
    assert named[:4] == ["-march=x86_64", "-march=x86_64_v3", "-march=x86_64_v3", "-march=x86_64_v4"]
    assert named[6] == "-march=generic"
    assert "-mavxvnni" in compiles[2]


@pytest.mark.parametrize(
    ("environ", "told"),
    [
        ({}, r"^no C\+\+ compiler on PATH; install g\+\+ 12 or newer, or run: pip install ziglang$"),
        ({"CXX": "/nonexistent -x"}, r"^no C\+\+ compiler '/nonexistent -x', which CXX names; install g\+\+"),
        ({"CXX": "'x"}, r"^no C\+\+ compiler \"'x\", which CXX names"),
    ],
)
def test_a_missing_compiler_is_told_with_the_cure(
    made: Objects, tmp_path: Path, environ: dict[str, str], told: str
) -> None:
    environ = {**environ, **on_path(tmp_path)}
    with pytest.raises(NativeUnavailableError, match=told):
        made.load(LEVEL, environ)
    assert made.is_ready(LEVEL, environ)  # nothing will be compiled


@pytest.mark.parametrize(
    ("action", "reason"),
    [
        ("echo 'x.h:1: error: no such thing' >&2; echo more >&2; exit 1", "failed: x.h:1: error: no such thing"),
        ("kill -9 $$", "failed: no message"),
    ],
)
def test_a_compiler_that_fails_is_one_line_and_leaves_nothing(
    made: Objects, tmp_path: Path, action: str, reason: str
) -> None:
    compiler(tmp_path / "bin", action=action)
    with pytest.raises(NativeUnavailableError, match=reason) as caught:
        made.build(LEVEL, on_path(tmp_path / "bin"))
    assert "\n" not in str(caught.value)
    assert [path.name for path in (tmp_path / "cache" / "native").iterdir()] == [".lock"]


def test_an_object_is_compiled_once(made: Objects, tmp_path: Path) -> None:
    environ = on_path(tmp_path / "bin")
    compiler(tmp_path / "bin")
    assert not made.is_ready(LEVEL, environ)
    first = made.build(LEVEL, environ)
    assert made.is_ready(LEVEL, environ)
    assert made.build(LEVEL, environ) == first
    assert len(commands(tmp_path / "bin")) == 2  # compiled and linked
    assert not list(first.parent.glob(".build-*"))


@pytest.mark.parametrize("damage", ["cut", "flipped", "empty", "longer"])
def test_a_damaged_object_is_compiled_again(made: Objects, tmp_path: Path, damage: str) -> None:
    environ = on_path(tmp_path / "bin")
    compiler(tmp_path / "bin")
    file = made.build(LEVEL, environ)
    content = file.read_bytes()
    flipped = bytes([content[0] ^ 1]) + content[1:]
    file.write_bytes({"cut": content[:-3], "flipped": flipped, "empty": b"", "longer": content + b"x"}[damage])
    assert not made.is_ready(LEVEL, environ)
    made.build(LEVEL, environ)
    assert file.read_bytes() == content
    assert len(commands(tmp_path / "bin")) == 4


BUILD = """
import os, sys
from pathlib import Path
from llm_kernels.cpu_level import choose_level
from llm_kernels.objects import Objects
print(Objects(Path(sys.argv[1]), Path(sys.argv[2])).build(choose_level({})))
assert "torch" not in sys.modules
"""


def building(made: Objects, path: Path) -> subprocess.Popen[str]:
    """A process that builds with the compilers in `path`."""
    return subprocess.Popen(
        [sys.executable, "-c", BUILD, str(made.cache), str(made.sources)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={"PYTHONPATH": str(VERSION), "PATH": f"{path}:{os.environ['PATH']}"},
    )


def test_processes_that_build_at_once_share_one_build(made: Objects, tmp_path: Path) -> None:
    compiler(tmp_path / "bin", action="sleep 0.2")
    children = [building(made, tmp_path / "bin") for _ in range(3)]
    told = [child.communicate(timeout=WAIT) for child in children]
    assert [child.returncode for child in children] == [0, 0, 0], told
    assert len({out for out, _ in told}) == 1
    assert len(commands(tmp_path / "bin")) == 2


def test_a_build_killed_half_way_leaves_nothing_that_is_taken_for_an_object(made: Objects, tmp_path: Path) -> None:
    fifo, native = tmp_path / "fifo", made.cache / "native"
    os.mkfifo(fifo)
    half = f'while [ "$1" != -o ]; do shift; done; echo half > "$2"; echo $$ > {fifo}; exec sleep 60'
    compiler(tmp_path / "bin", action=f'case "$*" in *-shared*) {half};; esac')
    child = building(made, tmp_path / "bin")
    try:
        pid = int(fifo.read_text())  # the linker has written half of the file
        child.kill()
        os.kill(pid, signal.SIGKILL)
        child.communicate(timeout=WAIT)
    finally:
        child.kill()
    assert [path for path in native.iterdir() if path.is_dir()] != []
    assert not made.is_ready(LEVEL, on_path(tmp_path / "bin"))
    compiler(tmp_path / "bin")
    assert is_whole(made.build(LEVEL, on_path(tmp_path / "bin")))
    assert [path for path in native.iterdir() if path.is_dir()] == []


def test_a_cache_that_cannot_be_written_is_one_line(made: Objects, tmp_path: Path) -> None:
    made.cache.write_text("a file where a folder should be")
    compiler(tmp_path / "bin")
    with pytest.raises(NativeUnavailableError, match=r"^cannot write to \S+/cache/native: Not a directory$"):
        made.build(LEVEL, on_path(tmp_path / "bin"))


def test_a_name_tells_sources_level_and_compiler_and_the_digest_the_sources_alone(
    made: Objects, tmp_path: Path
) -> None:
    names, digests = [], []

    def note(level: Level, version: str = "1") -> None:
        compiler(tmp_path / "bin", version=version)
        names.append(made.build(level, on_path(tmp_path / "bin")).name)
        digests.append(source_digest(made.sources))

    for level in levels("x86_64"):
        note(level)
    note(levels("aarch64")[0])
    note(LEVEL, "2")
    assert len(set(digests)) == 1
    for source in made.sources.iterdir():
        source.write_text(source.read_text() + "\n")
        note(LEVEL)
    (made.sources / "lanes.h").rename(made.sources / "other.h")
    note(LEVEL)
    (made.sources / "notes.txt").write_text("not compiled")
    assert source_digest(made.sources) == digests[-1]
    assert len(set(digests)) == 4
    assert len(set(names)) == len(names) == 11


def test_what_another_compiler_made_serves_where_there_is_none_now(made: Objects, tmp_path: Path) -> None:
    compiler(tmp_path / "bin")
    kept = made.build(LEVEL, on_path(tmp_path / "bin"))
    assert made.build(LEVEL, on_path(tmp_path)) == kept
    (made.sources / "lanes.h").write_text("#define LANES 9\n")
    with pytest.raises(NativeUnavailableError, match="no C\\+\\+ compiler"):
        made.build(LEVEL, on_path(tmp_path))


def test_what_is_whole_and_yet_no_library_is_refused_in_one_line(made: Objects, tmp_path: Path) -> None:
    compiler(tmp_path / "bin")
    with pytest.raises(NativeUnavailableError, match=r"tokenstream-\S+\.so cannot be loaded \(.*\); delete it$"):
        made.load(LEVEL, on_path(tmp_path / "bin"))


def test_a_prebuilt_folder_has_all_levels_and_nothing_else(made: Objects, tmp_path: Path) -> None:
    environ = on_path(tmp_path / "bin")
    compiler(tmp_path / "bin", version="1")
    old = build_all(made.prebuilt, "x86_64", environ, made.sources)
    compiler(tmp_path / "bin", version="2")
    arm = build_all(made.prebuilt, "aarch64", environ, made.sources)
    new = build_all(made.prebuilt, "x86_64", environ, made.sources)
    assert not set(old) & set(new)
    assert set(made.prebuilt.iterdir()) == {*new, *arm}
    assert len(new) == len(levels("x86_64"))
    assert all(is_whole(file) for file in new)


def test_a_level_that_is_none_of_this_cpu_is_refused_in_one_line(tmp_path: Path) -> None:
    with pytest.raises(NativeUnavailableError, match=r"^TOKENSTREAM_CPU is 'avx2'; allowed are native, "):
        load_object(tmp_path, {"TOKENSTREAM_CPU": "avx2"})


needs_gxx = pytest.mark.skipif(shutil.which("g++") is None, reason="there is no g++ to compile with")


@needs_gxx
def test_a_prebuilt_object_is_taken_first_if_it_is_of_these_sources_and_runs(made: Objects, tmp_path: Path) -> None:
    none, real = on_path(tmp_path), dict(os.environ)
    real.pop("CXX", None)
    prebuilt = next(
        file
        for file in build_all(made.prebuilt, LEVEL.machine, real, made.sources)
        if f"-{LEVEL.name}-{source_digest(made.sources)}" in file.name
    )
    assert made.is_ready(LEVEL, none)
    library = made.load(LEVEL, none)
    assert library._name == str(prebuilt)
    assert called(library) == 56.0
    assert not made.cache.exists()

    kept = made.build(LEVEL, real)
    shutil.rmtree(made.prebuilt)
    assert made.load(LEVEL, none)._name == str(kept)
    compiler(tmp_path / "bin")  # whose objects are whole, and none: as one for another C library would be
    build_all(made.prebuilt, LEVEL.machine, on_path(tmp_path / "bin"), made.sources)
    assert made.load(LEVEL, none)._name == str(kept)
    (made.sources / "lanes.h").write_text("#define LANES 8 // changed\n")
    with pytest.raises(NativeUnavailableError, match="no C\\+\\+ compiler"):
        made.load(LEVEL, none)


@needs_gxx
def test_objects_of_two_levels_live_in_one_process_and_share_nothing(made: Objects) -> None:
    environ = {"PATH": os.environ["PATH"]}
    libraries = [made.load(level, environ) for level in runnable()]
    assert [called(library) for library in libraries] == [56.0] * len(libraries)
    assert [library.count() for library in libraries] == [1] * len(libraries)
    if platform.machine() == "x86_64":
        assert [library.has_avx512() for library in libraries] == [int("v4" in level.name) for level in runnable()]


def test_zig_compiles_what_runs_without_anything_of_its_own(
    made: Objects, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, zig: ModuleSpec | None
) -> None:
    if zig is None:
        pytest.skip("the package ziglang is not installed")
    monkeypatch.setattr(compilers, "find_spec", {"ziglang": zig}.get)
    none = on_path(tmp_path)
    libraries = [made.load(level, none) for level in runnable()]
    assert [called(library) for library in libraries] == [56.0] * len(libraries)
    assert [library.count() for library in libraries] == [1] * len(libraries)
    content = Path(libraries[0]._name).read_bytes()
    needed = set(re.findall(rb"[\w+-]+\.so\.\d+", content))
    glibc = {b"libc.so.6", b"libdl.so.2", b"libm.so.6", b"libpthread.so.0", b"ld-linux-x86-64.so.2"}
    assert needed <= glibc
    assert b"ubsan" not in content

"""How the kernels are built, kept and done without; most compilers here are scripts, so that a build takes no time."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import textwrap
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import pytest
from llm_kernels.build import NativeUnavailableError, Toolchain, build, is_built

from engine import driver
from llm_engine.config import ConfigError, cache_folder
from llm_kernels import build as native_build
from llm_kernels import native
from waiting import WAIT

VERSION = Path(native_build.FOLDER).parent  # the folder that holds llm_engine
COMPILE = 'while [ "$1" != "-o" ]; do shift; done; echo "made by $$" > "$2"; echo made >> "$LOG"'


def compiler(folder: Path, compile_: str = COMPILE, macros: str = "#define __AVX2__ 1") -> Path:
    """A script that answers like a compiler: with `macros` when asked for them, else by running `compile_`."""
    script = folder / "compiler"
    script.write_text(
        f"#!/bin/sh\nLOG={folder / 'log'}\ncase \"$*\" in *-dM*) echo '{macros}'; exit 0;; esac\n{compile_}\n"
    )
    script.chmod(0o755)
    return script


def builds(folder: Path) -> int:
    """How often the script has compiled."""
    log = folder / "log"
    return len(log.read_text().splitlines()) if log.exists() else 0


def toolchain(folder: Path, compile_: str = COMPILE, macros: str = "#define __AVX2__ 1") -> Toolchain:
    return Toolchain.found({"CXX": str(compiler(folder, compile_, macros)), "PATH": os.environ["PATH"]})


def run(code: str, environ: Mapping[str, str] | None = None) -> subprocess.Popen[str]:
    path = os.pathsep.join([str(VERSION), str(Path(__file__).parents[1])])
    return subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(code)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": path, **(environ or {})},
    )


def test_the_name_depends_on_sources_torch_compiler_and_processor(tmp_path: Path) -> None:
    sources, torch = tmp_path / "sources", tmp_path / "torch"
    shutil.copytree(native_build.FOLDER, sources)
    torch.mkdir()
    (torch / "version.py").write_text("__version__ = '1'")
    names = []

    def note(chain: Toolchain) -> None:
        names.append(chain.target(tmp_path).name)

    chain = Toolchain("g++", "#define __AVX2__ 1", torch, sources)
    note(chain)
    assert replace(chain, compiler="/usr/bin/g++").target(tmp_path).name == names[0]
    for source in sorted((*sources.glob("*.h"), *sources.glob("*.cpp"))):
        source.write_text(source.read_text() + "\n")
        note(chain)
    (torch / "version.py").write_text("__version__ = '2'")
    note(chain)
    note(replace(chain, macros="#define __AVX512F__ 1"))
    assert len(names) > 10
    assert len(set(names)) == len(names)


def test_the_arithmetic_depends_on_sources_compiler_and_instructions_alone(tmp_path: Path) -> None:
    sources = Path(shutil.copytree(native_build.FOLDER, tmp_path / "sources"))
    macros = '#define __VERSION__ "12.2.0"\n#define __tune_znver4__ 1\n#define __AVX2__ 1\n#define __PKU__ 1\n'
    chain = Toolchain("g++", macros, tmp_path / "torch", sources)
    first = chain.arithmetic
    assert first.endswith(" (12.2.0, znver4)")
    other_order = "\n".join(reversed(macros.splitlines()))
    for macros_ in (macros.replace("__PKU__", "__SGX__"), other_order):
        assert replace(chain, macros=macros_, torch=tmp_path / "other").arithmetic == first
    changes = {"12.2.0": "13.1.0", "znver4": "sapphirerapids", "#define __AVX2__ 1": "", "AVX2": "AVX512F"}
    found = {replace(chain, macros=macros.replace(old, new)).arithmetic for old, new in changes.items()}
    (sources / "tile_cpu.h").write_text((sources / "tile_cpu.h").read_text() + "\n")
    assert len({first, chain.arithmetic, *found}) == 2 + len(changes)


@pytest.mark.parametrize("dtype", driver.native_dtypes()[:1])
def test_the_loaded_kernels_name_their_own_arithmetic(dtype: str) -> None:
    native.load(cache_folder(), dtype)
    assert native.arithmetic() == Toolchain.found().arithmetic


def test_a_build_is_kept(tmp_path: Path) -> None:
    chain = toolchain(tmp_path)
    cache = tmp_path / "cache"
    assert not is_built(cache, chain)
    first = build(cache, chain)
    assert is_built(cache, chain)
    assert build(cache, chain) == first
    assert builds(tmp_path) == 1


@pytest.mark.parametrize("damage", ["cut", "flipped", "empty", "longer"])
def test_a_damaged_file_is_built_again(tmp_path: Path, damage: str) -> None:
    chain = toolchain(tmp_path)
    file = build(tmp_path / "cache", chain)
    content = file.read_bytes()
    flipped = bytes([content[0] ^ 1]) + content[1:]
    file.write_bytes({"cut": content[:-3], "flipped": flipped, "empty": b"", "longer": content + b"x"}[damage])
    assert not is_built(tmp_path / "cache", chain)
    build(tmp_path / "cache", chain)
    assert is_built(tmp_path / "cache", chain)
    assert builds(tmp_path) == 2


BUILD = """
    import sys
    from pathlib import Path
    from llm_kernels.build import Toolchain, build
    print(build(Path(sys.argv[1] if len(sys.argv) > 1 else {cache!r}), Toolchain.found()).name)
    assert "torch" not in sys.modules
"""


def test_a_build_killed_half_way_leaves_nothing_that_is_taken_for_a_build(tmp_path: Path) -> None:
    cache, fifo = tmp_path / "cache", tmp_path / "fifo"
    os.mkfifo(fifo)
    half = f'while [ "$1" != "-o" ]; do shift; done; printf half > "$2"; echo $$ > {fifo}; exec sleep 60'
    child = run(BUILD.format(cache=str(cache)), {"CXX": str(compiler(tmp_path, half))})
    try:
        pid = int(fifo.read_text())  # the compiler has written half of the file
        child.kill()
        os.kill(pid, 9)
        child.communicate(timeout=WAIT)
    finally:
        child.kill()
    chain = toolchain(tmp_path)
    assert [path.name for path in (cache / "native").iterdir() if path.is_dir()] != []
    assert not is_built(cache, chain)
    build(cache, chain)
    assert is_built(cache, chain)
    assert [path.name for path in (cache / "native").iterdir() if path.is_dir()] == []


def test_processes_that_build_at_once_share_one_build(tmp_path: Path) -> None:
    slow = f"{COMPILE}; sleep 0.2"
    environ = {"CXX": str(compiler(tmp_path, slow))}
    code = BUILD.format(cache=str(tmp_path / "cache"))
    children = [run(code, environ) for _ in range(3)]
    told = [child.communicate(timeout=WAIT) for child in children]
    assert [child.returncode for child in children] == [0, 0, 0], told
    assert len({out for out, _ in told}) == 1
    assert builds(tmp_path) == 1
    assert is_built(tmp_path / "cache", toolchain(tmp_path))


@pytest.mark.parametrize(
    ("compile_", "reason"),
    [
        ("echo 'x.h:1: error: no such thing' >&2; echo more >&2; exit 1", "failed: x.h:1: error: no such thing"),
        ("exit 3", "failed: no message"),
        ("kill -9 $$", "failed: no message"),
    ],
)
def test_a_compiler_that_fails_is_one_line(tmp_path: Path, compile_: str, reason: str) -> None:
    chain = toolchain(tmp_path, compile_)
    with pytest.raises(NativeUnavailableError, match=reason) as caught:
        build(tmp_path / "cache", chain)
    assert "\n" not in str(caught.value)
    assert not is_built(tmp_path / "cache", chain)
    assert [path.name for path in (tmp_path / "cache" / "native").iterdir()] == [".lock"]


def test_a_cache_that_cannot_be_written_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "cache").write_text("a file where a folder should be")
    with pytest.raises(NativeUnavailableError, match=r"cannot write to .*cache"):
        build(tmp_path / "cache", toolchain(tmp_path))


def test_a_missing_compiler_is_told_with_the_cure(tmp_path: Path) -> None:
    for environ in ({"PATH": str(tmp_path)}, {"CXX": "/nonexistent", "PATH": os.environ["PATH"]}):
        with pytest.raises(NativeUnavailableError, match=r"no C\+\+ compiler .*; install g\+\+"):
            Toolchain.found(environ)


def test_bf16_needs_its_instructions(tmp_path: Path) -> None:
    names = ("AVX512F", "AVX512BW", "AVX512DQ", "AVX512VL", "AVX512BF16")
    lines = [f"#define __{name}__ 1" for name in names]
    toolchain(tmp_path, macros="\n".join(lines)).require_bf16()
    for missing, name in zip(lines, names, strict=True):
        macros = "\n".join(line for line in lines if line != missing)
        with pytest.raises(NativeUnavailableError, match=f"no {name},"):
            toolchain(tmp_path, macros=macros).require_bf16()


def test_without_a_compiler_the_engine_serves_and_says_once_what_it_costs(tmp_path: Path) -> None:
    code = """
        import json, logging
        logging.basicConfig(format="%(levelname)s %(message)s", level=logging.INFO)
        from engine import driver, tiny_models
        from llm_engine.config import ConfigError, cache_folder
        from llm_engine.request import SamplingParams
        told = {}
        for dtype in ("float32", "bfloat16"):
            loaded = driver.load("llama", dtype)
            with driver.serving(loaded) as engine:
                answer = engine.ask(tiny_models.prompt(9), SamplingParams(max_tokens=5, ignore_eos=True)).wait()
            try:
                driver.load("llama", dtype, kernels="native")
            except ConfigError as error:
                told[dtype] = [loaded.config.kernels, len(answer.tokens), str(error)]
        print(json.dumps(told))
    """
    child = run(code, {"CXX": "/nonexistent", "PATH": str(tmp_path), "TOKENSTREAM_CACHE": str(tmp_path)})
    out, err = child.communicate(timeout=WAIT)
    assert child.returncode == 0, err
    refusal = "kernels is 'native', but no C++ compiler '/nonexistent' on PATH; install g++ 12 or newer, or set CXX"
    assert json.loads(out) == {"float32": ["torch", 5, refusal], "bfloat16": ["torch", 5, refusal]}
    warnings = [line for line in err.splitlines() if line.startswith("WARNING")]
    assert len(warnings) == 2  # one for each engine
    for line, times in zip(warnings, ("one and a half times", "two to five times"), strict=True):
        assert "no C++ compiler" in line
        assert f"{times} as long" in line


def test_what_is_whole_and_yet_no_library_is_refused_in_one_line(tmp_path: Path) -> None:
    code = """
        from pathlib import Path
        from llm_kernels import native
        from llm_kernels.build import NativeUnavailableError
        try:
            native.load(Path({cache!r}), "float32")
        except NativeUnavailableError as error:
            print(error)
    """
    child = run(code.format(cache=str(tmp_path)), {"CXX": str(compiler(tmp_path))})
    out, err = child.communicate(timeout=WAIT)
    assert child.returncode == 0, err
    assert re.fullmatch(r".*tokenstream-\w+\.so cannot be loaded \(.*\); delete it\n", out)


def test_float16_has_no_native_kernels() -> None:
    assert driver.load("llama", "float16").config.kernels == "torch"
    with pytest.raises(ConfigError, match="kernels is 'native', but they compute in bfloat16 or float32"):
        driver.load("llama", "float16", kernels="native")


@pytest.mark.parametrize("dtype", driver.native_dtypes())
def test_where_the_kernels_are_there_auto_takes_them(dtype: str) -> None:
    loaded = driver.load("llama", dtype)
    assert loaded.config.kernels == "native"
    assert (loaded.llama is None) == (dtype == "float32")
    others = driver.load("gemma2", dtype)  # its layers run in transformers, with native attention
    assert others.config.kernels == "native"
    assert others.llama is None
    assert driver.load("llama", dtype, kernels="torch").config.kernels == "torch"
    assert loaded.digest != driver.load("llama", dtype, kernels="torch").digest


def prepare(model: Path, cache: Path, cxx: str) -> tuple[list[dict[str, object]], bool]:
    """Run `python -m llm_tools.weights`; return its lines, and whether it imported torch."""
    done = subprocess.run(
        [sys.executable, "-X", "importtime", "-m", "llm_tools.weights", str(model)],
        capture_output=True,
        text=True,
        timeout=WAIT,
        check=True,
        env={**os.environ, "PYTHONPATH": str(VERSION), "CXX": cxx, "TOKENSTREAM_CACHE": str(cache)},
    )
    imported = {line.rpartition("|")[2].strip() for line in done.stderr.splitlines()}
    assert "llm_kernels.build" in imported
    return [json.loads(line) for line in done.stdout.splitlines()], "torch" in imported


def test_preparing_a_model_builds_the_kernels_once_and_does_without_a_compiler(tmp_path: Path) -> None:
    model = tmp_path / "model"
    model.mkdir()
    (model / "config.json").write_text("{}")
    (model / "model.safetensors").write_bytes((2).to_bytes(8, "little") + b"{}")
    ready = {"path": str(model)}
    building = {"stage": "building the CPU kernels", "done": 0, "total": None}
    cxx = str(compiler(tmp_path))
    assert prepare(model, tmp_path / "cache", "/nonexistent") == ([ready], False)
    assert prepare(model, tmp_path / "cache", cxx) == ([building, ready], False)
    assert prepare(model, tmp_path / "cache", cxx) == ([ready], False)
    assert is_built(tmp_path / "cache", toolchain(tmp_path))
    assert prepare(model, tmp_path / "other", str(compiler(tmp_path, "exit 1"))) == ([building, ready], False)


def test_without_a_compiler_what_tests_the_kernels_is_skipped_and_says_why(tmp_path: Path) -> None:
    folder = Path(__file__).parent
    done = subprocess.run(
        [sys.executable, "-m", "pytest", str(folder / "test_native.py"), str(folder / "test_native_llama.py")],
        capture_output=True,
        text=True,
        timeout=WAIT,
        cwd=folder.parents[1],
        env={**os.environ, "CXX": "/nonexistent", "TOKENSTREAM_CACHE": str(tmp_path)},
    )
    assert re.search(r"^=+ \d+ skipped in ", done.stdout, re.MULTILINE), done.stdout + done.stderr
    for dtype in ("bfloat16", "float32"):
        assert f"the native kernels do not run in {dtype}: " in done.stdout
    assert "install g++" in done.stdout
    assert done.returncode == 0

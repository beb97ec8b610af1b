"""Which kernels a model gets, what is told where there are none, and that preparing a model builds them."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import textwrap
from collections.abc import Mapping
from pathlib import Path

import pytest

from engine import checkpoints, driver
from llm_engine.config import ConfigError
from llm_kernels import objects
from llm_kernels.cpu_level import choose_level
from llm_kernels.objects import Objects
from waiting import WAIT

TESTS = Path(__file__).parents[1]
VERSION = Path(objects.__file__).parents[1]  # the folder that holds llm_engine
WHOLE, PARTS = "llama", "gpt_oss"  # families of whole native steps, and of native attention alone


def run(code: str, environ: Mapping[str, str]) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)],
        capture_output=True,
        text=True,
        timeout=WAIT,
        check=True,
        env={**os.environ, "PYTHONPATH": f"{VERSION}:{TESTS}", **environ},
    )


def test_without_a_compiler_the_engine_serves_and_says_once_what_it_costs(tmp_path: Path) -> None:
    code = """
        import json, logging
        logging.basicConfig(format="%(levelname)s %(message)s", level=logging.INFO)
        from engine import driver, tiny_models
        from llm_engine.config import ConfigError
        from llm_engine.request import SamplingParams

        def refusal(family, dtype, **asked):
            try:
                driver.load(family, dtype, **asked)
            except ConfigError as error:
                return str(error)

        told = []
        for family, dtype in (("llama", "float32"), ("llama", "bfloat16"), ("gpt_oss", "bfloat16")):
            loaded = driver.load(family, dtype)
            with driver.serving(loaded) as engine:
                answer = engine.ask(tiny_models.prompt(9), SamplingParams(max_tokens=5, ignore_eos=True)).wait()
            told.append([loaded.config.kernels, len(answer.tokens), refusal(family, dtype, kernels="native")])
        print(json.dumps([told, refusal("llama", "float32", weight_format="int8")]))
    """
    done = run(code, {"CXX": "/nonexistent", "PATH": str(tmp_path), "TOKENSTREAM_CACHE": str(tmp_path)})
    lack = (
        "no C++ compiler '/nonexistent', which CXX names; install g++ 12 or newer, or run: pip install ziglang, and "
        "unset CXX"
    )
    told, refusal = json.loads(done.stdout)
    assert told == [["torch", 5, f"kernels is 'native', but {lack}"]] * 3
    assert refusal == f"weight_format is 'int8', which whole native steps alone honour, but {lack}"
    warnings = [line for line in done.stderr.splitlines() if line.startswith("WARNING")]
    cost = "PyTorch's take their place, and steps take longer"
    assert warnings == [f"WARNING native kernels are off: {lack}. {cost}"] * 3  # one for each engine


@pytest.mark.parametrize("family", [WHOLE, PARTS])
def test_float16_has_no_native_kernels(family: str) -> None:
    loaded = driver.load(family, "float16")
    assert loaded.config.kernels == "torch"
    assert loaded.steps is None
    assert loaded.attention is None
    with pytest.raises(ConfigError, match="kernels is 'native', but they compute in bfloat16 or float32, and dtype is"):
        driver.load(family, "float16", kernels="native")


@pytest.mark.parametrize("dtype", driver.native_dtypes())
def test_where_the_kernels_are_there_auto_takes_them(dtype: str) -> None:
    whole, parts = driver.load(WHOLE, dtype), driver.load(PARTS, dtype)
    assert (whole.config.kernels, parts.config.kernels) == ("native", "native")
    assert whole.steps is not None
    assert whole.attention is None
    assert parts.steps is None
    assert parts.attention is not None
    for loaded, family in ((whole, WHOLE), (parts, PARTS)):
        plain = driver.load(family, dtype, kernels="torch")
        assert plain.config.kernels == "torch"
        assert plain.steps is None
        assert plain.attention is None
        assert plain.digest != loaded.digest


@driver.needs_native()
@pytest.mark.parametrize("asked", [{"weight_format": "int8"}, {"arithmetic": "fma32"}])
def test_a_format_or_arithmetic_that_a_family_cannot_honour_is_refused(asked: dict[str, str]) -> None:
    ((name, value),) = asked.items()
    with pytest.raises(
        ConfigError, match=f"^{name} is '{value}', which whole native steps alone honour, but model type '{PARTS}' has"
    ):
        driver.load(PARTS, "bfloat16", **asked)


COMPILER = """#!/bin/sh
case "$*" in *--version) echo 1; exit;; esac
{action}
while [ "$1" != -o ]; do shift; done
echo made > "$2"
"""


def compiler(folder: Path, action: str = "") -> str:
    """A script that answers like a compiler, whose objects are none."""
    script = folder / "compiler"
    script.write_text(COMPILER.format(action=action))
    script.chmod(0o755)
    return str(script)


def prepare(model: Path, cache: Path, cxx: str) -> tuple[list[str], set[str]]:
    """Run `python -m llm_tools.weights`; return the stages that it told, and what it imported of torch's world."""
    done = subprocess.run(
        [sys.executable, "-X", "importtime", "-m", "llm_tools.weights", str(model)],
        capture_output=True,
        text=True,
        timeout=WAIT,
        check=True,
        env={**os.environ, "PYTHONPATH": str(VERSION), "CXX": cxx, "TOKENSTREAM_CACHE": str(cache)},
    )
    imported = {line.rpartition("|")[2].strip() for line in done.stderr.splitlines()}
    assert "llm_kernels.objects" in imported
    *lines, last = map(json.loads, done.stdout.splitlines())
    assert last == {"path": str(model)}
    return [line["stage"] for line in lines], {"torch", "transformers"} & imported


def test_preparing_a_model_builds_the_kernels_once_and_does_without_a_compiler(tmp_path: Path) -> None:
    model, cache = checkpoints.save(tmp_path / "model"), tmp_path / "cache"
    checking, building = "checking the model's tensors", "building the CPU kernels"
    cold, _ = prepare(model, cache, "/nonexistent")
    assert cold == [checking]
    assert prepare(model, cache, "/nonexistent") == ([], set())
    cxx = compiler(tmp_path)
    assert prepare(model, cache, cxx) == ([building], set())
    assert prepare(model, cache, cxx) == ([], set())
    assert Objects(cache).is_ready(choose_level(), {"CXX": cxx})
    failing = prepare(model, tmp_path / "other", compiler(tmp_path, "exit 1"))[0]
    assert failing == [checking, building]


def test_without_a_compiler_what_tests_the_kernels_is_skipped_and_says_why(tmp_path: Path) -> None:
    folder = Path(__file__).parent
    done = subprocess.run(
        [sys.executable, "-m", "pytest", str(folder / "test_native.py"), str(folder / "test_native_steps.py")],
        capture_output=True,
        text=True,
        timeout=WAIT,
        cwd=folder.parents[1],
        env={**os.environ, "CXX": "/nonexistent", "TOKENSTREAM_CACHE": str(tmp_path)},
    )
    told = done.stdout + done.stderr
    assert re.search(r"^=+ 3 passed, \d+ skipped in ", done.stdout, re.MULTILINE), told  # 3 call no kernel
    assert "the native kernels do not run here: " in done.stdout
    assert "install g++" in done.stdout
    assert done.returncode == 0

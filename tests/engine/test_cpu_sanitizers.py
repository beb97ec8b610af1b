"""The CPU kernels under the compiler's sanitizers: what the other tests compute leaves no report."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from engine.cpu_objects import OBJECT
from llm_kernels.compilers import FLAGS
from llm_kernels.cpu_level import Level, runnable
from llm_kernels.objects import SOURCES

HERE = Path(__file__).parent
TESTED = [HERE / f"test_cpu_{name}.py" for name in ("linear", "decoder", "draw")]
SANITIZED = ("-O1", "-g", "-shared", "-fsanitize=address,undefined,float-cast-overflow", "-fno-sanitize-recover=all")
LEVELS = [level for level in runnable() if level.name in ("generic", "x86-64-v3")]


def runtime(name: str) -> str:
    found = subprocess.run(["g++", f"-print-file-name={name}"], capture_output=True, text=True, check=True)
    return found.stdout.strip()


@pytest.mark.large
@pytest.mark.skipif(shutil.which("g++") is None, reason="there is no g++, whose sanitizers these are")
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("level", LEVELS, ids=lambda level: level.name)
def test_no_sanitizer_reports_anything(level: Level, tmp_path: Path) -> None:
    made = tmp_path / "sanitized.so"
    flags = [flag for flag in (*FLAGS, *level.options) if not flag.startswith("-O")]
    subprocess.run(["g++", *flags, *SANITIZED, str(SOURCES / "api.cpp"), "-o", str(made)], check=True)
    environ = os.environ | {
        OBJECT: str(made),
        "LD_PRELOAD": f"{runtime('libasan.so')} {runtime('libstdc++.so.6')}",
        "ASAN_OPTIONS": "detect_leaks=0",  # of Python's, which frees little at its end
        "HYPOTHESIS_PROFILE": "quick",
    }
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", *map(str, TESTED)]
    run = subprocess.run(command, env=environ, cwd=HERE.parents[1], capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stdout + run.stderr

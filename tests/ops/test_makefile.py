"""A machine without a C++ compiler gets one from `make`; pip is a script here, which notes what it is asked for."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
TOOLS = ("bash", "date", "sh")  # what the Makefile runs besides make


@pytest.fixture
def programs(tmp_path: Path) -> Path:
    """A folder to be the whole PATH: tools, and no compiler."""
    folder = tmp_path / "programs"
    folder.mkdir()
    for name in TOOLS:
        (folder / name).symlink_to(shutil.which(name) or "")
    return folder


def set_up(programs: Path, venv: Path) -> tuple[str, str]:
    """What `make compiler` prints, and what it has pip do in the virtual environment."""
    python = venv / "bin" / "python"
    if not python.exists():
        python.parent.mkdir(parents=True)
        # -S: a package ziglang beside the running Python would be a compiler
        python.write_text(
            f'#!/bin/sh\n[ "$2" = pip ] && {{ echo "$*" >> {venv}/asked; exit; }}\nexec {sys.executable} -S "$@"\n'
        )
        python.chmod(0o755)
    done = subprocess.run(
        [
            shutil.which("make") or "make",
            "--no-print-directory",
            "compiler",
            f"VENV={venv}",
            f"PYTHON={sys.executable}",
        ],
        cwd=ROOT,
        env={"PATH": str(programs), "HOME": os.environ.get("HOME", "/")},
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    asked = venv / "asked"
    return done.stdout + done.stderr, asked.read_text() if asked.exists() else ""


def test_without_a_compiler_one_is_installed_and_make_says_so(programs: Path, tmp_path: Path) -> None:
    told, asked = set_up(programs, tmp_path / "venv")
    assert told.startswith("There is no C++ compiler here for the CPU kernels: installing one in ")
    assert told.count("\n") == 1
    assert asked.endswith(" install --quiet --group compiler\n")


@pytest.mark.parametrize("name", ["g++", "clang++"])
def test_where_there_is_a_compiler_none_is_installed(programs: Path, tmp_path: Path, name: str) -> None:
    compiler = programs / name
    compiler.write_text("#!/bin/sh\necho 1\n")
    compiler.chmod(0o755)
    assert set_up(programs, tmp_path / "venv") == ("", "")

"""A model's own child process converts its weights; what it reports is heard, and its faults are one line."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tokenstream.diagnosis import SetupError
from tokenstream.prepare import prepare
from tokenstream.repository import Model


def make(tmp_path: Path, code: str) -> Model:
    (tmp_path / "llm_tools").mkdir()
    (tmp_path / "llm_tools" / "__init__.py").touch()
    (tmp_path / "llm_tools" / "weights.py").write_text(code)
    return Model("llm", tmp_path, "a/b")


def run(model: Model, log: Path) -> list[tuple[str, int, int | None]]:
    heard: list[tuple[str, int, int | None]] = []
    prepare(model, os.environ, log, lambda *stage: heard.append(stage), lambda: None)
    return heard


def test_progress_is_heard_and_other_lines_are_passed_over(tmp_path: Path) -> None:
    loading = """
import json, sys
print("loading", sys.argv[1])
print("[1, 2]")
print(json.dumps({"stage": "convert", "done": 1, "total": 2}))
print(json.dumps({"stage": "compile", "done": 0, "total": None}))
print(json.dumps({"path": "/somewhere"}))
"""
    assert run(make(tmp_path, loading), tmp_path / "log") == [("convert", 1, 2), ("compile", 0, None)]


def test_an_error_is_its_one_line(tmp_path: Path) -> None:
    loading = "import json, sys\nprint(json.dumps({'error': 'no space left: free some'}))\nsys.exit(1)"
    with pytest.raises(SetupError, match=r"^model 'llm' cannot be prepared: no space left: free some$"):
        run(make(tmp_path, loading), tmp_path / "log")


@pytest.mark.parametrize(
    ("loading", "line"),
    [
        ("raise RuntimeError('odd file')", r"RuntimeError: odd file \(exit code 1\)"),
        ("import os; os.kill(os.getpid(), 9)", "killed by signal 9"),
    ],
)
def test_a_child_that_dies_gives_its_last_words(tmp_path: Path, loading: str, line: str) -> None:
    with pytest.raises(SetupError, match=f"^model 'llm' cannot be prepared: {line}$"):
        run(make(tmp_path, loading), tmp_path / "log")


def test_a_check_that_raises_ends_the_child(tmp_path: Path) -> None:
    def check() -> None:
        raise InterruptedError

    model = make(tmp_path, "import time; time.sleep(60)")
    with pytest.raises(InterruptedError):
        prepare(model, os.environ, tmp_path / "log", lambda *_: None, check)


@pytest.mark.parametrize("model", [Model("llm", Path("/absent"), "a/b"), Model("llm", Path("/absent"), "")])
def test_a_model_without_a_child_or_weights_needs_no_preparation(model: Model, tmp_path: Path) -> None:
    assert run(model, tmp_path / "log") == []

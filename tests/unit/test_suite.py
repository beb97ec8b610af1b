"""What the suite promises: a test that hangs fails alone, and Ctrl-C reaches a child wherever the suite runs."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
FAILED = "HangError: the test hangs: it has run for more than 1 s"
# Ways to hang, each of which some test of this suite could fall into.
HANGS = {
    "waiting for a lock": "threading.Lock().acquire() and threading.Event().wait()",
    "waiting for a child": "subprocess.run([sys.executable, '-c', 'import time; time.sleep(600)'])",
    "waiting for a channel": "grpc.channel_ready_future(grpc.insecure_channel('127.0.0.1:1')).result()",
    "in an event loop": "asyncio.run(asyncio.sleep(600))",
    "in a loop that swallows": """
    while True:
        try:
            time.sleep(0.01)
        except Exception:
            pass
""",
    "in an example": """
    @hypothesis.given(hypothesis.strategies.integers())
    @hypothesis.settings(deadline=None, database=None)
    def example(number):
        threading.Event().wait()
    example()
""",
}
HEAD = """
import asyncio, signal, subprocess, sys, threading, time
import grpc, hypothesis, hypothesis.strategies, pytest
"""


def suite(folder: Path, tests: str, *options: str, ignoring: bool = False) -> subprocess.CompletedProcess[str]:
    """A run of `tests` as the suite's, in a process that ignores SIGINT if asked, as below a `nohup make test &`."""
    file = folder / "test_it.py"
    file.write_text(HEAD + tests)
    command = [sys.executable, "-m", "pytest", "-c", str(ROOT / "pyproject.toml"), "-p", "conftest"]
    shell = ["/bin/sh", "-c", 'trap "" INT; exec "$@"', "sh"] if ignoring else []
    return subprocess.run(
        [*shell, *command, "-p", "no:cacheprovider", f"--rootdir={folder}", *options, str(file)],
        env={**os.environ, "PYTHONPATH": str(ROOT / "tests")},
        cwd=folder,
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.mark.parametrize("hang", HANGS)
def test_a_hanging_test_fails_and_the_next_one_passes(hang: str, tmp_path: Path) -> None:
    done = suite(tmp_path, f"def test_hangs():\n    {HANGS[hang]}\n\ndef test_next():\n    pass\n", "--timeout=1")
    assert "1 failed, 1 passed" in done.stdout, done.stdout + done.stderr
    assert FAILED in done.stdout
    assert "most recent call first" in done.stdout  # where the other threads were


def test_a_fixture_that_hangs_fails_its_own_test(tmp_path: Path) -> None:
    tests = """
@pytest.fixture
def one():
    threading.Event().wait()

@pytest.fixture(scope="module")
def shared():
    yield 1

def test_before(shared):
    pass

def test_hangs(shared, one):
    pass

def test_next(shared):
    assert shared == 1
"""
    done = suite(tmp_path, tests, "--timeout=1")
    assert "2 passed, 1 error" in done.stdout, done.stdout + done.stderr
    assert FAILED in done.stdout


def test_a_child_hears_ctrl_c_where_the_suite_runs_in_the_background(tmp_path: Path) -> None:
    tests = """
def test_heard():
    child = subprocess.Popen([sys.executable, "-c", "import time; print(flush=True); time.sleep(600)"],
                             stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
    with child:
        child.stdout.readline()
        child.send_signal(signal.SIGINT)
        assert child.wait() == -signal.SIGINT
"""
    done = suite(tmp_path, tests, "--timeout=20", ignoring=True)
    assert "1 passed" in done.stdout, done.stdout + done.stderr

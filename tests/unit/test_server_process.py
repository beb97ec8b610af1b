"""A child and its children never outlive their parent, and end is reported as it was."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tokenstream import _keeper
from tokenstream.process import Process
from tokenstream.runfolder import processes
from waiting import WAIT


@pytest.fixture
def log(tmp_path: Path) -> Path:
    return tmp_path / "log"


def run(command: str, log: Path, mark: str = "", *, pipe: bool = False) -> Process:
    return Process(["sh", "-c", command], {**os.environ, "TOKENSTREAM_RUN_ID": mark}, log, pipe=pipe)


def seen(mark: str, pid: int) -> bool:
    """Whether the process is found within 10 s. Once is enough: a later look may meet it in an exec, without a mark."""
    deadline = time.monotonic() + 10
    while time.monotonic() < deadline:
        if pid in processes(mark):
            return True
        time.sleep(0.02)
    return False


def gone(mark: str) -> bool:
    deadline = time.monotonic() + 10
    while processes(mark) and time.monotonic() < deadline:
        time.sleep(0.02)
    return processes(mark) == []


@pytest.mark.parametrize(
    ("command", "code"), [("exit 0", 0), ("exit 7", 7), ("kill -9 $$", -9), ("kill -TERM $$", -15)]
)
def test_the_end_of_a_child_is_reported_as_it_was(command: str, code: int, log: Path) -> None:
    child = run(command, log)
    assert child.wait(WAIT) == code
    assert child.close(0) == code


def test_what_a_child_says_is_in_the_log(log: Path) -> None:
    child = run("echo out; echo err >&2; read line || echo no input", log)
    child.wait(WAIT)
    child.close(0)
    assert log.read_text().split("\n") == ["out", "err", "no input", ""]


def test_a_command_that_does_not_exist_says_so(log: Path) -> None:
    child = Process(["/no/such/program"], dict(os.environ), log)
    assert child.wait(WAIT) == 127
    child.close(0)
    assert log.read_text() == "cannot run /no/such/program: No such file or directory\n"


def test_lines_come_as_they_are_said(log: Path) -> None:
    child = run("echo one; echo two; printf three", log, pipe=True)
    assert [line for line in child.lines(0.1) if line is not None] == ["one", "two", "three"]
    assert child.close(1) == 0


def test_a_child_ends_at_sigterm_and_one_that_will_not_is_killed(log: Path) -> None:
    assert run("exec sleep 60", log).close(10) == -signal.SIGTERM
    stubborn = run("trap '' TERM; echo deaf; while :; do sleep 0.05; done", log, pipe=True)
    assert next(line for line in stubborn.lines(0.1) if line) == "deaf"
    assert stubborn.close(0.3) == -signal.SIGKILL


def test_what_a_child_leaves_behind_is_ended_with_it(log: Path) -> None:
    child = run("sleep 60 & exit 3", log, "left-behind")
    assert child.wait(WAIT) == 3
    child.close(0)
    assert processes("left-behind") == []


def test_a_child_and_its_children_die_with_a_killed_parent(log: Path) -> None:
    code = (
        "import os, sys, time; from pathlib import Path; from tokenstream.process import Process;"
        "child = Process(['sh', '-c', 'sleep 60 & sleep 60'], dict(os.environ), Path(sys.argv[1]));"
        "print(child.pid, flush=True); time.sleep(60)"
    )
    path = os.pathsep.join(entry for entry in sys.path if entry)
    env = {**os.environ, "PYTHONPATH": path, "TOKENSTREAM_RUN_ID": "killed-parent"}
    parent = subprocess.Popen([sys.executable, "-c", code, log], env=env, stdout=subprocess.PIPE)
    with parent:
        assert parent.stdout is not None
        assert seen("killed-parent", int(parent.stdout.readline()))
        parent.kill()
    assert gone("killed-parent")


def test_a_keeper_whose_asker_does_not_hear_its_answer_stays_until_the_end() -> None:
    hears, answer = os.pipe()
    os.close(hears)
    command = [sys.executable, "-I", "-S", _keeper.__file__, str(answer), "sh", "-c", "exit 3"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, pass_fds=[answer]) as keeper:  # the lifeline is held
        os.close(answer)
        assert keeper.wait(WAIT) == 3


def test_a_child_dies_with_a_killed_keeper(log: Path) -> None:
    child = run("exec sleep 60", log, "killed-keeper")
    (keeper,) = set(processes("killed-keeper")) - {child.pid}
    os.kill(keeper, signal.SIGKILL)
    assert child.wait(WAIT) == -signal.SIGKILL
    assert gone("killed-keeper")
    child.close(0)

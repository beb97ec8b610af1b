"""`probe --live` and `drain` by heartbeats alone, and a command that cannot even begin."""

from __future__ import annotations

import json
import os
import resource
import subprocess
import threading
import time
from pathlib import Path

import pytest

import tokenstream
from tokenstream.runfolder import RunFolder
from unit.test_cli_commands import COMMAND, run
from unit.test_server_heartbeat import write_beat
from waiting import WAIT

CLIENT = str(Path(tokenstream.__file__).parent.parent)


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("TOKENSTREAM_CACHE", str(tmp_path / "cache"))
    monkeypatch.delenv("TOKENSTREAM_RUN_DIR", raising=False)
    return tmp_path / "cache"


def test_a_server_that_beats_is_live_even_if_it_is_full_and_draining(tmp_path: Path) -> None:
    write_beat(tmp_path, live=5000, draining=True)
    result = run("probe", "--live", "--run-dir", str(tmp_path))
    assert (result.exit_code, result.stdout, result.stderr) == (0, "live\n", "")


@pytest.mark.parametrize(
    ("beat", "why"),
    [
        ({"pid": 2**22 + 1}, "the process of llm_0_1 (pid 4194305) died"),
        ({"at": 5.0}, f"llm_0_1 (pid {os.getpid()}) gives no sign of life any more"),
        ({"stalled": True}, f"llm_0_1 (pid {os.getpid()}) has work and makes no progress"),
    ],
)
def test_the_instance_that_is_not_live_is_named_in_one_line(tmp_path: Path, beat: dict[str, object], why: str) -> None:
    write_beat(tmp_path)
    write_beat(tmp_path, "llm_0_1", **beat)
    result = run("probe", "--live", "--run-dir", str(tmp_path))
    assert (result.exit_code, result.stdout, result.stderr) == (1, "", f"{why}\n")


def test_without_any_server_the_cure_is_told(tmp_path: Path) -> None:
    cure = "start one with `tokenstream serve`, or name its run folder with --run-dir"
    for arguments, where in (([], "of this user"), (["--run-dir", str(tmp_path)], f"in {tmp_path}")):
        result = run("probe", "--live", *arguments)
        assert (result.exit_code, result.stderr) == (1, f"no server {where} is serving: {cure}\n")
        told = json.loads(run("probe", "--live", "--json", *arguments).stderr)
        assert told == {"error": result.stderr.strip(), "code": 1}


@pytest.mark.parametrize("elsewhere", [False, True])
def test_a_server_that_has_not_beaten_yet_is_not_serving_yet(cache: Path, tmp_path: Path, elsewhere: bool) -> None:
    folder = RunFolder(cache / "run", files=tmp_path / "mine" if elsewhere else None, shared_memory=tmp_path)
    for arguments in ([], ["--run-dir", str(folder.files)]):
        result = run("probe", "--live", *arguments)
        assert (result.exit_code, result.stderr) == (1, "not serving yet\n")
    folder.remove()


@pytest.mark.parametrize("elsewhere", [False, True])
def test_a_live_server_of_this_user_is_found_without_a_name(cache: Path, tmp_path: Path, elsewhere: bool) -> None:
    folder = RunFolder(cache / "run", files=tmp_path / "mine" if elsewhere else None, shared_memory=tmp_path)
    write_beat(folder.files)
    assert run("probe", "--live").exit_code == 0
    write_beat(folder.files, draining=True)
    assert run("drain").exit_code == 0
    folder.remove()
    assert run("probe", "--live").exit_code == 1


def test_the_environment_may_name_the_run_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_beat(tmp_path)
    monkeypatch.setenv("TOKENSTREAM_RUN_DIR", str(tmp_path))
    assert run("probe", "--live").exit_code == 0


def test_drain_waits_for_the_end_and_says_how_many_there_were(tmp_path: Path) -> None:
    write_beat(tmp_path, live=3)

    def serve() -> None:
        deadline = time.monotonic() + WAIT
        while not (tmp_path / "drain").exists() and time.monotonic() < deadline:
            time.sleep(0.01)
        assert json.loads((tmp_path / "drain").read_text()) == {"seconds": 15.0}
        write_beat(tmp_path, live=0, draining=True)

    model = threading.Thread(target=serve)
    model.start()
    result = run("drain", "--seconds", "15", "--run-dir", str(tmp_path))
    model.join()
    assert (result.exit_code, result.stdout) == (0, "drained: 3 requests were live, and all have ended\n")


def test_no_server_to_drain_is_exit_code_3_with_the_cure(tmp_path: Path) -> None:
    write_beat(tmp_path, pid=2**22 + 1)
    for arguments in ([], ["--run-dir", str(tmp_path)]):
        result = run("drain", *arguments)
        assert result.exit_code == 3
        assert result.stderr.count("\n") == 1
        assert "tokenstream serve" in result.stderr
    assert not (tmp_path / "drain").exists()


def test_ctrl_c_while_the_command_loads_is_exit_code_130_and_no_traceback(tmp_path: Path) -> None:
    (tmp_path / "typer.py").write_text("import os, signal, time; os.kill(os.getpid(), signal.SIGINT); time.sleep(20)")
    env = {**os.environ, "PYTHONPATH": os.pathsep.join((str(tmp_path), CLIENT))}
    ended = subprocess.run([*COMMAND, "--help"], env=env, capture_output=True, timeout=WAIT)
    assert (ended.returncode, ended.stderr) == (130, b"")


def test_too_few_open_files_are_one_line_with_the_cure_before_a_start() -> None:
    ended = subprocess.run(
        [*COMMAND, "serve"],
        env={**os.environ, "PYTHONPATH": CLIENT},
        capture_output=True,
        text=True,
        timeout=WAIT,
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_NOFILE, (64, 64)),
    )
    assert ended.returncode == 1
    assert ended.stderr.count("\n") == 1
    assert "only 64 files may be open (ulimit -n), the server needs 256: raise it with `ulimit -n 1024`" in ended.stderr

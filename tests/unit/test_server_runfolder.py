"""A sweep clears away dead runs whole, and nothing else."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tokenstream.diagnosis import SetupError
from tokenstream.runfolder import RUN_ID, RunFolder, live_files, processes, sweep
from waiting import WAIT

DEAD = "0123456789abcdef"


@pytest.fixture
def root(tmp_path: Path) -> Path:
    (tmp_path / "run").mkdir()
    return tmp_path / "run"


@pytest.fixture
def shm(tmp_path: Path) -> Path:
    (tmp_path / "shm").mkdir()
    return tmp_path / "shm"


def make_dead(root: Path, shm: Path, run_id: str = DEAD, *, locked_once: bool = True) -> None:
    (root / run_id / "backends").mkdir(parents=True)
    (root / run_id / "server.log").write_text("what it said last")
    if locked_once:
        (root / run_id / "lock").touch()
    (shm / f"tokenstream_{run_id}_region").touch()


@contextmanager
def process_of(run_id: str) -> Iterator[subprocess.Popen[bytes]]:
    """A process that belongs to the run and does not leave by itself."""
    env = {**os.environ, RUN_ID: run_id}
    process = subprocess.Popen([sys.executable, "-c", "print(flush=True); input()"], env=env, **PIPES)
    assert process.stdout is not None
    process.stdout.readline()
    with process:
        try:
            yield process
        finally:
            process.kill()


PIPES = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL}


@pytest.mark.parametrize("locked_once", [True, False])
def test_a_dead_run_is_swept_with_its_shared_memory(root: Path, shm: Path, locked_once: bool) -> None:
    make_dead(root, shm, locked_once=locked_once)
    assert sweep(root, shared_memory=shm) == [DEAD]
    assert list(shm.iterdir()) == []
    assert not (root / DEAD).exists()
    assert (root / "last-failed.log").read_text() == "what it said last"


def test_a_sweep_leaves_live_runs_and_what_is_not_ours(root: Path, shm: Path) -> None:
    live = RunFolder(root, shared_memory=shm)
    (shm / f"{live.prefix}region").touch()
    (shm / "psm_other").touch()
    (shm / "tokenstream_fedcba9876543210_other-cache").touch()
    (root / "notes").mkdir()
    assert sweep(root, shared_memory=shm) == []
    assert live.log_path.exists()
    assert len(list(shm.iterdir())) == 3
    assert (root / "notes").exists()
    live.remove()
    assert len(list(shm.iterdir())) == 2
    assert sweep(root, shared_memory=shm) == []


def test_a_start_sweeps_first(root: Path, shm: Path) -> None:
    make_dead(root, shm)
    RunFolder(root, shared_memory=shm).remove()
    assert [path.name for path in root.iterdir() if path.is_dir()] == []
    assert list(shm.iterdir()) == []


def test_what_is_left_of_a_dead_run_is_killed_and_nobody_else(root: Path, shm: Path) -> None:
    make_dead(root, shm)
    with process_of(DEAD) as left, process_of("fedcba9876543210") as other:
        assert processes(DEAD) == [left.pid]
        sweep(root, shared_memory=shm, patience=0.2)
        assert left.wait(WAIT) == -9
        assert other.poll() is None


def test_a_dead_run_that_is_still_leaving_is_waited_for(root: Path, shm: Path) -> None:
    make_dead(root, shm)
    with process_of(DEAD) as left:
        assert left.stdin is not None
        left.stdin.write(b"\n")
        left.stdin.flush()
        sweep(root, shared_memory=shm, patience=20)
        assert left.wait(WAIT) == 0


def test_a_lock_falls_with_the_process_that_held_it(root: Path, shm: Path) -> None:
    code = (
        "import sys, os; from pathlib import Path; from tokenstream.runfolder import RunFolder;"
        "print(RunFolder(Path(sys.argv[1]), shared_memory=Path(sys.argv[2])).id, flush=True); os.kill(os.getpid(), 9)"
    )
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    done = subprocess.run(
        [sys.executable, "-c", code, root, shm], env=env, capture_output=True, text=True, timeout=WAIT
    )
    assert sweep(root, shared_memory=shm) == [done.stdout.strip()]


def test_a_failed_run_keeps_its_log_and_a_good_one_does_not(root: Path, shm: Path) -> None:
    good, failed = RunFolder(root, shared_memory=shm), RunFolder(root, shared_memory=shm)
    failed.log_path.write_text("why")
    failed.remove(failed=True)
    good.remove()
    assert failed.log_path == failed.kept_log_path
    assert failed.log_path.read_text() == "why"
    assert not good.log_path.exists()


def test_a_given_folder_for_files_is_kept(root: Path, shm: Path, tmp_path: Path) -> None:
    run = RunFolder(root, files=tmp_path / "mine", shared_memory=shm)
    run.remove(failed=True)
    assert run.log_path == tmp_path / "mine" / "server.log"
    assert run.log_path.exists()
    assert not run.path.exists()


def test_an_unusable_cache_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(SetupError, match=r"cannot write to .*file/run \(Not a directory\): set TOKENSTREAM_CACHE"):
        RunFolder(tmp_path / "file" / "run")
    with pytest.raises(SetupError, match=r"cannot write to .*/file \("):
        RunFolder(tmp_path / "run", files=tmp_path / "file")
    assert [path for path in (tmp_path / "run").iterdir() if path.is_dir()] == []


def test_live_runs_are_found_wherever_their_files_are(root: Path, shm: Path, tmp_path: Path) -> None:
    assert live_files(root) == []
    make_dead(root, shm)
    (root / DEAD / "files").write_text(str(root / DEAD))
    assert live_files(root) == []
    own = RunFolder(root, shared_memory=shm)
    elsewhere = RunFolder(root, files=tmp_path / "mine", shared_memory=shm)
    assert set(live_files(root)) == {own.path, tmp_path / "mine"}
    own.remove()
    assert live_files(root) == [tmp_path / "mine"]
    elsewhere.remove()
    assert live_files(root) == []


def test_a_look_for_live_runs_does_not_unlock_them(root: Path, shm: Path) -> None:
    run = RunFolder(root, shared_memory=shm)
    for _ in range(2):
        assert live_files(root) == [run.path]
    assert sweep(root, shared_memory=shm) == []
    run.remove()


def test_two_live_servers_do_not_share_a_folder_for_files(root: Path, shm: Path, tmp_path: Path) -> None:
    first = RunFolder(root, files=tmp_path / "mine", shared_memory=shm)
    (tmp_path / "mine" / "heartbeat-llm_0_0.json").touch()
    first.log_path.write_text("said")
    with pytest.raises(SetupError, match="mine belongs to another server that runs: give each its own"):
        RunFolder(root, files=tmp_path / "mine", shared_memory=shm)
    assert first.log_path.read_text() == "said"
    assert (tmp_path / "mine" / "heartbeat-llm_0_0.json").exists()
    first.remove()
    RunFolder(root, files=tmp_path / "mine", shared_memory=shm).remove()


def test_what_a_dead_server_left_is_gone_before_the_next_one_in_its_folder(root: Path, shm: Path) -> None:
    run = RunFolder(root, shared_memory=shm)
    (shm / f"{run.prefix}region").touch()
    for name in ("heartbeat-llm_0_0.json", "heartbeat-llm_0_0.new", "drain"):
        (run.files / name).touch()
    run.log_path.write_text("what it said last")
    with process_of(run.id) as left:
        run.clear()
        assert left.wait(WAIT) == -9
    assert list(shm.iterdir()) == []
    assert sorted(path.name for path in run.path.iterdir()) == ["files", "lock", "server.log"]
    assert run.log_path.read_text() == "what it said last"
    run.remove()


def test_a_log_is_read_from_where_a_start_began(root: Path, shm: Path) -> None:
    run = RunFolder(root, shared_memory=shm)
    run.log_path.write_text("x" * 100_000 + "tail")
    assert run.read_log(100_000) == "tail"
    assert len(run.read_log()) == 65536
    run.remove()
    assert run.read_log() == ""

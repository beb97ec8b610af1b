"""A server that dies, hangs or stalls is noticed within seconds, told in one line and started again where it was."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from server import tiny
from server.conftest import LONG
from server.raw import Wire, infer
from server.serving import BEATING, Serving, ready, run
from server.supervised import add_model, regions
from tokenstream.heartbeat import lives, read_heartbeats
from tokenstream.runfolder import processes
from tokenstream.server import TritonServer
from waiting import eventually

NOTICE_SECONDS = 8.0  # the five that are promised, and what this machine needs beside the tests


@pytest.fixture
def serving(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Serving]:
    """The command with a model that beats and does nothing else."""
    repository = add_model(tmp_path / "repository", initialize=BEATING)
    with Serving(tmp_path / "run", "--repository", str(repository)) as serving:
        eventually(lambda: run("probe", "--live", "--run-dir", str(serving.run_dir)).returncode == 0)
        yield serving


def restarted(serving: Serving, complaint: str) -> None:
    """The one line is said in time, and the server is ready again on its port, alone."""
    run_id, old = serving.run_id(), serving.beat().pid
    began = time.monotonic()
    line = serving.complains("^tokenstream: ").string
    assert time.monotonic() - began < NOTICE_SECONDS
    assert complaint in line
    assert "; restarting in 1 s (log: " in line
    serving.says("^Ready again")
    assert ready(serving.http_url, "tiny")
    assert not lives(old)
    assert len(regions(run_id)) == 1
    assert len(processes(run_id)) == 3  # keeper, server, stub
    eventually(lambda: run("probe", "--live", "--run-dir", str(serving.run_dir)).returncode == 0)


def test_a_new_request_is_served_on_the_same_port_after_the_stub_was_killed_in_mid_stream(tmp_path: Path) -> None:
    with Serving(tmp_path / "run", "--repository", str(tiny.repository())) as serving:
        wire = Wire(serving.grpc_url)
        stream = wire.call(infer(text_input="Once upon a time", **LONG))
        assert stream.next()
        pid = serving.beat().pid
        os.kill(pid, signal.SIGKILL)
        assert f"the process of llm_0_0 (pid {pid}) died; restarting in 1 s" in serving.complains("^tokenstream").string
        stream.rest()  # cut with the server: it does not hang
        wire.close()
        serving.says("^Ready again")
        again = Wire(serving.grpc_url)
        assert again.ask(text_input="Once upon a time", max_tokens=2)[-1]["finish_reason"] == "length"
        again.close()
        assert serving.end() == 0


def test_a_stopped_stub_is_noticed_by_its_silence(serving: Serving) -> None:
    pid = serving.beat().pid
    os.kill(pid, signal.SIGSTOP)
    restarted(serving, f"tiny_0_0 (pid {pid}) gives no sign of life any more")


def test_a_stalled_engine_is_restarted(serving: Serving) -> None:
    pid = serving.beat().pid
    (serving.run_dir / f"stall-{pid}").touch()
    restarted(serving, f"tiny_0_0 (pid {pid}) has work and makes no progress")


def test_a_killed_server_is_restarted_and_its_stub_is_not_blamed(serving: Serving) -> None:
    os.kill(serving.server_pid(), signal.SIGKILL)
    restarted(serving, "the server was killed by signal 9 while it was serving")


def test_probe_names_the_instance_that_stalls(serving: Serving) -> None:
    os.kill(serving.process.pid, signal.SIGSTOP)  # it would restart the server
    pid = serving.beat().pid
    (serving.run_dir / f"stall-{pid}").touch()
    eventually(lambda: serving.beat().stalled)
    probe = run("probe", "--live", "--run-dir", str(serving.run_dir))
    os.kill(serving.process.pid, signal.SIGCONT)
    assert probe.returncode == 1
    assert probe.stderr == f"tiny_0_0 (pid {pid}) has work and makes no progress\n"


def test_a_signal_between_two_starts_ends_the_command_in_order(serving: Serving) -> None:
    run_id = serving.run_id()
    os.kill(serving.beat().pid, signal.SIGKILL)
    serving.complains("; restarting in")
    assert serving.end() == 0
    assert regions(run_id) == []
    assert processes(run_id) == []


def test_a_model_that_does_not_beat_is_never_missed(tmp_path: Path) -> None:
    with Serving(tmp_path / "run", "--repository", str(add_model(tmp_path / "repository"))) as serving:
        probe = run("probe", "--live", "--run-dir", str(serving.run_dir))
        assert (probe.returncode, probe.stderr) == (1, "not serving yet\n")
        assert ready(serving.http_url, "tiny")
        assert serving.end() == 0
        assert serving.complaints()[-1] == "Loading the model"


def test_a_server_whose_stub_died_is_not_asked_to_end_in_order(tmp_path: Path) -> None:
    repository = add_model(tmp_path / "repository", initialize=BEATING)
    with TritonServer(repository, run_dir=tmp_path / "run", exit_timeout=3600) as server:
        eventually(lambda: bool(read_heartbeats(tmp_path / "run")))
        (beat,) = read_heartbeats(tmp_path / "run")
        os.kill(beat.pid, signal.SIGKILL)
        eventually(lambda: server.fault() is not None)
        assert server.fault() == f"the process of tiny_0_0 (pid {beat.pid}) died"
    assert server.returncode == -signal.SIGKILL
    assert read_heartbeats(tmp_path / "run") == ()

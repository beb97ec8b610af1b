"""Signals and kills: whichever of supervisor, keeper and server they hit, and when, nothing stays behind."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

import tokenstream
from server import supervised
from server.supervised import add_model, processes_under, regions, run_ids
from tokenstream.heartbeat import lives
from tokenstream.runfolder import processes
from tokenstream.server import TritonServer, sweep
from waiting import WAIT, eventually

cache = supervised.cache
repository = supervised.repository

SUPERVISOR = """
import sys
from pathlib import Path
from tokenstream.server import SetupError, TritonServer, serve_until_signal

def show(*words):
    print(*words, flush=True)

server = TritonServer(Path(sys.argv[1]), progress=lambda stage, done, total, elapsed: show("stage", stage))
try:
    code = serve_until_signal(
        server,
        on_ready=lambda: show("ready", server.pid, server.http_url),
        on_death=lambda failure: show("died", failure, failure.log_path),
    )
except SetupError as error:
    show("error", error)
    code = 1
sys.exit(code)
"""


class Supervisor:
    """SUPERVISOR in a process of its own."""

    def __init__(self, repository: Path) -> None:
        env = {**os.environ, "PYTHONPATH": str(Path(tokenstream.__file__).parent.parent)}
        self.process = subprocess.Popen(
            [sys.executable, "-c", SUPERVISOR, str(repository)], env=env, stdout=subprocess.PIPE, text=True
        )

    def until(self, word: str) -> list[str]:
        """The first line that starts with `word`; fails when there is none."""
        assert self.process.stdout is not None
        seen = []
        for line in self.process.stdout:
            seen.append(line)
            if line.split()[: len(word.split())] == word.split():
                return line.split()
        pytest.fail(f"no line {word!r} in {seen}")

    def close(self) -> None:
        self.process.kill()
        self.process.wait()
        assert self.process.stdout is not None
        self.process.stdout.close()


@pytest.fixture
def supervise(repository: Path) -> Iterator[Callable[[], Supervisor]]:
    made: list[Supervisor] = []

    def make() -> Supervisor:
        made.append(Supervisor(repository))
        return made[-1]

    yield make
    for supervisor in made:
        supervisor.close()


def test_a_signal_becomes_an_orderly_end_and_its_exit_code(
    repository: Path, cache: Path, supervise: Callable[[], Supervisor]
) -> None:
    add_model(repository)
    supervisor = supervise()
    pid = int(supervisor.until("ready")[1])
    supervisor.process.send_signal(signal.SIGTERM)
    assert supervisor.process.wait(WAIT) == 0
    assert not lives(pid)
    assert run_ids(cache) == []


@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGTERM])
@pytest.mark.parametrize("moment", ["layout", "start", "load"])
def test_a_signal_at_any_moment_of_a_start_ends_everything(
    repository: Path, cache: Path, supervise: Callable[[], Supervisor], signum: signal.Signals, moment: str
) -> None:
    add_model(repository, initialize="time.sleep(60)")
    supervisor = supervise()
    supervisor.until(f"stage {moment}")
    supervisor.process.send_signal(signum)
    assert supervisor.process.wait(WAIT) == 128 + signum
    assert processes_under(cache) == []
    assert run_ids(cache) == []


def test_a_signal_while_the_weights_are_prepared_ends_everything(
    repository: Path, cache: Path, supervise: Callable[[], Supervisor]
) -> None:
    loading = """
        import json, time
        print(json.dumps({"stage": "convert", "done": 0, "total": 2}))
        time.sleep(60)
    """
    add_model(repository, loading=loading)
    supervisor = supervise()
    supervisor.until("stage convert")
    (run_id,) = run_ids(cache)
    supervisor.process.send_signal(signal.SIGINT)
    assert supervisor.process.wait(WAIT) == 128 + signal.SIGINT
    assert processes(run_id) == []
    assert run_ids(cache) == []


def test_a_second_signal_kills_a_server_that_does_not_want_to_end(
    repository: Path, supervise: Callable[[], Supervisor]
) -> None:
    add_model(repository)
    supervisor = supervise()
    pid = int(supervisor.until("ready")[1])
    os.kill(pid, signal.SIGSTOP)  # it will not hear SIGTERM
    supervisor.process.send_signal(signal.SIGINT)
    with pytest.raises(subprocess.TimeoutExpired):
        supervisor.process.wait(1)
    supervisor.process.send_signal(signal.SIGINT)
    assert supervisor.process.wait(WAIT) == 128 + signal.SIGKILL
    assert not lives(pid)


@pytest.mark.parametrize("moment", ["ready", "stage load"])
def test_a_killed_supervisor_leaves_no_process_and_the_next_sweep_no_memory(
    repository: Path, cache: Path, supervise: Callable[[], Supervisor], moment: str
) -> None:
    add_model(repository, initialize="pass" if moment == "ready" else "time.sleep(60)")
    supervisor = supervise()
    supervisor.until(moment)
    (run_id,) = run_ids(cache)
    eventually(lambda: len(processes(run_id)) == 3 and bool(regions(run_id)))  # keeper, server, stub
    supervisor.process.kill()
    eventually(lambda: processes(run_id) == [])
    sweep(cache / "run")
    assert regions(run_id) == []
    assert run_ids(cache) == []
    assert (cache / "run" / "last-failed.log").read_text()


def test_a_start_right_after_a_killed_supervisor_gets_its_ports(
    repository: Path, supervise: Callable[[], Supervisor]
) -> None:
    add_model(repository)
    supervisor = supervise()
    port = int(supervisor.until("ready")[2].rpartition(":")[2])
    supervisor.process.kill()
    with TritonServer(repository, http_port=port) as server:
        assert server.ports.http == port


def test_a_killed_keeper_takes_the_server_along_and_stop_clears_the_rest(repository: Path, cache: Path) -> None:
    with TritonServer(add_model(repository)) as server:
        (run_id,) = run_ids(cache)
        keeper = int(Path(f"/proc/{server.pid}/stat").read_text().rpartition(")")[2].split()[1])
        os.kill(keeper, signal.SIGKILL)
        assert server.wait() == -signal.SIGKILL
    assert processes(run_id) == []
    assert regions(run_id) == []

"""A real tritonserver under `tokenstream.server`: started, watched and taken down, whatever its supervisor meets."""

from __future__ import annotations

import contextlib
import http.client
import os
import signal
import socket
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

import tokenstream
from tokenstream.runfolder import processes
from tokenstream.server import ServerFailed, SetupError, TritonServer, sweep

SHARED_MEMORY = Path("/dev/shm")
CONFIG = """
name: "{name}"
backend: "python"
model_transaction_policy {{ decoupled: true }}
input [ {{ name: "COUNT" data_type: TYPE_INT32 dims: [ 1 ] }} ]
output [ {{ name: "INDEX" data_type: TYPE_INT32 dims: [ 1 ] }} ]
instance_group [ {{ kind: KIND_CPU count: 1 }} ]
parameters {{ key: "model" value {{ string_value: "${{TINY_SPEC:-tiny}}" }} }}
"""
MODEL = """
import os
import time
import numpy as np
import triton_python_backend_utils as pb_utils

class TritonPythonModel:
    def initialize(self, args):
        {initialize}

    def execute(self, requests):
        for request in requests:
            sender = request.get_response_sender()
            output = pb_utils.Tensor("INDEX", np.array([1], np.int32))
            sender.send(pb_utils.InferenceResponse([output]), flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)
"""
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


def add_model(repository: Path, name: str = "tiny", initialize: str = "pass", loading: str | None = None) -> Path:
    version = repository / name / "1"
    version.mkdir(parents=True)
    (repository / name / "config.pbtxt").write_text(CONFIG.format(name=name))
    (version / "model.py").write_text(MODEL.format(initialize=initialize))
    if loading is not None:
        (version / "llm_engine").mkdir()
        (version / "llm_engine" / "__init__.py").touch()
        (version / "llm_engine" / "weights.py").write_text(textwrap.dedent(loading))
    return repository


def eventually(condition: Callable[[], bool], seconds: float = 15.0) -> bool:
    deadline = time.monotonic() + seconds
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.05)
    return condition()


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def regions(run_id: str = "") -> list[str]:
    return [path.name for path in SHARED_MEMORY.glob(f"tokenstream_{run_id}*")]


def processes_under(cache: Path) -> list[int]:
    """Living processes that were given this cache, the test's own apart."""
    mark = f"TOKENSTREAM_CACHE={cache}".encode()
    found = []
    for environ in Path("/proc").glob("[0-9]*/environ"):
        with contextlib.suppress(OSError):
            if mark in environ.read_bytes().split(b"\0"):
                found.append(int(environ.parent.name))
    return found


def run_ids(cache: Path) -> list[str]:
    return [path.name for path in (cache / "run").glob("*") if path.is_dir()]


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("TOKENSTREAM_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    return tmp_path / "repository"


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


def test_a_server_is_ready_inside_the_with_and_gone_behind_it(repository: Path, cache: Path) -> None:
    stages: list[tuple[str, int, int | None]] = []
    with TritonServer(
        add_model(repository), progress=lambda stage, done, total, _: stages.append((stage, done, total))
    ) as server:
        (run_id,) = run_ids(cache)
        connection = http.client.HTTPConnection(server.http_url.removeprefix("http://"), timeout=5)
        connection.request("GET", "/v2/models/tiny/ready")
        assert connection.getresponse().status == 200
        connection.close()
        assert len({server.http_url, server.grpc_url, server.metrics_url}) == 3
        assert server.poll() is None
        assert any("Started HTTPService" in line for line in server.tail(100))
        assert regions(run_id)
    assert server.returncode == 0
    assert not alive(server.pid)
    assert processes(run_id) == []
    assert regions(run_id) == []
    assert run_ids(cache) == []
    assert [stage for stage, _, _ in stages][:2] == ["layout", "start"]
    assert stages[-1] == ("load", 1, 1)


def test_stopping_one_server_leaves_another_of_the_same_user_alone(repository: Path, cache: Path) -> None:
    add_model(repository)
    with TritonServer(repository) as first:
        with TritonServer(repository) as second:
            assert first.http_url != second.http_url
        assert sweep(cache / "run") == []
        assert first.poll() is None
        first.wait_ready(5)


def test_a_given_run_folder_keeps_the_log_and_reaches_the_model(repository: Path, tmp_path: Path) -> None:
    add_model(repository, initialize="open(os.environ['TOKENSTREAM_RUN_DIR'] + '/seen', 'w').close()")
    with TritonServer(repository, run_dir=tmp_path / "mine", env={"TINY": "1"}) as server:
        assert server.log_path == tmp_path / "mine" / "server.log"
    assert (tmp_path / "mine" / "seen").exists()
    assert server.log_path.read_text()


def test_only_named_models_are_loaded(repository: Path) -> None:
    add_model(repository, "good")
    add_model(repository, "broken", initialize="raise RuntimeError('boom')")
    with TritonServer(repository, model_names=["good"]) as server:
        assert server.poll() is None


def test_a_model_that_fails_to_load_gives_its_own_error_line(repository: Path, cache: Path) -> None:
    add_model(repository, initialize="raise ValueError('weights are missing: fetch them')")
    with pytest.raises(ServerFailed) as caught, TritonServer(repository):
        pass
    assert str(caught.value) == "model 'tiny' failed to load: ValueError: weights are missing: fetch them"
    assert any("error: creating server" in line for line in caught.value.tail)
    assert "weights are missing" in caught.value.log_path.read_text()
    assert run_ids(cache) == []
    assert caught.value.log_path.parent == cache / "run"


def test_a_model_whose_process_dies_in_mid_start_is_reported(repository: Path, cache: Path) -> None:
    add_model(repository, initialize="os.kill(os.getpid(), 9)")
    with pytest.raises(ServerFailed, match="model 'tiny' failed to load: its process died while it loaded"):
        TritonServer(repository).__enter__()
    assert run_ids(cache) == []
    assert processes_under(cache) == []


def test_a_server_that_is_not_ready_in_time_is_reported_and_taken_down(repository: Path, cache: Path) -> None:
    server = TritonServer(add_model(repository, initialize="time.sleep(60)"))
    server.start()
    with pytest.raises(ServerFailed, match="not ready after 1 s"):
        server.wait_ready(1)
    assert server.stop() != 0
    assert not alive(server.pid)
    assert run_ids(cache) == []


def test_a_taken_port_is_one_line_that_names_it(repository: Path) -> None:
    add_model(repository)
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(SetupError, match=f"^grpc port {port} on 127.0.0.1 is taken.*--grpc-port"):
            TritonServer(repository, grpc_port=port).start()


def test_a_free_port_lost_before_the_server_listens_is_replaced(
    repository: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    server = TritonServer(add_model(repository, initialize="time.sleep(1)"))
    server.start()
    first = server.ports
    try:
        with socket.create_server(("127.0.0.1", first.http)):
            server.wait_ready(30)
            assert server.ports.http != first.http
    finally:
        assert server.stop() == 0


def test_the_weights_are_prepared_first_and_progress_is_heard(repository: Path) -> None:
    loading = """
        import json, os, sys
        assert os.environ["TOKENSTREAM_CACHE"]
        print(json.dumps({"stage": "convert " + sys.argv[1], "done": 1, "total": 2}))
    """
    stages: list[tuple[str, int, int | None]] = []
    with TritonServer(
        add_model(repository, loading=loading),
        env={"TINY_SPEC": "other"},
        progress=lambda stage, done, total, _: stages.append((stage, done, total)),
    ):
        assert stages[:3] == [("layout", 0, None), ("convert other", 1, 2), ("start", 0, None)]


def test_a_signal_becomes_an_orderly_end_and_its_exit_code(
    repository: Path, cache: Path, supervise: Callable[[], Supervisor]
) -> None:
    add_model(repository)
    supervisor = supervise()
    pid = int(supervisor.until("ready")[1])
    supervisor.process.send_signal(signal.SIGTERM)
    assert supervisor.process.wait(30) == 0
    assert not alive(pid)
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
    assert supervisor.process.wait(30) == 128 + signum
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
    assert supervisor.process.wait(30) == 128 + signal.SIGINT
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
    assert supervisor.process.wait(20) == 128 + signal.SIGKILL
    assert not alive(pid)


@pytest.mark.parametrize("moment", ["ready", "stage load"])
def test_a_killed_supervisor_leaves_no_process_and_the_next_sweep_no_memory(
    repository: Path, cache: Path, supervise: Callable[[], Supervisor], moment: str
) -> None:
    add_model(repository, initialize="pass" if moment == "ready" else "time.sleep(60)")
    supervisor = supervise()
    supervisor.until(moment)
    (run_id,) = run_ids(cache)
    assert eventually(lambda: len(processes(run_id)) == 3 and bool(regions(run_id)))  # keeper, server, stub
    supervisor.process.kill()
    assert eventually(lambda: processes(run_id) == [])
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


def test_a_killed_server_ends_its_supervisor_with_the_signal(
    repository: Path, cache: Path, supervise: Callable[[], Supervisor]
) -> None:
    add_model(repository)
    supervisor = supervise()
    pid = int(supervisor.until("ready")[1])
    (run_id,) = run_ids(cache)
    os.kill(pid, signal.SIGKILL)
    words = " ".join(supervisor.until("died"))
    assert "was killed by signal 9 while it was serving" in words
    assert supervisor.process.wait(30) == 128 + signal.SIGKILL
    assert Path(words.split()[-1]).is_file()
    assert processes(run_id) == []
    assert regions(run_id) == []


def test_a_killed_keeper_takes_the_server_along_and_stop_clears_the_rest(repository: Path, cache: Path) -> None:
    with TritonServer(add_model(repository)) as server:
        (run_id,) = run_ids(cache)
        keeper = int(Path(f"/proc/{server.pid}/stat").read_text().rpartition(")")[2].split()[1])
        os.kill(keeper, signal.SIGKILL)
        assert server.wait() == -signal.SIGKILL
    assert processes(run_id) == []
    assert regions(run_id) == []


def test_a_server_outlives_the_thread_that_started_it(repository: Path) -> None:
    server = TritonServer(add_model(repository))
    starter = threading.Thread(target=server.start)
    starter.start()
    starter.join()
    try:
        server.wait_ready(30)
    finally:
        assert server.stop() == 0

"""A real tritonserver under `tokenstream.server`: started, ready and stopped, or its failure told in one line."""

from __future__ import annotations

import http.client
import socket
import threading
from pathlib import Path

import pytest

from server import supervised
from server.supervised import add_model, processes_under, regions, run_ids
from tokenstream.heartbeat import lives
from tokenstream.runfolder import processes
from tokenstream.server import ServerFailed, SetupError, TritonServer, sweep
from waiting import WAIT

cache = supervised.cache
repository = supervised.repository


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
        assert server.returncode is None
        assert any("Started HTTPService" in line for line in server.tail(100))
        assert regions(run_id)
    assert server.returncode == 0
    assert not lives(server.pid)
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
        assert first.returncode is None
        first.wait_ready(WAIT)


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
        assert server.returncode is None


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
    assert not lives(server.pid)
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
            server.wait_ready(WAIT)
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


def test_a_server_outlives_the_thread_that_started_it(repository: Path) -> None:
    server = TritonServer(add_model(repository))
    starter = threading.Thread(target=server.start)
    starter.start()
    starter.join()
    try:
        server.wait_ready(WAIT)
    finally:
        assert server.stop() == 0

"""A drained server ends every stream in order, short ones by themselves, long ones with CANCELLED; nothing stays."""

from __future__ import annotations

import signal
import subprocess
import threading
import time
from pathlib import Path

import pytest

from server.raw import Call, Response, Wire, infer
from server.serving import WAIT, Serving, run
from server.supervised import regions
from tokenstream.runfolder import processes
from tokenstream.server import TritonServer, find_repository
from waiting import eventually

DRAIN_SECONDS = 3
SHORT, LONG = (8, 16, 24, 32) * 2, (4000,) * 8  # tokens of 16 streams


def begin(wire: Wire, *lengths: int) -> list[Call]:
    """Streams of so many tokens that have all begun."""
    calls = [wire.call(infer(text_input="Once", max_tokens=length, ignore_eos=True)) for length in lengths]
    for call in calls:
        assert call.next()
    return calls


def end(call: Call) -> Response:
    """The last response of a stream."""
    return call.rest()[-1]


def test_sigterm_lets_short_streams_end_and_ends_long_ones_with_cancelled(tmp_path: Path) -> None:
    with Serving(tmp_path / "run", "--drain-seconds", str(DRAIN_SECONDS)) as serving:
        run_id = serving.run_id()
        wire = Wire(serving.grpc_url)
        calls = begin(wire, *LONG, *SHORT)
        began = time.monotonic()
        serving.process.send_signal(signal.SIGTERM)
        assert serving.complains(r"^draining: (\d+) live requests, up to 3 s$")
        last = [end(call) for call in calls]
        assert serving.process.wait(WAIT) == 0
        assert time.monotonic() - began < DRAIN_SECONDS + 10
        wire.close()
        for response in last[: len(LONG)]:
            assert "code=CANCELLED" in response.error
            assert "drain" in response.error
        assert [response["finish_reason"] for response in last[len(LONG) :]] == ["length"] * len(SHORT)
        assert all(response.final for response in last)
        assert serving.complaints() == []
    assert regions(run_id) == []
    assert processes(run_id) == []


def test_a_second_signal_ends_a_drain(tmp_path: Path) -> None:
    with Serving(tmp_path / "run", "--drain-seconds", "600") as serving:
        run_id = serving.run_id()
        wire = Wire(serving.grpc_url)
        begin(wire, 4000)
        serving.process.send_signal(signal.SIGINT)
        serving.complains("^draining: ")
        assert serving.end(signal.SIGINT) == 128 + signal.SIGKILL
        wire.close()
    assert regions(run_id) == []
    assert processes(run_id) == []


def test_a_drain_by_command_refuses_new_requests_and_leaves_the_rest_to_whoever_stops_the_server(
    tmp_path: Path,
) -> None:
    with Serving(tmp_path / "run") as serving:
        wire = Wire(serving.grpc_url)
        (long,) = begin(wire, 4000)
        eventually(lambda: serving.beat().live == 1)
        drained: list[subprocess.CompletedProcess[str]] = []
        drain = threading.Thread(
            target=lambda: drained.append(run("drain", "--seconds", "2", "--run-dir", str(serving.run_dir)))
        )
        drain.start()
        eventually(lambda: serving.beat().draining)
        refused = wire.ask(text_input="Once", max_tokens=1)[-1]
        assert "drain" in refused.error
        assert "code=UNAVAILABLE" in refused.error
        assert "code=CANCELLED" in end(long).error
        drain.join()
        assert drained[0].stdout == "drained: 1 requests were live, and all have ended\n"
        assert drained[0].returncode == 0
        assert run("probe", "--live", "--run-dir", str(serving.run_dir)).returncode == 0
        wire.close()
        assert serving.end() == 0


@pytest.mark.parametrize("seconds", [0.0, 30.0])
def test_stop_gives_a_library_s_server_as_much_time_as_was_said(seconds: float) -> None:
    with TritonServer(find_repository(), drain_seconds=seconds) as server:
        wire = Wire(server.grpc_url)
        (call,) = begin(wire, 4000 if seconds == 0 else 200)
    assert server.returncode == 0
    last = end(call)
    wire.close()
    if seconds:
        assert last["finish_reason"] == "length"
    else:
        assert "code=CANCELLED" in last.error

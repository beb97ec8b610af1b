"""A drained server ends every stream in order, short ones by themselves, long ones with CANCELLED; nothing stays."""

from __future__ import annotations

import signal
import subprocess
import threading
import time
from pathlib import Path

import pytest

from server import tiny
from server.raw import Call, Response, Wire, infer
from server.serving import Serving, run
from server.supervised import regions
from tokenstream.drain import Drain
from tokenstream.runfolder import processes
from tokenstream.server import TritonServer
from waiting import WAIT, eventually

SHORT, LONG = (12, 16, 20, 24) * 2, (8000,) * 8  # tokens of 16 streams


def serving(run_dir: Path, *options: str) -> Serving:
    """`tokenstream serve` with the tiny model."""
    return Serving(run_dir, "--repository", str(tiny.repository()), *options)


def begin(wire: Wire, *lengths: int) -> list[Call]:
    """Streams of so many tokens that have all begun."""
    calls = [wire.call(infer(text_input="Once", max_tokens=length, ignore_eos=True)) for length in lengths]
    for call in calls:
        assert call.next()
    return calls


def end(call: Call) -> Response:
    """The last response of a stream."""
    return call.rest()[-1]


def assert_drained(call: Call) -> None:
    last = end(call)
    assert "code=CANCELLED" in last.error
    assert "drain" in last.error
    assert last.final


def test_sigterm_lets_short_streams_end_and_ends_long_ones_with_cancelled(tmp_path: Path) -> None:
    with serving(tmp_path / "run", "--drain-seconds", "600") as server:
        run_id = server.run_id()
        wire = Wire(server.grpc_url)
        with tiny.paced(server.run_dir, 0.5):  # the shortest takes 6 s: none ends before the drain begins
            calls = begin(wire, *LONG, *SHORT)
            eventually(lambda: server.beat().live == len(calls))
            server.process.send_signal(signal.SIGTERM)
            assert server.complains(r"^draining: 16 live requests, up to 600 s$")
        last = [end(call) for call in calls[len(LONG) :]]
        assert [response["finish_reason"] for response in last] == ["length"] * len(SHORT)
        assert all(response.final for response in last)
        assert server.process.poll() is None  # it waits for the long ones
        Drain([server.run_dir], seconds=0.0)  # the time is over
        for call in calls[: len(LONG)]:
            assert_drained(call)
        assert server.process.wait(WAIT) == 0
        wire.close()
        assert server.complaints() == []
    assert regions(run_id) == []
    assert processes(run_id) == []


def test_a_drain_ends_when_its_time_is_over(tmp_path: Path) -> None:
    with serving(tmp_path / "run", "--drain-seconds", "1") as server:
        wire = Wire(server.grpc_url)
        (long,) = begin(wire, 8000)
        began = time.monotonic()
        server.process.send_signal(signal.SIGTERM)
        assert server.complains(r"^draining: \d live requests, up to 1 s$")
        assert_drained(long)
        assert time.monotonic() - began > 1
        assert server.process.wait(WAIT) == 0
        wire.close()


def test_a_second_signal_ends_a_drain(tmp_path: Path) -> None:
    with serving(tmp_path / "run", "--drain-seconds", "600") as server:
        run_id = server.run_id()
        wire = Wire(server.grpc_url)
        begin(wire, 8000)
        server.process.send_signal(signal.SIGINT)
        server.complains("^draining: ")
        assert server.end(signal.SIGINT) == 128 + signal.SIGKILL
        wire.close()
    assert regions(run_id) == []
    assert processes(run_id) == []


def test_a_drain_by_command_refuses_new_requests_and_leaves_the_rest_to_whoever_stops_the_server(
    tmp_path: Path,
) -> None:
    with serving(tmp_path / "run") as server:
        wire = Wire(server.grpc_url)
        (long,) = begin(wire, 8000)
        eventually(lambda: server.beat().live == 1)
        drained: list[subprocess.CompletedProcess[str]] = []
        drain = threading.Thread(
            target=lambda: drained.append(run("drain", "--seconds", "2", "--run-dir", str(server.run_dir)))
        )
        drain.start()
        eventually(lambda: server.beat().draining)
        refused = wire.ask(text_input="Once", max_tokens=1)[-1]
        assert "drain" in refused.error
        assert "code=UNAVAILABLE" in refused.error
        assert "code=CANCELLED" in end(long).error
        drain.join()
        assert drained[0].stdout == "drained: 1 requests were live, and all have ended\n"
        assert drained[0].returncode == 0
        assert run("probe", "--live", "--run-dir", str(server.run_dir)).returncode == 0
        wire.close()
        assert server.end() == 0


@pytest.mark.parametrize("seconds", [0.0, 600.0])
def test_stop_gives_a_library_s_server_as_much_time_as_was_said(seconds: float) -> None:
    with TritonServer(tiny.repository(), drain_seconds=seconds) as server:
        wire = Wire(server.grpc_url)
        (call,) = begin(wire, 8000 if seconds == 0 else 200)
    assert server.returncode == 0
    last = end(call)
    wire.close()
    if seconds:
        assert last["finish_reason"] == "length"
    else:
        assert "code=CANCELLED" in last.error

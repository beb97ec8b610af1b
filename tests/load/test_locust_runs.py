"""Locust itself against scripted servers: every request is counted once, whatever dies, and gRPC stays out of it."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from typing import Any

from http_servers import HttpServer
from tokenstream_loadtest.tally import Group
from unit.locust_runs import (
    WORDS,
    asked,
    children,
    driver_of,
    is_driver,
    locust,
    output,
    paced,
    result,
    run,
    workers,
)
from unit.scripted_triton import ScriptedCall, answer, failure, token
from waiting import WAIT, eventually


def told(folder: Path) -> Group:
    """What all requests of its one measurement came to."""
    (measurement,) = result(folder).measurements
    return measurement.all


def test_two_hundred_streams_at_once_are_all_answered_and_counted_without_grpc_in_locust(triton, tmp_path):
    users, here, all_here = 200, threading.Semaphore(0), threading.Event()
    plain = paced(*WORDS, gap=0.2)

    def script(request: Any, call: ScriptedCall) -> Iterator[Any]:
        here.release()
        assert all_here.wait(WAIT)
        yield from plain(request, call)

    def count() -> None:
        for _ in range(users):
            here.acquire()
        all_here.set()

    threading.Thread(target=count, daemon=True).start()
    server = triton(script, workers=users + 8)
    file = tmp_path / "locustfile.py"
    file.write_text(
        "import sys\n"
        "from locust import events\n"
        "from tokenstream_loadtest.under_locust.users import TokenstreamUser\n"
        "@events.quit.add_listener\n"
        "def tell(exit_code, **_):\n"
        "    print('grpc modules:', [name for name in sys.modules if name.split('.')[0] == 'grpc'])\n"
    )
    load = ("-u", str(users), "-r", str(users), "--ignore-flaws")
    code = run(tmp_path, server.url, *load, file=file, until=lambda: len(asked(server)) >= users + 100)
    assert code == 0, output(tmp_path)
    assert "grpc modules: []" in output(tmp_path)
    group = told(tmp_path)
    assert all_here.is_set()
    assert group.outcomes == {"ok": len(asked(server))}
    assert group.output_tokens == len(WORDS) * len(asked(server))
    assert result(tmp_path).measurements[0].stage.concurrency == users


def test_an_objective_that_does_not_hold_fails_the_run(triton, tmp_path):
    server = triton(paced(*WORDS))
    load = ("-u", "2", "-r", "2", "-t", "2s", "--slo", "e2e_p50=1ms", "--slo", "errors=0%", "--ignore-flaws")
    assert run(tmp_path, server.url, *load) == 1, output(tmp_path)
    assert "MISSED  e2e_p50 at 2 at once" in output(tmp_path)
    assert "met     errors at 2 at once: 0.00%" in output(tmp_path)


def test_errors_that_nobody_forgave_fail_the_run_and_show_their_line(triton, tmp_path):
    def script(request: Any, call: ScriptedCall) -> Iterator[Any]:
        yield failure("queue_full: no room [request=x tokens=0 code=UNAVAILABLE]")

    server = triton(script)
    load = ("-u", "1", "--slo", "errors=5%", "--ignore-flaws")
    assert run(tmp_path, server.url, *load, until=lambda: len(asked(server)) >= 5) == 1
    group = told(tmp_path)
    assert group.errors == group.requests == len(asked(server))
    assert "MISSED  errors at 1 at once: 100.00%" in output(tmp_path)


def test_a_rate_is_kept_whatever_users_there_are_and_shared_by_workers_whose_counts_are_exact(triton, tmp_path):
    server = triton(paced(*WORDS))
    load = ("--rate", "20", "--arrivals", "constant", *workers(2), "--ignore-flaws")
    assert run(tmp_path, server.url, *load, until=lambda: len(asked(server)) >= 64) == 0, output(tmp_path)
    (measurement,) = result(tmp_path).measurements
    assert measurement.stage.label == "20/s constant"
    assert measurement.all.outcomes == {"ok": len(asked(server))}
    assert measurement.all.output_tokens == len(WORDS) * len(asked(server))
    assert len({request.id.rpartition("-")[0] for request in asked(server)}) == 2  # drivers
    assert not [flaw for flaw in measurement.flaws if "worker" in flaw]
    starts = [second.sent for _, second in sorted(measurement.tally.seconds.items())][1:3]
    assert all(15 <= sent <= 25 for sent in starts), starts


def test_a_stall_shows_from_the_schedule_in_an_open_loop(triton, tmp_path):
    plain, frozen = answer(*WORDS), threading.Event()

    def script(request: Any, call: ScriptedCall) -> Iterator[Any]:
        if len(asked(server)) == 20:
            threading.Timer(1.2, frozen.set).start()
        if len(asked(server)) >= 20:
            frozen.wait(10)
        yield from plain(request, call)

    server = triton(script, workers=80)
    until = lambda: frozen.is_set() and len(asked(server)) >= 45  # noqa: E731
    assert run(tmp_path, server.url, "--rate", "20", "--ignore-flaws", until=until) == 0, output(tmp_path)
    assert (told(tmp_path).histograms["ttft"].percentile(99) or 0) > 0.9


def test_a_ramp_ends_when_an_objective_breaks(triton, tmp_path):
    gate = threading.Semaphore(1)
    plain = answer(*WORDS)

    def script(request: Any, call: ScriptedCall) -> Iterator[Any]:
        with gate:  # one at a time, a fifth of a second each: two users wait for each other
            call.over.wait(0.2)
            yield from plain(request, call)

    server = triton(script)
    ramp = ("--shape", "ramp", "--shape-seconds", "2", "-u", "64")
    code = run(tmp_path, server.url, *ramp, "--slo", "ttft_p50=300ms", "--ignore-flaws")
    assert code in (0, 1)  # by all requests of the run
    (measurement,) = result(tmp_path).measurements
    assert "the number of users changed while it was measured: shape ramp" in measurement.notes
    assert any("users at once met every objective, and the next step missed one" in note for note in measurement.notes)
    assert (measurement.stage.concurrency or 64) < 64
    assert measurement.all.outcomes == {"ok": len(asked(server))}


def test_a_driver_that_is_killed_is_told_of_once_and_replaced(triton, tmp_path):
    server = triton(paced(*WORDS))
    with locust(tmp_path, server.url, "-u", "4", "-r", "4") as process:
        eventually(lambda: len(asked(server)) >= 8)
        os.kill(driver_of(process), signal.SIGKILL)
        before = len(asked(server))
        eventually(lambda: len(asked(server)) >= before + 8)
        process.send_signal(signal.SIGINT)
        assert process.wait(WAIT) == 1
    assert output(tmp_path).count("the driver process ended (exit code -9)") >= 1
    assert sum("another one is started" in line for line in output(tmp_path).splitlines()) == 1
    (measurement,) = result(tmp_path).measurements
    assert measurement.all.outcomes["internal"] == 4
    assert measurement.all.outcomes["ok"] >= 12
    assert "the driver process ended 1 times in the test" in measurement.flaws


def test_a_worker_that_is_killed_takes_its_last_requests_along_and_that_is_a_flaw(triton, tmp_path):
    server = triton(paced(*WORDS))
    with locust(tmp_path, server.url, "-u", "4", "-r", "4", *workers(2)) as process:
        eventually(lambda: len(asked(server)) >= 12)
        os.kill(next(pid for pid in children(process.pid) if not is_driver(pid)), signal.SIGKILL)
        before = len(asked(server))
        eventually(lambda: len(asked(server)) >= before + 12)
        process.send_signal(signal.SIGINT)
        assert process.wait(WAIT) == 1
    (measurement,) = result(tmp_path).measurements
    assert any("did not tell how it ended" in flaw for flaw in measurement.flaws)
    assert set(measurement.all.outcomes) == {"ok"}


def test_a_driver_ends_with_its_locust_even_if_that_is_killed(triton, tmp_path):
    server = triton(paced(*(["word"] * 2000)))
    with locust(tmp_path, server.url, "-u", "3", "-r", "3", "--max-tokens", "2000") as process:
        eventually(lambda: len(asked(server)) >= 3)
        driver = driver_of(process)
        process.kill()
        process.wait()
        eventually(lambda: not is_driver(driver))
    assert all(call.over.wait(WAIT) for call in server.calls)
    assert sum(call.cancelled for call in server.calls) >= 3


def test_ctrl_c_waits_for_what_is_under_way_and_writes_everything(triton, tmp_path):
    server = triton(paced(*WORDS, gap=0.2))
    with locust(tmp_path, server.url, "-u", "4", "-r", "4", "--slo", "errors=0%", "--ignore-flaws") as process:
        eventually(lambda: len(asked(server)) >= 6)
        process.send_signal(signal.SIGINT)
        assert process.wait(WAIT) == 0, output(tmp_path)
    assert told(tmp_path).outcomes == {"ok": len(asked(server))}
    assert "met     errors at " in output(tmp_path)
    assert f"json    {tmp_path / 'run.json'}" in output(tmp_path)
    assert {path.name for path in tmp_path.iterdir()} >= {"run.json", "run.csv", "report.html"}
    assert not children_left(process)


def test_ctrl_c_ends_no_greenlet_that_reads_answers(triton, tmp_path):
    server = triton(answer(*WORDS))
    file = tmp_path / "locustfile.py"
    file.write_text(
        "import time\n"
        "from locust import events\n"
        "from tokenstream_loadtest.under_locust.users import TokenstreamUser\n"
        "@events.request.add_listener\n"
        "def be_busy(**_):\n"
        "    until = time.perf_counter() + 0.05\n"
        "    while time.perf_counter() < until: pass\n"
    )
    load = ("-u", "8", "-r", "8", "--ignore-flaws")
    assert run(tmp_path, server.url, *load, file=file, until=lambda: len(asked(server)) >= 24) == 0, output(tmp_path)
    assert told(tmp_path).outcomes == {"ok": len(asked(server))}
    assert "KeyboardInterrupt" not in output(tmp_path)


def test_what_is_not_done_in_time_is_cut_counted_and_a_flaw(triton, tmp_path):
    def script(request: Any, call: ScriptedCall) -> Iterator[Any]:
        yield token(0, "one", 100)
        call.over.wait(WAIT)

    server = triton(script)
    load = ("-u", "2", "-r", "2", "--drain", "1")
    assert run(tmp_path, server.url, *load, until=lambda: len(asked(server)) == 2) == 1
    (measurement,) = result(tmp_path).measurements
    assert measurement.all.outcomes == {"timeout": 2}
    assert "2 requests were not done 1 s behind the end, and were cut" in measurement.flaws
    assert all(call.over.wait(WAIT) for call in server.calls)


def test_openais_interface_is_asked_as_well(tmp_path):
    with Streaming() as server:
        load = ("--target", "openai", "-u", "3", "-r", "3", "--slo", "errors=0%", "--ignore-flaws")
        assert run(tmp_path, server.url, *load, until=lambda: server.answered >= 12) == 0, output(tmp_path)
        assert told(tmp_path).outcomes == {"ok": server.answered}
    assert told(tmp_path).output_tokens == 2 * server.answered
    assert "SSE " in output(tmp_path)  # the kind of its row in Locust's own table


def test_a_server_that_goes_away_makes_no_busy_loop(triton, tmp_path):
    server = triton(paced(*WORDS))
    with locust(tmp_path, server.url, "-u", "2", "-r", "2", "-t", "6s") as process:
        eventually(lambda: len(asked(server)) >= 4)
        server.close()
        assert process.wait(WAIT) == 1
    outcomes = told(tmp_path).outcomes
    assert 0 < outcomes["connection"] <= 2 * 6 * 10 + 2  # each waits for a tenth of a second


def test_a_report_that_cannot_be_written_in_the_end_fails_the_run_which_the_terminal_tells(triton, tmp_path):
    server, folder = triton(paced(*WORDS)), tmp_path / "results"
    with locust(tmp_path, server.url, "-u", "1", "--ignore-flaws", "--report", str(folder)) as process:
        eventually(lambda: asked(server))
        folder.write_text("somebody's file")
        process.send_signal(signal.SIGINT)
        assert process.wait(WAIT) == 1
    assert f"the report cannot be written: {folder}: " in output(tmp_path)
    assert "generator: " in output(tmp_path)
    assert "Traceback" not in output(tmp_path)


class Streaming(HttpServer):
    """A server of OpenAI's interface that answers with two tokens."""

    def __init__(self) -> None:
        self.answered = 0
        self.lock = threading.Lock()
        super().__init__(_Events)


class _Events(BaseHTTPRequestHandler):
    server: Streaming

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["content-length"]))
        self.send_response(200)
        self.send_header("content-type", "text/event-stream")
        self.end_headers()
        for text, reason in (("one", None), ("two", "length")):
            choice = {"index": 0, "text": text, "delta": {"content": text}, "finish_reason": reason}
            self.wfile.write(f"data: {json.dumps({'choices': [choice]})}\n\n".encode())
            self.server.over.wait(0.05)
        with self.server.lock:
            self.server.answered += 1
        self.wfile.write(b"data: [DONE]\n\n")

    def do_GET(self) -> None:
        self.send_response(200)
        self.end_headers()
        self.wfile.write(json.dumps({"data": [{"id": "llm"}]}).encode())

    def log_message(self, *args: object) -> None:
        """Nothing: the test's output is its own."""


def children_left(process: subprocess.Popen[str]) -> bool:
    """Whether a Locust that has ended left anything."""
    return Path(f"/proc/{process.pid}").exists() and bool(children(process.pid))

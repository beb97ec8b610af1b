"""`tokenstream load` against a real server: its files, its verdicts, its exit codes.

Other work on this machine makes a run invalid, which is no fault of the command: such flaws alone are allowed here.
"""

from __future__ import annotations

import csv
import json
import signal
import subprocess
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from typing import Any

import pytest

from http_servers import HttpServer
from server.serving import COMMAND, ENVIRONMENT
from tokenstream.server import TritonServer
from tokenstream_loadtest.results import Run, read_run
from waiting import WAIT

SCENARIO = """
title = "A little load"
about = "For a test."
workload = "chat"
max_tokens = 12
warmup = 1

[[stages]]
concurrency = 2
seconds = 3
"""
FILES = ("run.json", "run.csv", "report.html")
NOISE = ("others used", "the generator itself was late", "took", "the mean TTFT")


@pytest.fixture
def scenario(tmp_path: Path) -> Path:
    path = tmp_path / "little.toml"
    path.write_text(SCENARIO)
    return path


def load(*arguments: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    command = [*COMMAND, "load", *arguments]
    return subprocess.run(command, env=ENVIRONMENT, cwd=cwd, capture_output=True, text=True, timeout=WAIT, check=False)


def noise(flaw: str) -> bool:
    return any(words in flaw for words in NOISE)


def files(out: Path) -> Run:
    """The run that is written there beside its table and its report."""
    assert sorted(path.name for path in out.iterdir()) == sorted(FILES)
    run = read_run(out / "run.json")
    with (out / "run.csv").open(newline="") as table:
        assert len(list(csv.reader(table))) == 1 + len(run.measurements)
    assert (out / "report.html").read_text().startswith("<!doctype html>")
    return run


def test_an_objective_that_holds_is_met_and_three_files_say_so(
    server: TritonServer, scenario: Path, tmp_path: Path
) -> None:
    where = ["--url", server.grpc_url, "--metrics-url", server.metrics_url, "--out", str(tmp_path / "out")]
    done = load(str(scenario), *where, "--slo", "e2e_p95=30s", "--slo", "errors=1%", "--json", cwd=tmp_path)
    assert done.stderr == ""
    *before, summary = [json.loads(line) for line in done.stdout.splitlines()]
    assert {message["event"] for message in before} == {"progress"}
    assert before[-1]["stage_label"] == "2 at once"
    run = files(tmp_path / "out")
    (measurement,) = run.measurements
    assert all(noise(flaw) for flaw in measurement.flaws)
    assert measurement.server is not None
    assert measurement.server.output_tokens == measurement.all.output_tokens
    assert run.objectives == ("e2e_p95=30s", "errors=1%")
    assert run.command.startswith(f"tokenstream load {scenario} --url {server.grpc_url} ")
    (level,) = summary["levels"]
    assert (level["load"], level["errors"]) == ("2 at once", 0)
    assert level["ok"] == measurement.all.requests > 2
    assert [one["met"] for one in summary["objectives"]] == [True, True]
    assert (summary["met"], summary["valid"]) == (True, measurement.valid)
    assert done.returncode == (0 if measurement.valid else 1)


def test_an_objective_that_cannot_hold_is_missed_with_value_and_limit(
    server: TritonServer, scenario: Path, tmp_path: Path
) -> None:
    where = ["--url", server.grpc_url, "--metrics-url", "none", "--seconds", "2"]
    done = load(str(scenario), *where, "--slo", "e2e_p50=1us", "--name", "a try", cwd=tmp_path)
    assert done.returncode == 1
    (line,) = [line for line in done.stdout.splitlines() if line.startswith("MISSED")]
    assert line.startswith("MISSED  e2e_p50 at 2 at once: ")
    assert line.endswith(", limit 0.001 ms")
    (out,) = (tmp_path / "loadtest-results").iterdir()
    assert out.name.startswith("a-try-2")
    run = files(out)
    assert (run.scenario, run.measurements[0].server, run.measurements[0].goodput) == ("a try", None, 0.0)
    assert f"json    loadtest-results/{out.name}/run.json" in done.stdout


def test_ctrl_c_ends_the_load_and_what_was_measured_is_written(
    server: TritonServer, scenario: Path, tmp_path: Path
) -> None:
    where = ["--url", server.grpc_url, "--metrics-url", server.metrics_url, "--out", str(tmp_path / "out")]
    command = [*COMMAND, "load", str(scenario), *where, "--seconds", str(WAIT), "--repeats", "2", "--json"]
    with subprocess.Popen(command, env=ENVIRONMENT, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            for line in process.stdout:
                message: dict[str, Any] = json.loads(line)
                if message["stage_label"] == "2 at once" and message["ended"]:
                    break
            process.send_signal(signal.SIGINT)
            out, _ = process.communicate(timeout=WAIT)
        finally:
            process.kill()
    assert process.returncode == 130
    summary = json.loads(out.splitlines()[-1])
    assert (summary["event"], summary["interrupted"], summary["valid"]) == ("summary", True, False)
    (measurement,) = files(tmp_path / "out").measurements
    assert any("interrupted" in flaw for flaw in measurement.flaws)
    assert measurement.all.requests > 0


def test_two_runs_can_be_compared_and_reported_anew(server: TritonServer, scenario: Path, tmp_path: Path) -> None:
    where = ["--url", server.grpc_url, "--metrics-url", "none", "--requests", "2", "--warmup", "0"]
    for name in ("a", "b"):
        assert load(str(scenario), *where, "--out", name, cwd=tmp_path).returncode in (0, 1)
    compared = load("compare", "a/run.json", "b/run.json", "--json", cwd=tmp_path)
    assert (compared.returncode, compared.stderr) == (0, "")
    told = json.loads(compared.stdout)
    assert [one["load"] for one in told["loads"]] == ["2 at once"]
    assert "2 at once" in load("compare", "a/run.json", "b/run.json", cwd=tmp_path).stdout
    report = (tmp_path / "a" / "report.html").read_text()
    assert load("report", "a/run.json", "--out", "again.html", cwd=tmp_path).stdout == "again.html\n"
    assert (tmp_path / "again.html").read_text() == report
    wrong = load("compare", "a/run.json", "b/run.csv", cwd=tmp_path)
    assert (wrong.returncode, wrong.stdout, wrong.stderr.count("\n")) == (2, "", 1)


def test_what_cannot_be_run_is_one_line_and_leaves_nothing(
    server: TritonServer, scenario: Path, tmp_path: Path
) -> None:
    gone = str(tmp_path / "none" / "at-all.toml")
    for arguments, code, says in (
        ([gone], 2, "no scenario"),
        (["nonsense"], 2, "no scenario 'nonsense'"),
        ([str(scenario), "--slo", "speed=9"], 2, "no objective: 'speed=9'"),
        ([str(scenario), "--url", "127.0.0.1:1"], 3, "cannot connect to 127.0.0.1:1: connection refused."),
        ([str(scenario), "--url", server.grpc_url, "--model", "nobody"], 4, "unknown model: 'nobody'"),
        ([str(scenario), "--url", server.grpc_url, "--metrics-url", "page"], 2, "the metrics page is like"),
    ):
        done = load(*arguments, "--out", str(tmp_path / "out"), cwd=tmp_path)
        assert (done.returncode, done.stdout, done.stderr.count("\n")) == (code, "", 1), done.stderr
        assert says in done.stderr
        assert not (tmp_path / "out").exists()


def test_a_model_that_a_server_of_openais_interface_lacks_is_refused_before_the_run(
    scenario: Path, tmp_path: Path
) -> None:
    class Lacking(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.answer(200, {"data": [{"id": "llm"}]})

        def do_POST(self) -> None:
            self.rfile.read(int(self.headers["content-length"]))
            self.answer(404, {"error": {"message": "The model `nobody` does not exist."}})

        def answer(self, status: int, told: object) -> None:
            self.send_response(status)
            self.end_headers()
            self.wfile.write(json.dumps(told).encode())

        def log_message(self, *_: Any) -> None:
            pass

    with HttpServer(Lacking) as foreign:
        where = ["--target", "openai", "--url", foreign.url, "--model", "nobody"]
        done = load(str(scenario), *where, "--out", "out", cwd=tmp_path)
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (4, "", 1), done.stderr
    assert "HTTP 404: The model `nobody` does not exist; it lists llm" in done.stderr
    assert not (tmp_path / "out").exists()


def test_the_lists_hold_what_can_be_run(tmp_path: Path) -> None:
    done = load("list", "--json", cwd=tmp_path)
    names: dict[str, list[str]] = {"scenario": [], "workload": []}
    for line in done.stdout.splitlines():
        one = json.loads(line)
        names[one["event"]].append(one["name"])
    assert "quick" in names["scenario"]
    assert "chat" in names["workload"]

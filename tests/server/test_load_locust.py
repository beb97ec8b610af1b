"""Locust against the real server: what it counts is what the server's own metrics say, and objectives decide."""

from __future__ import annotations

from pathlib import Path

import pytest

from tokenstream.server import TritonServer
from unit.locust_runs import output, result, run, workers

SECONDS = "20s"
LOAD = ("-u", "6", "-r", "6", "-t", SECONDS, "--fixed-length", "--ignore-flaws")


@pytest.mark.parametrize(("slo", "code"), [("ttft_p95=60s", 0), ("ttft_p95=1us", 1)])
def test_twenty_seconds_pass_by_their_objectives(server: TritonServer, tmp_path: Path, slo: str, code: int) -> None:
    load = (*LOAD, "--metrics-url", server.metrics_url, "--slo", slo, "--slo", "errors=0%")
    assert run(tmp_path, server.grpc_url, *load) == code, output(tmp_path)
    assert ("MISSED ttft_p95" in output(tmp_path)) is bool(code)
    measured = result(tmp_path)
    assert measured.server  # what the model says of itself
    (measurement,) = measured.measurements
    assert measurement.samples
    assert set(measurement.all.outcomes) == {"ok"}


@pytest.mark.parametrize("processes", [1, 2])
def test_counts_are_exactly_the_servers(server: TritonServer, tmp_path: Path, processes: int) -> None:
    load = (*LOAD, *(workers(processes) if processes > 1 else ()), "--metrics-url", server.metrics_url)
    assert run(tmp_path, server.grpc_url, *load) == 0, output(tmp_path)
    (measurement,) = result(tmp_path).measurements
    counts, told = measurement.server, measurement.all
    assert counts is not None
    assert told.requests == told.outcomes["ok"] == counts.requests > 6
    assert told.output_tokens == counts.output_tokens == 8 * told.requests
    assert told.input_tokens == counts.input_tokens


def test_an_open_loop_of_two_workers_is_counted_exactly_too(server: TritonServer, tmp_path: Path) -> None:
    load = ("--rate", "4", "-t", "12s", *workers(2), "--ignore-flaws", "--metrics-url", server.metrics_url)
    assert run(tmp_path, server.grpc_url, *load) == 0, output(tmp_path)
    (measurement,) = result(tmp_path).measurements
    assert measurement.stage.label == "4/s poisson"
    assert measurement.server is not None
    assert measurement.all.requests == measurement.server.requests > 8

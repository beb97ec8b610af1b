"""Locust against the real server: what it counts is what the server's own metrics say, and objectives decide."""

from __future__ import annotations

from pathlib import Path

from tokenstream.server import TritonServer
from tokenstream_loadtest.results import Measurement
from unit.locust_runs import output, result, run, workers

LOAD = ("--fixed-length", "--ignore-flaws", "--slo", "errors=0%")


def assert_both_count_the_same(measurement: Measurement) -> None:
    """Requests, output tokens and input tokens, to the last one, of answers of eight tokens."""
    counts, told = measurement.server, measurement.all
    assert counts is not None
    assert set(told.outcomes) == {"ok"}
    assert told.requests == counts.requests > 6
    assert told.output_tokens == counts.output_tokens == 8 * told.requests
    assert told.input_tokens == counts.input_tokens


def test_twenty_seconds_of_two_workers_pass_by_their_objectives_and_are_counted_exactly(
    server: TritonServer, tmp_path: Path
) -> None:
    load = (*LOAD, "-u", "6", "-r", "6", "-t", "20s", *workers(2), "--slo", "ttft_p95=60s")
    code = run(tmp_path, server.grpc_url, *load, "--metrics-url", server.metrics_url)
    assert code == 0, output(tmp_path)
    assert "met     ttft_p95 at " in output(tmp_path)
    measured = result(tmp_path)
    assert measured.server  # what the model says of itself
    (measurement,) = measured.measurements
    assert measurement.seconds > 10  # of the 20, from when requests could be sent
    assert measurement.samples
    assert_both_count_the_same(measurement)


def test_an_open_loop_fails_by_a_missed_objective_and_is_counted_exactly(server: TritonServer, tmp_path: Path) -> None:
    load = (*LOAD, "--rate", "8", "-t", "6s", "--slo", "ttft_p95=1us")
    code = run(tmp_path, server.grpc_url, *load, "--metrics-url", server.metrics_url)
    assert code == 1, output(tmp_path)
    assert "MISSED  ttft_p95 at 8/s poisson: " in output(tmp_path)
    (measurement,) = result(tmp_path).measurements
    assert measurement.stage.label == "8/s poisson"
    assert_both_count_the_same(measurement)

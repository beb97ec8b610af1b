"""`tokenstream bench client` against a scripted server: what is asked, told and shown; not how fast anything is."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator

import pytest

from tokenstream import client_bench
from tokenstream.client_bench import IMPORTS, Meter, median
from unit.scripted_triton import ScriptedTriton, failure, inputs, token
from unit.test_cli_commands import run

STREAMS, TOKENS, ROUNDS = 3, 20, 2
ASKED = ["bench", "client", "--streams", str(STREAMS), "--tokens", str(TOKENS)]


def long(request, call) -> Iterator:
    """As many tokens as are asked for."""
    most = inputs(request)["sampling_parameters"]["max_tokens"]
    for index in range(most):
        last = index == most - 1
        yield token(index, "x", 7, final=last, finish_reason="length" if last else "")


@pytest.fixture(autouse=True)
def brief(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is measured well here."""
    monkeypatch.setattr(client_bench, "_LOADS", 1)
    monkeypatch.setattr(client_bench, "_ROUNDS", ROUNDS)
    monkeypatch.setattr(client_bench, "_IDLE_SECONDS", 0.05)


@pytest.fixture
def triton() -> Iterator[ScriptedTriton]:
    server = ScriptedTriton(long, workers=STREAMS + 2)
    yield server
    server.close()


def test_both_clients_are_measured_with_as_many_streams_and_tokens_as_were_asked_for(triton: ScriptedTriton) -> None:
    result = run(*ASKED, "--json", "--url", triton.url, "--token", "t")
    assert result.exit_code == 0, result.stderr
    threads, tasks, *imports = [json.loads(line) for line in result.stdout.splitlines()]
    for told, kind in ((threads, "threads"), (tasks, "tasks")):
        assert (told["kind"], told["streams"], told["tokens"]) == (kind, STREAMS, STREAMS * TOKENS)
        spent = told["cpu_seconds"] - told["idle_cpu_share"] * told["seconds"]
        assert told["cpu_us_per_token"] == pytest.approx(max(0.0, spent) / (STREAMS * TOKENS) * 1e6, abs=1.0)
        assert told["tokens_per_second"] == pytest.approx(STREAMS * TOKENS / told["seconds"], rel=1e-3)
    assert {told["kind"] for told in imports} == {"import"}
    assert [told["statement"] for told in imports] == list(IMPORTS)
    assert all(told["wall_ms"] > 0 and told["cpu_ms"] > 0 for told in imports)
    assert imports[0]["cpu_ms"] < imports[1]["cpu_ms"]  # gRPC is loaded with a client, not before
    assert [call.metadata["authorization"] for call in triton.calls] == ["Bearer t"] * (2 * (1 + ROUNDS) * STREAMS)
    asked = [inputs(request)["sampling_parameters"] for request in triton.requests]
    assert {one["max_tokens"] for one in asked} == {TOKENS}
    assert all(one["ignore_eos"] for one in asked)


def test_a_table_has_a_line_for_each(triton: ScriptedTriton) -> None:
    result = run(*ASKED, "--url", triton.url)
    assert result.exit_code == 0, result.stderr
    first = [line.split()[:3] for line in result.stdout.splitlines() if line.split()]
    assert ["threads", str(STREAMS), str(STREAMS * TOKENS)] in first
    assert ["tasks", str(STREAMS), str(STREAMS * TOKENS)] in first
    for statement in IMPORTS:
        assert statement in result.stdout


def test_a_server_that_refuses_a_stream_ends_the_measurement_in_one_line(triton: ScriptedTriton) -> None:
    triton.script = lambda request, call: iter([failure("the queue is full [request=r code=UNAVAILABLE]")])
    result = run(*ASKED, "--json", "--url", triton.url)
    assert (result.exit_code, result.stdout) == (4, "")
    assert json.loads(result.stderr)["error"].startswith("the queue is full")


@pytest.mark.parametrize("wrong", [["--streams", "0"], ["--tokens", "0"], ["--url", "http://x"]])
def test_what_cannot_be_measured_is_wrong_usage(wrong: list[str]) -> None:
    assert run("bench", "client", *wrong).exit_code == 2


def test_what_an_idle_client_takes_is_not_counted_and_the_middle_round_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    wall, cpu = iter([0.0, 2.0, 12.0, 22.0, 32.0]), iter([0.0, 0.2, 1.7, 2.9, 9.9])  # idle: a tenth of a core
    monkeypatch.setattr(time, "monotonic", lambda: next(wall))
    monkeypatch.setattr(time, "process_time", lambda: next(cpu))
    meter = Meter()
    meter.idle_ends()
    result = median(meter.result("threads", 4, 1000) for _ in range(3))
    monkeypatch.undo()
    assert (result.seconds, result.idle_cpu_share) == (10.0, 0.1)
    assert result.cpu_us_per_token == pytest.approx((1.5 - 10.0 * 0.1) / 1000 * 1e6)
    assert result.tokens_per_second == 100.0

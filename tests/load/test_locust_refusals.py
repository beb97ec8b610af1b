"""A Locust that cannot measure says so in one line before it begins."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from unit.locust_runs import asked, free_port, output, run
from unit.scripted_triton import ScriptedCall, ScriptedTriton, failure


@pytest.mark.parametrize(
    ("options", "told"),
    [
        (("--slo", "speed=1"), "no objective: 'speed=1'"),
        (("--rate", "3", "--shape", "spike"), "give one of them"),
        (("--host", "http://127.0.0.1:1"), "--host is HOST:PORT for gRPC"),
        (("--report", "/proc/nowhere"), "--report cannot be written: /proc/nowhere"),
    ],
)
def test_wrong_usage_is_one_line_and_exit_code_2(tmp_path, options, told):
    assert run(tmp_path, "127.0.0.1:1", "-t", "1s", *options) == 2
    assert told in output(tmp_path)
    assert "Traceback" not in output(tmp_path)


def test_an_unknown_model_ends_the_run_with_one_line_and_nothing_is_sent(tmp_path):
    def script(request: Any, call: ScriptedCall) -> Iterator[Any]:
        yield failure("unknown model: 'nobody' [request=x tokens=0 code=INVALID_ARGUMENT]")

    server = ScriptedTriton(script)
    try:
        assert run(tmp_path, server.url, "--model", "nobody", "-u", "2", "-t", "9s") == 1
        assert output(tmp_path).count("the test cannot begin: unknown model: 'nobody'") == 1
        assert asked(server) == []
    finally:
        server.close()


@pytest.mark.parametrize("target", ["tokenstream", "openai"])
def test_nobody_there_ends_the_run_with_one_line_and_nothing_is_measured(tmp_path, target):
    address = f"127.0.0.1:{free_port()}"
    url = address if target == "tokenstream" else f"http://{address}"
    assert run(tmp_path, url, "--target", target, "-u", "2", "-t", "9s") == 1
    assert output(tmp_path).count("the test cannot begin: ") == 1
    assert "ended before it had begun" not in output(tmp_path)
    assert not (tmp_path / "run.json").exists()

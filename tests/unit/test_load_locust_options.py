"""What Locust's command line comes to."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import pytest

from tokenstream_loadtest.results import Stage
from tokenstream_loadtest.under_locust.options import Choices, add_options, check_report


def read(*arguments: str, host: str | None = None) -> Choices:
    parser = argparse.ArgumentParser()
    add_options(parser)
    return Choices.read(parser.parse_args(arguments), host)


@pytest.mark.parametrize(
    ("arguments", "url"),
    [((), "127.0.0.1:8001"), (("--target", "openai"), "http://127.0.0.1:9000")],
)
def test_each_target_has_its_usual_place(arguments, url):
    assert read(*arguments).url == url


def test_the_host_is_locusts(monkeypatch):
    monkeypatch.delenv("TOKENSTREAM_METRICS_URL", raising=False)
    assert read(host="gpu1:7001").order.url == "gpu1:7001"
    assert read(host="gpu1:7001").metrics_url is None
    assert read(host="gpu1:8001").metrics_url == "http://gpu1:8002/metrics"


def test_metrics_can_be_named_and_refused(monkeypatch):
    monkeypatch.setenv("TOKENSTREAM_METRICS_URL", "http://gpu1:9/metrics")
    assert read(host="gpu1:8001").metrics_url == "http://gpu1:9/metrics"
    assert read("--metrics-url", "none", host="gpu1:8001").metrics_url is None


def test_a_rate_makes_an_open_loop():
    assert read().stage is None
    assert read("--rate", "4", "--arrivals", "constant").stage == Stage(arrivals="constant", rate=4.0)


def test_lengths_go_to_the_workload():
    request = next(read("--max-tokens", "7", "--fixed-length").workload.draw(1))
    assert (request.max_tokens, request.ignore_eos) == (7, True)


def test_objectives_add_up():
    choices = read("--slo", "ttft_p95=500ms", "--slo", "errors=1%")
    assert [str(one) for one in choices.objectives] == ["ttft_p95=500ms", "errors=1%"]


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (("--workload", "nothing"), "no workload 'nothing'"),
        (("--rate", "-1"), "--rate must be above 0"),
        (("--rate", "2", "--shape", "spike"), "give one of them"),
        (("--shape", "ramp"), "until an objective is missed: give one with --slo"),
    ],
)
def test_wrong_options_are_one_line(arguments, told):
    with pytest.raises(ValueError, match=told) as caught:
        read(*arguments)
    assert "\n" not in str(caught.value)


def test_an_address_of_http_is_none_of_grpc():
    with pytest.raises(ValueError, match="--host is HOST:PORT for gRPC, got http://gpu1:8001"):
        read(host="http://gpu1:8001")
    assert read("--target", "openai", host="http://gpu1:8001").url == "http://gpu1:8001"


def test_a_wrong_objective_is_wrong_usage(capsys):
    with pytest.raises(SystemExit):
        read("--slo", "speed=9")
    assert "no objective: 'speed=9'" in capsys.readouterr().err


def test_what_the_web_page_sends_as_text_is_read_too():
    parser = argparse.ArgumentParser()
    add_options(parser)
    options: Any = parser.parse_args([])
    options.seed, options.rate, options.max_tokens = "3", "2.5", "9"
    choices = Choices.read(options, None)
    assert (choices.seed, choices.stage) == (3, Stage(arrivals="poisson", rate=2.5))


def test_a_report_that_cannot_be_written_is_told_before_the_run(tmp_path: Path):
    (tmp_path / "file").write_text("")
    for wanted in (tmp_path / "file", tmp_path / "file" / "within", Path("/proc/nowhere")):
        with pytest.raises(ValueError, match="--report cannot be written: ") as caught:
            check_report(str(wanted))
        assert str(wanted) in str(caught.value)
        assert "\n" not in str(caught.value)


def test_looking_whether_a_report_can_be_written_leaves_nothing_and_takes_nothing(tmp_path: Path):
    (tmp_path / "there").mkdir()
    (tmp_path / "there" / "run.json").write_text("{}")
    for wanted in (tmp_path / "a" / "b", tmp_path / "there"):
        check_report(str(wanted))
    check_report("")
    assert [path.name for path in tmp_path.rglob("*")] == ["there", "run.json"]

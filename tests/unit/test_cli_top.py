"""`tokenstream top`: the page read, the arithmetic between two looks, and what is shown of it."""

from __future__ import annotations

import json
import math
import os
import re
import signal
import subprocess
import termios
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from http_servers import HttpServer
from tokenstream.exposition import Sample, parse_page
from tokenstream.intervals import OUTCOMES, InstanceInterval, Page, Percentiles, between, increase, quantile
from tokenstream.top_screen import bar, sparkline
from unit.scripted_triton import WAIT
from unit.test_cli_commands import COMMAND, ENVIRONMENT, Terminal, ended, run, start

INF = math.inf
LABELS = 'model="llm",version="1",instance="llm_0_0"'
TEXT = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\r"), max_size=20)


def test_names_labels_and_values_are_read_and_the_rest_is_passed_over() -> None:
    page = """# HELP llm_x What it is
# TYPE llm_x counter
llm_x 1
llm_y{} 2.5 1700000000000

llm_z{a="1",b="}, x=\\"2\\"",} +Inf
 nv_gpu{gpu="0"}  NaN
"""
    samples = parse_page(page)
    assert [(one.name, dict(one.labels)) for one in samples] == [
        ("llm_x", {}),
        ("llm_y", {}),
        ("llm_z", {"a": "1", "b": '}, x="2"'}),
        ("nv_gpu", {"gpu": "0"}),
    ]
    assert [one.value for one in samples[:3]] == [1.0, 2.5, INF]
    assert math.isnan(samples[3].value)


@given(st.dictionaries(st.from_regex(r"[a-z_][a-z0-9_]{0,8}", fullmatch=True), TEXT, max_size=4))
def test_any_label_value_survives_its_escapes(labels: dict[str, str]) -> None:
    def escaped(value: str) -> str:
        return value.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")

    written = ",".join(f'{name}="{escaped(value)}"' for name, value in labels.items())
    assert parse_page(f"x{{{written}}} 1\n") == [Sample("x", labels, 1.0)]


@pytest.mark.parametrize("line", ["<html>", "x", "x y", 'x{a="1} 1', "x{a=1} 1", 'x{"a"} 1', "x 1 2 3"])
def test_what_is_no_sample_is_an_error_that_shows_it(line: str) -> None:
    with pytest.raises(ValueError, match=re.escape(repr(line))):
        parse_page(f"good 1\n{line}\n")


@pytest.mark.parametrize(
    ("share", "cumulative", "value"),
    [
        (0.5, (0, 0, 0), None),
        (0.5, (10, 10, 10), 0.5),  # the first bucket begins at 0
        (0.5, (0, 10, 10), 1.5),
        (0.9, (5, 10, 10), 1.8),
        (0.5, (5, 10, 10), 1.0),  # exactly at a bound
        (0.99, (5, 5, 10), 2.0),  # above the last bound nothing is known
        (0.5, (0, 0, 3), 2.0),
    ],
)
def test_a_percentile_is_interpolated_within_its_bucket(
    share: float, cumulative: tuple[int, ...], value: float | None
) -> None:
    assert quantile(share, (1.0, 2.0, INF), cumulative) == (None if value is None else pytest.approx(value))


def test_a_histogram_without_finite_bounds_has_no_percentile() -> None:
    assert quantile(0.5, (INF,), (3,)) is None
    assert quantile(0.5, (), ()) is None


@given(st.lists(st.floats(0.0, 9.0), min_size=1, max_size=50), st.floats(0.01, 1.0))
def test_a_percentile_is_at_most_a_bucket_away_from_the_true_one(values: list[float], share: float) -> None:
    bounds = [float(bound) for bound in range(1, 11)] + [INF]
    cumulative = [sum(value <= bound for value in values) for bound in bounds]
    true = sorted(values)[max(0, math.ceil(share * len(values)) - 1)]
    found = quantile(share, bounds, cumulative)
    assert found is not None
    assert abs(found - true) <= 1.0


def test_a_counter_that_fell_began_anew() -> None:
    assert (increase(3, 10), increase(10, 10), increase(10, 4)) == (7, 0, 4)


def page(labels: str = LABELS, **numbers: Any) -> str:
    """A metrics page of one instance. A dict gives a histogram's cumulative counts by bound, or the outcomes."""
    lines = []
    for name, value in numbers.items():
        if name == "requests_total":
            lines += [f'llm_{name}{{{labels},outcome="{key}"}} {count}' for key, count in value.items()]
        elif isinstance(value, dict):
            lines += [f'llm_{name}_bucket{{{labels},le="{key}"}} {count}' for key, count in value.items()]
        else:
            lines.append(f"llm_{name}{{{labels}}} {value}")
    return "\n".join(["nv_cpu_utilization 0.5", *lines, ""])


BEFORE = page(
    num_requests_running=1, num_requests_waiting=0, kv_cache_usage_perc=0.1, prompt_tokens_total=100,
    generation_tokens_total=1000, requests_total={"stop": 5, "length": 1}, prefix_cache_queries_total=100,
    prefix_cache_hits_total=50, num_preemptions_total=1, step_time_seconds_sum=1.0, step_time_seconds_count=100,
    rows_per_step_sum=400, rows_per_step_count=100,
    inter_token_latency_seconds={"0.01": 5, "0.02": 5, "+Inf": 6}, time_to_first_token_seconds={"0.1": 3, "+Inf": 3},
)  # fmt: skip
AFTER = page(
    num_requests_running=3, num_requests_waiting=2, kv_cache_usage_perc=0.25, prompt_tokens_total=300,
    generation_tokens_total=1500, requests_total={"stop": 9, "length": 1}, prefix_cache_queries_total=300,
    prefix_cache_hits_total=200, num_preemptions_total=3, step_time_seconds_sum=2.0, step_time_seconds_count=300,
    rows_per_step_sum=1400, rows_per_step_count=300,
    inter_token_latency_seconds={"0.01": 5, "0.02": 105, "+Inf": 106},
    time_to_first_token_seconds={"0.1": 3, "+Inf": 3},
)  # fmt: skip


def told(before: str, after: str, seconds: float = 2.0) -> list[InstanceInterval]:
    return between(Page(parse_page(before)), Page(parse_page(after)), seconds)


def test_an_interval_is_what_grew_between_two_pages() -> None:
    (one,) = told(BEFORE, AFTER)
    assert one == InstanceInterval(
        model="llm",
        version="1",
        instance="llm_0_0",
        running=3,
        waiting=2,
        kv_usage=0.25,
        prompt_tokens_per_second=100.0,
        generation_tokens_per_second=250.0,
        requests_per_second={**dict.fromkeys(OUTCOMES, 0.0), "stop": 2.0},
        ttft=None,
        itl=Percentiles(pytest.approx(0.015), pytest.approx(0.0195), pytest.approx(0.0199)),
        queue=None,
        step_seconds=0.005,
        rows_per_step=5.0,
        prefix_hits=0.75,
        preemptions_per_second=1.0,
    )


def test_a_restarted_server_counts_from_its_start() -> None:
    (one,) = told(AFTER, BEFORE)
    assert one.generation_tokens_per_second == 500.0
    assert one.requests_per_second["stop"] == 2.5


def test_buckets_of_a_page_that_was_being_written_do_not_give_nonsense() -> None:
    torn = page(inter_token_latency_seconds={"0.01": 25, "0.02": 15, "+Inf": 16})
    (one,) = told(BEFORE, torn)
    assert one.itl is not None
    assert one.itl.p99 == pytest.approx(0.0099)


def test_instances_are_told_apart_and_bounds_are_ordered_as_numbers() -> None:
    second = LABELS.replace("llm_0_0", "llm_0_1")
    after = AFTER + page(second, request_queue_time_seconds={"10.0": 4, "+Inf": 4, "2.5": 0})
    first, other = told(BEFORE, after)
    assert (first.instance, other.instance) == ("llm_0_0", "llm_0_1")
    assert other.queue is not None
    assert other.queue.p50 == pytest.approx(6.25)


def test_bars_and_sparklines_show_the_least_and_the_most() -> None:
    shown = {0.0: "░░░░", 0.001: "█░░░", 0.5: "██░░", 1.0: "████", 1.2: "████"}
    assert {share: bar(share, 4) for share in shown} == shown
    assert (sparkline([]), sparkline([0, 0]), sparkline([0, 5, 10])) == ("", "▁▁", "▁▅█")


class MetricsServer:
    """Shows `pages` one after the other, then the last for ever; None is an answer of 503."""

    def __init__(self, *pages: str | None) -> None:
        self.pages = list(pages)
        served = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                text = served.pages.pop(0) if len(served.pages) > 1 else served.pages[0]
                if text is None or self.path != "/metrics":
                    self.send_error(404 if text else 503)
                    return
                self.send_response(200)
                self.end_headers()
                self.wfile.write(text.encode())

            def log_message(self, *arguments: object) -> None:
                pass

        self._server = HttpServer(Handler)
        self.url = f"{self._server.url}/metrics"

    def close(self) -> None:
        self._server.close()


@pytest.fixture
def metrics() -> Iterator[MetricsServer]:
    server = MetricsServer(BEFORE, AFTER)
    yield server
    server.close()


def test_once_prints_one_interval_as_plain_text(metrics: MetricsServer) -> None:
    result = run("top", "--once", "--interval", "0.1", "--metrics-url", metrics.url)
    assert (result.exit_code, result.stderr) == (0, "")
    assert "\x1b" not in result.stdout
    for part in ("llm 1, llm_0_0", "3 running, 2 waiting", "25.0%", "5.00 ms, 5.0 rows", "75.0% hit"):
        assert part in result.stdout
    (itl,) = re.findall(r"ITL +(\S+) +(\S+) +(\S+)", result.stdout)
    assert itl == ("15.0", "19.5", "19.9")
    assert re.search(r"TTFT +- +- +-", result.stdout)


def test_once_in_json_is_one_object_with_every_number(metrics: MetricsServer) -> None:
    result = run("top", "--once", "--json", "--interval", "0.1", "--metrics-url", metrics.url.removesuffix("/metrics"))
    (interval,) = [json.loads(line) for line in result.stdout.splitlines()]
    (one,) = interval["instances"]
    assert interval["seconds"] >= 0.1
    assert one["generation_tokens_per_second"] == pytest.approx(500 / interval["seconds"])
    assert set(one["requests_per_second"]) == set(OUTCOMES)
    assert (one["prefix_hits"], one["ttft"]) == (0.75, None)


def test_json_lines_go_on_when_the_server_is_back_and_tell_of_its_absence_once(metrics: MetricsServer) -> None:
    metrics.pages = [BEFORE, AFTER, None, None, BEFORE, AFTER]
    options = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with start("top", "--json", "--interval", "0.1", "--metrics-url", metrics.url, **options) as child:
        rates = [json.loads(child.stdout.readline())["instances"][0]["waiting"] for _ in range(3)]
        child.send_signal(signal.SIGINT)
        errors = child.stderr.read().decode().splitlines()
        assert ended(child, WAIT)
    assert rates == [2, 2, 2]
    assert child.returncode == 130
    (error,) = [json.loads(line) for line in errors]
    assert (error["code"], "503" in error["error"]) == (1, True)


@pytest.mark.parametrize(
    ("text", "shown"), [("<html>\n", "--metrics-url"), ("nv_x 1\n", "`metrics` on"), (None, "answered 503")]
)
def test_what_is_no_page_of_our_models_is_one_line_with_the_cure(
    metrics: MetricsServer, text: str | None, shown: str
) -> None:
    metrics.pages = [text]
    result = run("top", "--once", "--metrics-url", metrics.url)
    assert (result.exit_code, result.stdout) == (1, "")
    assert result.stderr.count("\n") == 1
    assert shown in result.stderr


def test_nobody_at_the_metrics_port_is_exit_code_3(metrics: MetricsServer) -> None:
    metrics.close()
    result = run("top", "--once", "--metrics-url", metrics.url)
    assert result.exit_code == 3
    cure = "Is it running? Start one with: tokenstream serve"
    assert result.stderr == f"tokenstream: cannot read {metrics.url}: connection refused. {cure}\n"


@pytest.mark.parametrize(
    "arguments",
    [
        ["--metrics-url", "127.0.0.1:8002"],
        ["--metrics-url", "http://a:b/"],
        ["--metrics-url", "http://a b/"],
        ["--interval", "0"],
        ["--interval", "inf"],
        [],  # standard output is no terminal
    ],
)
def test_a_url_that_is_none_or_no_terminal_is_wrong_usage(arguments: list[str]) -> None:
    result = run("top", *arguments)
    assert result.exit_code == 2
    assert result.stderr.count("\n") == 1


@pytest.fixture
def terminal() -> Iterator[Terminal]:
    terminal = Terminal()
    yield terminal
    terminal.close()


ENTER, LEAVE = b"\x1b[?1049h", b"\x1b[?1049l"  # the alternate screen


def screen(terminal: Terminal, metrics: MetricsServer) -> Any:
    side = terminal.side
    environment = {**ENVIRONMENT, "TERM": "xterm", "COLUMNS": "100", "LINES": "40"}
    arguments = [*COMMAND, "top", "--interval", "0.1", "--metrics-url", metrics.url]
    return subprocess.Popen(arguments, env=environment, stdin=side, stdout=side, stderr=side, start_new_session=True)


@pytest.mark.parametrize(("leave", "code"), [("q", 0), (signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_the_screen_is_left_as_it_was_found(
    metrics: MetricsServer, terminal: Terminal, leave: str | signal.Signals, code: int
) -> None:
    before = termios.tcgetattr(terminal.side)
    with screen(terminal, metrics) as child:
        try:
            assert terminal.shows(ENTER)
            assert terminal.shows(b"3 running, 2 waiting")
            assert termios.tcgetattr(terminal.side) != before
            if isinstance(leave, str):
                terminal.press(leave.encode())
            else:
                os.kill(child.pid, leave)
            assert terminal.shows(LEAVE)
            assert ended(child, WAIT)
        finally:
            child.kill()
    assert child.returncode == code
    assert termios.tcgetattr(terminal.side) == before


def test_the_screen_says_that_the_server_is_gone_and_sees_it_come_back(
    metrics: MetricsServer, terminal: Terminal
) -> None:
    with screen(terminal, metrics) as child:
        try:
            assert terminal.shows(b"3 running")
            metrics.pages = [None]
            assert terminal.shows(b"answered 503")
            assert terminal.shows(b"3 running")  # what was last seen stays
            metrics.pages = [BEFORE, BEFORE]
            assert terminal.shows(b"1 running")
            terminal.press(b"q")
            assert ended(child, WAIT)
        finally:
            child.kill()
    assert child.returncode == 0

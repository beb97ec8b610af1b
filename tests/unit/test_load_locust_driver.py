"""The driver of a Locust process as that sees it: lines over a socket, exact times, and an end that comes by itself."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from typing import IO, Any

import pytest

from http_servers import HttpServer
from tokenstream_loadtest.requests import Request
from tokenstream_loadtest.tally import Group
from tokenstream_loadtest.under_locust.wire import (
    Answer,
    Ask,
    Count,
    Counted,
    Cut,
    Finish,
    Finished,
    Looked,
    Open,
    Opened,
    Order,
    Report,
    order_line,
    read_report,
)
from tokenstream_loadtest.watch import PERIOD
from unit.locust_runs import free_port, introduced
from unit.scripted_triton import ScriptedCall, ScriptedTriton, answer, failure, token
from waiting import WAIT

ROOT = Path(__file__).parents[2]


class Driven:
    """A driver, in the place of Locust."""

    def __init__(self) -> None:
        self._socket, theirs = socket.socketpair()
        self._socket.settimeout(WAIT)
        env = {**os.environ, "PYTHONPATH": os.pathsep.join(str(ROOT / part) for part in ("loadtest", "client"))}
        with theirs:
            command = [sys.executable, "-P", "-m", "tokenstream_loadtest.under_locust.driver"]
            self.process = subprocess.Popen(command, stdin=theirs.fileno(), env=env, stderr=subprocess.PIPE)
        self._lines: IO[bytes] = self._socket.makefile("rb")

    def tell(self, order: Order) -> None:
        self._socket.sendall(order_line(order))

    def hear(self) -> Report:
        return read_report(self._lines.readline())

    def open(self, url: str, target: str = "tokenstream", number: int = 1) -> Opened:
        self.tell(Open(target, url, "llm", number=number))
        report = self.hear()
        assert isinstance(report, Opened)
        return report

    def answers(self, count: int) -> dict[int, Answer]:
        found: dict[int, Answer] = {}
        while len(found) < count:
            report = self.hear()
            assert isinstance(report, Answer)
            found[report.number] = report
        return found

    def hang_up(self) -> int:
        self._lines.close()
        self._socket.close()
        return self.process.wait(WAIT)

    def close(self) -> None:
        self.process.kill()
        self.hang_up()
        assert self.process.stderr is not None
        self.process.stderr.close()


@pytest.fixture
def driver() -> Iterator[Driven]:
    driven = Driven()
    yield driven
    driven.close()


@pytest.fixture
def triton() -> Iterator[Any]:
    open_now: list[ScriptedTriton] = []

    def start(script: Any) -> ScriptedTriton:
        open_now.append(ScriptedTriton(introduced(script), workers=16))
        return open_now[-1]

    yield start
    for one in open_now:
        one.close()


class Metrics(HttpServer):
    """A metrics page of a model that has had `requests`; `looks`: how often somebody read it."""

    def __init__(self) -> None:
        self.looks = self.requests = 0
        super().__init__(_Metrics)


class _Metrics(BaseHTTPRequestHandler):
    server: Metrics

    def do_GET(self) -> None:
        self.server.looks += 1
        self.send_response(200)
        self.end_headers()
        labels = 'model="llm",version="1",instance="llm_0_0"'
        lines = (
            f"llm_num_requests_running{{{labels}}} 0",
            f"llm_generation_tokens_total{{{labels}}} {self.server.requests}",
        )
        self.wfile.write("\n".join([*lines, ""]).encode())

    def log_message(self, *args: object) -> None:
        """Nothing: the test's output is its own."""


def question(**more: Any) -> Request:
    return Request("chat", 8, prompt="Why?", **more)


def test_an_answer_has_the_times_of_one_clock(driver, triton):
    assert not driver.open(triton(answer("a", "b", "c")).url, number=7).error
    before = time.perf_counter()
    driver.tell(Ask(1, question(), before))
    record = driver.answers(1)[1].record
    assert record.outcome == "ok"
    assert record.output_tokens == 3
    assert before == record.scheduled_at < record.sent_at < record.times[0] <= record.ended_at < time.perf_counter()


def test_requests_are_asked_at_once_and_answered_in_their_own_order(driver, triton):
    calls: list[ScriptedCall] = []

    def script(request: Any, call: ScriptedCall) -> Iterator[Any]:
        calls.append(call)
        while len(calls) < 4:
            if call.over.wait(0.01):
                return
        yield from answer("a")(request, call)

    driver.open(triton(script).url)
    now = time.perf_counter()
    for number in (5, 6, 7, 8):
        driver.tell(Ask(number, question(), now))
    assert sorted(driver.answers(4)) == [5, 6, 7, 8]


def test_it_ends_when_the_other_side_is_gone_and_leaves_its_requests(driver, triton):
    def script(request: Any, call: ScriptedCall) -> Iterator[Any]:
        yield token(0, "a", 1)
        call.over.wait(WAIT)

    server = triton(script)
    driver.open(server.url)
    driver.tell(Ask(1, question(), time.perf_counter()))
    deadline = time.monotonic() + WAIT
    while not any(request.id.startswith("locust-") for request in server.requests):
        assert time.monotonic() < deadline
        time.sleep(0.01)
    assert driver.hang_up() == 0
    assert all(call.over.wait(WAIT) for call in server.calls)


def test_what_is_cut_is_answered_as_a_timeout(driver, triton):
    def script(request: Any, call: ScriptedCall) -> Iterator[Any]:
        call.over.wait(WAIT)
        yield from ()

    driver.open(triton(script).url)
    for number in (1, 2):
        driver.tell(Ask(number, question(), time.perf_counter()))
    driver.tell(Cut())
    assert {answer.record.outcome for answer in driver.answers(2).values()} == {"timeout"}
    driver.tell(Finish(0.01))
    assert isinstance(driver.hear(), Finished)


@pytest.mark.parametrize("target", ["tokenstream", "openai"])
def test_a_server_that_is_not_there_is_no_server_to_test(driver, target):
    address = f"127.0.0.1:{free_port()}"
    opened = driver.open(f"http://{address}" if target == "openai" else address, target)
    assert "cannot connect" in opened.error or "connect" in opened.error
    assert "\n" not in opened.error


@pytest.mark.parametrize(("target", "url"), [("fax", "127.0.0.1:1"), ("openai", "127.0.0.1:1")])
def test_what_cannot_be_asked_is_said_in_one_line(driver, target, url):
    opened = driver.open(url, target)
    assert opened.error
    assert "\n" not in opened.error


def test_whatever_a_server_says_in_place_of_itself_ends_the_test_before_it_begins(driver, triton):
    def script(request: Any, call: ScriptedCall) -> Iterator[Any]:
        yield failure("internal: no weights [request=x tokens=0 code=INTERNAL]")

    server = triton(script)
    server.script = script  # without the introduction
    assert "no weights" in driver.open(server.url).error


def test_the_metrics_page_is_left_alone_as_soon_as_the_test_is_counted(driver, triton):
    with Metrics() as page:
        driver.tell(Open("tokenstream", triton(answer("a")).url, "llm", metrics_url=page.url, number=1))
        assert isinstance(driver.hear(), Opened)
        assert isinstance(driver.hear(), Looked)
        driver.tell(Count(Group()))
        while not isinstance(report := driver.hear(), Counted):
            assert isinstance(report, Looked)
        looks = page.looks
        time.sleep(2.5 * PERIOD)  # that nothing comes has no event
        assert page.looks == looks


def test_a_server_without_a_metrics_page_has_no_counts(driver, triton):
    driver.open(triton(answer("a")).url)
    driver.tell(Count(Group()))
    assert driver.hear() == Counted(None)


def test_a_server_that_was_started_anew_is_told_with_its_counts(driver, triton):
    with Metrics() as page:
        page.requests = 7
        driver.tell(Open("tokenstream", triton(answer("a")).url, "llm", metrics_url=page.url, number=1))
        assert isinstance(driver.hear(), Opened)
        page.requests = 0
        driver.tell(Count(Group()))
        while isinstance(report := driver.hear(), Looked):
            pass
        assert isinstance(report, Counted)
        assert report.restarted
        assert not report.lost


def test_a_line_that_is_no_report_is_refused_in_one_line():
    with pytest.raises(ValueError, match="no message between Locust and its driver") as caught:
        read_report(b'{"type": "dance"}\n')
    assert "\n" not in str(caught.value)

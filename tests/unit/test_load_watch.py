"""The server's metrics page and the machine's /proc, looked at while something is measured."""

from __future__ import annotations

import asyncio
import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler
from typing import Any

import pytest

from http_servers import HttpServer
from tokenstream.intervals import Page
from tokenstream_loadtest import host
from tokenstream_loadtest import watch as watching
from tokenstream_loadtest.host import Meter, descendants, describe_machine, host_and_port, is_here, listener
from tokenstream_loadtest.results import Sample, ServerCounts
from tokenstream_loadtest.tally import Group
from tokenstream_loadtest.watch import Watch

MODELS = (("llm", "llm_0_0"), ("llm", "llm_0_1"), ("other", "other_0_0"))


class Pages:
    """A metrics page; `show` replaces what it says, `later` does so at its so many-th look from now."""

    def __init__(self) -> None:
        self.text = ""
        self.looks = 0
        self._later: list[tuple[int, str]] = []
        pages = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                pages.looks += 1
                while pages._later and pages._later[0][0] <= pages.looks:
                    pages.text = pages._later.pop(0)[1]
                self.send_response(200 if pages.text else 500)
                self.end_headers()
                self.wfile.write(pages.text.encode())

            def log_message(self, *_: Any) -> None:
                pass

        self.server = HttpServer(Handler)
        self.url = f"{self.server.url}/metrics"

    def show(self, **values: float) -> None:
        self.text = page(**values)

    def later(self, looks: int, **values: float) -> None:
        self._later.append((self.looks + looks, page(**values)))


@pytest.fixture
def pages() -> Iterator[Pages]:
    found = Pages()
    yield found
    found.server.close()


def page(**values: float) -> str:
    """The same values for every instance; of requests' outcomes those that stopped and those that were cancelled."""
    lines = []
    for model, instance in MODELS:
        labels = f'model="{model}",version="1",instance="{instance}"'
        for name, value in ({"num_requests_running": 0} | values).items():
            family, _, outcome = name.partition("__")
            more = f',outcome="{outcome}"' if outcome else ""
            lines.append(f"llm_{family}{{{labels}{more}}} {value}")
        requests = values.get("requests_total__stop", 0)
        lines.append(f'nv_inference_exec_count{{model="{model}",version="1"}} {requests}')
        lines.append(f'nv_inference_queue_duration_us{{model="{model}",version="1"}} {requests * 3000}')
    return "\n".join(lines)


def told(requests: int, output_tokens: int) -> Group:
    return Group(outcomes={"ok": requests}, output_tokens=output_tokens)


BEFORE = {"requests_total__stop": 10, "generation_tokens_total": 100, "prompt_tokens_total": 50}
AFTER = {
    "requests_total__stop": 12,
    "requests_total__cancelled": 1,
    "generation_tokens_total": 140,
    "prompt_tokens_total": 70,
    "time_to_first_token_seconds_sum": 0.5,
    "time_to_first_token_seconds_count": 2,
    "num_preemptions_total": 3,
    "prefix_cache_queries_total": 20,
    "prefix_cache_hits_total": 5,
}


async def begun(pages: Pages) -> tuple[Watch, Page]:
    """A watch over `pages`, and how they stood when it began."""
    watch = Watch(pages.url, "llm")
    pages.show(**BEFORE)
    before = await watch.settled()
    assert before is not None
    return watch, before


def test_counts_are_what_all_instances_of_the_model_did_meanwhile(pages):
    async def main() -> ServerCounts | None:
        watch, before = await begun(pages)
        pages.later(3, **AFTER)
        return await watch.counts(before, told(6, 80))

    assert asyncio.run(main()) == ServerCounts(
        requests=6,
        input_tokens=40,
        output_tokens=80,
        ttft=0.25 + 0.003,  # the model's, and Triton's queue
        itl=None,
        queue=None,
        preemptions=6,
        prefix_hits=0.25,
    )


@pytest.mark.parametrize(("after", "restarted"), [(AFTER, False), ({"generation_tokens_total": 99}, True), ({}, True)])
def test_counters_that_went_back_are_those_of_a_server_that_was_started_anew(pages, after, restarted):
    async def main() -> bool:
        watch, before = await begun(pages)
        pages.show(**after)
        await watch.counts(before, told(6, 80))
        return watch.restarted

    assert asyncio.run(main()) is restarted


def test_counts_that_never_agree_are_taken_once_the_page_stands_still(pages):
    async def main() -> tuple[ServerCounts | None, float]:
        watch, before = await begun(pages)
        pages.later(4, **AFTER)
        began = time.perf_counter()
        return await watch.counts(before, told(7, 81)), time.perf_counter() - began

    counts, seconds = asyncio.run(main())
    assert counts is not None
    assert (counts.requests, counts.output_tokens) == (6, 80)
    assert seconds > 1.2


def test_a_page_that_cannot_be_read_for_a_moment_is_asked_again(pages):
    async def main() -> ServerCounts | None:
        watch, before = await begun(pages)
        pages.text = ""  # an error of the server
        pages.later(3, **AFTER)
        return await watch.counts(before, told(6, 80))

    counts = asyncio.run(main())
    assert counts is not None
    assert counts.output_tokens == 80


def test_a_page_that_never_comes_back_gives_no_counts(pages, monkeypatch):
    monkeypatch.setattr(watching, "_PATIENCE", 0.3)

    async def main() -> ServerCounts | None:
        watch, before = await begun(pages)
        pages.text = ""
        return await watch.counts(before, told(6, 80))

    assert asyncio.run(main()) is None


def test_a_page_without_the_model_by_that_name_is_taken_whole(pages):
    async def main() -> ServerCounts | None:
        watch = Watch(pages.url, "gateway")
        pages.show(**BEFORE)
        before = await watch.settled()
        assert before is not None
        pages.show(**AFTER)
        return await watch.counts(before, told(9, 120))

    counts = asyncio.run(main())
    assert counts is not None
    assert counts.output_tokens == 120


@pytest.mark.parametrize("text", ["", "no page", "up 1\n"])
def test_a_page_that_is_none_gives_nothing(pages, text):
    async def main() -> tuple[Any, tuple[Sample, ...]]:
        watch = Watch(pages.url, "llm")
        pages.text = text
        sampling = asyncio.create_task(watch.sample())
        before = await watch.settled()
        sampling.cancel()
        return before, watch.samples

    assert asyncio.run(main()) == (None, ())


def test_a_page_at_no_url_is_refused():
    with pytest.raises(ValueError, match=r"metrics page"):
        Watch("127.0.0.1:8002", "llm")


def test_samples_are_sums_over_the_instances(pages):
    async def main() -> tuple[Sample, ...]:
        watch = Watch(pages.url, "llm")
        pages.show(**BEFORE)
        pages.later(2, **(BEFORE | {"num_requests_running": 3, "num_requests_waiting": 1, "kv_cache_usage_perc": 0.5}))
        pages.later(3, **AFTER)
        sampling = asyncio.create_task(watch.sample())
        while pages.looks < 3:
            await asyncio.sleep(0.05)
        await asyncio.sleep(0.3)  # for the third page to be read to its end
        sampling.cancel()
        return watch.samples

    first, second, *_ = asyncio.run(main())
    assert (first.running, first.waiting, first.kv_usage) == (6, 2, 0.5)
    assert first.generation_tokens_per_second == 0
    assert first.rows_per_step is None
    assert second.running == 0
    assert second.generation_tokens_per_second == pytest.approx(80, rel=0.5)  # over about a second
    assert 0.9 < first.at < second.at


# --- the machine

SERVER = """
import socket, subprocess, sys
server = socket.create_server(("127.0.0.1", 0))
burn = "end = time.process_time() + 0.3\\nwhile time.process_time() < end: pass\\nprint(1, flush=True)"
code = f"import sys, time\\nsys.stdin.readline()\\n{burn}\\nsys.stdin.read()"
child = subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
print(server.getsockname()[1], flush=True)
sys.stdin.readline()
child.stdin.write(b"go\\n")
child.stdin.flush()
child.stdout.readline()
print("burnt", flush=True)
sys.stdin.read()
"""


@pytest.fixture
def burning() -> Iterator[tuple[subprocess.Popen[str], int]]:
    """A process that listens on a port and whose child, when told to, uses 0.3 s of a processor."""
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with subprocess.Popen([sys.executable, "-c", SERVER], text=True, **pipes) as process:  # type: ignore[call-overload]
        yield process, int(process.stdout.readline())
        process.stdin.close()


def test_the_servers_processes_are_the_listener_and_its_children(burning):
    process, port = burning
    assert listener(port) == process.pid
    tree = descendants(process.pid)
    assert process.pid in tree
    assert len(tree) == 2
    assert tree < descendants(os.getpid())


def test_a_server_that_another_took_the_place_of_is_told(burning, monkeypatch):
    process, port = burning
    meter = Meter(port)
    meter.read()
    assert not meter.restarted
    monkeypatch.setattr(host, "listener", lambda _port: process.pid + 1)
    meter.read()
    assert meter.restarted


def test_cpu_is_told_apart_between_server_and_generator(burning):
    process, port = burning
    meter = Meter(port)
    began = time.perf_counter()
    end = time.process_time() + 0.2
    while time.process_time() < end:
        pass
    process.stdin.write("go\n")
    process.stdin.flush()
    assert process.stdout.readline() == "burnt\n"
    cores, seconds = meter.read(), time.perf_counter() - began
    assert cores.server is not None
    assert 0.28 < cores.server * seconds < 0.6
    assert 0.18 < cores.generator * seconds < 0.5
    assert cores.others >= 0
    assert cores.stolen >= 0


def test_a_server_that_is_not_seen_has_no_share():
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))  # and does not listen
        port = unused.getsockname()[1]
        assert listener(port) is None
        assert Meter(port).read().server is None
    assert Meter(None).read().server is None


def test_a_server_within_this_process_is_not_told_from_the_generator(pages):
    assert listener(pages.server.server_port) == os.getpid()
    assert Meter(pages.server.server_port).read().server is None


@pytest.mark.parametrize(
    ("url", "found"),
    [
        ("127.0.0.1:8001", ("127.0.0.1", 8001)),
        ("a:1,b:2", ("a", 1)),
        ("[::1]:8001", ("::1", 8001)),
        ("http://host:9000/v1", ("host", 9000)),
        ("https://host", ("host", 443)),
        ("http://host", ("host", 80)),
    ],
)
def test_a_url_has_a_host_and_a_port(url, found):
    assert host_and_port(url) == found


def test_this_machine_is_known_by_its_addresses():
    assert is_here("127.0.0.1")
    assert is_here("localhost")
    assert not is_here("192.0.2.1")
    assert not is_here("no.such.host.invalid")


def test_the_machine_is_described():
    machine = describe_machine(local=True)
    assert machine.processor
    assert 0 < machine.cores <= (os.cpu_count() or 1)
    assert machine.memory_bytes > 1 << 28
    assert machine.system.startswith("Linux ")
    assert machine.local

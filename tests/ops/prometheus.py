"""Debian's Prometheus, scraping a server every second and asked over HTTP; ended with its `with`.

Every wait is bounded. It does not know what it scrapes.
"""

from __future__ import annotations

import json
import socket
import subprocess
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from debian_packages import debian_program
from waiting import eventually

START_SECONDS = 60.0
STOP_SECONDS = 10.0
ANSWER_SECONDS = 10.0
ATTEMPTS = 3  # somebody else may take a port between its choice and its use
CONFIG = """
global: {{ scrape_interval: 1s, scrape_timeout: 1s }}
scrape_configs: [ {{ job_name: server, static_configs: [ {{ targets: ["{target}"] }} ] }} ]
"""


@dataclass(frozen=True, slots=True)
class Sample:
    """One element of an instant vector."""

    labels: Mapping[str, str]
    value: float


class Prometheus:
    """A running Prometheus at `url`."""

    def __init__(self, url: str) -> None:
        self.url = url

    def query(self, expression: str) -> list[Sample]:
        """What the expression is now. ValueError with Prometheus's words if it is not an instant vector or scalar."""
        request = f"{self.url}/api/v1/query?{urllib.parse.urlencode({'query': expression})}"
        try:
            with urllib.request.urlopen(request, timeout=ANSWER_SECONDS) as page:
                data = json.load(page)["data"]
        except urllib.error.HTTPError as error:
            raise ValueError(f"{expression}: {error.read().decode()}") from error
        if data["resultType"] == "scalar":
            return [Sample({}, float(data["result"][1]))]
        return [Sample(one["metric"], float(one["value"][1])) for one in data["result"]]

    def value(self, expression: str) -> float | None:
        """The expression's one value; None while it has none."""
        samples = self.query(expression)
        assert len(samples) <= 1, f"{expression} has {len(samples)} values: {samples}"
        return samples[0].value if samples else None

    def until(self, expression: str, holds: Callable[[float], bool], seconds: float = 30.0) -> float:
        """The expression's one value once it `holds`; AssertionError with the last one if that does not come."""
        values: list[float | None] = []

        def holding() -> bool:
            values.append(self.value(expression))
            return values[-1] is not None and holds(values[-1])

        eventually(holding, seconds, lambda: f"{expression} is {values[-1]} after {seconds:g} s")
        value = values[-1]
        assert value is not None
        return value


@contextmanager
def scraping(url: str, folder: Path) -> Iterator[Prometheus]:
    """A Prometheus that scrapes `url` (its /metrics) and keeps its data in `folder`; it has scraped once."""
    program = debian_program("prometheus", "usr/bin/prometheus")
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "prometheus.yml").write_text(CONFIG.format(target=urllib.parse.urlsplit(url).netloc))
    process, prometheus = _start(program, folder)
    try:
        prometheus.until("up", lambda up: up == 1.0)
        yield prometheus
    finally:
        _stop(process)


def _start(program: Path, folder: Path) -> tuple[subprocess.Popen[bytes], Prometheus]:
    for attempt in range(ATTEMPTS):
        with socket.create_server(("127.0.0.1", 0)) as free:
            address = f"127.0.0.1:{free.getsockname()[1]}"
        log = folder / f"prometheus-{attempt}.log"
        command = [
            str(program),
            f"--config.file={folder / 'prometheus.yml'}",
            f"--storage.tsdb.path={folder / 'data'}",
            f"--web.listen-address={address}",
        ]
        with log.open("wb") as output:
            process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=output, stderr=output)
        if _ready(process, f"http://{address}/-/ready"):
            return process, Prometheus(f"http://{address}")
    raise AssertionError(f"Prometheus did not start: {log.read_text()[-2000:]}")


def _ready(process: subprocess.Popen[bytes], url: str) -> bool:
    """Whether it answers; false if it has ended instead. AssertionError, and it is stopped, if neither comes."""
    try:
        eventually(lambda: process.poll() is not None or _answers(url), START_SECONDS)
    except BaseException:
        _stop(process)
        raise
    return process.returncode is None


def _answers(url: str) -> bool:
    try:
        with urllib.request.urlopen(url, timeout=ANSWER_SECONDS):
            return True
    except OSError:  # not listening yet, or 503: still opening its storage
        return False


def _stop(process: subprocess.Popen[bytes]) -> None:
    process.terminate()
    try:
        process.wait(STOP_SECONDS)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait(STOP_SECONDS)

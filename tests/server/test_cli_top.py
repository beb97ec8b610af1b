"""`tokenstream top` and `models` beside a real server under a little load."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager

from typer.testing import CliRunner, Result

from server.conftest import LONG
from tokenstream import Client
from tokenstream.commands import app
from tokenstream.server import TritonServer
from waiting import WAIT


@contextmanager
def load(client: Client) -> Iterator[None]:
    """Two streams that go on until the end of the block; they have begun."""
    stop, begun = threading.Event(), threading.Barrier(3)

    def read(number: int) -> None:
        prompt = [1000 + number] * 40
        with client.stream(input_ids=prompt, **LONG) as stream:
            next(stream)
            begun.wait(WAIT)
            for _ in stream:
                if stop.is_set():
                    return

    readers = [threading.Thread(target=read, args=(number,)) for number in range(2)]
    for reader in readers:
        reader.start()
    try:
        begun.wait(WAIT)
        yield
    finally:
        stop.set()
        for reader in readers:
            reader.join(WAIT)


def run(*arguments: str) -> Result:
    result = CliRunner().invoke(app, list(arguments))
    assert result.exit_code == 0, result.output
    assert result.stderr == ""
    return result


def test_top_shows_what_a_loaded_server_does(server: TritonServer, client: Client) -> None:
    # The model renews its numbers once a second: of three seconds at least one falls wholly within the load.
    options = ["top", "--once", "--interval", "3", "--metrics-url", server.metrics_url]
    with load(client):
        one = json.loads(run(*options, "--json").stdout)["instances"][0]
        text = run(*options).stdout
    assert (one["model"], one["instance"], one["running"], one["waiting"]) == ("llm", "llm_0_0", 2, 0)
    assert 0 < one["kv_usage"] < 1
    assert one["generation_tokens_per_second"] > 0
    assert 0 < one["itl"]["p50"] <= one["itl"]["p95"] <= one["itl"]["p99"]
    assert one["rows_per_step"] >= 1
    assert one["step_seconds"] > 0
    assert "2 running, 0 waiting" in text


def test_models_shows_the_model_and_its_load(server: TritonServer, client: Client) -> None:
    with load(client):
        (row,) = [json.loads(line) for line in run("models", "--url", server.grpc_url, "--json").stdout.splitlines()]
        text = run("models", "--url", server.grpc_url).stdout
    assert (row["name"], row["ready"], row["info"]["running"]) == ("llm", True, 2)
    assert row["info"] | {"running": 0, "waiting": 0} == client.info().details | {"running": 0, "waiting": 0}
    _, _, shown, *taken = text.splitlines()
    assert shown.split()[:3] == ["llm", "1", "yes"]
    assert [line.split(" ")[:2] for line in taken] == [["llm:", "threads:"], ["llm:", "KV"], ["llm:", "weights:"]]
    assert row["info"]["kv_cache_mib"] > 0
    assert row["info"]["threads_from"] in text

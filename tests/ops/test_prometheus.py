"""A real Prometheus over a real server: its quantiles are numbers, its counters are what the client counted."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from ops.prometheus import Prometheus, scraping
from server.conftest import copied, parameters, running
from tokenstream import Client, Completion, InvalidRequest

ROOT = Path(__file__).parents[2]
HISTOGRAMS = (
    "step_time_seconds",
    "rows_per_step",
    "time_to_first_token_seconds",
    "inter_token_latency_seconds",
    "request_queue_time_seconds",
    "request_prefill_time_seconds",
    "request_decode_time_seconds",
    "e2e_request_latency_seconds",
    "request_prompt_tokens",
    "request_generation_tokens",
)
OWN_ALONE = {"step_time_seconds", "rows_per_step"}
FAMILIES = [f"llm_{name}" for name in HISTOGRAMS] + [f"vllm:{name}" for name in HISTOGRAMS if name not in OWN_ALONE]
REQUESTS = 18
QUERIES = re.findall(r"```promql\n(.*?)\n```", (ROOT / "docs" / "metrics.md").read_text())
assert QUERIES


class Counted:
    """What the client has seen: how its requests ended, and its tokens."""

    def __init__(self) -> None:
        self.outcomes: Counter[str] = Counter()
        self.prompt_tokens = 0
        self.generated_tokens = 0

    def add(self, answer: Completion) -> None:
        self.outcomes[answer.finish_reason] += 1
        self.prompt_tokens += answer.usage.input_tokens
        self.generated_tokens += len(answer.token_ids)


@pytest.fixture(scope="module")
def observed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Prometheus, Counted]]:
    """A Prometheus that has watched a server answer requests, all of them counted there."""
    folder = tmp_path_factory.mktemp("observed")
    changes = parameters(vllm_metric_names=True)
    with (
        running(copied(folder / "repository", changes)) as server,
        scraping(server.metrics_url, folder / "prometheus") as prometheus,
        Client(server.grpc_url) as client,
    ):
        prometheus.until("sum(llm_requests_total)", lambda count: count == 0)  # rates need a beginning
        yield prometheus, asked(client)


def asked(client: Client) -> Counted:
    """Some requests at a time, long and short, that end in different ways."""
    counted = Counted()

    def ask(number: int) -> Completion:
        stop = ["e"] if number % 3 == 0 else []
        return client.generate(f"Number {number}: " + "and so on " * number, max_tokens=4 + number, stop=stop, seed=1)

    with ThreadPoolExecutor(4) as pool:
        for answer in pool.map(ask, range(REQUESTS)):
            counted.add(answer)
    for _ in range(2):
        with pytest.raises(InvalidRequest):
            client.generate("x", stop_token_ids=[10**8])
        counted.outcomes["invalid"] += 1
    assert {"stop", "length", "invalid"} <= set(counted.outcomes)
    return counted


def test_request_and_token_counters_equal_what_the_client_counted(observed: tuple[Prometheus, Counted]) -> None:
    prometheus, counted = observed
    total = counted.outcomes.total()
    prometheus.until("sum(llm_requests_total)", lambda count: count == total)
    ended = {one.labels["outcome"]: one.value for one in prometheus.query("llm_requests_total")}
    assert {outcome: count for outcome, count in ended.items() if count} == counted.outcomes
    finished = {one.labels["finished_reason"]: one.value for one in prometheus.query("vllm:request_success_total")}
    assert (finished["stop"], finished["length"]) == (ended["stop"], ended["length"])
    for prefix in ("llm_", "vllm:"):
        assert prometheus.value(f"{prefix}generation_tokens_total") == counted.generated_tokens
        assert prometheus.value(f"{prefix}prompt_tokens_total") == counted.prompt_tokens
        assert prometheus.value(f"{prefix}request_generation_tokens_sum") == counted.generated_tokens
        assert prometheus.value(f"{prefix}time_to_first_token_seconds_count") == REQUESTS
        assert prometheus.value(f"{prefix}inter_token_latency_seconds_count") == counted.generated_tokens - REQUESTS


@pytest.mark.parametrize("family", FAMILIES)
def test_every_histogram_has_quantiles(observed: tuple[Prometheus, Counted], family: str) -> None:
    prometheus, _ = observed
    for quantile in (0.5, 0.95, 0.99):
        query = f"histogram_quantile({quantile}, sum by (le) (rate({family}_bucket[2m])))"
        assert math.isfinite(prometheus.until(query, lambda value: not math.isnan(value)))
    assert prometheus.until(f"{family}_sum / {family}_count", lambda value: not math.isnan(value)) >= 0.0


@pytest.mark.parametrize("query", QUERIES)
def test_every_documented_query_is_understood(observed: tuple[Prometheus, Counted], query: str) -> None:
    prometheus, _ = observed
    answer = prometheus.query(query)
    is_alert = " > " in query or " == " in query
    assert is_alert or answer

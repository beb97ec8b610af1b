"""What Triton's metrics port says of the model: two instances in processes of their own, every number exact."""

from __future__ import annotations

import re
import time
import urllib.request
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, closing
from dataclasses import dataclass
from typing import Any

import pytest

from server.conftest import LONG, copied, parameters, running
from server.raw import Wire, infer, tokens
from tokenstream.server import TritonServer
from waiting import WAIT

INSTANCES = ("llm_0_0", "llm_0_1")
SEATS = 2
SHORT: dict[str, Any] = {"max_tokens": 12, "ignore_eos": True, "temperature": 0.0}
OUTCOMES = ("stop", "length", "cancelled", "invalid", "rejected", "error", "expired")
LINE = re.compile(r"([a-z0-9_:]+)(?:\{(.*)\})? (\S+)")


class Page:
    """One scrape of the metrics port."""

    def __init__(self, text: str) -> None:
        self.types = dict(re.findall(r"^# TYPE (\S+) (\S+)$", text, re.MULTILINE))
        self.series: list[tuple[str, Mapping[str, str], float]] = []
        for line in text.splitlines():
            if found := LINE.fullmatch(line):
                labels = dict(re.findall(r'(\w+)="(.*?)"', found[2] or ""))
                self.series.append((found[1], labels, float(found[3])))

    def all(self, name: str, **labels: str) -> list[tuple[Mapping[str, str], float]]:
        """The series of a family that have these labels."""
        return [
            (mine, value) for family, mine, value in self.series if family == name and labels.items() <= mine.items()
        ]

    def total(self, name: str, **labels: str) -> float:
        """Their sum; fails if there is none."""
        found = self.all(name, **labels)
        assert found, f"no series {name} {labels}"
        return sum(value for _, value in found)

    def outcomes(self) -> dict[str, float]:
        return {outcome: self.total("llm_requests_total", outcome=outcome) for outcome in OUTCOMES}


@dataclass(frozen=True, slots=True)
class Pair:
    """The server and a way to it."""

    server: TritonServer
    wire: Wire

    def page(self) -> Page:
        with urllib.request.urlopen(self.server.metrics_url, timeout=WAIT) as page:
            return Page(page.read().decode())

    def once(self, holds: Callable[[Page], bool]) -> Page:
        """The first page for which this holds; pages change once a second."""
        deadline = time.monotonic() + WAIT
        while not holds(page := self.page()):
            assert time.monotonic() < deadline, f"it does not come to hold; ended so far: {page.outcomes()}"
            time.sleep(0.1)
        return page

    def settled(self, since: Page, **more: int) -> Page:
        """The page once these numbers of requests more than `since` have ended, by outcome."""
        expected = {outcome: count + more.get(outcome, 0) for outcome, count in since.outcomes().items()}
        return self.once(lambda page: page.outcomes() == expected)


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    changes = parameters(vllm_metric_names=True, max_sequences=SEATS)
    changes["KIND_CPU, count: 1"] = "KIND_CPU, count: 2"
    repository = copied(tmp_path_factory.mktemp("pair") / "repository", changes)
    with running(repository) as server, closing(Wire(server.grpc_url)) as wire:
        yield Pair(server, wire)


def test_every_instance_has_every_series_from_the_start(pair: Pair) -> None:
    page = pair.page()
    ours = {name for name, _, _ in page.series if name.startswith(("llm_", "vllm:"))}
    for name in ours:
        assert {labels["instance"] for labels, _ in page.all(name)} == set(INSTANCES), name
        assert all(labels["model"] == "llm" and labels["version"] == "1" for labels, _ in page.all(name)), name
        ends = ("_total", "_bucket", "_sum", "_count")
        assert page.types[name] == ("counter" if name.endswith(ends) else "gauge")
    assert {"llm_requests_total", "llm_time_to_first_token_seconds_bucket", "vllm:num_requests_running"} <= ours


def test_all_counters_equal_what_the_client_counted(pair: Pair) -> None:
    before = pair.page()
    requests = [infer(input_ids=[7 + i] * (20 + i), **(SHORT | {"max_tokens": 5 + i})) for i in range(8)]
    answers = pair.wire.together(requests)
    after = pair.settled(before, length=8)
    drawn = sum(len(tokens(answer)) for answer in answers)
    prompts = sum(20 + i for i in range(8))

    def grown(name: str) -> float:
        return after.total(name) - before.total(name)

    for prefix in ("llm_", "vllm:"):
        assert grown(f"{prefix}generation_tokens_total") == drawn
        assert grown(f"{prefix}prompt_tokens_total") == prompts
        assert grown(f"{prefix}prefix_cache_queries_total") == prompts
        assert grown(f"{prefix}prefix_cache_hits_total") == 0
        assert grown(f"{prefix}inter_token_latency_seconds_count") == drawn - 8
        assert grown(f"{prefix}request_prompt_tokens_sum") == prompts
        assert grown(f"{prefix}request_generation_tokens_sum") == drawn
        for once in ("time_to_first_token", "e2e_request_latency", "request_queue_time", "request_decode_time"):
            assert grown(f"{prefix}{once}_seconds_count") == 8
    assert grown("vllm:request_success_total") == 8
    shares = [after.total("llm_requests_total", instance=one) for one in INSTANCES]
    assert min(shares) > 0


def test_rows_are_the_tokens_that_steps_computed(pair: Pair) -> None:
    before = pair.page()
    pair.wire.together([infer(input_ids=[900 + i] * 33, **SHORT) for i in range(3)])
    after = pair.settled(before, length=3)
    computed = 3 * (33 + SHORT["max_tokens"] - 1)  # the last token of an answer is drawn and not computed
    assert after.total("llm_rows_per_step_sum") - before.total("llm_rows_per_step_sum") == computed
    assert after.total("llm_rows_per_step_count") == after.total("llm_steps_total")


def test_buckets_are_cumulative_and_end_at_the_count(pair: Pair) -> None:
    page = pair.page()
    for name in {name.removesuffix("_bucket") for name, _, _ in page.series if name.endswith("_bucket")}:
        for instance in INSTANCES:
            counts = sorted(
                (float(labels["le"]), count) for labels, count in page.all(f"{name}_bucket", instance=instance)
            )
            assert [count for _, count in counts] == sorted(count for _, count in counts)
            assert counts[-1] == (float("inf"), page.total(f"{name}_count", instance=instance))


def test_a_prompt_asked_again_counts_as_found_in_the_prefix_cache(pair: Pair) -> None:
    before = pair.page()
    for _ in range(3):  # two instances: by the third time one of them has seen it
        pair.wire.ask(input_ids=[31] * 65, **SHORT)
    after = pair.settled(before, length=3)
    assert after.total("llm_prefix_cache_queries_total") - before.total("llm_prefix_cache_queries_total") == 3 * 65
    assert after.total("llm_prefix_cache_hits_total") - before.total("llm_prefix_cache_hits_total") in (64, 128)


def test_every_way_to_end_is_counted_as_what_it_was(pair: Pair) -> None:
    before = pair.page()
    stopping = tokens(pair.wire.ask(input_ids=[5] * 20, **SHORT))[0]
    assert tokens(pair.wire.ask(input_ids=[5] * 20, stop_token_ids=[stopping], **SHORT)) == [stopping]
    pair.wire.refusal(infer(text_input="x", stop_token_ids=[10**8]))
    with ExitStack() as holders:
        for _ in range(SEATS * len(INSTANCES)):
            assert holders.enter_context(pair.wire.call(infer(text_input="Once", **LONG))).next()
        full = pair.once(lambda page: page.total("llm_num_requests_running") == SEATS * len(INSTANCES))
        assert full.total("vllm:num_requests_running") == SEATS * len(INSTANCES)
        assert 0 < full.total("llm_kv_cache_usage_perc") < len(INSTANCES)
        pair.wire.refusal(infer(text_input="Next", parameters={"timeout": 200_000}))
    after = pair.settled(before, stop=1, length=1, invalid=1, expired=1, cancelled=SEATS * len(INSTANCES))
    pair.once(lambda page: page.total("llm_num_requests_running") == 0 == page.total("llm_kv_cache_usage_perc"))
    wasted = after.total("llm_tokens_after_cancel_total") - before.total("llm_tokens_after_cancel_total")
    assert wasted <= SEATS * len(INSTANCES)  # each ends within a step
    aborted = after.outcomes()["cancelled"] + after.outcomes()["expired"]
    assert after.total("vllm:request_success_total", finished_reason="abort") == aborted

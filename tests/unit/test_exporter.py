"""The exporter over a server's registry that is made up: what it shows is what the engine counted, exactly once."""

from __future__ import annotations

import re
import subprocess
import sys
import threading
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from exporter import Exporter
from llm_engine.metrics import SECONDS, TOKENS, Histogram, Metrics
from llm_engine.request import FinishReason, Request, SamplingParams
from unit.fake_metrics import Registry
from waiting import WAIT

ROOT = Path(__file__).parents[2]
LABELS = {"model": "llm", "version": "1", "instance": "llm_0_0"}
HISTOGRAMS = {
    "step_time_seconds": "step_seconds",
    "rows_per_step": "rows_per_step",
    "time_to_first_token_seconds": "time_to_first_token_seconds",
    "inter_token_latency_seconds": "inter_token_latency_seconds",
    "request_queue_time_seconds": "queue_seconds",
    "request_prefill_time_seconds": "prefill_seconds",
    "request_decode_time_seconds": "decode_seconds",
    "e2e_request_latency_seconds": "e2e_request_latency_seconds",
    "request_prompt_tokens": "request_prompt_tokens",
    "request_generation_tokens": "request_generation_tokens",
}
COUNTERS = {
    "prefix_cache_queries_total": "prefix_query_tokens",
    "prefix_cache_hits_total": "prefix_hit_tokens",
    "num_preemptions_total": "preemptions",
    "prompt_tokens_total": "prompt_tokens",
    "generation_tokens_total": "generation_tokens",
    "tokens_after_cancel_total": "tokens_after_cancel",
    "steps_total": "steps",
}
OUTCOMES = {
    "stop": "stopped",
    "length": "limited",
    "cancelled": "cancelled",
    "invalid": "invalid",
    "rejected": "rejected",
    "error": "failed",
    "expired": "expired",
}
GAUGES = {"num_requests_running": "running", "num_requests_waiting": "waiting", "kv_cache_usage_perc": "kv_usage"}


@pytest.fixture
def registry() -> Registry:
    return Registry()


def filled(scale: int = 1) -> Metrics:
    """Numbers that are all different, so that none can pass for another."""
    metrics = Metrics()
    for place, name in enumerate((*COUNTERS.values(), *OUTCOMES.values(), *GAUGES.values()), start=1):
        setattr(metrics, name, scale * (100 + place))
    for place, name in enumerate(HISTOGRAMS.values(), start=1):
        for _ in range(scale * place):
            getattr(metrics, name).observe(0.004)
            getattr(metrics, name).observe(3000.0 * place)
    return metrics


def assert_shown(registry: Registry, metrics: Metrics, labels: dict[str, str] = LABELS) -> None:
    """The registry holds just these numbers under these labels."""
    for name, attribute in (COUNTERS | GAUGES).items():
        assert registry.value(f"llm_{name}", **labels) == pytest.approx(getattr(metrics, attribute)), name
    for outcome, attribute in OUTCOMES.items():
        assert registry.value("llm_requests_total", outcome=outcome, **labels) == getattr(metrics, attribute)
    for name, attribute in HISTOGRAMS.items():
        histogram: Histogram = getattr(metrics, attribute)
        shown = registry.buckets(f"llm_{name}", labels)
        assert [bound for bound, _ in shown] == [*histogram.bounds, float("inf")]
        assert [count for _, count in shown] == [sum(histogram.counts[: i + 1]) for i in range(len(shown))]
        assert registry.value(f"llm_{name}_count", **labels) == sum(histogram.counts)
        assert registry.value(f"llm_{name}_sum", **labels) == pytest.approx(histogram.total)


@pytest.mark.parametrize("vllm_names", [False, True])
def test_every_number_is_shown_as_it_was_counted(registry: Registry, vllm_names: bool) -> None:
    metrics = filled()
    Exporter(metrics, registry.stub(), LABELS, vllm_names=vllm_names).export()
    assert_shown(registry, metrics)
    assert any(name.startswith("vllm:") for name in registry.kinds) == vllm_names


def test_every_series_exists_before_anything_has_happened(registry: Registry) -> None:
    Exporter(Metrics(), registry.stub(), LABELS)
    assert_shown(registry, Metrics())


def test_vllms_names_show_the_same_numbers(registry: Registry) -> None:
    metrics = filled()
    Exporter(metrics, registry.stub(), LABELS, vllm_names=True).export()
    shared = [name for name in registry.kinds if name.startswith("vllm:")]
    mine = {"model_name": "llm", **LABELS}
    for name in shared:
        own = name.replace("vllm:", "llm_").replace("request_max_num_generation", "request_generation")
        if name != "vllm:request_success_total":
            assert registry.value(name, **mine) == registry.value(own, **LABELS), name
    assert len(shared) == 3 + 5 + 1 + 9 * 3
    reasons = {"stop": 108, "length": 109, "abort": 110 + 114, "error": 113}
    for reason, count in reasons.items():
        assert registry.value("vllm:request_success_total", finished_reason=reason, **mine) == count


@settings(deadline=None, max_examples=40)
@given(st.lists(st.lists(st.floats(0, 100), max_size=5), min_size=1, max_size=6))
def test_shown_numbers_follow_the_engine_from_export_to_export(rounds: list[list[float]]) -> None:
    registry, metrics = Registry(), Metrics()
    exporter = Exporter(metrics, registry.stub(), LABELS)
    for seconds in rounds:
        for value in seconds:
            metrics.generation_tokens += 1
            metrics.inter_token_latency_seconds.observe(value)
        metrics.running = len(seconds)
        exporter.export()
        assert_shown(registry, metrics)


def test_only_what_changed_is_told_to_the_server(registry: Registry) -> None:
    metrics = filled()
    exporter = Exporter(metrics, registry.stub(), LABELS)
    exporter.export()
    before = registry.calls
    metrics.limited += 1
    metrics.queue_seconds.observe(20.0)
    exporter.export()
    told = ["running, waiting, KV cache", "length", "count", "sum", "+Inf", "60.0", "30.0"]
    assert registry.calls - before == len(told) + 2


def test_a_failed_export_is_made_up_for_by_the_next_one_on_another_thread(registry: Registry) -> None:
    metrics = filled()
    exporter = Exporter(metrics, registry.stub(), LABELS)
    registry.fail_after = 40  # amidst the histograms
    with pytest.raises(OSError, match="did not answer"):
        exporter.export()
    metrics.generation_tokens += 5
    other = threading.Thread(target=exporter.export)
    other.start()
    other.join(WAIT)
    assert_shown(registry, metrics)
    assert len(registry.threads) == 2


def test_instances_in_processes_of_their_own_do_not_mix_their_numbers(registry: Registry) -> None:
    instances = [LABELS | {"instance": f"llm_0_{i}"} for i in range(3)]
    counted = [filled(i + 1) for i in range(3)]
    exporters = [Exporter(metrics, registry.stub(), labels) for metrics, labels in zip(counted, instances, strict=True)]
    for exporter in (*exporters, *exporters):
        exporter.export()
    for metrics, labels in zip(counted, instances, strict=True):
        assert_shown(registry, metrics, labels)
    assert registry.value("llm_generation_tokens_total", model="llm") == sum(m.generation_tokens for m in counted)


def test_a_reloaded_model_counts_on_from_where_its_last_load_stood(registry: Registry) -> None:
    old, new = filled(), Metrics()
    Exporter(old, registry.stub(), LABELS).export()
    new.generation_tokens, new.running = 7, 2
    Exporter(new, registry.stub(), LABELS).export()
    assert registry.value("llm_generation_tokens_total", **LABELS) == old.generation_tokens + 7
    assert registry.value("llm_num_requests_running", **LABELS) == 2


def test_a_scrape_in_the_middle_of_an_export_sees_no_bucket_above_a_wider_one(
    registry: Registry, monkeypatch: pytest.MonkeyPatch
) -> None:
    metrics = Metrics()
    exporter = Exporter(metrics, registry.stub(), LABELS)
    for value in (0.0001, 0.02, 3.0, 100.0):
        metrics.queue_seconds.observe(value)
    seen: list[list[float]] = []
    monkeypatch.setattr(
        registry,
        "call",
        lambda: seen.append([count for _, count in registry.buckets("llm_request_queue_time_seconds", LABELS)]),
    )
    exporter.export()
    assert len({tuple(counts) for counts in seen}) > 10
    assert all(counts == sorted(counts) for counts in seen)


def test_a_scrape_that_shows_an_ended_request_shows_all_of_it(
    registry: Registry, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At every call to the server the engine has ended another request of three tokens."""
    metrics = Metrics()
    exporter = Exporter(metrics, registry.stub(), LABELS, vllm_names=True)
    ended: list[float] = []

    def serve_another() -> None:
        ended.append(registry.value("llm_requests_total"))
        assert ended[-1] <= registry.value("vllm:request_success_total")
        for prefix in ("llm_", "vllm:"):
            assert registry.value(f"{prefix}generation_tokens_total") >= 3 * ended[-1]
            assert registry.value(f"{prefix}e2e_request_latency_seconds_count") >= ended[-1]
        metrics.generation_tokens += 3
        metrics.e2e_request_latency_seconds.observe(0.5)
        metrics.limited += 1

    monkeypatch.setattr(registry, "call", serve_another)
    for _ in range(4):
        exporter.export()
        seconds, count = (registry.value(f"llm_e2e_request_latency_seconds_{part}") for part in ("sum", "count"))
        assert seconds == 0.5 * count
    assert ended[-1] > 10


def test_time_buckets_go_from_a_millisecond_to_a_minute_and_token_buckets_to_32768() -> None:
    assert (SECONDS[0], SECONDS[-1]) == (0.001, 60.0)
    assert tuple(2**power for power in range(16)) == TOKENS


def test_all_names_that_are_counters_end_as_counters_of_prometheus_do(registry: Registry) -> None:
    Exporter(Metrics(), registry.stub(), LABELS, vllm_names=True)
    for name, kind in registry.kinds.items():
        assert name.endswith(("_total", "_bucket", "_sum", "_count")) == (kind == "counter"), name


def test_every_metric_is_documented_and_every_documented_one_exists(registry: Registry) -> None:
    Exporter(Metrics(), registry.stub(), LABELS, vllm_names=True)
    exist = set(registry.kinds) | {name.removesuffix("_bucket") for name in registry.kinds if name.endswith("_bucket")}
    documented = set(re.findall(r"\b(?:llm_|vllm:)[a-z][a-z0-9_]+", (ROOT / "docs" / "metrics.md").read_text()))
    assert documented <= exist
    parts = {name for name in exist if name.endswith(("_bucket", "_sum", "_count"))}
    assert exist - parts <= documented


def test_it_is_imported_without_triton_and_without_torch() -> None:
    code = "import sys, exporter; sys.exit('torch' in sys.modules or 'triton_python_backend_utils' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], cwd=ROOT / "model_repository/llm/1", check=True, timeout=WAIT)


# What the engine counts


def answered(resumed: int = 0, tokens: int = 3) -> tuple[Metrics, Request]:
    """A request that arrives at 10 s, is seated at 11 s, and draws a token at 13, 14, 15 s."""
    metrics = Metrics()
    request = Request("a", [1] * 20, SamplingParams(), resume_token_ids=[1] * resumed)
    request.arrived_at, request.prompt_len = 10.0, 20
    request.tokens = [1] * (20 + resumed)
    for index in range(tokens):
        request.admitted_at = 11.0
        now = 13.0 + index
        request.tokens.append(1)
        metrics.count_token(request, now)
        request.first_token_at = request.first_token_at or now
        request.last_token_at = now
    return metrics, request


def test_a_finished_request_is_seen_once_in_every_histogram_of_requests_that_the_engine_keeps() -> None:
    metrics, request = answered(resumed=4)
    metrics.count_finished(request, FinishReason.LENGTH, 15.0)
    seen = {name: (sum(getattr(metrics, name).counts), getattr(metrics, name).total) for name in HISTOGRAMS.values()}
    assert seen == {
        "step_seconds": (0, 0),
        "rows_per_step": (0, 0),
        "time_to_first_token_seconds": (0, 0),  # counted where it is sent
        "inter_token_latency_seconds": (2, 2.0),
        "queue_seconds": (1, 1.0),
        "prefill_seconds": (1, 2.0),
        "decode_seconds": (1, 2.0),
        "e2e_request_latency_seconds": (1, 5.0),
        "request_prompt_tokens": (1, 20),
        "request_generation_tokens": (1, 3),
    }
    assert (metrics.stopped, metrics.limited, metrics.generation_tokens) == (0, 1, 3)


def test_a_request_that_was_over_before_it_began_counts_without_times() -> None:
    metrics, request = answered(tokens=0)
    metrics.count_finished(request, FinishReason.STOP, 10.0)
    assert metrics.stopped == 1
    assert all(not any(getattr(metrics, name).counts) for name in HISTOGRAMS.values())

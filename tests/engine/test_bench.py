"""The engine's own benchmark on tiny models: what it samples, what it counts as a limit, and what its check sees."""

from __future__ import annotations

import json
import sys
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch

from engine import driver, tiny_models
from llm_engine.config import EngineConfig
from llm_engine.engine import Engine
from llm_engine.loading import LoadedModel
from llm_kernels.compiling import NativeUnavailableError
from llm_tools import accuracy, bench
from llm_tools.bench import QUICK, BenchError, Case, Measurement, Setup
from llm_tools.limits import Limits, Work
from llm_tools.prepared import prepare_source

HIDDEN, INNER, LAYERS, HEAD_DIM = 32, 64, 2, 8  # of tiny_models, with 4 query heads and 2 key heads
KV_PER_LAYER = 2 * 2 * HEAD_DIM * 4  # bytes of a token: keys and values, two heads, float32


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A saved model, as a deployer would name it."""
    path = tmp_path_factory.mktemp("model")
    tiny_models.build("llama").save_pretrained(path)
    tiny_models.tokenizer().save_pretrained(path)
    return path


def config(**values: Any) -> EngineConfig:
    return driver.config(kv_tokens=2048, prefix_cache=False, **values)


def silent(_stage: str, _done: int, _total: int | None) -> None:
    pass


def command(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, Any]:
    """Exit code and lines of `python -m llm_tools.bench`."""
    monkeypatch.setattr(sys, "argv", ["bench", "--threads", "1", *arguments])
    code = bench.main()
    return code, [json.loads(line) for line in capsys.readouterr().out.splitlines()]


def test_every_measurement_stands_beside_a_limit_and_shows_its_noise(folder: Path) -> None:
    stages: list[tuple[str, int, int | None]] = []
    results = bench.bench(config(model=str(folder)), QUICK, lambda *stage: stages.append(stage))
    setup, *times = results
    assert isinstance(setup, Setup)
    assert setup.read_gb_per_second > 0
    assert setup.gflop_per_second > 0
    assert (setup.dtype, setup.threads) == ("float32", 1)
    assert [(t.kind, t.rows) for t in times if isinstance(t, Measurement)] == [
        ("decode", 1),
        ("decode", 4),
        ("prefill", 1),
    ]
    for t in times:
        assert isinstance(t, Measurement)
        assert 0 < t.host_ms < t.median_ms
        assert sum(t.parts_ms.values()) <= t.max_ms
        assert t.min_ms <= min(t.rounds_ms) <= t.median_ms <= max(t.rounds_ms) <= t.max_ms
        assert t.limit_ms > 0
        assert t.ratio > 0
        assert len(t.rounds_ms) == 2
        assert t.samples == 2 * (QUICK.steps if t.kind == "decode" else QUICK.prefills)
    dones = [done for _, done, total in stages if total]
    assert dones == list(range(8))


def test_a_decode_step_is_sampled_only_when_every_row_draws_a_later_token() -> None:
    engine = Engine(config(), driver.load(kv_tokens=2048, prefix_cache=False))
    try:
        samples = bench.run(engine, Case("decode", 4, 100), tiny_models.prompt(90), QUICK)
    finally:
        engine.close()
    assert len(samples) == QUICK.steps
    for sample in samples:
        assert sample.new == 1
        assert len(sample.contexts) == 4
        assert all(context > 98 for context in sample.contexts)
        assert 0 < sample.model_seconds < sample.seconds
    for before, after in pairwise(samples):  # none was left out, so that the time between them is one step's
        assert [c + 1 for c in before.contexts] == list(after.contexts)


def test_a_prefill_is_sampled_from_submit_to_first_token_over_all_its_steps() -> None:
    engine = Engine(config(), driver.load(kv_tokens=2048, prefix_cache=False))
    try:
        samples = bench.run(engine, Case("prefill", 1, 150), tiny_models.prompt(90), QUICK)
        steps = engine.metrics.steps
    finally:
        engine.close()
    assert [(s.contexts, s.new) for s in samples] == [((150,), 150)] * QUICK.prefills
    assert steps == 3 * QUICK.prefills  # of 64 tokens: nothing came out of a cache
    assert all(0 < s.model_seconds < s.seconds for s in samples)


def break_norm(loaded: LoadedModel) -> None:
    """Make every logit NaN."""
    if loaded.steps is None:
        model: Any = loaded.model
        model.model.norm.weight[:] = float("nan")
    else:
        loaded.steps.decoder.norms["model.norm"][:] = float("nan")


def test_a_request_that_fails_ends_the_measurement_with_its_reason() -> None:
    loaded = driver.load(kv_tokens=2048, prefix_cache=False)
    engine = Engine(config(), loaded)
    break_norm(loaded)
    try:
        with pytest.raises(BenchError, match=r"0 of 4 steps were measured: the model computed NaN"):
            bench.run(engine, Case("decode", 1, 20), tiny_models.prompt(20), QUICK)
    finally:
        engine.close()


def test_what_does_not_fit_the_model_is_left_out() -> None:
    fitting = config(max_context=100, max_sequences=4)
    assert bench.cases(fitting, QUICK) == [Case("decode", 1, 50), Case("decode", 4, 50)]
    assert bench.cases(config(max_context=8), QUICK) == []


def test_work_is_counted_from_the_models_own_weights() -> None:
    work = Work.of(driver.load("llama"))
    attention = HIDDEN * HIDDEN * 2 + HIDDEN * HIDDEN  # q and o, then k and v of half the heads
    assert work.linear_parameters == LAYERS * (attention + 3 * HIDDEN * INNER)
    assert work.head_parameters == HIDDEN * tiny_models.vocab_size()
    norms = (2 * LAYERS + 1) * HIDDEN
    assert work.weight_bytes == 4 * (work.linear_parameters + work.head_parameters + norms)
    assert work.kv_bytes_per_token == LAYERS * KV_PER_LAYER


@pytest.mark.parametrize("family", sorted(tiny_models.FAMILIES))
def test_every_family_has_work(family: str) -> None:
    work = Work.of(driver.load(family))
    assert len(work.attention) == LAYERS
    assert work.linear_parameters > 0
    assert work.read_bytes([100], 1) > work.weight_bytes > 4 * work.linear_parameters


def test_of_experts_only_those_that_a_row_is_routed_to_count() -> None:
    loaded = driver.load("gpt_oss")
    work = Work.of(loaded)
    experts = sum(p.numel() for p in loaded.model.parameters() if p.dim() == 3)
    model: Any = loaded.model
    every = sum(p.numel() for p in model.model.layers.parameters() if p.dim() > 1)
    assert work.linear_parameters == every - experts // 2  # two of four


def test_a_windowed_layer_reads_and_multiplies_no_more_than_its_window() -> None:
    windowed, full = Work.of(driver.load("mistral")), Work.of(driver.load("llama"))
    window = tiny_models.WINDOW
    assert windowed.read_bytes([window], 1) == windowed.read_bytes([200], 1) < full.read_bytes([200], 1)
    assert windowed.flops([window], 1) == windowed.flops([200], 1) < full.flops([200], 1)


def test_a_prefill_multiplies_as_much_as_its_rows_one_by_one_but_for_the_head() -> None:
    work = Work.of(driver.load("mistral"))
    rows = sum(work.flops([end], 1) for end in range(1, 31))
    assert work.flops([30], 30) == rows - 29 * 2 * work.head_parameters
    assert work.read_bytes([30], 30) == work.weight_bytes + 30 * LAYERS * KV_PER_LAYER


def test_the_larger_limit_bounds() -> None:
    work = Work.of(driver.load("llama"))
    samples = [[bench.Sample(0.5, 0.25, (), (10, 10), 1)] * 3] * 2
    for limits, bound in ((Limits(1e6, 1e15), "memory"), (Limits(1e15, 1e6), "compute")):
        found = bench.summarise(Case("decode", 2, 10), samples, work, limits)
        seconds = max(
            work.read_bytes((10, 10), 1) / limits.bytes_per_second, work.flops((10, 10), 1) / limits.flops_per_second
        )
        assert found.bound == bound
        assert found.limit_ms == pytest.approx(1e3 * seconds, rel=1e-3)
        assert found.ratio == pytest.approx(0.5 / seconds, rel=1e-3)
        assert found.tokens_per_second == 4.0


def test_the_check_finds_no_nan_and_float32_closer_than_bfloat16(folder: Path) -> None:
    checks = accuracy.check(config(model=str(folder)), prepare_source(str(folder)), silent)
    assert [(c.dtype, c.kernels) for c in checks] == list(accuracy.COMBINATIONS)
    ran = {(c.dtype, c.kernels): c for c in checks if not c.skipped}
    assert all((c.nan, c.inf, c.tokens) == (0, 0, accuracy.TOKENS) for c in ran.values())
    exact, rough = ran["float32", "torch"], ran["bfloat16", "torch"]
    assert exact.max_error is not None
    assert rough.max_error is not None
    assert exact.max_error < 1e-3 < rough.max_error
    assert exact.argmax_agreement == 1.0


def test_a_combination_that_does_not_run_here_says_why(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def unavailable(*_: object) -> None:
        raise NativeUnavailableError("this processor is too old")

    for module in ("attaching", "steps"):
        monkeypatch.setattr(f"llm_engine.loading.{module}.load_object", unavailable)
    skipped = accuracy.check(config(model=str(folder)), prepare_source(str(folder)), silent)[0]
    assert (skipped.dtype, skipped.kernels, skipped.max_error) == ("bfloat16", "native", None)
    assert skipped.skipped == "kernels is 'native', but this processor is too old"


def test_an_injected_nan_is_counted() -> None:
    loaded = driver.load()
    ids = tiny_models.prompt(20)
    reference = accuracy.engine_logits(loaded, ids)
    break_norm(loaded)
    found = accuracy.compare(reference, accuracy.engine_logits(loaded, ids), "float32", "torch")
    assert (found.nan, found.inf, found.max_error) == (20 * tiny_models.vocab_size(), 0, None)


def test_positions_with_nan_or_inf_do_not_hide_the_errors_of_others() -> None:
    reference = torch.tensor([[0.0, 1.0, 2.0], [0.0, 1.0, 2.0], [2.0, 1.0, 0.0]])
    logits = torch.tensor([[0.0, float("nan"), 2.0], [0.0, float("inf"), 2.0], [1.5, 1.75, 0.0]])
    found = accuracy.compare(reference, logits, "float32", "torch")
    assert (found.nan, found.inf, found.tokens) == (1, 1, 3)
    assert (found.max_error, found.argmax_agreement) == (0.75, 0.0)
    p, q = reference[2].double().softmax(0), logits[2].double().softmax(0)
    assert found.mean_kl == pytest.approx((p * (p / q).log()).sum().item())


def test_the_command_reports_progress_and_results_in_lines(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    code, lines = command(monkeypatch, capsys, "--quick", "--check", "--dtype", "float32", str(folder))
    assert code == 0
    kinds = [line["result"]["kind"] for line in lines if "result" in line]
    assert kinds == ["setup"] + ["decode"] * 4 + ["prefill"] + ["check"] * len(accuracy.COMBINATIONS)
    assert all({"stage", "done", "total"} == set(line) for line in lines if "result" not in line)


def test_the_commands_error_is_one_line_and_code_1(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    code, lines = command(monkeypatch, capsys, str(tmp_path))
    assert code == 1
    assert lines[-1]["error"] == f"model folder {tmp_path} has no config.json; it must hold a transformers model"

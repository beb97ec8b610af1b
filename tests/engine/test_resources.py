"""What an engine takes of the machine: its KV cache fits beside the weights or the model is refused with the sum."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from engine import driver, tiny_models
from llm_engine import loading
from llm_engine.config import ConfigError, EngineConfig
from llm_engine.engine import Engine
from llm_engine.loading import LoadedModel, machine, resources
from llm_engine.loading.machine import MIB, Memory, Processors
from llm_engine.loading.resources import CPU_KV_TOKENS, LEAST_KV_TOKENS, Demand

CPU = torch.device("cpu")
PER_TOKEN, WEIGHTS, ROOM = 1000, 30 * MIB, 20 * MIB


class Shape:
    """A model's configuration, as far as sizes go."""

    def __init__(self, limit: int | None) -> None:
        self.max_position_embeddings = limit


def demand(tokens: float) -> Demand:
    """There is room for so many tokens beside weights and all else."""
    left = WEIGHTS + ROOM + int(tokens * PER_TOKEN)
    return Demand(Memory(left, 2 * left, "memory.max of /box"), PER_TOKEN, WEIGHTS, ROOM)


def sizes(tokens: float, limit: int | None = 8192, **values: Any) -> tuple[EngineConfig, str]:
    config = EngineConfig("m", **values)
    return resources.resolve_sizes(config, Shape(limit), demand(tokens), CPU)


@given(
    tokens=st.integers(0, 3 * CPU_KV_TOKENS),
    limit=st.none() | st.integers(2, 131072),
    block=st.sampled_from([1, 8, 32]),
    share=st.integers(1, 4),
    context=st.just(0) | st.integers(2, 70000),
)
def test_the_kv_cache_fits_and_serves_at_least_one_request_or_the_model_is_refused(
    tokens: int, limit: int | None, block: int, share: int, context: int
) -> None:
    if limit and context > limit:
        context = 0
    least = context or min(limit or LEAST_KV_TOKENS, LEAST_KV_TOKENS)
    try:
        config, _ = sizes(tokens, limit, block_size=block, cpu_share=share, max_context=context)
    except ConfigError as error:
        assert "KV cache of" in str(error)
        assert tokens < least + block
        return
    assert config.kv_tokens <= tokens
    assert config.kv_tokens <= max(CPU_KV_TOKENS, context + block)
    assert config.kv_tokens % block == 0
    assert 2 <= config.max_context <= config.kv_tokens
    assert config.max_context >= least
    assert config.max_context == (context or min(limit or config.kv_tokens, config.kv_tokens))


@pytest.mark.parametrize(("tokens", "kv_tokens"), [(40000, CPU_KV_TOKENS), (5000, 4992), (2048, 2048)])
def test_it_shrinks_from_what_is_wanted_to_what_fits_and_says_so(
    tokens: int, kv_tokens: int, caplog: pytest.LogCaptureFixture
) -> None:
    config, source = sizes(tokens, limit=131072)
    assert (config.kv_tokens, config.max_context) == (kv_tokens, kv_tokens)
    assert ("what fits" in source and "memory.max of /box" in source) == (kv_tokens < CPU_KV_TOKENS)
    assert f"max_context is {kv_tokens} of the model's 131072 tokens" in caplog.text


def test_instances_take_their_part_and_more_only_where_they_could_not_serve() -> None:
    fixed = (WEIGHTS + ROOM) // PER_TOKEN  # in tokens
    assert sizes(20000 + fixed, cpu_share=2)[0].kv_tokens == 9984
    assert sizes(3000, cpu_share=2)[0].kv_tokens == LEAST_KV_TOKENS


def test_a_context_that_was_asked_for_is_held_and_never_cut() -> None:
    assert sizes(90000, limit=131072, max_context=50000)[0].kv_tokens == 50016
    assert sizes(6016, max_context=6000)[0].max_context == 6000
    with pytest.raises(ConfigError, match=r"KV cache of 6,016 tokens 6 MiB"):
        sizes(5990, max_context=6000)


def test_what_does_not_fit_is_refused_with_the_sum_and_who_limits_it() -> None:
    told = (
        r"the model does not fit into memory: weights 30 MiB \+ KV cache of 100,000 tokens 95 MiB \+ room 20 MiB = "
        r"145 MiB, and there are left 88 MiB of the 177 MiB that memory.max of /box allows; raise that limit"
    )
    with pytest.raises(ConfigError, match=told):
        sizes(40300, kv_tokens=100_000)


def test_on_cuda_the_cache_takes_a_share_of_what_is_left_and_more_only_if_asked() -> None:
    left = Demand(Memory(100_000 * PER_TOKEN, 200_000 * PER_TOKEN, "device cuda"), PER_TOKEN)

    def kv_tokens(**values: Any) -> int:
        return resources.resolve_sizes(EngineConfig("m", **values), Shape(8192), left, torch.device("cuda"))[
            0
        ].kv_tokens

    assert kv_tokens() == 80_000
    assert kv_tokens(kv_tokens=99_968) == 99_968
    with pytest.raises(
        ConfigError, match=r"KV cache of 100,032 tokens 95 MiB = 95 MiB, and .* that device cuda allows"
    ):
        kv_tokens(kv_tokens=100_032)


def load(left: int, dtype: str = "float32", **values: Any) -> LoadedModel:
    """Attach a tiny model where `left` bytes were left before its weights were read."""
    model = tiny_models.build("llama", getattr(torch, dtype))
    config = driver.config(dtype, **{"kv_tokens": 0, **values})
    return loading.attach(model, tiny_models.tokenizer(), config, "digest", Memory(left, left, "a test"))


def kv_bytes(loaded: LoadedModel) -> int:
    """What keys and values take, of whole native steps or of caches that hang on modules."""
    if loaded.steps is not None:
        return loaded.steps.decoder.kv_bytes
    return sum(cache.key[:-2].nbytes + cache.value[:-2].nbytes for cache in loaded.caches)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_an_engine_takes_no_more_than_what_was_left(dtype: str) -> None:
    whole = load(1 << 40, dtype)
    assert whole.config.kv_tokens == CPU_KV_TOKENS
    per_token = kv_bytes(whole) // whole.config.kv_tokens
    least = resources.ROOM + tiny_models.CONTEXT * per_token
    with pytest.raises(ConfigError, match=r"weights \d+ MiB \+ KV cache of 256 tokens"):
        load(least, dtype)
    tight = load(least + MIB, dtype)
    taken = tight.resources.weights_mib + kv_bytes(tight) / MIB
    assert resources.ROOM / MIB + taken <= least / MIB + 1
    assert tight.resources.kv_cache_mib == round(tight.config.kv_tokens * per_token / MIB, 1)


def test_weights_that_cannot_fit_are_refused_before_they_are_read(tmp_path: Path) -> None:
    elements = 1 << 40
    header = {"w": {"dtype": "BF16", "shape": [elements >> 10, 1 << 10], "data_offsets": [0, 2 * elements]}}
    text = json.dumps(header).encode()
    with (tmp_path / "model.safetensors").open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        file.truncate(8 + len(text) + 2 * elements)  # holes: it takes no space
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(ConfigError, match=r"weights 4,194,304 MiB \+ room 256 MiB = .*, and there are left"):
        loading.load(EngineConfig(str(tmp_path), dtype="float32"))


def test_threads_are_the_processors_that_are_left_divided_among_instances(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "processors", lambda affinity: Processors(5, "4.5 cores by cpu.max of /box"))
    set_: list[int] = []
    monkeypatch.setattr(torch, "set_num_threads", set_.append)
    plain = EngineConfig("m")
    cases = {
        (0, 1): (5, "4.5 cores by cpu.max of /box"),
        (0, 2): (2, "4.5 cores by cpu.max of /box, for 2 instances"),
        (0, 9): (1, "4.5 cores by cpu.max of /box, for 9 instances"),
        (7, 2): (7, "as configured"),
    }
    for (threads, share), expected in cases.items():
        config, source = resources.resolve_threads(replace(plain, threads=threads, cpu_share=share), CPU)
        assert (config.threads, source) == expected
    assert set_ == [threads for threads, _ in cases.values()]


def test_info_says_what_was_taken_and_why() -> None:
    loaded = driver.load()
    engine = Engine(loaded.config, loaded)
    try:
        info = engine.info()
    finally:
        engine.close()
    assert (info["threads"], info["threads_from"]) == (1, "as configured")
    assert (info["kv_tokens"], info["kv_cache_from"]) == (512, "as configured")
    assert info["kv_cache_mib"] == round(kv_bytes(loaded) / MIB, 1)
    form = "as transformers holds them" if loaded.steps is None else "packed as float32 for the native kernels"
    assert info["weights_form"] == form
    assert info["weights_mib"] == pytest.approx(sum(p.nbytes for p in loaded.model.parameters()) / MIB, abs=0.1)
    json.dumps(info)

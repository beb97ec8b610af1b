"""What a GGUF file states of its model is honoured, or refused by name: whatever the value, and whatever its type."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import gguf
import pytest
import transformers
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import engine.test_checkpoint_gguf as whole
from engine import gguf_files, tiny_models
from llm_engine.config import ConfigError
from llm_tools import gguf_file, weights
from llm_tools.gguf_header import read_header

VERSION = Path(__file__).parents[2] / "model_repository/llm/1"
CONTEXT = tiny_models.CONTEXT


def written(folder: Path, **keys: Any) -> Path:
    """The tiny llama with these keys, two underscores for each point; a leading one stands for the architecture's."""
    named = {key.replace("__", ".").removeprefix("."): value for key, value in keys.items()}
    return gguf_files.write(folder / "m.gguf", keys=named)


@pytest.mark.parametrize(
    ("keys", "words"),
    [
        ({"llama__rope__scaling__attn_factor": 2.0}, "llama.rope.scaling.attn_factor as 2.0, which is not supported"),
        (
            {
                "llama__rope__scaling__type": "linear",
                "llama__rope__scaling__factor": 2.0,
                "llama__rope__scaling__attn_factor": 2.0,
            },
            "llama.rope.scaling.attn_factor as 2.0, which is not supported",
        ),
        ({"llama__rope__scaling__original_context_length": 7}, "original_context_length as 7, which is not supported"),
        ({"llama__rope__scaling__yarn_ext_factor": 0.0}, "yarn_ext_factor as 0.0, which is not supported"),
        ({"llama__attention__causal": False}, "states llama.attention.causal as False"),
        ({"llama__expert_weights_norm": False}, "states llama.expert_weights_norm as False"),
        ({"mistral__context_length": 7}, "states mistral.context_length, but is of architecture llama"),
        ({"llama__nobody_knows": 0}, "states llama.nobody_knows as 0"),
        ({"llama__nobody_knows": ""}, "states llama.nobody_knows"),
        ({"llama__attention__layer_norm_rms_epsilon": None}, "does not state llama.attention.layer_norm_rms_epsilon"),
        ({"llama__attention__layer_norm_rms_epsilon": 0.0}, "layer_norm_rms_epsilon as 0.0, it must be above 0"),
        ({"llama__context_length": None}, "does not state llama.context_length"),
        ({"llama__attention__head_count": None}, "does not state llama.attention.head_count"),
        ({"llama__context_length": "8192"}, "llama.context_length must be an integer, not '8192'"),
        ({"llama__rope__freq_base": float("nan")}, "llama.rope.freq_base must be a finite number, not nan"),
        ({"llama__block_count": 1_000_000}, "tensors for 1000000 layers"),
        ({"llama__attention__head_count_kv": [2, 4]}, "llama.attention.head_count_kv as [2, 4]: layers that differ"),
        ({"general__name": 5}, "general.name must be a string, not 5"),
        ({"general__alignment": 0}, "general.alignment is 0"),
        ({"general__alignment": [32]}, "general.alignment must be an integer, not [32]"),
        ({"split__count": 3}, "is one part of 3; name the parts"),
        ({"split__count": "3"}, "split.count must be an integer, not '3'"),
        ({"tokenizer__ggml__merges": [1, 2]}, "merges must be a string, not 1"),
        ({"tokenizer__chat_template": 7}, "tokenizer.chat_template must be a string, not 7"),
        ({"tokenizer__ggml__eos_token_id": 500_000}, "eos_token_id is 500000, beyond its vocabulary of"),
    ],
)
def test_what_is_not_honoured_is_refused_by_name_and_once(tmp_path: Path, keys: dict[str, Any], words: str) -> None:
    said = whole.refusal(file := written(tmp_path, **keys))
    assert words in said
    assert said.count(str(file)) == 1
    assert said.count("; ") == 1


@pytest.mark.parametrize(
    "keys",
    [
        {"general__name": "mistral"},
        {"llama__attention__head_count_kv": [gguf_files.KV_HEADS] * 2},
        {"llama__attention__head_count": [gguf_files.HEADS] * 2, "general__name": "mistral"},
        {"llama__attention__causal": True},
        {"llama__expert_count": 0, "llama__final_logit_softcapping": 0.0, "llama__attention__sliding_window": 0},
        {"llama__rope__scaling__attn_factor": 1.0, "llama__rope__scaling__finetuned": False},
        {"llama__rope__scaling__original_context_length": CONTEXT},
    ],
)
def test_what_changes_nothing_changes_nothing(tmp_path: Path, keys: dict[str, Any]) -> None:
    config, found = whole.converted(written(tmp_path, **keys))
    whole.assert_tiny_llama(found)
    assert (config["model_type"], config["num_key_value_heads"]) == ("llama", gguf_files.KV_HEADS)
    assert config["num_attention_heads"] == gguf_files.HEADS
    assert config["rope_parameters"] == {"rope_type": "default", "rope_theta": 10000.0}


def test_an_absent_rope_base_is_the_formats_or_the_file_is_refused(tmp_path: Path) -> None:
    config, _ = whole.converted(written(tmp_path, llama__rope__freq_base=None))
    assert config["rope_parameters"]["rope_theta"] == 10000.0
    other = transformers.LlamaConfig(head_dim=8, rope_parameters={"rope_type": "default", "rope_theta": 5e5})
    with pytest.raises(ConfigError, match=r"does not state llama\.rope\.freq_base"):
        gguf_file.complete_config(read_header(tmp_path / "m.gguf"), other)


def test_a_sliding_window_that_no_layer_would_heed_is_refused(tmp_path: Path) -> None:
    file = gguf_files.write(tmp_path / "m.gguf", kind="qwen2", keys={"qwen2.attention.sliding_window": 16})
    assert "states qwen2.attention.sliding_window as 16" in whole.refusal(file)


@pytest.mark.parametrize("stated", [False, True])
def test_whether_experts_weights_are_normed_is_what_the_file_says(tmp_path: Path, stated: bool) -> None:
    keys = {"qwen3moe.expert_weights_norm": stated, "qwen3moe.expert_used_count": 2}
    file = gguf_files.write(tmp_path / "m.gguf", kind="qwen3moe", keys=keys)
    config = transformers.Qwen3MoeConfig(norm_topk_prob=not stated, head_dim=8)
    gguf_file.complete_config(read_header(file), config)
    assert config.norm_topk_prob is stated


def test_a_key_that_a_file_states_twice_is_refused(tmp_path: Path) -> None:
    file = written(tmp_path, llama__context_length=CONTEXT, llama__context_lengtx=CONTEXT)
    file.write_bytes(file.read_bytes().replace(b"context_lengtx", b"context_length"))
    assert "states llama.context_length twice" in whole.refusal(file)


@pytest.mark.parametrize("failing", ["gguf_file.check_parts", "read_header", "describe"])
def test_whatever_fails_is_told_in_the_line_that_the_starter_waits_for(tmp_path: Path, failing: str) -> None:
    code = (
        f"import sys; from llm_tools import prepared, weights\n"
        f"def fail(*_, **__): raise AttributeError('odd\\nfile')\n"
        f"prepared.{failing} = fail\n"
        f"sys.argv = ['weights', {str(written(tmp_path))!r}]; sys.exit(weights.main())"
    )
    env = {"PYTHONPATH": str(VERSION), "TOKENSTREAM_CACHE": str(tmp_path / "cache")}
    done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 1
    line = json.loads(done.stdout.splitlines()[-1])["error"]
    assert line == f"model '{tmp_path}/m.gguf': AttributeError: odd"


TYPES = gguf.GGUFValueType
INTEGERS = {
    **dict.fromkeys((TYPES.UINT8, TYPES.UINT16), (0, 1, 2, 8, 200)),
    **dict.fromkeys((TYPES.UINT32, TYPES.UINT64), (0, 4, 300, 2**32 - 1)),
    **dict.fromkeys((TYPES.INT8, TYPES.INT16, TYPES.INT32, TYPES.INT64), (-1, 0, 2, 64)),
}
SCALARS: dict[gguf.GGUFValueType, tuple[Any, ...]] = {
    **INTEGERS,
    **{kind: (0.0, 1.0, -1.0, 0.5, 1e30, float("nan"), float("inf")) for kind in (TYPES.FLOAT32, TYPES.FLOAT64)},
    TYPES.BOOL: (False, True),
    TYPES.STRING: ("", "1", "llama", "mistral", "none", "linear", "gpt2", "gpt-2", "a b"),
}
VALUES = st.one_of(
    *(st.sampled_from([gguf.GGUFValue(value, kind) for value in values]) for kind, values in SCALARS.items()),
    *(
        st.lists(st.sampled_from(values), min_size=1, max_size=3).map(
            lambda found, kind=kind: gguf.GGUFValue(found, TYPES.ARRAY, kind)
        )
        for kind, values in SCALARS.items()
    ),
)
KEYS = [
    *("general.architecture", "general.name", "general.alignment", "split.no", "split.count", "split.tensors.count"),
    *("llama.context_length", "llama.embedding_length", "llama.block_count", "llama.feed_forward_length"),
    *("llama.attention.head_count", "llama.attention.head_count_kv", "llama.rope.dimension_count", "llama.vocab_size"),
    *("llama.rope.freq_base", "llama.attention.layer_norm_rms_epsilon", "llama.rope.scaling.type"),
    *("llama.rope.scaling.factor", "llama.rope.scaling.attn_factor", "llama.rope.scaling.original_context_length"),
    *("llama.attention.causal", "llama.attention.sliding_window", "llama.attention.key_length", "llama.expert_count"),
    *(f"tokenizer.ggml.{key}" for key in ("model", "pre", "tokens", "token_type", "merges", "scores")),
    *(f"tokenizer.ggml.{role}_token_id" for role in ("bos", "eos", "eot", "eom", "unknown", "padding")),
    *(f"tokenizer.ggml.add_{what}" for what in ("bos_token", "eos_token", "space_prefix")),
    *("tokenizer.chat_template", "tokenizer.chat_templates"),
]


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(keys=st.dictionaries(st.sampled_from(KEYS), VALUES, min_size=1, max_size=2))
def test_metadata_of_any_type_are_served_or_refused_in_one_line(tmp_path: Path, keys: dict[str, Any]) -> None:
    file = gguf_files.write(tmp_path / "m.gguf", keys=keys)
    try:
        weights.prepare(str(file), tmp_path / "cache")
    except ConfigError as error:
        assert "\n" not in str(error)
        assert str(error).count(str(file)) == 1

"""A GGUF file is converted to the model that it holds, in one part or several, or refused in one line."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from engine import gguf_files, tiny_models
from llm_engine.config import ConfigError
from llm_tools import weights

Q, DOWN = "blk.0.attn_q.weight", "blk.1.ffn_down.weight"


def converted(file: Path) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
    """Configuration and tensors of what `file` is converted to."""
    folder = weights.prepare(str(file), file.parent / "cache")
    return json.loads((folder / "config.json").read_text()), load_file(folder / "model.safetensors")


def refusal(file: Path) -> str:
    with pytest.raises(ConfigError) as refused:
        weights.prepare(str(file), file.parent / "cache")
    said = str(refused.value)
    assert "\n" not in said
    assert not [path for path in (file.parent / "cache").glob("weights/*") if path.is_dir()]
    return said


def assert_tiny_llama(found: dict[str, torch.Tensor]) -> None:
    wanted = {name: tensor.bfloat16() for name, tensor in tiny_models.build("llama").state_dict().items()}
    assert found.keys() == wanted.keys()
    assert all(torch.equal(found[name], tensor) for name, tensor in wanted.items())


def test_a_file_is_converted_to_the_weights_that_it_holds(tmp_path: Path) -> None:
    config, found = converted(gguf_files.write(tmp_path / "m.gguf"))
    assert_tiny_llama(found)
    assert config["rope_parameters"] == {"rope_type": "default", "rope_theta": 10000.0}
    assert config["eos_token_id"] == tiny_models.EOS


@pytest.mark.parametrize("named", [1, 2, 3])
def test_a_file_in_parts_is_merged_whichever_part_is_named(tmp_path: Path, named: int) -> None:
    gguf_files.write(tmp_path / "m.gguf", per_part=8)
    assert len(list(tmp_path.glob("m-*-of-00003.gguf"))) == 3
    _, found = converted(tmp_path / f"m-{named:05d}-of-00003.gguf")
    assert_tiny_llama(found)
    assert [path.name[:3] for path in (tmp_path / "cache/weights").iterdir() if path.is_dir()] == ["m-0"]


def test_a_part_that_is_missing_is_named(tmp_path: Path) -> None:
    gguf_files.write(tmp_path / "m.gguf", per_part=8)
    (tmp_path / "m-00002-of-00003.gguf").unlink()
    assert "m-00002-of-00003.gguf is missing beside it; fetch all parts" in refusal(tmp_path / "m-00001-of-00003.gguf")


def test_parts_that_do_not_belong_together_are_refused(tmp_path: Path) -> None:
    gguf_files.write(tmp_path / "m.gguf", per_part=8)
    first, second = (tmp_path / f"m-0000{no}-of-00003.gguf" for no in (1, 2))
    second.write_bytes(first.read_bytes())
    assert "says that it is part 0 of 3, counted from 0, not 1 of 3" in refusal(first)


def test_a_part_under_another_name_is_not_taken_for_the_whole(tmp_path: Path) -> None:
    gguf_files.write(tmp_path / "m.gguf", per_part=8)
    file = (tmp_path / "m-00001-of-00003.gguf").rename(tmp_path / "whole.gguf")
    assert "is part 1 of 3; name the parts NAME-00001-of-00003.gguf" in refusal(file)


def test_a_tensor_that_is_missing_is_named(tmp_path: Path) -> None:
    values = gguf_files.tensors()
    del values[DOWN]
    assert "lacks 1 tensor, first 'model.layers.1.mlp.down_proj.weight'" in refusal(
        gguf_files.write(tmp_path / "m.gguf", values)
    )


def test_a_tensor_of_another_shape_is_named(tmp_path: Path) -> None:
    values = gguf_files.tensors()
    values[DOWN] = values[DOWN][:, :32].copy()
    assert "another shape, first 'model.layers.1.mlp.down_proj.weight'" in refusal(
        gguf_files.write(tmp_path / "m.gguf", values)
    )


def test_a_tensor_that_the_conversion_would_drop_is_named(tmp_path: Path) -> None:
    values = {**gguf_files.tensors(), "blk.0.attn_q.bias": np.ones(32, np.float32)}
    assert "'blk.0.attn_q.bias' has none" in refusal(gguf_files.write(tmp_path / "m.gguf", values))


def llama3_factors(scale: float, theta: float) -> np.ndarray[Any, Any]:
    """What llama.cpp writes for the rope of Llama 3.1 (original context 8192, factors 1 and 4), heads of 8 values."""
    found = []
    for i in range(4):
        wave = 2 * math.pi * theta ** (i / 4)
        if wave < 8192 / 4:
            found.append(1.0)
        elif wave > 8192:
            found.append(scale)
        else:
            smooth = (8192 / wave - 1) / 3
            found.append(1 / ((1 - smooth) / scale + smooth))
    return np.array(found, np.float32)


@pytest.mark.parametrize(("scale", "theta"), [(8.0, 500000.0), (32.0, 500000.0), (32.0, 25000.0)])
def test_rope_factors_of_llama3_are_honoured(tmp_path: Path, scale: float, theta: float) -> None:
    values = {**gguf_files.tensors(), "rope_freqs.weight": llama3_factors(scale, theta)}
    config, _ = converted(gguf_files.write(tmp_path / "m.gguf", values, theta=theta))
    assert config["rope_parameters"] == {
        "rope_type": "llama3",
        "rope_theta": theta,
        "factor": scale,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }


def test_rope_factors_that_change_nothing_leave_the_rope_as_it_is(tmp_path: Path) -> None:
    values = {**gguf_files.tensors(), "rope_freqs.weight": np.ones(4, np.float32)}
    config, _ = converted(gguf_files.write(tmp_path / "m.gguf", values))
    assert config["rope_parameters"]["rope_type"] == "default"


def test_rope_factors_of_another_kind_are_refused(tmp_path: Path) -> None:
    values = {**gguf_files.tensors(), "rope_freqs.weight": np.array([1, 2, 3, 4], np.float32)}
    assert "has rope factors of its own" in refusal(gguf_files.write(tmp_path / "m.gguf", values))


def test_linear_rope_scaling_is_honoured_and_others_are_refused(tmp_path: Path) -> None:
    linear: dict[str, Any] = {"rope__scaling__type": "linear", "rope__scaling__factor": 4.0}
    config, _ = converted(gguf_files.write(tmp_path / "m.gguf", **linear))
    assert config["rope_parameters"] == {"rope_type": "linear", "factor": 4.0, "rope_theta": 10000.0}
    (tmp_path / "other").mkdir()
    yarn: dict[str, Any] = {**linear, "rope__scaling__type": "yarn"}
    assert "rope scaling 'yarn'" in refusal(gguf_files.write(tmp_path / "other/m.gguf", **yarn))


def test_metadata_that_the_conversion_does_not_know_are_refused_by_name(tmp_path: Path) -> None:
    assert "states llama.logit_scale" in refusal(gguf_files.write(tmp_path / "m.gguf", logit_scale=0.5))


def test_an_architecture_that_transformers_does_not_read_is_refused(tmp_path: Path) -> None:
    assert "architecture plamo is not supported" in refusal(gguf_files.write(tmp_path / "m.gguf", kind="plamo"))


@pytest.mark.parametrize("kept", [0, 3, 20, 300, -5000, -1])
def test_a_file_that_was_cut_is_refused_at_once(tmp_path: Path, kept: int) -> None:
    file = gguf_files.write(tmp_path / "m.gguf")
    file.write_bytes(file.read_bytes()[:kept])
    assert "fetch it again" in refusal(file)

"""A folder that is no whole, plain safetensors model is refused at once, in one line with the file and the cure."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from llm_engine.config import ConfigError
from llm_tools import weights
from llm_tools.folder import INDEX, first_line, weight_files


def write(file: Path, content: Any) -> None:
    file.write_text(content if isinstance(content, str) else json.dumps(content))


def shard(
    folder: Path, name: str, *tensors: str, dtype: torch.dtype = torch.float32, shape: tuple[int, ...] = (4, 4)
) -> None:
    save_file({tensor: torch.ones(shape).to(dtype) for tensor in tensors}, folder / name)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A configuration without weights."""
    folder = tmp_path / "model"
    folder.mkdir()
    write(folder / "config.json", {"model_type": "llama"})
    return folder


def sharded(folder: Path, **weight_map: str) -> None:
    shard(folder, "model-00001-of-00002.safetensors", "a", "b")
    shard(folder, "model-00002-of-00002.safetensors", "c")
    names = {"a": 1, "b": 1, "c": 2}
    files = {tensor: f"model-0000{no}-of-00002.safetensors" for tensor, no in names.items()}
    write(folder / INDEX, {"weight_map": {**files, **weight_map}})


def refusal(folder: Path) -> str:
    with pytest.raises(ConfigError) as refused:
        weights.prepare(str(folder), folder.parent / "cache")
    said = str(refused.value)
    assert "\n" not in said
    assert str(folder) in said
    return said


def test_a_sharded_model_is_served_and_what_is_not_its_own_is_left_alone(folder: Path) -> None:
    sharded(folder)
    shard(folder, "consolidated.safetensors", "a")
    assert weights.prepare(str(folder)) == folder
    assert [file.name[:11] for file in weight_files(folder)] == ["model-00001", "model-00002"]


SHARDS: dict[str, tuple[str, Callable[[Path], Any]]] = {
    "absent": ("lacks model-00002-of-00002", lambda d: (d / "model-00002-of-00002.safetensors").unlink()),
    "doubled": ("'a' stands in both", lambda d: shard(d, "model-00002-of-00002.safetensors", "c", "a")),
    "stray": ("holds model-00003-of-00003", lambda d: shard(d, "model-00003-of-00003.safetensors", "d")),
    "beside a whole one": ("holds model.safetensors", lambda d: shard(d, "model.safetensors", "a")),
    "without index": ("but no model.safetensors.index.json", lambda d: (d / INDEX).unlink()),
    "index cut": ("cannot be read as JSON", lambda d: write(d / INDEX, '{"weight_map": {')),
    "index empty": ("has no weight_map", lambda d: write(d / INDEX, {})),
    "index leads outside": ("no file of the folder", lambda d: write(d / INDEX, {"weight_map": {"a": "../x"}})),
    "tensor not where promised": (
        "lacks tensor 'c'",
        lambda d: shard(d, "model-00002-of-00002.safetensors", "d"),
    ),
}


@pytest.mark.parametrize("fault", SHARDS)
def test_a_faulty_set_of_shards_is_refused_with_the_file(folder: Path, fault: str) -> None:
    told, spoil = SHARDS[fault]
    sharded(folder)
    spoil(folder)
    assert told in refusal(folder)


@pytest.mark.parametrize(
    ("config", "method"),
    [
        ({"quantization_config": {"quant_method": "gptq", "bits": 4}}, "gptq"),
        ({"quantization_config": {"quant_method": "awq"}}, "awq"),
        ({"quantization_config": {"quant_method": "bitsandbytes", "load_in_4bit": True}}, "bitsandbytes"),
        ({"quantization_config": {"quant_method": "compressed-tensors"}}, "compressed-tensors"),
        ({"quantization_config": {"quant_method": "fp8"}}, "fp8"),
        ({"quantization_config": {"quant_method": "mxfp4"}}, "mxfp4"),
        ({"text_config": {"quantization_config": {"quant_method": "gptq"}}}, "gptq"),
        ({"compression_config": {"format": "pack-quantized"}}, "pack-quantized"),
        ({"quantization_config": {"bits": 4}}, "unknown"),
        ({"quantization_config": {}}, "unknown"),
    ],
)
def test_a_quantized_folder_is_refused_with_its_method_and_what_is_supported(
    folder: Path, config: dict[str, Any], method: str
) -> None:
    write(folder / "config.json", {"model_type": "llama", **config})
    shard(folder, "model.safetensors", "a")
    said = refusal(folder)
    assert f"method {method})" in said
    assert "safetensors in float32, float16 or bfloat16, or a GGUF file" in said


@pytest.mark.parametrize(("file", "method"), [("quantize_config.json", "GPTQ"), ("hf_quant_config.json", "ModelOpt")])
def test_a_file_beside_the_configuration_tells_the_method_too(folder: Path, file: str, method: str) -> None:
    shard(folder, "model.safetensors", "a")
    write(folder / file, {})
    assert f"method {method})" in refusal(folder)


@pytest.mark.parametrize("dtype", [torch.int8, torch.uint8, torch.float8_e4m3fn])
@pytest.mark.parametrize("name", ["down_proj.weight", "experts.down_proj", "experts.down_proj_bias", "q_proj.bias"])
def test_weights_of_a_packed_type_are_refused_even_where_nothing_says_quantized(
    folder: Path, dtype: torch.dtype, name: str
) -> None:
    shard(folder, "model.safetensors", f"model.layers.0.mlp.{name}", dtype=dtype)
    assert f"is packed ('model.layers.0.mlp.{name}'" in refusal(folder)


@pytest.mark.parametrize(
    ("name", "dtype", "shape"),
    [
        ("h.0.attn.bias", torch.uint8, (1, 1, 4, 4)),
        ("position_ids", torch.int64, (1, 4)),
        ("vision.norm.num_batches_tracked", torch.int64, ()),
    ],
)
def test_masks_positions_and_counters_in_an_old_checkpoint_are_no_packed_weights(
    folder: Path, name: str, dtype: torch.dtype, shape: tuple[int, ...]
) -> None:
    shard(folder, "model.safetensors", name, dtype=dtype, shape=shape)
    weights.prepare(str(folder))


def test_bytes_behind_the_tensors_are_told(folder: Path) -> None:
    shard(folder, "model.safetensors", "a")
    with (folder / "model.safetensors").open("ab") as file:
        file.write(b"more")
    assert "model.safetensors has 4 bytes behind its tensors" in refusal(folder)


def test_a_wrongly_numbered_expert_is_refused_before_anything_is_loaded(folder: Path) -> None:
    experts = (f"layers.0.mlp.experts.{i}.up_proj.weight" for i in (0, 1, 3))
    shard(folder, "model.safetensors", *experts)
    assert "lacks 1 tensor of experts, first 'layers.0.mlp.experts.2.up_proj.weight'" in refusal(folder)


def test_an_adapter_is_refused_with_the_model_that_it_needs(folder: Path) -> None:
    (folder / "config.json").unlink()
    write(folder / "adapter_config.json", {"base_model_name_or_path": "org/base"})
    shard(folder, "adapter_model.safetensors", "a")
    assert "is an adapter for org/base; merge it" in refusal(folder)
    write(folder / "config.json", {"model_type": "llama"})
    assert "holds an adapter too" in refusal(folder)


@pytest.mark.parametrize("name", ["pytorch_model.bin", "consolidated.00.pth", "tf_model.h5", "model.onnx"])
def test_weights_of_another_format_are_refused_by_name(folder: Path, name: str) -> None:
    (folder / name).touch()
    assert f"holds {name} and no .safetensors file" in refusal(folder)


def test_a_folder_of_gguf_files_names_the_one_to_serve(folder: Path) -> None:
    (folder / "config.json").unlink()
    (folder / "m.Q4.gguf").touch()
    assert f"name it: {folder / 'm.Q4.gguf'}" in refusal(folder)


@pytest.mark.parametrize("content", ["{", "[]", "null"])
def test_a_damaged_configuration_is_named(folder: Path, content: str) -> None:
    write(folder / "config.json", content)
    assert "config.json" in refusal(folder)


def test_a_weights_file_under_another_name_is_not_searched_for(folder: Path) -> None:
    shard(folder, "weights.safetensors", "a")
    assert "has weights.safetensors, but no model.safetensors" in refusal(folder)
    write(folder / "config.json", {"transformers_weights": "weights.safetensors"})
    assert "rename it to model.safetensors" in refusal(folder)


@pytest.mark.parametrize(
    ("said", "line"),
    [
        ("", "ValueError"),
        ("\n == \n one\ntwo", "one"),
        ("of field 'x':\n  TypeError: y\nz", "of field 'x': TypeError: y"),
    ],
)
def test_whatever_a_library_says_becomes_one_line(said: str, line: str) -> None:
    assert first_line(ValueError(said)) == line


def test_a_missing_key_is_told_as_one() -> None:
    assert first_line(KeyError("foo")) == "KeyError: 'foo'"

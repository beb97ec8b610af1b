"""The fingerprint tells the truth: each ingredient of an answer changes the digest, and nothing else does."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from engine import driver, tiny_models
from llm_engine import loading
from llm_engine.config import ConfigError, EngineConfig
from llm_engine.loading import LoadedModel, identity
from llm_engine.loading.identity import digest_of_weights

HOUR_NS = 3600 * 10**9
CPU, CUDA = torch.device("cpu"), torch.device("cuda")
Change = Callable[[Any], None]


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a tiny model."""
    folder = tmp_path_factory.mktemp("saved")
    tiny_models.build("llama").save_pretrained(folder)
    tiny_models.tokenizer().save_pretrained(folder)
    return folder


@pytest.fixture
def folder(saved: Path, tmp_path: Path) -> Path:
    """A copy for one test."""
    return Path(shutil.copytree(saved, tmp_path / "model"))


@pytest.fixture
def later(monkeypatch: pytest.MonkeyPatch) -> None:
    """Files that have just been written are old: their digests are remembered."""
    now = identity.time_ns
    monkeypatch.setattr(identity, "time_ns", lambda: now() + HOUR_NS)


def digest_of_folder(folder: Path) -> str:
    config = driver.config(kernels="torch")
    return loading.load(
        EngineConfig(str(folder), **{n: getattr(config, n) for n in ("dtype", "threads", "kernels")})
    ).digest


# The weights


def reads(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Bytes that are read from now on, piece by piece."""
    noted: list[int] = []
    pread = os.pread

    def noting(descriptor: int, count: int, at: int) -> bytes:
        noted.append(count)
        return pread(descriptor, count, at)

    monkeypatch.setattr(identity.os, "pread", noting)
    return noted


@given(place=st.floats(0, 1, exclude_max=True), bit=st.integers(0, 7))
def test_one_bit_anywhere_in_the_weights_changes_the_digest(
    saved: Path, tmp_path: Path, place: float, bit: int
) -> None:
    content = bytearray((saved / "model.safetensors").read_bytes())
    begin = 8 + int.from_bytes(content[:8], "little")
    target = tmp_path / "model.safetensors"
    target.write_bytes(content)
    before = digest_of_weights(tmp_path, tmp_path / "cache")
    content[begin + int(place * (len(content) - begin))] ^= 1 << bit
    target.write_bytes(content)
    assert digest_of_weights(tmp_path, tmp_path / "cache") != before


@pytest.mark.parametrize("change", ["name", "shape", "dtype", "missing"])
def test_what_the_tensors_are_called_and_how_they_are_read_changes_the_digest(
    saved: Path, folder: Path, tmp_path: Path, change: str
) -> None:
    tensors = load_file(folder / "model.safetensors")
    name = "model.layers.1.mlp.down_proj.weight"
    tensor = tensors.pop(name)
    if change == "name":
        tensors["another"] = tensor
    elif change != "missing":
        tensors[name] = tensor.T.contiguous() if change == "shape" else tensor.view(torch.int32)
    save_file(tensors, folder / "model.safetensors")
    assert digest_of_weights(folder, tmp_path / "cache") != digest_of_weights(saved, tmp_path / "cache")


def test_folder_times_shards_and_metadata_change_nothing(saved: Path, folder: Path, tmp_path: Path) -> None:
    expected = digest_of_weights(saved, tmp_path / "cache")
    whole = folder / "model.safetensors"
    os.utime(whole, ns=(0, 0))
    assert digest_of_weights(folder, tmp_path / "cache") == expected
    tensors = load_file(whole)
    save_file(dict(reversed(tensors.items())), whole, metadata={"made": "today"})
    assert digest_of_weights(folder, tmp_path / "cache") == expected
    whole.unlink()
    tiny_models.build("llama").save_pretrained(folder, max_shard_size="20KB")
    (folder / "stray.safetensors").write_bytes(b"of another program")
    assert len(identity.weights_files(folder)) > 2
    assert digest_of_weights(folder, tmp_path / "cache") == expected


@pytest.mark.usefixtures("later")
def test_a_file_is_hashed_once(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    noted = reads(monkeypatch)
    first = digest_of_weights(folder, tmp_path / "cache")
    assert sum(noted) == sum(tensor.nbytes for tensor in load_file(folder / "model.safetensors").values())
    noted.clear()
    assert digest_of_weights(folder, tmp_path / "cache") == first
    assert noted == []


@pytest.mark.usefixtures("later")
@pytest.mark.parametrize("replace", [False, True])
def test_other_bytes_under_the_same_size_and_time_are_seen(folder: Path, tmp_path: Path, replace: bool) -> None:
    file = folder / "model.safetensors"
    first = digest_of_weights(folder, tmp_path / "cache")
    was = file.stat()
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    if replace:
        (folder / "new").write_bytes(content)
        (folder / "new").replace(file)
    else:
        file.write_bytes(content)
    os.utime(file, ns=(was.st_atime_ns, was.st_mtime_ns))
    assert file.stat().st_mtime_ns == was.st_mtime_ns
    assert digest_of_weights(folder, tmp_path / "cache") != first


def test_a_file_that_was_just_written_is_not_remembered(folder: Path, tmp_path: Path) -> None:
    (folder / "model.safetensors").touch()
    digest_of_weights(folder, tmp_path / "cache")
    assert not (tmp_path / "cache").exists()  # two writes may share one time


@pytest.mark.usefixtures("later")
@pytest.mark.parametrize("damage", [b"", b"{", b"[]", b"{}", b'{"a": "b"}', b"\xff", "null"])
def test_a_damaged_cache_is_not_believed(folder: Path, tmp_path: Path, damage: bytes | str) -> None:
    first = digest_of_weights(folder, tmp_path / "cache")
    (kept,) = (tmp_path / "cache/digests").iterdir()
    whole = kept.read_bytes()
    kept.write_bytes(json.dumps(dict.fromkeys(json.loads(whole))).encode() if isinstance(damage, str) else damage)
    assert digest_of_weights(folder, tmp_path / "cache") == first
    assert kept.read_bytes() == whole


@pytest.mark.usefixtures("later")
@pytest.mark.parametrize("kind", ["file", "entry is a folder"])
def test_a_cache_that_cannot_be_read_or_written_is_done_without(folder: Path, tmp_path: Path, kind: str) -> None:
    cache = tmp_path / "cache"
    first = digest_of_weights(folder, cache)
    (kept,) = (cache / "digests").iterdir()
    if kind == "file":
        shutil.rmtree(cache)
        cache.write_text("")
    else:
        kept.unlink()
        kept.mkdir()
    assert digest_of_weights(folder, cache) == first
    assert kind == "file" or list((cache / "digests").iterdir()) == [kept]  # nothing half-written is left


@pytest.mark.usefixtures("later")
def test_loads_at_once_agree_and_leave_one_file(folder: Path, tmp_path: Path) -> None:
    with ThreadPoolExecutor(8) as pool:
        found = set(pool.map(lambda _: digest_of_weights(folder, tmp_path / "cache"), range(24)))
    assert len(found) == 1
    assert len(list((tmp_path / "cache/digests").iterdir())) == 1


@pytest.mark.parametrize("content", [b"", b"\x05\0\0\0\0\0\0\0{", b"\x0e\0\0\0\0\0\0\0" + b'{"a":{"x":1}}]'])
def test_a_file_that_is_no_safetensors_is_refused_in_one_line(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "model.safetensors").write_bytes(content)
    with pytest.raises(
        ConfigError, match=r"weights file .*model.safetensors is damaged \(.*\); fetch it again"
    ) as told:
        digest_of_weights(tmp_path, tmp_path / "cache")
    assert "\n" not in str(told.value)


def test_a_shard_that_the_index_names_and_is_not_there_is_told(folder: Path, tmp_path: Path) -> None:
    (folder / "model.safetensors").unlink()
    tiny_models.build("llama").save_pretrained(folder, max_shard_size="20KB")
    identity.weights_files(folder)[1].unlink()
    with pytest.raises(ConfigError, match=r"weights file .*model-00002-of-.* cannot be read: No such file"):
        digest_of_weights(folder, tmp_path / "cache")


def test_a_checkpoint_in_another_folder_and_in_shards_has_the_same_digest(saved: Path, folder: Path) -> None:
    expected = digest_of_folder(saved)
    (folder / "model.safetensors").unlink()
    tiny_models.build("llama").save_pretrained(folder, max_shard_size="20KB")
    assert digest_of_folder(folder) == expected


def test_a_checkpoint_with_one_other_number_or_setting_has_another_digest(saved: Path, folder: Path) -> None:
    found = [digest_of_folder(saved)]
    model = tiny_models.build("llama")
    model.model.layers[0].self_attn.q_proj.weight.data[0, 0] *= 1.0001
    model.save_pretrained(folder)
    found.append(digest_of_folder(folder))
    config = json.loads((saved / "config.json").read_text())
    for changed in ({"rms_norm_eps": 2e-6}, {"rope_parameters": {"rope_type": "default", "rope_theta": 20000.0}}):
        shutil.copy(saved / "model.safetensors", folder)
        (folder / "config.json").write_text(json.dumps(config | changed))
        found.append(digest_of_folder(folder))
    assert len(set(found)) == 4


# Everything else


def attach(change: Change | None = None, tokenizer: Any = None, digest: str = "weights", **values: Any) -> LoadedModel:
    config = driver.config(**{"kernels": "torch", **values})
    model = tiny_models.build("llama", getattr(torch, config.dtype))
    if change is not None:
        change(model)
    return loading.attach(model, tokenizer or tiny_models.tokenizer(), config, digest)


@pytest.fixture(scope="module")
def plain() -> LoadedModel:
    return attach()


def setting(part: str, name: str, value: Any) -> Change:
    return lambda model: setattr(getattr(model, part), name, value)


CHANGES = {
    "rms_norm_eps": setting("config", "rms_norm_eps", 2e-6),
    "rope": lambda model: model.config.rope_parameters.update(rope_theta=5000.0),
    "activation": setting("config", "hidden_act", "gelu"),
    "an unknown setting": setting("config", "new_in_some_release", 1),
    "temperature": setting("generation_config", "temperature", 0.3),
    "top_k": setting("generation_config", "top_k", 7),
    "eos": setting("generation_config", "eos_token_id", [tiny_models.EOS, 9]),
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_configuration_defaults_and_eos_change_the_digest(plain: LoadedModel, change: Change) -> None:
    assert attach(change).digest != plain.digest


def test_weights_and_dtype_change_the_digest(plain: LoadedModel) -> None:
    assert attach(digest="other weights").digest != plain.digest
    assert attach(dtype="bfloat16").digest != plain.digest


@pytest.mark.parametrize("change", ["template", "token", "special"])
def test_tokenizer_and_template_change_the_digest(plain: LoadedModel, change: str) -> None:
    backend = tiny_models.tokenizer().backend_tokenizer
    same = {"pad_token": "<pad>", "bos_token": "<s>", "eos_token": "</s>"}
    copy = transformers.PreTrainedTokenizerFast
    assert attach(tokenizer=copy(tokenizer_object=backend, **same)).digest == plain.digest
    other = copy(tokenizer_object=backend, **(same | {"bos_token": "</s>"} if change == "special" else same))
    if change == "template":
        other.chat_template = "{{ messages }}"
    if change == "token":
        other.add_tokens(["harbour"])
    assert attach(tokenizer=other).digest != plain.digest


def test_what_changes_no_bit_keeps_the_digest(plain: LoadedModel) -> None:
    def rename(model: Any) -> None:
        model.config._name_or_path = "/elsewhere"
        model.config.transformers_version = "4.0.0"
        model.config.architectures = ["LlamaForCausalLM"]

    assert attach(rename).digest == plain.digest
    assert (
        attach(kv_tokens=1024, max_context=100, block_size=16, max_step_tokens=32, max_sequences=2).digest
        == plain.digest
    )


# What computes


def arithmetic(device: torch.device = CPU, **values: Any) -> str:
    return identity.name_arithmetic(driver.config(**{"kernels": "torch", **values}), device)


def test_the_arithmetic_is_told_and_is_part_of_the_digest(plain: LoadedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    assert plain.info()["arithmetic"] == plain.arithmetic == arithmetic()
    assert f"torch {torch.__version__}" in plain.arithmetic
    monkeypatch.setattr(torch, "__version__", "9.9.9")
    assert attach().digest != plain.digest


WHERE_TORCH_COMPUTES = {
    "torch.__version__": "9.9.9",
    "transformers.__version__": "9.9.9",
    "torch.backends.cpu.get_cpu_capability": lambda: "AVX2",
    "torch.cpu.get_capabilities": lambda: {"amx_bf16": True},
    "llm_engine.loading.machine.vendor": lambda: "GenuineOther",
    "llm_engine.loading.identity._TORCH_ATTENTION": 99,
    "llm_engine.loading.identity._SAMPLING": 99,
}


@pytest.mark.parametrize("part", WHERE_TORCH_COMPUTES)
def test_each_part_of_what_computes_changes_its_name(part: str, monkeypatch: pytest.MonkeyPatch) -> None:
    before = arithmetic()
    monkeypatch.setattr(part, WHERE_TORCH_COMPUTES[part])
    assert arithmetic() != before


@driver.needs_native()
def test_threads_are_named_where_torch_multiplies_and_not_where_our_kernels_do(monkeypatch: pytest.MonkeyPatch) -> None:
    assert arithmetic(threads=1) != arithmetic(threads=2)
    assert arithmetic(threads=1, kernels="native") != arithmetic(threads=2, kernels="native")
    whole = [driver.load(threads=threads, kernels="native").arithmetic for threads in (1, 2)]
    assert whole[0] == whole[1]
    assert len({arithmetic(), arithmetic(kernels="native"), whole[0]}) == 3
    for module in ("identity", "steps"):
        monkeypatch.setattr(f"llm_engine.loading.{module}.source_digest", lambda: "other sources")
    assert driver.load(kernels="native").arithmetic != whole[0]


@driver.needs_native()
def test_weight_format_and_arithmetic_change_the_digest() -> None:
    formats = ("float32", "bfloat16", "int8", "int4")
    found = {driver.load(kernels="native", weight_format=f, arithmetic="fma32").digest for f in formats}
    found |= {driver.load(kernels="native", weight_format=f, arithmetic="q8dot").digest for f in formats[2:]}
    assert len(found) == 6


def test_cuda_is_another_arithmetic_than_a_cpu_and_so_is_another_chip(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _device: "Chip")
    found = {arithmetic()}
    for capability in ((9, 0), (10, 0)):
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _device, c=capability: c)
        found.add(arithmetic(CUDA))
    assert len(found) == 3


@pytest.mark.parametrize("dtype", driver.native_dtypes())
def test_native_kernels_change_the_digest(dtype: str) -> None:
    assert attach(dtype=dtype, kernels="native").digest != attach(dtype=dtype, kernels="torch").digest

"""What a model folder must hold before anything reads it: a configuration, and whole safetensors that are not packed.

Everything here is told from file names, JSON and safetensors headers, in milliseconds, and refused by ConfigError, one
line with the cure. It does not import torch, and does not know which tensors a model needs.
"""

from __future__ import annotations

import json
import re
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from llm_engine.config import ConfigError

from .experts import refuse_misnumbered

CONFIG = "config.json"
SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
SUPPORTED = "safetensors in float32, float16 or bfloat16, or a GGUF file"
_SHARD = re.compile(r"model-\d+-of-\d+\.safetensors")
_FLOATS = {"F64", "F32", "F16", "BF16"}
_NO_WEIGHTS = {(), (1,)}  # how shapes of masks, positions and counters in old checkpoints begin
_OTHER_WEIGHTS = ("*.bin", "*.pt", "*.pth", "*.h5", "*.msgpack", "*.onnx", "*.ckpt", "*.npz")
_QUANTIZED_BY = {  # files beside config.json that say how weights were packed
    "quantize_config.json": "GPTQ",
    "quant_config.json": "AWQ",
    "hf_quant_config.json": "ModelOpt",
}


@dataclass(frozen=True, slots=True)
class Stored:
    """One tensor as a safetensors header tells it. `dtype` is the format's own name, `F32` say.

    Its bytes are those of `file` from `begin` to before `end`, counted from the start of the file.
    """

    dtype: str
    shape: tuple[int, ...]
    file: Path
    begin: int
    end: int


def check_folder(folder: Path) -> Path:
    """Return `folder` if it holds a model as far as its headers tell. Raises ConfigError with the reason and cure."""
    if (folder / "adapter_config.json").is_file():
        raise ConfigError(_adapter(folder))
    if not (folder / CONFIG).is_file():
        raise ConfigError(_without_config(folder))
    config = read_json(folder / CONFIG)
    _refuse_quantized(folder, config)
    if named := config.get("transformers_weights"):
        raise ConfigError(f"model folder {folder} keeps its weights in {named!r}; rename it to {SINGLE}")
    shapes = {name: stored.shape for name, stored in tensors(folder).items()}
    refuse_misnumbered(f"model folder {folder}", shapes, config)
    return folder


def read_json(file: Path) -> dict[str, Any]:
    """The JSON object in `file`. ConfigError if it is something else."""
    try:
        content = json.loads(file.read_bytes())
    except (OSError, ValueError) as error:
        raise ConfigError(f"{file} cannot be read as JSON ({first_line(error)}); fetch it again") from None
    if not isinstance(content, dict):
        raise ConfigError(f"{file} must hold a JSON object, not {type(content).__name__}; fetch it again")
    return content


def tensors(folder: Path) -> dict[str, Stored]:
    """Every tensor of the folder's weights files, by name. ConfigError if a file is absent, cut, doubled or packed."""
    found: dict[str, Stored] = {}
    places: dict[str, Path] = {}
    for file in weight_files(folder):
        for name, stored in _header(file).items():
            if name in places:
                raise ConfigError(f"tensor {name!r} stands in both {places[name].name} and {file.name} of {folder}")
            if stored.dtype not in _FLOATS and (name.endswith(".weight") or stored.shape[:1] not in _NO_WEIGHTS):
                raise ConfigError(
                    f"model folder {folder} is packed ({name!r} is {stored.dtype}); supported are {SUPPORTED}"
                )
            found[name], places[name] = stored, file
    if (folder / INDEX).is_file():
        _check_index(folder, places)
    return found


def weight_files(folder: Path) -> list[Path]:
    """The safetensors files that make up the model, in order; others that lie beside them are none of it."""
    here = sorted(folder.glob("*.safetensors"))
    if not here:
        raise ConfigError(_without_safetensors(folder))
    shards = [file.name for file in here if _SHARD.fullmatch(file.name)]
    if not (folder / INDEX).is_file():
        if (folder / SINGLE).is_file():
            if shards:
                raise ConfigError(f"model folder {folder} holds both {SINGLE} and {shards[0]}; remove one of them")
            return [folder / SINGLE]
        if shards:
            raise ConfigError(f"model folder {folder} has shards ({shards[0]}) but no {INDEX}; fetch it too")
        raise ConfigError(f"model folder {folder} has {here[0].name}, but no {SINGLE}; rename it, or fetch them all")
    named = sorted(set(_weight_map(folder).values()))
    for name in named:
        if not (folder / name).is_file():
            raise ConfigError(f"model folder {folder} lacks {name}, which {INDEX} names; fetch it again")
    if strays := sorted({*shards, *([SINGLE] if (folder / SINGLE).is_file() else [])} - set(named)):
        raise ConfigError(
            f"model folder {folder} holds {strays[0]}, which {INDEX} does not name; remove what is not its own"
        )
    return [folder / name for name in named]


def first_line(error: BaseException) -> str:
    """What an exception says in one line: its first line with words and what that announces, else its name.

    A KeyError says no more than the key, and gets its name before it.
    """
    if isinstance(error, KeyError):
        return f"KeyError: {error}"[:300].replace("\n", " ")
    lines = [line for line in (line.strip(" -=\t") for line in str(error).splitlines()) if line]
    return " ".join(lines[: 2 if lines and lines[0].endswith(":") else 1])[:300] or type(error).__name__


def _weight_map(folder: Path) -> dict[str, str]:
    weight_map = read_json(folder / INDEX).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise ConfigError(f"{folder / INDEX} has no weight_map; fetch it again")
    for name in weight_map.values():
        if not isinstance(name, str) or Path(name).name != name:
            raise ConfigError(f"{folder / INDEX} names {name!r}, which is no file of the folder; fetch it again")
    return weight_map


def _check_index(folder: Path, places: Mapping[str, Path]) -> None:
    for tensor, name in _weight_map(folder).items():
        if tensor not in places:
            raise ConfigError(f"{name} of {folder} lacks tensor {tensor!r}, which {INDEX} names; fetch it again")


def _header(file: Path) -> dict[str, Stored]:
    """Read a header and compare the file's size with what it promises: a truncated download is told at once."""
    size = file.stat().st_size
    with file.open("rb") as f:
        head = f.read(8)
        length = struct.unpack("<Q", head)[0] if len(head) == 8 else 0
        if not 0 < length <= size - 8:
            raise ConfigError(f"weights file {file} is truncated ({size} bytes); fetch it again")
        try:
            header = {name: entry for name, entry in json.loads(f.read(length)).items() if name != "__metadata__"}
            end = max((entry["data_offsets"][1] for entry in header.values()), default=0)
            found = {name: _stored(entry, file, 8 + length) for name, entry in header.items()}
        except (ValueError, TypeError, KeyError, AttributeError, IndexError):
            raise ConfigError(f"weights file {file} has a damaged header; fetch it again") from None
    if size < 8 + length + end:
        raise ConfigError(f"weights file {file} is truncated: {size} bytes of {8 + length + end}; fetch it again")
    if size > 8 + length + end:
        raise ConfigError(f"weights file {file} has {size - 8 - length - end} bytes behind its tensors; fetch it again")
    return found


def _stored(entry: Mapping[str, Any], file: Path, data_start: int) -> Stored:
    """What a header says of one tensor. ValueError if it cannot be."""
    shape, (begin, end) = tuple(entry["shape"]), entry["data_offsets"]
    if not all(type(number) is int and number >= 0 for number in (*shape, begin, end - begin)):
        raise ValueError("a shape or a place that is no count")
    return Stored(str(entry["dtype"]), shape, file, data_start + begin, data_start + end)


def _refuse_quantized(folder: Path, config: Mapping[str, Any]) -> None:
    text = config.get("text_config")
    for part in (config, text if isinstance(text, dict) else {}):
        for key in ("quantization_config", "compression_config"):
            if (packed := part.get(key)) is not None:
                method = packed.get("quant_method") or packed.get("format") if isinstance(packed, dict) else None
                raise ConfigError(_packed(folder, str(method or "unknown")))
    for name, method in _QUANTIZED_BY.items():
        if (folder / name).is_file():
            raise ConfigError(_packed(folder, method))


def _packed(folder: Path, method: str) -> str:
    return (
        f"model folder {folder} is quantized (method {method}), which is not supported; supported are {SUPPORTED}; "
        f"choose the original of this model, or a GGUF of it"
    )


def _adapter(folder: Path) -> str:
    base = read_json(folder / "adapter_config.json").get("base_model_name_or_path")
    if (folder / CONFIG).is_file():
        return f"model folder {folder} holds an adapter too (adapter_config.json); merge it, or remove its files"
    return (
        f"model folder {folder} is an adapter for {base or 'another model'}; "
        f"merge it into that model (peft: merge_and_unload, then save_pretrained)"
    )


def _without_config(folder: Path) -> str:
    if packed := sorted(folder.glob("*.gguf")):
        return f"model folder {folder} has no config.json; to serve a GGUF file, name it: {packed[0]}"
    return f"model folder {folder} has no config.json; it must hold a transformers model"


def _without_safetensors(folder: Path) -> str:
    for pattern in _OTHER_WEIGHTS:
        if others := sorted(folder.glob(pattern)):
            return (
                f"model folder {folder} holds {others[0].name} and no .safetensors file; load it where you trust it, "
                f"and save it with save_pretrained"
            )
    return f"model folder {folder} has no .safetensors file; save the model with save_pretrained"

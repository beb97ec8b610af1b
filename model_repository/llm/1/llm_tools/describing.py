"""From the headers of a GGUF file to a folder with configuration, tokenizer and the places of tensors, and no weights.

Which tensor of the file is which of the model is asked of transformers, once; a model of shapes alone proves that all
are there and none is left over. It does not know where such folders are kept.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from llm_engine.config import ConfigError

from . import gguf_file, gguf_tokenizer
from .folder import CONFIG, first_line, read_json
from .gguf_header import GgufHeader, read_header
from .sources import Place
from .storage import BY_NUMBER
from .tensors import refuse_unproven

TENSORS = "tensors.json"
_GENERATION, _TOKENIZER, _TOKENIZER_CONFIG = "generation_config.json", "tokenizer.json", "tokenizer_config.json"
# Architectures whose tensors need no more than `Place` can say.
_ARCHITECTURES = {"llama", "qwen2", "qwen3", "phi3", "gemma2", "gemma3", "gpt2"}
_TRANSPOSED = ("attn_qkv.weight", "attn_output.weight", "ffn_up.weight", "ffn_down.weight")  # GPT-2's Conv1D
_OLD_FREQUENCIES = r"rotary_emb\.inv_freq$"  # which old checkpoints stored, and every model computes


def is_direct(headers: Sequence[GgufHeader]) -> bool:
    """Whether the file can be used as it is: a known architecture, every tensor of a kind that is unpacked here."""
    known = headers[0].architecture in _ARCHITECTURES
    return known and all(tensor.kind in BY_NUMBER for header in headers for tensor in header.tensors)


def describe(parts: Sequence[Path], out: Path) -> None:
    """Write what a GGUF file in these parts says of its model into the folder `out`, which must be there.

    Imports torch and transformers, reads no values but the rope's factors. Raises ConfigError with the reason.
    """
    headers = [read_header(part) for part in parts]
    gguf_file.check_parts(headers)
    tokenizer = gguf_tokenizer.read(headers[0])
    whole = out / "outline.gguf"
    gguf_file.outline(headers, whole)
    header = read_header(whole, parts[0])
    gguf_file.check_types(header)
    try:
        model = _model_of_shapes(_config(header))
        places = _places(header, model)
    except ConfigError:
        raise
    except Exception as error:  # its header is sound, so what fails here is what transformers makes of its contents
        raise ConfigError(
            f"model file {header.name} cannot be used ({first_line(error)}); "
            f"serve the safetensors original of this model"
        ) from error
    shapes = {tensor.name: tensor.shape for tensor in header.tensors}
    placed = {name: shapes[place.stored][:: -1 if place.transposed else 1] for name, place in places.items()}
    _refuse_unproven(f"model file {header.name}", placed, model)
    gguf_file.refuse_leftovers(header, model)
    whole.unlink()
    model.generation_config.eos_token_id = list(tokenizer.end_ids) or None
    model.config.architectures = [type(model).__name__]
    model.config.save_pretrained(out)
    model.generation_config.save_pretrained(out)
    tokenizer.save(out)
    said = {
        "tokenizer_bytes": (out / _TOKENIZER).stat().st_size,
        "tensors": {name: asdict(place) for name, place in places.items()},
    }
    (out / TENSORS).write_text(json.dumps(said, indent=1) + "\n")


def prove_folder(folder: Path, shapes: Mapping[str, tuple[int, ...]]) -> None:
    """Raise ConfigError unless a folder's tensors, with these shapes by transformers' names, fit its configuration."""
    import transformers

    try:
        config = transformers.AutoConfig.from_pretrained(folder, trust_remote_code=False)
        model = _model_of_shapes(config)
    except Exception as error:
        raise ConfigError(f"model folder {folder} cannot be used: {first_line(error)}; check {CONFIG}") from error
    _refuse_unproven(f"model folder {folder}", shapes, model)


def read_places(folder: Path) -> dict[str, Place]:
    """What `describe` wrote of tensors. ConfigError if any of its files is absent or damaged."""
    for name in (CONFIG, _GENERATION, _TOKENIZER_CONFIG):
        read_json(folder / name)
    said = read_json(folder / TENSORS)
    try:
        if (folder / _TOKENIZER).stat().st_size != said["tokenizer_bytes"]:  # too long to be parsed at every start
            raise ConfigError(f"{folder / _TOKENIZER} is damaged; remove {folder}")
        return {name: Place(**place) for name, place in said["tensors"].items()}
    except (TypeError, KeyError, AttributeError) as error:
        raise ConfigError(f"{folder / TENSORS} is damaged ({first_line(error)}); remove {folder}") from None


def _config(header: GgufHeader) -> Any:
    """The configuration that the header describes."""
    import transformers

    source = header.file
    config = transformers.AutoConfig.from_pretrained(source.parent, gguf_file=source.name, trust_remote_code=False)
    gguf_file.complete_config(header, config)
    return config


def _model_of_shapes(config: Any) -> Any:
    """The model of this configuration without memory for its weights; the tied ones are tied."""
    import torch
    import transformers

    with torch.device("meta"):
        return transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16, trust_remote_code=False)


def _places(header: GgufHeader, model: Any) -> dict[str, Place]:
    """For each tensor of the model that the file holds, where."""
    from transformers.modeling_gguf_pytorch_utils import TensorProcessor, get_gguf_hf_weights_map

    names: Mapping[str, str] = get_gguf_hf_weights_map(model, TensorProcessor())
    return {
        names[tensor.name]: _place(header.architecture, tensor.name, model.config)
        for tensor in header.tensors
        if tensor.name in names
    }


def _place(architecture: str, name: str, config: Any) -> Place:
    match architecture:
        case "llama" if ".attn_q." in name:
            return Place(name, heads=config.num_attention_heads)
        case "llama" if ".attn_k." in name:
            return Place(name, heads=config.num_key_value_heads)
        case "gemma2" | "gemma3" if "norm.weight" in name:
            return Place(name, raised=True)
        case "gpt2" if name.endswith(_TRANSPOSED):
            return Place(name, transposed=True)
    return Place(name)


def _refuse_unproven(where: str, shapes: Mapping[str, tuple[int, ...]], model: Any) -> None:
    """Raise ConfigError unless `shapes` has every weight of the model, in its shape, and nothing else."""
    weights = model.state_dict(keep_vars=True)
    placed = {id(weights[name]) for name in shapes if name in weights}  # tied weights are one object under all names
    harmless = (*(model._keys_to_ignore_on_load_unexpected or ()), _OLD_FREQUENCIES)
    ignored = [re.compile(pattern) for pattern in harmless]
    report = {
        "mismatched_keys": {
            (name, shape, tuple(weights[name].shape))
            for name, shape in shapes.items()
            if name in weights and shape != tuple(weights[name].shape)
        },
        "unexpected_keys": {
            name for name in shapes if name not in weights and not any(pattern.search(name) for pattern in ignored)
        },
        "missing_keys": {name for name, weight in weights.items() if id(weight) not in placed},
    }
    refuse_unproven(where, model, report)

"""What a GGUF file says of its model that transformers' loader does not heed: its parts, rope factors, tensors.

A file in parts is merged; what would change the answers is put into the configuration, or the file is refused by
ConfigError. It does not know where converted weights are kept, nor the file's tokenizer.
"""

from __future__ import annotations

import math
import re
import shutil
import struct
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from llm_engine.config import ConfigError

from .gguf_header import MAGIC, GgufHeader

_PART = re.compile(r"(?P<name>.+)-(?P<no>\d{5})-of-(?P<count>\d{5})\.gguf")
_SPLIT_KEYS = ("split.no", "split.count", "split.tensors.count")
_LLAMA3_ROPE = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
_ROPE_FACTORS = "rope_freqs.weight"
_ALTERNATIVE = "serve the safetensors original of this model"
_TOLERANCE = 1e-3
# Metadata of an architecture that transformers does not read, and that its tensors' shapes prove or nothing depends on.
_HARMLESS = {
    *("vocab_size", "attention.key_length", "attention.value_length", "rope.dimension_count", "tensor_data_layout"),
    *("expert_feed_forward_length", "expert_shared_feed_forward_length", "attention.causal", "use_parallel_residual"),
}
_OVERLOOKED = {  # metadata -> the field of transformers' configuration that it belongs into
    "attn_logit_softcapping": "attn_logit_softcapping",
    "final_logit_softcapping": "final_logit_softcapping",
    "attention.sliding_window": "sliding_window",
}
_SCALED_BY_WIDTH = {("gemma2", 46), ("gemma3", 62)}  # 27 B: queries are scaled by the layer's width, not the head's


def parts(file: Path) -> list[Path]:
    """All parts of the file that `file` is one part of, in order; `file` alone if its name is not a part's."""
    if not (match := _PART.fullmatch(file.name)):
        return [file]
    name, count = match["name"], int(match["count"])
    found = [file.parent / f"{name}-{no:05d}-of-{count:05d}.gguf" for no in range(1, count + 1)]
    if absent := [part for part in found if not part.is_file()]:
        raise ConfigError(
            f"model file {file} is one part of {count}; {absent[0].name} is missing beside it; fetch all parts"
        )
    return found


def merge(headers: list[GgufHeader], target: Path) -> None:
    """Write the parts with these headers as one file `target`. ConfigError if they are not the parts of one file."""
    first = headers[0]
    for no, header in enumerate(headers):
        said = (header.metadata.get("split.no"), header.metadata.get("split.count"))
        if said != (no, len(headers)) or header.alignment != first.alignment:
            raise ConfigError(
                f"model file {header.file} says that it is part {said[0]} of {said[1]}, counted from 0, "
                f"not {no} of {len(headers)}; fetch all parts of one model"
            )
    count = sum(len(header.tensors) for header in headers)
    if (promised := first.metadata.get("split.tensors.count", count)) != count:
        raise ConfigError(f"the parts of {first.file} hold {count} tensors of {promised}; fetch them again")
    entries = [entry for key, entry in first.entries if not key.startswith("split.")]
    with target.open("wb") as out:
        out.write(MAGIC + struct.pack("<IQQ", first.version, count, len(entries)) + b"".join(entries))
        base = 0
        for header in headers:
            for tensor in header.tensors:
                name, shape = tensor.name.encode(), tensor.shape[::-1]
                out.write(struct.pack("<Q", len(name)) + name + struct.pack(f"<I{len(shape)}Q", len(shape), *shape))
                out.write(struct.pack("<IQ", tensor.kind, base + tensor.offset))
            base += _padded(header.file.stat().st_size - header.data_start, first.alignment)
        for header in headers:
            out.write(bytes(-out.tell() % first.alignment))
            with header.file.open("rb") as part:
                part.seek(header.data_start)
                shutil.copyfileobj(part, out, 1 << 24)


def _padded(size: int, alignment: int) -> int:
    return -(-size // alignment) * alignment


def refuse_part(header: GgufHeader) -> None:
    """Raise ConfigError for one part of several under a name that does not say so."""
    if (count := header.metadata.get("split.count") or 1) > 1:
        raise ConfigError(
            f"model file {header.file} is part {header.metadata['split.no'] + 1} of {count}; "
            f"name the parts NAME-00001-of-{count:05d}.gguf and so on, in one folder"
        )


def complete_config(header: GgufHeader, config: Any) -> None:
    """Put into transformers' `config` what its loader overlooks. ConfigError for what has no place there."""
    kind = str(header.metadata.get("general.architecture"))
    table = _table(kind, config)
    for field, value in header.metadata.items():
        key = field.removeprefix(f"{kind}.")
        if (
            key == field
            or not table
            or not value
            or key in table
            or key in _HARMLESS
            or key.startswith("rope.scaling.")
        ):
            continue
        if not hasattr(config, name := _OVERLOOKED.get(key, "")):
            raise ConfigError(
                f"model file {header.file} states {field}, which its conversion does not know; {_ALTERNATIVE}"
            )
        setattr(config, name, value)
    for name in ("bos", "eos"):  # else those of the class, which belong to another vocabulary
        setattr(config, f"{name}_token_id", header.metadata.get(f"tokenizer.ggml.{name}_token_id"))
    if kind in ("gemma2", "gemma3"):
        wide = (kind, config.num_hidden_layers) in _SCALED_BY_WIDTH
        config.query_pre_attn_scalar = config.hidden_size // config.num_attention_heads if wide else config.head_dim
    _check_rotary_width(header, kind, config)
    _scale_rope(header, kind, config)


def refuse_leftovers(header: GgufHeader, model: Any) -> None:
    """Raise ConfigError if the file holds values that did not reach `model`, in which nothing is missing."""
    from transformers.modeling_gguf_pytorch_utils import TensorProcessor, get_gguf_hf_weights_map

    tensors = [tensor for tensor in header.tensors if tensor.name != _ROPE_FACTORS]
    stored = sum(tensor.values for tensor in tensors)
    weights = {id(value): value.numel() for value in model.state_dict(keep_vars=True).values()}  # tied ones once
    if stored == sum(weights.values()):
        return
    placed = get_gguf_hf_weights_map(model, TensorProcessor())
    names = [tensor.name for tensor in tensors if tensor.name not in placed]
    raise ConfigError(
        f"model file {header.file} holds {stored} values, {sum(weights.values())} of them have a place in the model"
        f"{f'; {names[0]!r} has none' if names else ''}; {_ALTERNATIVE}"
    )


def _table(kind: str, config: Any) -> Mapping[str, Any]:
    """The metadata that transformers reads of this architecture; empty for those that it reads key by key."""
    from transformers.integrations import GGUF_CONFIG_MAPPING

    found: Mapping[str, Any] = GGUF_CONFIG_MAPPING.get(kind) or GGUF_CONFIG_MAPPING.get(config.model_type) or {}
    return found


def _check_rotary_width(header: GgufHeader, kind: str, config: Any) -> None:
    width = header.metadata.get(f"{kind}.rope.dimension_count")
    head = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    rope = _flat_rope(config)
    rotated = int(head * (rope.get("partial_rotary_factor") or getattr(config, "partial_rotary_factor", None) or 1))
    if width and rope and width != rotated:
        raise ConfigError(f"model file {header.file} rotates {width} values of a head, not {rotated}; {_ALTERNATIVE}")


def _scale_rope(header: GgufHeader, kind: str, config: Any) -> None:
    scaling = header.metadata.get(f"{kind}.rope.scaling.type")
    factor = header.metadata.get(f"{kind}.rope.scaling.factor") or 1.0
    factors = next((tensor for tensor in header.tensors if tensor.name == _ROPE_FACTORS), None)
    if scaling == "linear" and factors is None:
        if factor != 1.0:
            _flat_rope(config).update(rope_type="linear", factor=float(factor))
    elif scaling not in (None, "none") or (scaling is None and factor != 1.0):
        raise ConfigError(
            f"model file {header.file} has rope scaling {scaling!r}, which is not supported; {_ALTERNATIVE}"
        )
    elif factors is not None:
        _flat_rope(config).update(_llama3_rope(header.file, header.floats(factors), config))


def _flat_rope(config: Any) -> dict[str, Any]:
    """The rope parameters of full attention, to be read and changed; a model without rope has an empty one."""
    rope: dict[str, Any] = getattr(config, "rope_parameters", None) or {}
    full: dict[str, Any] = rope.get("full_attention", rope)
    return full


def _llama3_rope(file: Path, factors: list[float], config: Any) -> dict[str, Any]:
    """The `llama3` rope whose divisors of the frequencies are `factors`; nothing to change if all are 1."""
    if all(math.isclose(factor, 1.0) for factor in factors):
        return {}
    scale, theta = max(factors), float(_flat_rope(config)["rope_theta"])
    computed = _llama3_factors(scale, theta, len(factors))
    if not all(math.isclose(a, b, rel_tol=_TOLERANCE) for a, b in zip(factors, computed, strict=True)):
        raise ConfigError(f"model file {file} has rope factors of its own ({_ROPE_FACTORS}); {_ALTERNATIVE}")
    return {"rope_type": "llama3", "factor": scale, **_LLAMA3_ROPE}


def _llama3_factors(scale: float, theta: float, count: int) -> Iterable[float]:
    low, high, context = _LLAMA3_ROPE.values()
    for i in range(count):
        wave = 2 * math.pi * theta ** (i / count)
        smooth = min(max((context / wave - low) / (high - low), 0.0), 1.0)
        yield 1 / ((1 - smooth) / scale + smooth)

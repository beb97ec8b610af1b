"""What a GGUF file says of its model that transformers' loader does not heed: its parts, rope factors, tensors.

A file in parts is merged; what would change the answers is put into the configuration, or the file is refused by
ConfigError. It does not know where converted weights are kept, nor the file's tokenizer.
"""

from __future__ import annotations

import math
import re
import shutil
import struct
from collections import Counter
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, BinaryIO

from llm_engine.config import ConfigError

from .gguf_header import MAGIC, GgufHeader

_PART = re.compile(r"(?P<name>.+)-(?P<no>\d{5})-of-(?P<count>\d{5})\.gguf")
_SPLIT_KEYS = ("split.no", "split.count", "split.tensors.count")
_LLAMA3_ROPE = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
_ROPE_FACTORS = "rope_freqs.weight"
_ROPE_SCALING = "rope.scaling."
_ALTERNATIVE = "serve the safetensors original of this model"
_TOLERANCE = 1e-3
_UINT64, _FLOAT32 = 10, 0  # a type of metadata, a type of tensors
# Metadata of an architecture that transformers does not read, and that its tensors' shapes prove or nothing depends on.
_HARMLESS = {
    *("vocab_size", "attention.key_length", "attention.value_length", "rope.dimension_count", "tensor_data_layout"),
    *("expert_feed_forward_length", "expert_shared_feed_forward_length", "use_parallel_residual"),
}
_OVERLOOKED: dict[str, tuple[str, type]] = {  # metadata -> the field of transformers' configuration, and its type
    "attn_logit_softcapping": ("attn_logit_softcapping", float),
    "final_logit_softcapping": ("final_logit_softcapping", float),
    "attention.sliding_window": ("sliding_window", int),
    "expert_weights_norm": ("norm_topk_prob", bool),
}
_UNUSED_IF_0 = {  # llama.cpp writes these for models that lack what they describe
    *("expert_count", "expert_used_count", "expert_shared_count", "expert_group_count", "expert_group_used_count"),
    *("attention.clamp_kqv", "attention.max_alibi_bias", "attention.q_lora_rank", "attention.kv_lora_rank"),
    *("attention.scale", "attention.sliding_window", "attention.shared_kv_layers", "attention.head_count"),
    *("attn_logit_softcapping", "final_logit_softcapping", "router_logit_softcapping", "logit_scale"),
    *("residual_scale", "embedding_scale", "expert_weights_scale", "feed_forward_length", "leading_dense_block_count"),
    *("nextn_predict_layers", "pooling_type", "ssm.dt_b_c_rms", "embedding_length_per_layer_input"),
}
_UNUSED_IF_1 = {"attention.causal", "expert_weights_scale", "logit_scale", "residual_scale"}
# What no tensor proves, and where a class's default in transformers may be another model's.
_NEEDED = {
    *("context_length", "attention.head_count", "attention.layer_norm_epsilon", "attention.layer_norm_rms_epsilon"),
    *("attention.sliding_window", "expert_used_count"),
}
_FLOATS = {"rope.freq_base", "attention.layer_norm_epsilon", "attention.layer_norm_rms_epsilon"}
_POSITIVE = {*_NEEDED, "block_count", "embedding_length", "rope.freq_base"}
_DEFAULT_THETA = 10000.0  # where the file states no rope.freq_base
_PER_LAYER = {"attention.head_count", "attention.head_count_kv", "feed_forward_length"}
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


def must_be_copied(headers: list[GgufHeader]) -> bool:
    """Whether transformers cannot read the file as it stands: it is in parts, or `copy` would change its metadata."""
    metadata = headers[0].metadata
    renamed = metadata.get("general.name") == "mistral"  # at which transformers takes another architecture
    return len(headers) > 1 or renamed or bool(_numbers_of_lists(headers[0]))


def copy(headers: list[GgufHeader], target: Path) -> None:
    """Write the parts with these headers as one file `target`, of no name, with a number for a list of equal ones.

    ConfigError if they are not the parts of one file.
    """
    with target.open("wb") as out:
        _write_header(headers, out)
        for header in headers:
            out.write(bytes(-out.tell() % header.alignment))
            with header.file.open("rb") as part:
                part.seek(header.data_start)
                shutil.copyfileobj(part, out, 1 << 24)


def outline(headers: list[GgufHeader], target: Path) -> None:
    """Write what `copy` would, with no values but the rope's factors: the rest is a hole that takes no space.

    ConfigError if the headers are not those of the parts of one file.
    """
    with target.open("wb") as out:
        _write_header(headers, out)
        start = _padded(out.tell(), headers[0].alignment)
        for header in headers:
            for offset, factors in rope_factors(header).items():
                out.seek(start + offset)
                out.write(struct.pack(f"<{len(factors)}f", *factors))
            start += _padded(header.file.stat().st_size - header.data_start, header.alignment)
        out.truncate(start)


def rope_factors(header: GgufHeader) -> dict[int, list[float]]:
    """The rope's factors that this part holds in float32, by their offset, in bytes from the start of the data."""
    return {
        tensor.offset: header.floats(tensor)
        for tensor in header.tensors
        if tensor.name == _ROPE_FACTORS and tensor.kind == _FLOAT32
    }


def check_parts(headers: list[GgufHeader]) -> None:
    """Raise ConfigError unless these are the headers of all parts of one file, in order."""
    first = headers[0]
    if len(headers) == 1:
        refuse_part(first)
    for no, header in enumerate(headers if len(headers) > 1 else ()):
        said = (header.metadata.get("split.no"), header.metadata.get("split.count"))
        if said != (no, len(headers)) or header.alignment != first.alignment:
            raise ConfigError(
                f"model file {header.name} says that it is part {said[0]} of {said[1]}, counted from 0, "
                f"not {no} of {len(headers)}; fetch all parts of one model"
            )
    count = sum(len(header.tensors) for header in headers)
    if (promised := first.metadata.get("split.tensors.count", count)) != count:
        raise ConfigError(f"the parts of {first.name} hold {count} tensors of {promised}; fetch them again")
    names = Counter(tensor.name for header in headers for tensor in header.tensors)
    if doubled := [name for name, times in names.items() if times > 1]:
        raise ConfigError(f"the parts of {first.name} hold tensor {doubled[0]!r} twice; fetch them again")


def _write_header(headers: list[GgufHeader], out: BinaryIO) -> None:
    """Write the header of the file that these parts make up."""
    check_parts(headers)
    first = headers[0]
    count = sum(len(header.tensors) for header in headers)
    numbers = _numbers_of_lists(first)
    dropped = {"general.name", *numbers}
    entries = [entry for key, entry in first.entries if not key.startswith("split.") and key not in dropped]
    entries += [_entry(key, number) for key, number in numbers.items()]
    out.write(MAGIC + struct.pack("<IQQ", first.version, count, len(entries)) + b"".join(entries))
    base = 0
    for header in headers:
        for tensor in header.tensors:
            name, shape = tensor.name.encode(), tensor.shape[::-1]
            out.write(struct.pack("<Q", len(name)) + name + struct.pack(f"<I{len(shape)}Q", len(shape), *shape))
            out.write(struct.pack("<IQ", tensor.kind, base + tensor.offset))
        base += _padded(header.file.stat().st_size - header.data_start, first.alignment)


def _numbers_of_lists(header: GgufHeader) -> dict[str, int]:
    """The keys that state the same number for each layer, with it. ConfigError if layers differ."""
    found = {}
    for key in _PER_LAYER:
        field = f"{header.architecture}.{key}"
        values = header.metadata.get(field)
        if not isinstance(values, list) or header.architecture == "lfm2":  # of which transformers reads the list
            continue
        if not all(type(value) is int and value == values[0] >= 0 for value in values) or not values:
            raise ConfigError(
                f"model file {header.name} states {field} as {values}: layers that differ are not supported; "
                f"{_ALTERNATIVE}"
            )
        found[field] = values[0]
    return found


def _entry(key: str, number: int) -> bytes:
    name = key.encode()
    return struct.pack("<Q", len(name)) + name + struct.pack("<IQ", _UINT64, number)


def _padded(size: int, alignment: int) -> int:
    return -(-size // alignment) * alignment


def refuse_part(header: GgufHeader) -> None:
    """Raise ConfigError for one part of several under a name that does not say so."""
    no, count = header.stated("split.no", int), header.stated("split.count", int) or 1
    if count > 1:
        part = "one part" if no is None else f"part {no + 1}"
        raise ConfigError(
            f"model file {header.name} is {part} of {count}; "
            f"name the parts NAME-00001-of-{count:05d}.gguf and so on, in one folder"
        )


def check_types(header: GgufHeader) -> None:
    """Raise ConfigError for metadata that transformers reads, but that hold something else than they should."""
    from transformers.integrations import GGUF_CONFIG_MAPPING

    read = {key for table in GGUF_CONFIG_MAPPING.values() for key in table}
    header.stated("general.name", str)
    for key in read:
        field = f"{header.architecture}.{key}"
        if key in _PER_LAYER and isinstance(header.metadata.get(field), list):
            continue
        if key in _FLOATS:
            header.stated(field, float)
        elif (header.stated(field, int) or 0) < 0:
            raise ConfigError(f"model file {header.name} states {field} as {header.metadata[field]}; fetch another")
    blocks = header.stated(f"{header.architecture}.block_count", int) or 0
    if blocks > len(header.tensors):
        raise ConfigError(
            f"model file {header.name} holds {len(header.tensors)} tensors for {blocks} layers; fetch it again"
        )


def complete_config(header: GgufHeader, config: Any) -> None:
    """Put into transformers' `config` what its loader overlooks. ConfigError for what has no place there."""
    kind = header.architecture
    table = _table(kind, config)
    for field in header.metadata:
        if field.partition(".")[0] in _other_architectures(kind):  # transformers would take it for the file's own
            raise ConfigError(f"model file {header.name} states {field}, but is of architecture {kind}; {_ALTERNATIVE}")
        key = field.removeprefix(f"{kind}.")
        if key in table:
            if key in _POSITIVE and not (header.stated(field, float) or 0) > 0:
                raise ConfigError(
                    f"model file {header.name} states {field} as {header.metadata[field]}, it must be above 0; "
                    f"fetch another"
                )
        elif key != field and key not in _HARMLESS and not key.startswith(_ROPE_SCALING):
            _place(header, field, key, config)
    for key in sorted(_NEEDED):
        if table.get(key) and f"{kind}.{key}" not in header.metadata:
            raise ConfigError(f"model file {header.name} does not state {kind}.{key}; fetch another")
    for name in ("bos", "eos"):  # else those of the class, which belong to another vocabulary
        setattr(config, f"{name}_token_id", header.stated(f"tokenizer.ggml.{name}_token_id", int))
    if kind in ("gemma2", "gemma3"):
        wide = (kind, config.num_hidden_layers) in _SCALED_BY_WIDTH
        config.query_pre_attn_scalar = config.hidden_size // config.num_attention_heads if wide else config.head_dim
    _check_rope(header, kind, table, config)
    _scale_rope(header, kind, config)


def _place(header: GgufHeader, field: str, key: str, config: Any) -> None:
    """Put what the file states under `key` into its place, if it has one and is used at all."""
    value = header.metadata[field]
    name, kind = _OVERLOOKED.get(key, ("", str))
    if hasattr(config, name):
        found = header.stated(field, kind)
        setattr(config, name, found if found or kind is bool else None)  # 0 turns a softcap or a window off
        layers = getattr(config, "layer_types", None)
        if name != "sliding_window" or not found or not layers or "sliding_attention" in layers:
            return
    unused = (value == 0 and key in _UNUSED_IF_0) or (value == 1 and key in _UNUSED_IF_1)
    if not unused:
        raise ConfigError(
            f"model file {header.name} states {field}{_short(value)}, which its conversion does not know; "
            f"{_ALTERNATIVE}"
        )


def _short(value: Any) -> str:
    return f" as {value}" if isinstance(value, int | float) else ""


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
        f"model file {header.name} holds {stored} values, {sum(weights.values())} of them have a place in the model"
        f"{f'; {names[0]!r} has none' if names else ''}; {_ALTERNATIVE}"
    )


def _table(kind: str, config: Any) -> Mapping[str, Any]:
    """The metadata that transformers reads of this architecture; empty for those that it reads key by key."""
    from transformers.integrations import GGUF_CONFIG_MAPPING

    found: Mapping[str, Any] = GGUF_CONFIG_MAPPING.get(kind) or GGUF_CONFIG_MAPPING.get(config.model_type) or {}
    return found


def _other_architectures(kind: str) -> set[str]:
    from transformers.integrations import GGUF_CONFIG_MAPPING

    return set(GGUF_CONFIG_MAPPING) - {kind, "general", "tokenizer"}


def _rotary_width(config: Any) -> int:
    """How many values of a head the model rotates."""
    head = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    share = _flat_rope(config).get("partial_rotary_factor") or getattr(config, "partial_rotary_factor", None) or 1
    return int(head * share)


def _check_rope(header: GgufHeader, kind: str, table: Mapping[str, Any], config: Any) -> None:
    if not (rope := _flat_rope(config)):
        return
    width, rotated = header.stated(f"{kind}.rope.dimension_count", int), _rotary_width(config)
    if width and width != rotated:
        raise ConfigError(f"model file {header.name} rotates {width} values of a head, not {rotated}; {_ALTERNATIVE}")
    base = f"{kind}.rope.freq_base"
    if table.get("rope.freq_base") and base not in header.metadata and rope.get("rope_theta") != _DEFAULT_THETA:
        raise ConfigError(f"model file {header.name} does not state {base}; fetch another")


def _scale_rope(header: GgufHeader, kind: str, config: Any) -> None:
    prefix = f"{kind}.{_ROPE_SCALING}"
    scaling = header.stated(f"{prefix}type", str)
    factor = header.stated(f"{prefix}factor", float) or 1.0
    factors = next((tensor for tensor in header.tensors if tensor.name == _ROPE_FACTORS), None)
    if scaling not in (None, "none", "linear") or (scaling is None and factor != 1.0):
        raise _unsupported_rope(header, f"rope scaling {scaling!r}")
    if scaling == "linear" and (factors is not None or factor <= 0):
        raise _unsupported_rope(header, f"linear rope scaling by {factor} with factors of its own or not above 0")
    factor = factor if scaling == "linear" else 1.0
    for field, value in header.metadata.items():
        key = field.removeprefix(prefix)
        if key == field or key in ("type", "factor", "finetuned"):
            continue
        if key == "attn_factor":
            neutral = value == 1
        else:
            trained = header.stated(field, int) if key == "original_context_length" else None
            whole = header.stated(f"{kind}.context_length", int)
            by_tensor = factors is not None and trained == _LLAMA3_ROPE["original_max_position_embeddings"]
            neutral = by_tensor or (trained is not None and trained * factor == whole)
        if not neutral:
            raise _unsupported_rope(header, f"{field}{_short(value)}")
    if scaling == "linear" and factor != 1.0:
        _flat_rope(config).update(rope_type="linear", factor=factor)
    elif factors is not None:
        if factors.kind != _FLOAT32 or 2 * factors.values != _rotary_width(config):
            raise _unsupported_rope(header, f"rope factors of another type or number ({_ROPE_FACTORS})")
        _flat_rope(config).update(_llama3_rope(header.name, header.floats(factors), config))


def _unsupported_rope(header: GgufHeader, what: str) -> ConfigError:
    return ConfigError(f"model file {header.name} has {what}, which is not supported; {_ALTERNATIVE}")


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

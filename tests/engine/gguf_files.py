"""A tiny llama as a GGUF file, in one part or several, as llama.cpp's converter would write it.

It knows the format's names of tensors and metadata, and nothing of how such a file is read here.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np

from engine import tiny_models

Value = np.ndarray[Any, Any] | tuple[np.ndarray[Any, Any], gguf.GGMLQuantizationType]
HEADS, KV_HEADS = 4, 2
NAMES = {
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "model.layers": "blk",
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
}


def tensors() -> dict[str, np.ndarray[Any, Any]]:
    """The tensors of the tiny llama under their names in a GGUF file; queries and keys in its order of rows."""
    found = {}
    for name, tensor in tiny_models.build("llama").state_dict().items():
        for ours, theirs in NAMES.items():
            name = name.replace(ours, theirs)
        array = tensor.numpy()
        if heads := {"attn_q": HEADS, "attn_k": KV_HEADS}.get(name.split(".")[-2]):
            array = array.reshape(heads, 2, -1, array.shape[1]).swapaxes(1, 2).reshape(array.shape)
        found[name] = np.ascontiguousarray(array)
    return found


def write(
    file: Path,
    values: Mapping[str, Value] | None = None,
    *,
    kind: str = "llama",
    per_part: int = 0,
    theta: float = 10000.0,
    keys: Mapping[str, Any] | None = None,
    **metadata: Any,
) -> Path:
    """Write `values`, by default the tiny llama, to `file`; with `per_part` tensors in each of several files.

    A value is an array, or the bytes of rows of blocks and their type.

    `metadata`: further keys of the architecture, two underscores for each point. `keys` come last, under their whole
    names, in place of what stands there; None leaves a key out, a value of gguf.GGUFValue has its type.
    """
    writer = gguf.GGUFWriter(file, kind, split_max_tensors=per_part)
    writer.add_name("tiny")
    writer.add_context_length(tiny_models.CONTEXT)
    writer.add_embedding_length(32)
    writer.add_block_count(2)
    writer.add_feed_forward_length(64)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_rope_dimension_count(8)
    writer.add_rope_freq_base(theta)
    writer.add_layer_norm_rms_eps(1e-6)
    for key, value in metadata.items():
        key = f"{kind}.{key.replace('__', '.')}"
        writer.add_string(key, value) if isinstance(value, str) else writer.add_float32(key, value)
    _add_tokenizer(writer)
    _put(writer, keys or {})
    for name, value in (tensors() if values is None else values).items():
        array, blocks = value if isinstance(value, tuple) else (value, None)
        writer.add_tensor(name, array, raw_dtype=blocks)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return file


def _put(writer: gguf.GGUFWriter, keys: Mapping[str, Any]) -> None:
    for key, value in keys.items():
        writer.kv_data[0].pop(key, None)
        match value:
            case None:
                pass
            case gguf.GGUFValue():
                writer.kv_data[0][key] = value
            case list():
                writer.add_array(key, value)
            case _:
                writer.add_key_value(key, value, gguf.GGUFValueType.get_type(value))


def _add_tokenizer(writer: gguf.GGUFWriter) -> None:
    model = json.loads(tiny_models.tokenizer().backend_tokenizer.to_str())["model"]
    special = [gguf.TokenType.CONTROL] * 3
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list(sorted(model["vocab"], key=model["vocab"].get))
    writer.add_token_types([*special, *[gguf.TokenType.NORMAL] * (len(model["vocab"]) - 3)])
    writer.add_token_merges([" ".join(pair) for pair in model["merges"]])
    writer.add_pad_token_id(tiny_models.PAD)
    writer.add_bos_token_id(tiny_models.BOS)
    writer.add_eos_token_id(tiny_models.EOS)
    writer.add_add_bos_token(False)

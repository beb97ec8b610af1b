"""A tiny random model of any causal LM type that transformers knows, shrunk from the type's default configuration.

Names of sizes are the same in most configurations; HINTS holds what a type needs besides. Sliding windows are shorter
than the prompts of the sweep. It knows transformers, and nothing of the engine.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import transformers
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from engine import tiny_models

TYPES = tuple(sorted(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES))
WIDTH = 32
MAX_LAYERS = 8

_SIZES: dict[int, str] = {
    WIDTH: "hidden_size d_model n_embd embed_dim dim model_dim embedding_size word_embed_proj_dim",
    64: "intermediate_size ffn_dim d_ff d_inner n_inner decoder_ffn_dim encoder_ffn_dim ffn_hidden_size dim_ff "
    "moe_intermediate_size shared_expert_intermediate_size shared_intermediate_size dff expert_ffn_hidden_size "
    "moe_shared_expert_intermediate_size intermediate_size_mlp feed_forward_size dense_intermediate_size",
    4: "num_attention_heads n_head n_heads num_heads decoder_attention_heads encoder_attention_heads "
    "num_experts num_local_experts n_routed_experts moe_num_experts linear_num_value_heads "
    "swa_num_attention_heads",
    2: "num_key_value_heads num_experts_per_tok num_experts_per_token moe_topk moe_k top_k_experts "
    "linear_num_key_heads num_kv_heads swa_num_key_value_heads",
    1: "n_group topk_group n_shared_experts num_shared_experts n_shared_expert first_k_dense_replace",
    16: "head_dim d_kv global_head_dim qk_head_dim q_lora_rank kv_lora_rank linear_key_head_dim linear_value_head_dim "
    "swa_head_dim hidden_size_per_layer_input expert_dim",
    8: "qk_rope_head_dim qk_nope_head_dim v_head_dim",
    tiny_models.CONTEXT: "max_position_embeddings n_positions n_ctx max_sequence_length max_seq_len",
    tiny_models.WINDOW: "sliding_window window_size attention_window sliding_window_size",
}
_SIZE_OF = {name: size for size, names in _SIZES.items() for name in names.split()}
_LAYERS = ("num_hidden_layers", "n_layer", "n_layers", "num_layers", "decoder_layers", "encoder_layers")
_TOKENS = {"pad_token_id": tiny_models.PAD, "bos_token_id": tiny_models.BOS, "eos_token_id": tiny_models.EOS}
_PER_LAYER = ("layer_types", "mlp_layer_types", "layers_block_type")

_MIXED = ["sliding_attention", "full_attention"]
_ROPE = {"rope_type": "default", "rope_theta": 10000.0}
_ROPES = dict.fromkeys(_MIXED, _ROPE)
_INDEXER = {
    "indexer_n_heads": 2,
    "indexer_kv_heads": 1,
    "indexer_head_dim": 16,
    "indexer_budget": 16,
    "indexer_compress_ratio": 4,
    "ngram_vocab_size_base": 100,
    "split_ngram_parts": 1,
}
_SHARED_KV = {"num_hidden_layers": 4, "layer_types": 2 * _MIXED, "num_kv_shared_layers": 2}
HINTS: dict[str, dict[str, Any]] = {
    "bamba": {"mamba_n_heads": 4, "mamba_d_head": 16},
    "blt": {"encoder_hash_byte_group_vocab": 100},
    "codegen": {"rotary_dim": 4},
    "cohere_compass_text": {"rope_parameters": _ROPES},
    "dbrx": {"attn_config": {"rope_theta": 10000.0, "kv_n_heads": 2, "clip_qkv": 8.0}},
    "deepseek_v2": {"num_experts_per_tok": 2},
    "dory": {
        "num_hidden_layers": 6,
        "layer_types": 3 * _MIXED,
        "n_input_layers": 2,
        "n_recurrent_layers": 2,
        "n_output_layers": 2,
    },
    "dots1": {"n_routed_experts": 4, "num_experts_per_tok": 2, "n_shared_experts": 1},
    "dots3_note": {"vision_config": {"adapter_in_dim": WIDTH, "adapter_out_dim": WIDTH}},
    "gemma3n_text": {
        **_SHARED_KV,
        "intermediate_size": 64,
        "activation_sparsity_pattern": [0.5, 0.0, 0.5, 0.0],
        "vocab_size_per_layer_input": tiny_models.vocab_size(),
    },
    "gpt_neo": {"attention_types": [[["global", "local"], 1]]},
    "gptj": {"rotary_dim": 4},
    "granitemoehybrid": {"mamba_n_heads": 4, "mamba_d_head": 16},
    "helium": {"head_dim": 8},
    "hunyuan_v1_dense": {"head_dim": 16},
    "hunyuan_v1_moe": {"head_dim": 16},
    "laguna": {"num_attention_heads_per_layer": [4, 2]},
    "lfm2": {"layer_types": ["conv", "full_attention"]},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"]},
    "minimax_m3_vl_text": {"layer_types": ["full_attention", "minimax_m3_sparse"]},
    "ministral": {"head_dim": 16},
    "mllama": {"text_config": {"num_hidden_layers": 3, "cross_attention_layers": [1]}},
    "nemotron": {"num_key_value_heads": 2},
    "phimoe": {"sliding_window": None},
    "qwen2_moe": {"use_sliding_window": False, "layer_types": None},
    "qwen4_exp": {"text_config": _INDEXER},
    "qwen4_exp_text": _INDEXER,
    "reformer": {"is_decoder": True, "axial_pos_embds": False, "attention_head_size": 8, "feed_forward_size": 64},
    "xlm": {"emb_dim": WIDTH},
}


def configuration(model_type: str) -> Any:
    """A small configuration of `model_type`."""
    return _shrunk(CONFIG_MAPPING[model_type], HINTS.get(model_type, {}))


def _shrunk(kind: Any, hints: Mapping[str, Any]) -> Any:
    default = kind()
    given = default.to_dict()
    values: dict[str, Any] = {
        name: small for name, value in given.items() if (small := _small(name, value)) is not None
    }
    if "kv_lora_rank" in given:  # keys and values are made for every head
        values |= {"num_key_value_heads": 4, "head_dim": 8}
    depth = next((given[name] for name in _LAYERS if isinstance(given.get(name), int)), 0)
    layers = _layers(given)
    values |= {name: layers for name in _LAYERS if isinstance(given.get(name), int)}
    values |= {name: v[:layers] for name, v in given.items() if depth > 3 and isinstance(v, list) and len(v) == depth}
    if "use_sliding_window" in given:
        values["use_sliding_window"] = True
    if "sliding_window" in given and set(given.get("layer_types") or ()) == {"full_attention"}:
        values["layer_types"] = _MIXED
    parts = getattr(kind, "sub_configs", None) or {}
    for name in parts:
        chosen = getattr(default, name, None)
        if chosen is not None:
            values[name] = _shrunk(type(chosen), hints.get(name, {}))
    return kind(**{**values, **{name: value for name, value in hints.items() if name not in parts}})


def _small(name: str, value: Any) -> Any:
    """The value to give to `name` in place of its default; None to leave it."""
    if name in _TOKENS:
        return _TOKENS[name]
    if name == "vocab_size":
        return tiny_models.vocab_size()
    if name == "sliding_window":
        return tiny_models.WINDOW
    if name == "tie_word_embeddings":
        return False
    if name in ("initializer_range", "init_std") and isinstance(value, float):
        return 0.3  # far from 0.02, so that logits depend on the whole context
    if name in _SIZE_OF and isinstance(value, int) and value > 0:
        return min(value, _SIZE_OF[name])
    return None


def _layers(given: Mapping[str, Any]) -> int:
    """As many layers as show every kind of layer once, two at least."""
    kinds_by_name = [given.get(name) for name in _PER_LAYER]
    firsts = [1 + max(map(kinds.index, set(kinds))) for kinds in kinds_by_name if isinstance(kinds, list) and kinds]
    return min(max([2, *firsts]), MAX_LAYERS)


def build(model_type: str, dtype: torch.dtype = torch.float32, seed: int = 0) -> Any:
    """A random model of `model_type`, for evaluation; the same bits every time."""
    torch.manual_seed(seed)
    config = configuration(model_type)
    model = transformers.AutoModelForCausalLM.from_config(config)
    with torch.no_grad():  # zeros and ones, as biases, norms and sinks begin, would hide what they are for
        for parameter in model.parameters():
            if parameter.dim() == 1:
                parameter.add_(torch.randn_like(parameter) * 0.1)
    return model.eval().requires_grad_(requires_grad=False).to(dtype)

"""Tiny random models of many families and a byte-level tokenizer, made in memory; the same bits every time.

Sliding windows are shorter than the tests' sequences. It knows transformers, and nothing of the engine.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import torch
import transformers
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

PAD, BOS, EOS = 0, 1, 2
CONTEXT = 256
WINDOW = 12
_CORPUS = "the quick brown fox jumps over the lazy dog and then the other one. the end, they said; then there was rain."
_SHAPE = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": CONTEXT,
    "initializer_range": 0.3,  # far from transformers' 0.02, so that logits depend on the whole context
    "pad_token_id": PAD,
    "bos_token_id": BOS,
    "eos_token_id": EOS,
    "tie_word_embeddings": False,  # tied, a random model only repeats its last token
}
_WIDE = {"head_dim": 16, "sliding_window": WINDOW}

FAMILIES: dict[str, Callable[[int], Any]] = {
    "llama": lambda v: transformers.LlamaConfig(vocab_size=v, **_SHAPE),
    "qwen2": lambda v: transformers.Qwen2Config(vocab_size=v, **_SHAPE),
    "qwen3": lambda v: transformers.Qwen3Config(vocab_size=v, head_dim=16, **_SHAPE),
    "mistral": lambda v: transformers.MistralConfig(vocab_size=v, sliding_window=WINDOW, **_SHAPE),
    "gemma2": lambda v: transformers.Gemma2Config(
        vocab_size=v,
        query_pre_attn_scalar=16,
        attn_logit_softcapping=5.0,
        final_logit_softcapping=10.0,
        **_WIDE,
        **_SHAPE,
    ),
    "gemma3": lambda v: transformers.Gemma3TextConfig(
        vocab_size=v,
        query_pre_attn_scalar=16,
        layer_types=["sliding_attention", "full_attention"],
        **_WIDE,
        **_SHAPE,
    ),
    "phi3": lambda v: transformers.Phi3Config(vocab_size=v, **_SHAPE),
    "gpt2": lambda v: transformers.GPT2Config(
        vocab_size=v,
        n_embd=32,
        n_layer=2,
        n_head=4,
        n_positions=CONTEXT,
        initializer_range=0.3,
        tie_word_embeddings=False,
        bos_token_id=BOS,
        eos_token_id=EOS,
    ),
    "gpt_oss": lambda v: transformers.GptOssConfig(
        vocab_size=v,
        num_local_experts=4,
        num_experts_per_tok=2,
        layer_types=["sliding_attention", "full_attention"],
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
        **_WIDE,
        **_SHAPE,
    ),
}


@cache
def tokenizer() -> Any:
    """Byte-level BPE with a few merges: special tokens 0 to 2, then every byte, then pieces of English."""
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=300,
        special_tokens=["<pad>", "<s>", "</s>"],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    bpe.train_from_iterator([_CORPUS], trainer)
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=bpe, pad_token="<pad>", bos_token="<s>", eos_token="</s>"
    )


def vocab_size() -> int:
    """Number of tokens of the tokenizer and of every model here."""
    return len(tokenizer())


def build(family: str, dtype: torch.dtype = torch.float32, seed: int = 0) -> Any:
    """Return a random model of `family`, for evaluation."""
    torch.manual_seed(seed)
    model = transformers.AutoModelForCausalLM.from_config(FAMILIES[family](vocab_size()))
    with torch.no_grad():  # zeros and ones, as biases, norms and sinks begin, would hide what they are for
        for parameter in model.parameters():
            if parameter.dim() == 1:
                parameter.add_(torch.randn_like(parameter) * 0.1)
    return model.eval().requires_grad_(requires_grad=False).to(dtype)


def prompt(length: int, seed: int = 0) -> list[int]:
    """Return `length` token ids, none of them special."""
    generator = torch.Generator().manual_seed(1000 * seed + length)
    ids: list[int] = torch.randint(3, vocab_size(), (length,), generator=generator).tolist()
    return ids

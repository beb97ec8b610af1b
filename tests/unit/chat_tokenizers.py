"""Tokenizers with chat templates, made in memory: byte-level BPE, as most models have, and SentencePiece's Unigram."""

from __future__ import annotations

from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers
from transformers import PreTrainedTokenizerFast

CHATML = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n<think>{% endif %}"
)
PARTS = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n"
    "{% for part in message.content %}{% if part.type == 'text' %}{{ part.text }}{% endif %}{% endfor %}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
TOOLS = (
    "{% if tools %}<tools>{{ tools | tojson }}</tools>{% endif %}{% for message in messages %}"
    "<|im_start|>{{ message.role }}\n{{ message.content }}{% for call in message.tool_calls or [] %}"
    "<tool_call>{{ call.function.name }} {{ call.function.arguments ARGUMENTS }}</tool_call>{% endfor %}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
SPECIAL = ["<|im_start|>", "<|im_end|>", "<|endoftext|>"]
ADDED = ["<think>", "</think>", "<tool_call>", "user", "<unused7>"]


def byte_level(template: Any = CHATML) -> Any:
    """GPT-2's kind, with two merges; special tokens, and added ones that are not special."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {token: number for number, token in enumerate([*alphabet, "<|", "|>"])}
    tokenizer = Tokenizer(models.BPE(vocabulary, [("<", "|"), ("|", ">")]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return _wrapped(tokenizer, template)


def unigram(template: Any = CHATML) -> Any:
    """SentencePiece's kind: a space before every text, and a vocabulary that holds its control tokens as words."""
    letters = sorted({*"abcdefghijklmnopqrstuvwxyzABCHTW<>|/_▁\n .,!"})
    pieces = [("<unk>", 0.0), *((letter, -9.0) for letter in letters), *((token, -1.0) for token in SPECIAL)]
    tokenizer = Tokenizer(models.Unigram(pieces, unk_id=0))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Metaspace()
    return _wrapped(tokenizer, template)


def lowering(template: Any = CHATML) -> Any:
    """One that finds its special tokens in lower-cased text."""
    tokenizer = byte_level(template)
    backend = tokenizer.backend_tokenizer
    backend.normalizer = normalizers.Lowercase()
    wrapped = PreTrainedTokenizerFast(tokenizer_object=backend)
    wrapped.add_tokens([AddedToken("<|stop|>", special=True, normalized=True)])
    wrapped.chat_template = template
    return wrapped


def _wrapped(tokenizer: Tokenizer, template: Any) -> Any:
    tokenizer.add_tokens([AddedToken(token, special=True, normalized=False) for token in SPECIAL])
    tokenizer.add_tokens([AddedToken(token, special=False, normalized=False) for token in ADDED])
    wrapped = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|im_end|>", bos_token="<|endoftext|>")
    wrapped.chat_template = template
    return wrapped

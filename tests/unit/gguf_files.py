"""GGUF files that hold a small vocabulary and no weights."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import gguf
from tokenizers import pre_tokenizers

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, BYTE = 1, 2, 3, 4, 6
BYTES = sorted(pre_tokenizers.ByteLevel.alphabet())
MERGES = ("h e", "l l", "he ll", "hell o", "1 2", "Ġ hello")


def write(file: Path, keys: Mapping[str, Any]) -> Path:
    """Write `keys`, those of the tokenizer without their prefix; None leaves a key out."""
    writer = gguf.GGUFWriter(file, "llama")
    for key, value in keys.items():
        name = key if "." in key else f"tokenizer.ggml.{key}"
        match value:
            case bool():
                writer.add_bool(name, value)
            case int():
                writer.add_uint32(name, value)
            case str():
                writer.add_string(name, value)
            case None:
                pass
            case _:
                writer.add_array(name, list(value))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    return file


def byte_level(file: Path, added: Sequence[tuple[str, int]] = (), **keys: Any) -> Path:
    """Write byte-level BPE: a token for each byte, those that MERGES make, and then `added` with their types."""
    tokens = [*BYTES, *(merge.replace(" ", "") for merge in MERGES)]
    types = [NORMAL] * len(tokens) + [kind for _, kind in added]
    tokens += [text for text, _ in added]
    whole = {"model": "gpt2", "pre": "gpt-2", "tokens": tokens, "token_type": types, "merges": MERGES, **keys}
    return write(file, whole)


def sentencepiece(file: Path, added: Sequence[tuple[str, int]] = (), **keys: Any) -> Path:
    """Write sentencepiece BPE: unknown, BOS, EOS, a token for each byte, some words by score, and then `added`."""
    words = ["▁h", "he", "ll", "▁he", "llo", "▁hello", *"▁helo1", "\n"]
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *words, *(text for text, _ in added)]
    types = [UNKNOWN, CONTROL, CONTROL, *[BYTE] * 256, *[NORMAL] * len(words), *(kind for _, kind in added)]
    scores = [0.0] * 259 + [-float(rank) for rank in range(len(words))] + [-1000.0] * len(added)
    return write(file, {"model": "llama", "tokens": tokens, "scores": scores, "token_type": types, **keys})

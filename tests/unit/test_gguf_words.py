"""Every pre-tokenizer that a GGUF file may name cuts text as llama.cpp's of that name, which gguf_words.json records.

Where llama.cpp only approximates the expression of the model's own tokenizer, the words of the latter stand here.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from tokenizers import decoders

from llm_tools.gguf_pretokenizers import PRE_TOKENIZERS
from llm_tools.gguf_tokenizer import pre_tokenizer

RECORDED = json.loads(Path(__file__).with_name("gguf_words.json").read_text())
BY_NAME = {name: family["words"] for family in RECORDED for name in family["names"].split()}


def words(name: str, text: str) -> list[str]:
    decode = decoders.ByteLevel().decode
    return [decode([word]) for word, _ in pre_tokenizer(name).pre_tokenize_str(text)]


@pytest.mark.parametrize("name", sorted(PRE_TOKENIZERS))
def test_text_is_cut_as_llama_cpp_cuts_it(name: str) -> None:
    for expected in BY_NAME[name]:
        assert words(name, "".join(expected)) == expected


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        # llama.cpp has one class for all letters beyond ASCII, and its letters have no marks
        ("tekken", ["Привет", ",", " Мир", "!", " ÉCOLE", " École"]),
        ("tekken", ["cafe\u0301", " नमस्ते"]),
        ("gpt-4o", ["ÉCOLE's", " École", " नमस्ते"]),
        ("youtu", ["foo", "Bar", " HTTPServer"]),
        # it has one class for all white space beyond ASCII
        ("deepseek-llm", ["a", "\xa0b", "\u3000", "c", "\u2003", "d"]),
        ("deepseek-coder", ["a", "\xa0b", "\u3000", "c", "\u2003", "d"]),
    ],
)
def test_text_is_cut_as_the_models_own_tokenizer_cuts_it(name: str, expected: list[str]) -> None:
    assert words(name, "".join(expected)) == expected


@pytest.mark.parametrize("name", [family["names"].split()[0] for family in RECORDED])
def test_long_runs_are_cut_in_the_time_of_their_length(name: str) -> None:
    text = "1" * 100_000 + "a" + " " * 100_000 + "ก"  # with its square, this takes minutes
    assert "".join(words(name, text)) == text

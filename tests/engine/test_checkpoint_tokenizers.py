"""A tokenizer is served as its files have it, or refused in one line."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from engine import checkpoints, tiny_models
from llm_engine.config import ConfigError
from llm_engine.loading.tokenizer import load_tokenizer

TEXT = "the quick  brown\n fox, 2024 jumps </s> over"
VOCAB = tiny_models.vocab_size()


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    tiny_models.tokenizer().save_pretrained(tmp_path)
    return tmp_path


def newer(folder: Path, part: str) -> None:
    checkpoints.edit(folder / "tokenizer.json", **{part: {"type": "Telepathic"}})


def of_class(folder: Path, name: str, **more: Any) -> None:
    checkpoints.edit(folder / "tokenizer_config.json", tokenizer_class=name, **more)


REFUSED: dict[str, tuple[str, Callable[[Path], Any]]] = {
    "absent": ("has no tokenizer", lambda d: (d / "tokenizer.json").unlink()),
    "cut": ("cannot be read as JSON", lambda d: (d / "tokenizer.json").write_text('{"version": "1.0", "mod')),
    "of a newer format": ("of a newer format", lambda d: newer(d, "pre_tokenizer")),
    "of a newer model": ("of a newer format", lambda d: newer(d, "model")),
    "of a newer version": ("of a newer format", lambda d: checkpoints.edit(d / "tokenizer.json", version="9.0")),
    "settings cut": ("tokenizer_config.json cannot be read", lambda d: (d / "tokenizer_config.json").write_text("{")),
    "sentencepiece that is none": (
        "cannot be converted to a fast one",
        lambda d: ((d / "tokenizer.json").rename(d / "tokenizer.model"), of_class(d, "LlamaTokenizer")),
    ),
    "slow only": (
        "is not a fast one",
        lambda d: (
            (d / "tokenizer.json").unlink(),
            (d / "vocab.json").write_text('{"a": 0, "<unk>": 1}'),
            (d / "merges.txt").write_text("#version\n"),
            of_class(d, "CTRLTokenizer"),
        ),
    ),
}


@pytest.mark.parametrize("fault", REFUSED)
def test_a_tokenizer_that_cannot_be_used_is_refused_in_one_line(folder: Path, fault: str) -> None:
    told, spoil = REFUSED[fault]
    spoil(folder)
    with pytest.raises(ConfigError, match=told) as refused:
        load_tokenizer(folder, VOCAB)
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize("name", ["LlamaTokenizer", "GemmaTokenizer", "BertTokenizer", "CTRLTokenizer", "OwnTokenizer"])
def test_the_file_decides_how_text_is_cut_whatever_class_is_named(folder: Path, name: str) -> None:
    of_class(folder, name)
    wanted = tiny_models.tokenizer()
    found = load_tokenizer(folder, VOCAB)
    assert found(TEXT)["input_ids"] == wanted(TEXT)["input_ids"]
    assert found.eos_token_id == tiny_models.EOS


def test_a_tokenizer_with_tokens_that_the_model_lacks_is_refused(folder: Path) -> None:
    with pytest.raises(ConfigError, match=f"has token {VOCAB - 1} .*its model knows only {VOCAB - 1}"):
        load_tokenizer(folder, VOCAB - 1)


def added(folder: Path, text: str) -> None:
    content = json.loads((folder / "tokenizer.json").read_text())
    token = {"content": text, "special": True, "lstrip": False, "rstrip": False, "normalized": False}
    checkpoints.edit(
        folder / "tokenizer.json",
        added_tokens=[*content["added_tokens"], {"id": VOCAB, "single_word": False, **token}],
    )


def test_an_added_token_that_the_model_lacks_is_refused_only_if_answers_or_the_template_need_it(folder: Path) -> None:
    added(folder, "<|im_end|>")
    assert len(load_tokenizer(folder, VOCAB)) == VOCAB + 1
    (folder / "chat_template.jinja").write_text("{{ messages[0].content }}<|im_end|>")
    with pytest.raises(ConfigError, match=r"'<\|im_end\|>'"):
        load_tokenizer(folder, VOCAB)
    (folder / "chat_template.jinja").unlink()
    checkpoints.edit(folder / "tokenizer_config.json", eos_token="<|im_end|>")
    with pytest.raises(ConfigError, match=r"'<\|im_end\|>'"):
        load_tokenizer(folder, VOCAB)

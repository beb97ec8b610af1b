"""Converted weights are made once, and again if what is in the cache was damaged."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from llm_engine.config import ConfigError
from llm_tools import weights


def made(folder: Path) -> Path:
    folder.mkdir(parents=True)
    for name in ("config.json", "tokenizer.json"):
        (folder / name).write_text(json.dumps({"model_type": "llama"}))
    save_file({"a": torch.ones(64, 64)}, folder / "model.safetensors")
    return folder


@pytest.fixture
def conversions(monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    done: list[Path] = []

    def convert(_file: Path, target: Path, _progress: weights.Progress) -> None:
        done.append(made(target))

    monkeypatch.setattr(weights, "_convert", convert)
    return done


def test_a_conversion_is_made_once(tmp_path: Path, conversions: list[Path]) -> None:
    file = tmp_path / "m.gguf"
    file.write_bytes(b"GGUF")
    first = weights.prepare(str(file), tmp_path / "cache")
    assert weights.prepare(str(file), tmp_path / "cache") == first
    assert conversions == [first]


@pytest.mark.parametrize("name", ["model.safetensors", "config.json", "tokenizer.json"])
def test_a_damaged_conversion_is_made_again(tmp_path: Path, conversions: list[Path], name: str) -> None:
    file = tmp_path / "m.gguf"
    file.write_bytes(b"GGUF")
    damaged = weights.prepare(str(file), tmp_path / "cache") / name
    damaged.write_bytes(damaged.read_bytes()[:-9])
    assert weights.prepare(str(file), tmp_path / "cache") == damaged.parent
    assert conversions == [damaged.parent, damaged.parent]


def test_a_truncated_file_of_a_users_folder_is_named_and_left_alone(tmp_path: Path) -> None:
    file = made(tmp_path / "mine") / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-9])
    with pytest.raises(ConfigError, match=r"model\.safetensors is truncated"):
        weights.prepare(str(file.parent), tmp_path / "cache")
    assert file.exists()


@pytest.mark.parametrize(
    ("spec", "words"),
    [
        ("/nowhere/x.gguf", "does not exist"),
        ("package://nosuch/x.gguf", "is not installed"),
        ("package://../x", "must have the form"),
        ("/nowhere", "neither a folder nor a .gguf file"),
    ],
)
def test_weights_that_are_missing_are_one_line_with_the_cure(tmp_path: Path, spec: str, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        weights.prepare(spec, tmp_path)

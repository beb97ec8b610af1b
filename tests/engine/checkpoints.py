"""Tiny model folders as a user would have them, and ways to spoil them. It knows files, and nothing of the engine."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from engine import tiny_models

WEIGHTS = "model.safetensors"


def save(folder: Path, family: str = "llama", **config: Any) -> Path:
    """Write a tiny model with its tokenizer to `folder`, as save_pretrained does."""
    model = tiny_models.build(family)
    for name, value in config.items():
        setattr(model.config, name, value)
    model.save_pretrained(folder)
    tiny_models.tokenizer().save_pretrained(folder)
    return folder


def rewrite(folder: Path, change: Callable[[dict[str, torch.Tensor]], dict[str, torch.Tensor]]) -> None:
    """Replace the folder's tensors by what `change` makes of them."""
    save_file(change(load_file(folder / WEIGHTS)), folder / WEIGHTS, metadata={"format": "pt"})


def edit(file: Path, **values: Any) -> None:
    """Set values of a JSON object in a file; None removes one."""
    content = {**json.loads(file.read_text()), **values} if file.exists() else values
    file.write_text(json.dumps({name: value for name, value in content.items() if value is not None}))

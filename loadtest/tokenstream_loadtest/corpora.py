"""Reads the texts of workloads: prompts, corpora and the scripts of conversations.

A file is looked for beside the workload's own, then among the shipped ones. Errors are ValueErrors of one line with the
file and the line. It does not know what is asked with them.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import TypeVar

from .data_files import SHIPPED, read_text

Item = TypeVar("Item")
Script = tuple[str, ...]  # user, assistant, user, ..., user


def read_prompts(folder: str, name: str) -> list[str]:
    """Prompts: the lines of a .txt file, or the "prompt" of the objects, one a line, of a .jsonl file."""
    path = _locate(folder, name)
    if path.suffix == ".jsonl":
        prompts = [_field(path, number, line, "prompt") for number, line in _lines(path)]
    else:
        prompts = [line for _, line in _lines(path)]
    for number, prompt in enumerate(prompts, 1):
        if not isinstance(prompt, str) or not prompt.strip():
            raise ValueError(f'{path}: prompt {number}: "prompt" should be text, not {prompt!r}')
    return [str(prompt) for prompt in _some(path, prompts, "prompts")]


def read_scripts(folder: str, name: str) -> list[Script]:
    """Conversations: the "turns" of the objects, one a line: user, assistant and so on, a user first and last."""
    path = _locate(folder, name)
    scripts: list[Script] = []
    for number, line in _lines(path):
        turns = _field(path, number, line, "turns")
        if not isinstance(turns, list) or len(turns) % 2 == 0 or not all(isinstance(turn, str) for turn in turns):
            raise ValueError(
                f'{path}, line {number}: "turns" should be an odd number of texts: user, assistant, ..., user'
            )
        scripts.append(tuple(turns))
    return _some(path, scripts, "conversations")


def read_texts(folder: str, name: str) -> list[str]:
    """The texts of a corpus: what stands between lines that begin with "# ", which are titles and left out."""
    path = _locate(folder, name)
    texts: list[list[str]] = [[]]
    for line in read_text(path).splitlines():
        if line.startswith("# "):
            texts.append([])
        else:
            texts[-1].append(line)
    return _some(path, [text for lines in texts if (text := "\n".join(lines).strip())], "texts")


def read_paragraphs(folder: str, name: str) -> list[str]:
    """The paragraphs of a corpus, parted by empty lines, each on one line."""
    return [
        " ".join(paragraph.split())
        for text in read_texts(folder, name)
        for paragraph in text.split("\n\n")
        if paragraph.strip()
    ]


def _locate(folder: str, name: str) -> Path:
    path = Path(folder) / name
    shipped = SHIPPED / "workloads" / name
    return shipped if not path.exists() and shipped.exists() else path


def _lines(path: Path) -> Iterator[tuple[int, str]]:
    # not `splitlines`, which also parts at characters that JSON strings may hold
    return ((number, line) for number, line in enumerate(read_text(path).split("\n"), 1) if line.strip())


def _field(path: Path, number: int, line: str, field: str) -> object:
    try:
        return json.loads(line)[field]
    except (ValueError, KeyError, TypeError):
        raise ValueError(f'{path}, line {number}: should be a JSON object with "{field}"') from None


def _some(path: Path, items: list[Item], what: str) -> list[Item]:
    if not items:
        raise ValueError(f"{path} holds no {what}")
    return items

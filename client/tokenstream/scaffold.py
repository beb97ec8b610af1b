"""A new model in a repository: a copy of an existing model's folder under another name, with its config.pbtxt edited.

The text is edited in place, so comments and everything a deployer has tuned stay as they are.
It does not know what a model specification means: the loader reads it.
"""

from __future__ import annotations

import re
import shutil
import tempfile
from pathlib import Path

from .errors import TokenstreamError

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,63}")
_NAME_LINE = re.compile(r'^name\s*:\s*"[^"\n]*"', re.MULTILINE)
_MODEL_VALUE = re.compile(
    r'^(?P<before>[^#\n]*\bkey\s*:\s*"model"\s*,?\s*value\s*:?\s*\{\s*string_value\s*:\s*")'
    r'(?:[^"\\\n]|\\.)*(?P<after>")',
    re.MULTILINE,
)


class ScaffoldError(TokenstreamError):
    """A new model cannot be made: one line, with the cure."""


def new_model(name: str, spec: str, source: Path, repository: Path) -> Path:
    """Copy the model folder `source` to `repository`/`name`, loading `spec`; return the new folder.

    The folder appears whole or not at all. Raises ScaffoldError for a bad name, an existing one, a missing source, a
    config.pbtxt without the parameter `model`, or a repository that cannot be written.
    """
    if not _NAME.fullmatch(name):
        raise ScaffoldError(f"{name!r} is no model name: use up to 64 letters, digits and _ . - (not first)")
    if (path := _path(spec)) is not None and not path.exists():
        raise ScaffoldError(f"there is no model at {path}: give a folder, a .gguf file, package:// or a hub id")
    target = repository / name
    if target.exists():
        raise ScaffoldError(f"{target} exists already: choose another name, or remove it first")
    if not (source / "config.pbtxt").is_file():
        raise ScaffoldError(f"there is no model to copy at {source}: give --repository a folder that holds one")
    config = edit_config((source / "config.pbtxt").read_text(encoding="utf-8"), name, _absolute(spec))
    try:
        repository.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=repository, prefix=".new-") as building:
            copy = Path(building) / name
            shutil.copytree(source, copy, ignore=shutil.ignore_patterns("__pycache__", "*.pyc"))
            (copy / "config.pbtxt").write_text(config, encoding="utf-8")
            copy.rename(target)
    except OSError as error:
        raise ScaffoldError(f"cannot write {target}: {error.strerror}. Choose a folder with --repository") from error
    return target


def edit_config(text: str, name: str, spec: str) -> str:
    """`text` of a config.pbtxt with its top-level `name` and its parameter `model` replaced, and nothing else."""
    if any(ord(letter) < 32 for letter in spec) or not spec:
        raise ScaffoldError(f"{spec!r} is no model: give a hub id, a folder or a package:// path")
    quoted = spec.replace("\\", "\\\\").replace('"', '\\"')
    found = list(_MODEL_VALUE.finditer(text))
    if len(found) != 1:
        raise ScaffoldError(f"config.pbtxt must hold the parameter `model` once, found {len(found)} of it")
    match = found[0]
    text = f"{text[: match.start()]}{match['before']}{quoted}{match['after']}{text[match.end() :]}"
    edited, count = _NAME_LINE.subn(f'name: "{name}"', text, count=1)
    return edited if count else f'name: "{name}"\n{text}'


def _absolute(spec: str) -> str:
    """A path is written out whole, for the server starts elsewhere; a hub id or an URI stays as it is."""
    path = _path(spec)
    return spec if path is None else str(path)


def _path(spec: str) -> Path | None:
    """What `spec` names on this disk, if it is a path at all; `${...}` is known only where the server runs."""
    return Path(spec).expanduser().resolve() if spec.startswith((".", "~", "/")) and "${" not in spec else None

"""Reads a model repository from outside: which models it holds, and which weights each one names.

It knows Triton's folder layout and config.pbtxt, and nothing of how a model works.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from google.protobuf import text_format  # type: ignore[import-untyped]
from tritonclient.grpc import model_config_pb2

from .diagnosis import SetupError

_VARIABLE = re.compile(r"\$\{([A-Za-z_][A-Za-z0-9_]*)(?::-([^}]*))?\}")


@dataclass(frozen=True, slots=True)
class Model:
    """One model: its name, the version folder that is served, and its parameter `model` ("" if it has none)."""

    name: str
    version: Path
    spec: str


def find_repository() -> Path:
    """The repository served by default: the clone's `model_repository`, else the copy inside this package.

    Raises SetupError when there is neither.
    """
    here = Path(__file__).resolve().parent
    for folder in (here.parent.parent / "model_repository", here / "model_repository"):
        if folder.is_dir():
            return folder
    raise SetupError(f"no model repository was installed with {here}: name one with --repository")


def read_repository(
    folder: Path, names: Sequence[str] | None = None, env: Mapping[str, str] = os.environ
) -> tuple[Model, ...]:
    """The models in `folder`, all or those in `names`, with `${VAR:-default}` replaced from `env` in their `spec`.

    Raises SetupError when the folder, a named model or a readable config.pbtxt is missing.
    """
    if not folder.is_dir():
        raise SetupError(f"there is no model repository at {folder}: name one with --repository")
    present = sorted(path.parent.name for path in folder.glob("*/config.pbtxt"))
    if not present:
        raise SetupError(f"{folder} holds no model (no */config.pbtxt): name a model repository with --repository")
    if missing := sorted(set(names or ()) - set(present)):
        raise SetupError(f"{folder} holds no model {', '.join(missing)}: it holds {', '.join(present)}")
    return tuple(_read_model(folder / name, env) for name in names or present)


def _read_model(folder: Path, env: Mapping[str, str]) -> Model:
    config = model_config_pb2.ModelConfig()
    try:
        text_format.Parse((folder / "config.pbtxt").read_text(encoding="utf-8"), config)
    except (text_format.ParseError, UnicodeDecodeError, OSError) as error:
        raise SetupError(f"{folder / 'config.pbtxt'} cannot be read: {error}") from error
    versions = [path for path in folder.iterdir() if path.name.isdecimal() and path.is_dir()]
    if not versions:
        raise SetupError(f"model {folder.name!r} in {folder.parent} has no version folder such as {folder.name}/1")
    spec = config.parameters["model"].string_value if "model" in config.parameters else ""
    return Model(folder.name, max(versions, key=lambda path: int(path.name)), _expand(spec, env))


def _expand(text: str, env: Mapping[str, str]) -> str:
    """Replace `${VAR:-default}` as the model does; one without value or default stays, for the model to complain of."""
    return _VARIABLE.sub(lambda found: env.get(found[1]) or (found[0] if found[2] is None else found[2]), text)

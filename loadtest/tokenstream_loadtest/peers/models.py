"""The weights that every server gets: one folder in bfloat16, a copy of it that knows no end, and a BF16 GGUF file.

The folder is what `tokenstream` itself serves by default. Servers that cannot be told to ignore the end of a text get
the copy, so that all answers are equally long. It does not know how the servers load them.
"""

from __future__ import annotations

import importlib.util
import json
import os
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tokenstream.diagnosis import SetupError
from tokenstream.engine_child import run_module
from tokenstream.repository import find_repository, read_repository

from .environments import Environment, Say, Unavailable

_PACKAGE = "package://"


@dataclass(frozen=True, slots=True)
class Models:
    """`folder`: config, tokenizer and bfloat16 safetensors. `endless`: the same without an end-of-text id.

    `source`: what the deployer named, from which a GGUF file can be had.
    """

    folder: Path
    endless: Path
    source: str

    @property
    def name(self) -> str:
        """The folder's name: the file it came from, and its digest."""
        return self.folder.name


def make_models(into: Path, say: Say) -> Models:
    """The default model's folders, made now if they are not there. SetupError if that cannot be."""
    served = read_repository(find_repository(), ["llm"])[0]
    found: list[str] = []

    def hear(message: Mapping[str, Any]) -> None:
        if "path" in message:
            found.append(str(message["path"]))

    def report(stage: str, done: int, total: int | None) -> None:
        say(stage if total is None else f"{stage}: {done} of {total}")

    with tempfile.TemporaryDirectory() as scratch:
        log = Path(scratch) / "weights.log"
        failure = run_module(
            served.version, "llm_tools.weights", [served.spec], env=os.environ, log=log, report=report, hear=hear
        )
    if failure is not None or not found:
        raise SetupError(f"the default model cannot be prepared: {failure or 'its folder was not named'}")
    folder = Path(found[-1])
    return Models(folder, without_end(folder, into / f"{folder.name}-endless"), served.spec)


def without_end(folder: Path, copy: Path) -> Path:
    """A copy of the model that never ends a text: links to its files, and two of them without `eos_token_id`."""
    copy.mkdir(parents=True, exist_ok=True)
    for file in folder.iterdir():
        link = copy / file.name
        link.unlink(missing_ok=True)
        if file.name in ("config.json", "generation_config.json"):
            values = {**json.loads(file.read_text()), "eos_token_id": None}
            link.write_text(json.dumps(values, indent=2) + "\n")
        else:
            link.symlink_to(file)
    return copy


def gguf_in_bf16(source: str, into: Path, llama: Environment) -> Path:
    """The weights as a BF16 GGUF file, converted by llama.cpp's own program. Unavailable if `source` is no GGUF."""
    packed = _gguf(source)
    target = into / f"{packed.stem}-bf16.gguf"
    if not target.is_file():
        half = target.with_suffix(".part")
        program = str(llama.folder / "build/bin/llama-quantize")
        jobs = str(len(os.sched_getaffinity(0)))
        llama.run(program, "--allow-requantize", str(packed), str(half), "BF16", jobs, seconds=600)
        half.rename(target)
    return target


def _gguf(source: str) -> Path:
    name, _, file = source.removeprefix(_PACKAGE).partition("/")
    if source.startswith(_PACKAGE):
        found = importlib.util.find_spec(name)  # does not import the package
        folders = found.submodule_search_locations if found else None
        path = Path(next(iter(folders))) / file if folders else Path(file)
    else:
        path = Path(source)
    if path.suffix != ".gguf" or not path.is_file():
        raise Unavailable(f"llama.cpp needs a GGUF file, and the default model {source!r} is none")
    return path

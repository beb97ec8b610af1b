"""Files that a compiler makes once, and that are whole or made again: run, sealed with a digest, put in place at once.

It does not know what is compiled, nor which compilers there are.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from .shared import locked, new_folder

_SECONDS = 600
_DIGEST_BYTES = 16


class NativeUnavailableError(RuntimeError):
    """The kernels cannot be built or run here, or not for this model. The message is one line: why, and the cure."""


def make_once(target: Path, compile_: Callable[[Path], None]) -> None:
    """Have `compile_` write the file, unless `target` is there and whole. Raises NativeUnavailableError.

    Processes that make the same at once do so one after the other, and the others find the first one's.
    """
    if is_whole(target):
        return
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with locked(target.parent / ".lock"):
            if not is_whole(target):
                _make(target, compile_)
    except OSError as error:
        raise NativeUnavailableError(f"cannot write to {target.parent}: {error.strerror or error}") from None


def is_whole(file: Path) -> bool:
    """Whether a file ends with the digest of what is before: loading a truncated one would kill the process."""
    try:
        content = file.read_bytes()
    except OSError:
        return False
    return _digest(content[:-_DIGEST_BYTES]) == content[-_DIGEST_BYTES:]


def run(command: Sequence[str], environ: Mapping[str, str] = os.environ) -> str:
    """Return what a compiler's `command` prints; NativeUnavailableError if it fails."""
    try:
        done = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=_SECONDS, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise NativeUnavailableError(f"the C++ compiler {command[0]} did not run: {error}") from None
    if done.returncode:
        lines = done.stderr.splitlines() or ["no message"]
        reason = next((line for line in lines if "error" in line), lines[0])
        raise NativeUnavailableError(f"the C++ compiler {command[0]} failed: {reason}")
    return done.stdout


def _make(target: Path, compile_: Callable[[Path], None]) -> None:
    """Compile beside the target, seal and rename, so that nobody ever loads half a file. The caller holds the lock."""
    for stale in target.parent.glob(".build-*"):  # a killed build left it
        shutil.rmtree(stale, ignore_errors=True)
    folder = new_folder(target.parent, ".build-")
    try:
        made = folder / target.name
        compile_(made)
        content = made.read_bytes()
        made.write_bytes(content + _digest(content))  # the loader does not mind what follows the last section
        made.replace(target)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _digest(content: bytes) -> bytes:
    return hashlib.blake2b(content, digest_size=_DIGEST_BYTES).digest()

"""Files that are made once in a folder which several users read, and locks around their making.

Modes follow the umask, as those of any new file do, even where a library made them private. It does not know what the
files hold.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import secrets
from collections.abc import Iterator
from pathlib import Path


def new_folder(parent: Path, prefix: str) -> Path:
    """Make a folder with a name of its own; unlike those of `tempfile`, as open to others as the umask allows."""
    folder = parent / f"{prefix}{secrets.token_hex(6)}"
    folder.mkdir()
    return folder


def open_to_others(folder: Path) -> None:
    """Give every file and folder inside `folder` the mode that the umask gives a new one; the folder's is kept."""
    probe = new_folder(folder, ".mode-")
    (probe / "file").touch()
    for_folders, for_files = probe.stat().st_mode, (probe / "file").stat().st_mode
    (probe / "file").unlink()
    probe.rmdir()
    for path in folder.rglob("*"):
        path.chmod(for_folders if path.is_dir() else for_files)


@contextlib.contextmanager
def locked(file: Path) -> Iterator[None]:
    """Hold the lock of `file` among processes. A file that another user made is locked too, if it can be read."""
    try:
        descriptor = os.open(file, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
    except PermissionError:
        descriptor = os.open(file, os.O_RDONLY | os.O_CLOEXEC)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)

"""Programs of Debian packages for tests, unpacked into the cache folder: no root, nothing installed, nothing started.

A program that cannot be had is an error that says why; a test that needs it fails. It does not know what they do.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
from pathlib import Path

from tokenstream.server import cache_root

APT_SECONDS = 300


class ToolMissing(Exception):
    """A program cannot be had here; the message is the reason."""


def debian_program(package: str, program: str) -> Path:
    """The path of a package's program, such as `usr/bin/prometheus`; downloaded with apt-get on first use.

    The package alone is unpacked, not what it depends on. Raises ToolMissing with the reason.
    """
    folder = cache_root() / "tools" / package
    if not (folder / program).is_file():
        _unpack(package, folder)
    if not (folder / program).is_file():
        raise ToolMissing(f"package {package} holds no {program}")
    return folder / program


def _unpack(package: str, folder: Path) -> None:
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder.parent, prefix=f".{package}-") as scratch:
        new = Path(scratch)
        _download(package, new)
        (archive,) = new.glob("*.deb")
        _run("dpkg", "-x", archive.name, "unpacked", cwd=new)
        if folder.exists():  # of another version, perhaps, that had no such program
            shutil.rmtree(folder)
        (new / "unpacked").rename(folder)


def _download(package: str, into: Path) -> None:
    try:
        _run("apt-get", "download", package, cwd=into)
    except ToolMissing:
        if os.geteuid() != 0:  # only root may fetch the lists of packages
            raise
        _run("apt-get", "update", cwd=into)
        _run("apt-get", "download", package, cwd=into)


def _run(*command: str, cwd: Path) -> None:
    try:
        done = subprocess.run(command, cwd=cwd, capture_output=True, text=True, timeout=APT_SECONDS, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise ToolMissing(f"{' '.join(command)}: {error}") from error
    if done.returncode != 0:
        raise ToolMissing(f"{' '.join(command)}: {(done.stderr or done.stdout).strip()}")

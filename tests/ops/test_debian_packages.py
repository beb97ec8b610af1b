"""Packages come from Debian's own client with all that they need, once, whole or not at all.

They are fetched from a small archive of packages made here, by the real apt-get and dpkg, with nothing but files read.
"""

from __future__ import annotations

import hashlib
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

import debian_packages
from debian_packages import ToolMissing, debian_program

PIE = {
    "pie": "Depends: filling (>= 1), dpkg, libc6\nRecommends: plate",
    "filling": "Pre-Depends: crust | brick",
    "crust": "",
    "plate": "",
    "fork": "Depends: handle",
    "handle": "",
    "libc6": "",  # far newer than the machine's
}


def package(name: str, fields: str, archive: Path) -> str:
    """Build one package that holds `usr/bin/NAME`; its stanza in the archive's list."""
    tree = archive / name
    (tree / "DEBIAN").mkdir(parents=True)
    (tree / "usr" / "bin").mkdir(parents=True)
    (tree / "usr" / "bin" / name).write_text(f"{name}\n")
    control = f"Package: {name}\nVersion: 1:2.0~rc1\nArchitecture: all\nMaintainer: none\nDescription: {name}\n{fields}"
    (tree / "DEBIAN" / "control").write_text(control.strip() + "\n")
    built = archive / f"{name}.deb"
    subprocess.run(["dpkg-deb", "--build", "--root-owner-group", tree, built], check=True, capture_output=True)
    digest = hashlib.sha256(built.read_bytes()).hexdigest()
    return f"{control.strip()}\nFilename: ./{name}.deb\nSize: {built.stat().st_size}\nSHA256: {digest}\n"


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache, on a machine that has no lists of packages yet and whose one source is the small archive."""
    archive = tmp_path / "archive"
    archive.mkdir()
    (archive / "Packages").write_text("\n".join(package(name, fields, archive) for name, fields in PIE.items()))
    (tmp_path / "sources").write_text(f"deb [trusted=yes] copy:{archive} ./\n")
    (tmp_path / "lists" / "partial").mkdir(parents=True)
    settings = {"Etc::sourcelist": "sources", "Etc::sourceparts": "none", "State::lists": "lists/"}
    lines = [f'Dir::{name} "{tmp_path / value}";\n' for name, value in settings.items()]
    (tmp_path / "apt.conf").write_text("".join(lines) + 'Dir::Cache::pkgcache "";\nDir::Cache::srcpkgcache "";\n')
    monkeypatch.setenv("APT_CONFIG", str(tmp_path / "apt.conf"))
    monkeypatch.setenv("TOKENSTREAM_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache" / "tools"


@pytest.fixture
def unplug(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    """From its call on there is no program on the PATH."""
    return lambda: monkeypatch.setenv("PATH", str(tmp_path / "nowhere"))


def test_a_program_comes_with_all_it_depends_on_and_nothing_of_the_machine(cache: Path) -> None:
    program = debian_program("pie", "usr/bin/pie", beside=["fork"])
    assert program.read_text() == "pie\n"
    assert sorted(file.name for file in program.parent.iterdir()) == ["crust", "filling", "fork", "handle", "pie"]
    assert sorted(entry.name for entry in program.parents[2].iterdir()) == ["usr"]


def test_a_program_lies_in_a_folder_of_its_version_and_nothing_else_is_left(cache: Path) -> None:
    program = debian_program("pie", "usr/bin/pie")
    assert [entry.name for entry in cache.iterdir()] == ["pie_1%3a2.0~rc1_all"]
    assert ":" not in str(program)  # it would end a folder's name in a search path


def test_a_program_is_fetched_once(cache: Path, unplug: Callable[[], None]) -> None:
    program = debian_program("pie", "usr/bin/pie")
    unplug()
    assert debian_program("pie", "usr/bin/pie") == program


def test_of_two_runs_that_fetch_at_once_the_slower_uses_what_the_faster_has(
    cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    program = debian_program("pie", "usr/bin/pie")
    (program.parent / "faster").touch()
    monkeypatch.setattr(debian_packages, "_kept", lambda package: None)  # it had not been there when the slower looked
    assert debian_program("pie", "usr/bin/pie") == program
    assert (program.parent / "faster").exists()
    assert len(list(cache.iterdir())) == 1


def test_the_newest_of_several_is_used(cache: Path) -> None:
    first = debian_program("pie", "usr/bin/pie")
    newer = cache / "pie_3_all" / "usr" / "bin" / "pie"
    newer.parent.mkdir(parents=True)
    newer.touch()
    assert debian_program("pie", "usr/bin/pie") == newer != first


def test_a_package_that_nobody_has_is_an_error_of_one_line_that_names_it(cache: Path) -> None:
    with pytest.raises(ToolMissing, match=r"^apt-get: E: Unable to locate package cake\b.*$"):
        debian_program("cake", "usr/bin/cake")
    assert list(cache.iterdir()) == []


def test_a_package_that_came_damaged_is_an_error_and_leaves_nothing(cache: Path, tmp_path: Path) -> None:
    damaged = tmp_path / "archive" / "crust.deb"
    damaged.write_bytes(damaged.read_bytes()[:-1] + b"?")
    with pytest.raises(ToolMissing, match=r"crust"):
        debian_program("pie", "usr/bin/pie")
    assert list(cache.iterdir()) == []


def test_a_machine_without_the_client_is_an_error_that_says_so(cache: Path, unplug: Callable[[], None]) -> None:
    unplug()
    with pytest.raises(ToolMissing, match=r"dpkg-query: .*No such file"):
        debian_program("pie", "usr/bin/pie")
    assert list(cache.iterdir()) == []


def test_a_package_without_the_program_is_an_error_that_names_both(cache: Path) -> None:
    with pytest.raises(ToolMissing, match="package pie holds no usr/bin/cake"):
        debian_program("pie", "usr/bin/cake")

"""Debian packages for tests, with all they depend on, unpacked into the cache folder: no root, nothing installed.

Needs apt-get and dpkg, as every Debian machine has them; what cannot be had is an error that says why, and a test that
needs it fails. It does not know what the packages hold, and it starts nothing of theirs.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from tokenstream.layout import cache_root

COMMAND_SECONDS = 600
# Libraries of the machine's own loader and compiler: a second copy of them beside the machine's does not start.
OF_THE_MACHINE = {"libc6", "libgcc-s1", "libstdc++6"}


class ToolMissing(Exception):
    """A program cannot be had here; the message is the reason, in one line."""


def debian_program(package: str, program: str, beside: Sequence[str] = ()) -> Path:
    """The path of a package's program, such as `usr/bin/prometheus`; fetched on first use, then kept.

    It lies in a folder named after the package's version, a root file system of the package, of those named `beside`
    and of what all of these depend on, without what every Debian machine has: essential packages, libc, libstdc++.
    Scripts that packages run when they are installed have not run. Raises ToolMissing with the reason.
    """
    folder = _kept(package) or _fetched(package, beside)
    if not (folder / program).is_file():
        raise ToolMissing(f"package {package} holds no {program} in {folder}")
    return folder / program


def _tools() -> Path:
    return cache_root() / "tools"


def _kept(package: str) -> Path | None:
    folders = sorted(_tools().glob(f"{package}_*"), key=lambda folder: folder.stat().st_mtime)
    return folders[-1] if folders else None


def _fetched(package: str, beside: Sequence[str]) -> Path:
    """Fetch and unpack into a folder of our own, which then takes its name at once: two runs do not meet."""
    _tools().mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=_tools(), prefix=f".{package}-") as scratch:
        new = Path(scratch)
        archives = _downloaded([package, *beside], new)
        (own,) = (archive for archive in archives if archive.name.startswith(f"{package}_"))
        folder = _tools() / own.stem
        _say(f"unpacking into {folder}")
        for archive in archives:
            _run("dpkg-deb", "--extract", str(archive), str(new / "root"))
        try:
            (new / "root").rename(folder)
        except OSError:
            if not folder.is_dir():  # else another run was faster with the same
                raise
    return folder


def _downloaded(packages: Sequence[str], scratch: Path) -> list[Path]:
    for folder in ("archives", "lists"):
        (scratch / folder / "partial").mkdir(parents=True)
    (scratch / "status").write_text(_every_machine_has())
    apt = [
        *("apt-get", "--quiet", "--assume-yes", "--no-install-recommends"),
        *("-o", f"Dir::State::status={scratch}/status"),
        *("-o", f"Dir::Cache::archives={scratch}/archives/"),
        *("-o", "APT::Sandbox::User="),  # another user could not read the scratch folder
    ]
    try:
        _download(apt, packages)
    except ToolMissing:  # the machine has no lists of packages, or they name what is no longer served
        apt += ["-o", f"Dir::State::lists={scratch}/lists/"]
        _say("fetching Debian's lists of packages")
        updated = _run(*apt, "update", must=False)  # some source of the machine's may fail that nobody needs here
        try:
            _download(apt, packages)
        except ToolMissing as error:
            raise ToolMissing(f"{error} {_complaint(updated)}".strip()) from error
    return sorted((scratch / "archives").glob("*.deb"))


def _download(apt: Sequence[str], packages: Sequence[str]) -> None:
    listed = _run(*apt, "--print-uris", "install", *packages).stdout.splitlines()
    sizes = [int(line.split()[2]) for line in listed if line.startswith("'")]
    _say(f"downloading {packages[0]} and what it depends on: {len(sizes)} packages, {sum(sizes) >> 20} MiB, once")
    _run(*apt, "--download-only", "install", *packages)


def _every_machine_has() -> str:
    """What apt shall take for installed, in its own format: with it, every machine gets the same packages."""
    fields = ("Package", "Architecture", "Version", "Essential", "Priority")
    table = _run(
        "dpkg-query", "--show", "--showformat=" + "\\t".join(f"${{{field}}}" for field in fields) + "\\n"
    ).stdout
    stanzas = []
    for line in table.splitlines():
        package, architecture, version, essential, priority = line.split("\t")
        if essential == "yes" or priority == "required" or package in OF_THE_MACHINE:
            stanzas.append(
                f"Package: {package}\nStatus: install ok installed\nArchitecture: {architecture}\nVersion: {version}\n"
            )
    return "\n".join(stanzas)


def _say(line: str) -> None:
    sys.stderr.write(f"{line}\n")


def _run(*command: str, must: bool = True) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "LC_ALL": "C", "DEBIAN_FRONTEND": "noninteractive"}
    try:
        done = subprocess.run(
            command, env=environment, capture_output=True, text=True, timeout=COMMAND_SECONDS, check=False
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise ToolMissing(f"{command[0]}: {error}") from error
    if must and done.returncode != 0:
        raise ToolMissing(f"{command[0]}: {_complaint(done)}")
    return done


def _complaint(done: subprocess.CompletedProcess[str]) -> str:
    return " ".join(done.stderr.split())

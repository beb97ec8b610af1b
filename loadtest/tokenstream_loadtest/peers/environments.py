"""Python environments for other servers, each a folder of the cache with its own packages, made once by venv and pip.

A finished one is marked with the digest of its pins; an interrupted one is taken up where it stopped, since pip and
CMake pass over what is there. Everything is bounded in time. It does not know what it installs.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import shutil
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from tokenstream.layout import cache_root
from tokenstream.process import Process

Say = Callable[[str], None]

STEP_SECONDS = 3600.0
_POLL_SECONDS = 0.2
_LOADER_FOLDERS = ("/usr/lib/x86_64-linux-gnu", "/lib/x86_64-linux-gnu", "/usr/lib64", "/usr/lib", "/usr/local/lib")


class Unavailable(Exception):  # noqa: N818 (the name says it)
    """A server cannot be had here, or does not run. The message is the reason, in one line; `log` may tell more."""

    def __init__(self, reason: str, log: Path | None = None) -> None:
        super().__init__(" ".join(reason.split()))
        self.log = log


@dataclass(frozen=True, slots=True)
class Recipe:
    """How one server is installed: `pins` are its pip requirements, `steps` makes use of them in the environment."""

    name: str
    version: str
    pins: tuple[str, ...]
    steps: Callable[[Environment], None]

    @property
    def digest(self) -> str:
        """Changes with the pins."""
        return hashlib.sha256("\n".join((self.version, *self.pins)).encode()).hexdigest()


class Environment:
    """One folder with a virtual environment and whatever is built beside it. `say` hears each line of progress."""

    def __init__(self, folder: Path, say: Say) -> None:
        self.folder = folder
        self._say = say

    @property
    def python(self) -> Path:
        """Its interpreter."""
        return self.folder / "bin/python"

    @property
    def log(self) -> Path:
        """What pip and the compilers said."""
        return self.folder / "install.log"

    def variables(self) -> dict[str, str]:
        """This process's environment with the folder's programs in front, and without another's packages."""
        kept = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "VIRTUAL_ENV")}
        return {**kept, "PATH": os.pathsep.join([str(self.folder / "bin"), kept.get("PATH", "")])}

    def create(self) -> None:
        """The virtual environment, made anew if an interrupted one has no pip."""
        self.folder.mkdir(parents=True, exist_ok=True)
        if self.python.exists():
            try:
                self.run(str(self.python), "-m", "pip", "--version", seconds=60)
            except Unavailable:
                shutil.rmtree(self.folder)
                self.folder.mkdir()
            else:
                return
        self.run(sys.executable, "-m", "venv", str(self.folder), seconds=300)

    def pip(self, *arguments: str) -> None:
        """Run pip with `arguments`."""
        self.run(str(self.python), "-m", "pip", "--disable-pip-version-check", "--no-input", *arguments)

    def run(self, *command: str, seconds: float = STEP_SECONDS) -> list[str]:
        """Run one command at low priority and return its lines; Unavailable if it does not succeed in time."""
        deadline = time.monotonic() + seconds
        spoken: list[str] = []
        child = Process(["nice", "-n", "10", *command], {**self.variables(), "LC_ALL": "C.UTF-8"}, self.log, pipe=True)
        try:
            for line in child.lines(_POLL_SECONDS):
                if time.monotonic() > deadline:
                    raise Unavailable(f"{self._short(command)} was not done after {seconds:.0f} s", self.log)
                if line:
                    spoken.append(line.rstrip())
                    self._say(spoken[-1].strip())
                    with self.log.open("a") as log:
                        log.write(f"{spoken[-1]}\n")
            code = child.wait(max(1.0, deadline - time.monotonic()))
        finally:
            child.close(3.0)
        if code != 0:
            raise Unavailable(f"{self._short(command)} failed: {self._last_words()}", self.log)
        return spoken

    def library(self, package: str, name: str) -> Path | None:
        """A shared library of the machine, else out of Debian's `package`, unpacked here; None if it cannot be had."""
        if (there := self.find_library(name)) is not None:
            return there
        downloads = self.folder / "debian"
        downloads.mkdir(exist_ok=True)
        try:
            self.run("env", "-C", str(downloads), "apt-get", "download", package, seconds=120)
            for archive in downloads.glob(f"{package}_*.deb"):
                self.run("dpkg-deb", "--extract", str(archive), str(downloads), seconds=60)
        except Unavailable:
            return None
        return self.find_library(name)

    def find_library(self, name: str) -> Path | None:
        """The same, if it is there by now."""
        folders = (self.unpacked_libraries, *map(Path, _LOADER_FOLDERS))
        return next((folder / name for folder in folders if (folder / name).exists()), None)

    @property
    def unpacked_libraries(self) -> Path:
        """Where `library` unpacks; it need not be there."""
        return self.folder / "debian/usr/lib/x86_64-linux-gnu"

    def _short(self, command: Sequence[str]) -> str:
        text = " ".join(command).replace(str(self.folder), "$ENV")
        return text if len(text) < 120 else f"{text[:117]}..."

    def _last_words(self) -> str:
        said = [line.strip() for line in self.log.read_text(errors="replace").splitlines() if line.strip()]
        errors = [line for line in said[-40:] if "error" in line.lower()]
        return (errors or said or ["it said nothing"])[-1][:300].replace(str(self.folder), "$ENV")


def peers_folder(env: Mapping[str, str] = os.environ) -> Path:
    """Where environments, models and results of comparisons lie: in the cache, outside the repository."""
    return cache_root(env) / "peers"


def installed(recipe: Recipe, say: Say, root: Path | None = None) -> Environment:
    """The environment of a recipe, made now if it is not there. Unavailable with the reason."""
    folder = (root or peers_folder()) / f"{recipe.name}-{recipe.version}"
    environment = Environment(folder, say)
    done = folder / ".done"
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with _alone(folder.with_name(f".{folder.name}.lock"), say):
            if not done.is_file() or done.read_text() != recipe.digest:
                done.unlink(missing_ok=True)
                environment.create()
                recipe.steps(environment)
                done.write_text(recipe.digest)
    except OSError as error:
        raise Unavailable(f"{folder.name} cannot be written: {error.strerror or error}") from error
    return environment


@contextmanager
def _alone(file: Path, say: Say) -> Iterator[None]:
    say("waiting for another install of the same, if there is one")
    with file.open("w") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        yield

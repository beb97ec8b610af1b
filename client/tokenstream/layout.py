"""Finds tritonserver, in the nvidia-pytriton wheel or where $TOKENSTREAM_TRITON says, and what keeps it from running.

`locate` checks the ground (platform, glibc, wheel, numpy, stub, libpython) and raises SetupError with the cure; `link`
lays out a backend folder in which the stub of the running Python lies where the server looks for it.
It imports neither the wheel nor numpy, and does not know what is served.
"""

from __future__ import annotations

import os
import platform
import re
import subprocess
import sys
import sysconfig
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

import platformdirs

from .diagnosis import SetupError, writing_to

WHEEL = "nvidia-pytriton"
INSTALL = "pip install 'tokenstream[server]'"
MIN_GLIBC = (2, 35)
STUB = "triton_python_backend_stub"
_LOADER_FOLDERS = ("/usr/local/lib", "/usr/lib/x86_64-linux-gnu", "/lib/x86_64-linux-gnu", "/usr/lib64", "/lib64")


@dataclass(frozen=True, slots=True)
class Layout:
    """Where things are: the server binary, the wheel's Python backend, the stub, and folders of shared libraries."""

    binary: Path
    backend: Path
    stub: Path
    libraries: tuple[Path, ...]
    help: str  # what the binary says about its flags

    def supports(self, flag: str) -> bool:
        """Whether this binary knows the flag (`--name`)."""
        return re.search(rf"^\s*{re.escape(flag)}\b", self.help, re.MULTILINE) is not None

    def environment(self, base: Mapping[str, str]) -> dict[str, str]:
        """`base` with the library path and the running interpreter in front, by which the stub finds its packages."""
        libraries = [*map(str, self.libraries), *filter(None, [base.get("LD_LIBRARY_PATH")])]
        programs = [str(Path(sys.executable).parent), *filter(None, [base.get("PATH")])]
        return {**base, "LD_LIBRARY_PATH": os.pathsep.join(libraries), "PATH": os.pathsep.join(programs)}

    def link(self, folder: Path) -> Path:
        """Make `folder`/python, the Python backend with its stub, out of links; return `folder`.

        Links cost nothing and never go stale, since every run makes its own. SetupError if it cannot be written.
        """
        target = folder / "python"
        with writing_to(folder):
            target.mkdir(parents=True)
            for source in (*self.backend.glob("*.so"), *self.backend.glob("*.py"), self.stub):
                (target / source.name).symlink_to(source)
        return folder


def cache_root(env: Mapping[str, str] = os.environ) -> Path:
    """The user's folder for weights, compiled artifacts and runs: $TOKENSTREAM_CACHE, else the platform's."""
    chosen = env.get("TOKENSTREAM_CACHE")
    return Path(chosen).expanduser().absolute() if chosen else platformdirs.user_cache_path("tokenstream")


def check_path(path: Path, what: str, cure: str) -> None:
    """Refuse a path from which Triton's Python backend cannot start a model: it writes it into a shell command."""
    if not str(path).isascii() or re.search(r"[\s'\"$`&;|<>()*?\\]", str(path)):
        raise SetupError(
            f"{what} {str(path)!r} has a space or sign that Triton cannot start a Python model from: {cure}"
        )


def locate(env: Mapping[str, str] = os.environ) -> Layout:
    """Find everything a server needs; SetupError naming the first thing that is missing or too old.

    $TOKENSTREAM_TRITON names a Triton installation (NVIDIA's images: /opt/tritonserver); without it, the wheel.
    """
    check_platform()
    folder = env.get("TOKENSTREAM_TRITON")
    layout = _installed(Path(folder), env) if folder else _in_wheel(_wheel())
    _check_numpy()
    if not (Path(sys.executable).parent / "python3").exists():
        raise SetupError(f"there is no python3 beside {sys.executable}: run from a virtual environment, which has one")
    return layout


def _in_wheel(wheel: Path) -> Layout:
    version = f"{sys.version_info.major}.{sys.version_info.minor}"
    stub = wheel / "pytriton/tritonserver/python_backend_stubs" / version / STUB
    if not stub.is_file():
        known = sorted((path.name for path in stub.parent.parent.glob("3.*")), key=lambda name: int(name[2:]))
        raise SetupError(f"{WHEEL} has no stub for Python {version}: use one of Python {', '.join(known)}")
    bundled = wheel / "nvidia_pytriton.libs"
    binary = wheel / "pytriton/tritonserver/bin/tritonserver"
    libraries = (_libpython_folder(stub, bundled), bundled)
    return Layout(binary, wheel / "pytriton/tritonserver/backends/python", stub, libraries, _help(binary, libraries))


def _installed(folder: Path, env: Mapping[str, str]) -> Layout:
    binary, backend = folder / "bin/tritonserver", folder / "backends/python"
    stub = backend / STUB
    for needed in (binary, stub):
        if not os.access(needed, os.X_OK):
            raise SetupError(f"{needed} is missing: let TOKENSTREAM_TRITON name a Triton with the Python backend")
    version = f"{sys.version_info.major}.{sys.version_info.minor}"
    if f"libpython{version}.so".encode() not in stub.read_bytes():
        raise SetupError(f"{stub} is for another Python than {version}: use the one that the image came with")
    inherited = tuple(map(Path, filter(None, env.get("LD_LIBRARY_PATH", "").split(os.pathsep))))
    libraries = (_libpython_folder(stub, folder / "lib"), folder / "lib", *inherited)
    return Layout(binary, backend, stub, libraries, _help(binary, libraries))


def check_platform() -> None:
    """Refuse what the wheel's binary cannot run on: SetupError with what was found."""
    system, machine = sys.platform, platform.machine()
    if system != "linux" or machine not in ("x86_64", "AMD64"):
        cure = "use the container image, or a server elsewhere with --url"
        raise SetupError(f"tritonserver from {WHEEL} needs Linux on x86-64, this is {system} on {machine}: {cure}")
    name, _, release = _libc().partition(" ")
    if name != "glibc" or tuple(int(part) for part in re.findall(r"\d+", release)[:2]) < MIN_GLIBC:
        cure = "use Debian 12, Ubuntu 22.04 or later, or the container image"
        raise SetupError(f"tritonserver from {WHEEL} needs glibc 2.35 or later, this is {name} {release}: {cure}")


def _libc() -> str:
    """For example "glibc 2.36"; another C library has no such name."""
    try:
        return os.confstr("CS_GNU_LIBC_VERSION") or "an unknown C library"
    except (ValueError, OSError):
        return "another C library"


def _wheel() -> Path:
    """The site-packages folder that holds the wheel."""
    try:
        wheel = Path(str(metadata.distribution(WHEEL).locate_file("")))
    except metadata.PackageNotFoundError:
        raise SetupError(
            f"{WHEEL}, which holds tritonserver, is not installed for {sys.executable}: {INSTALL}"
        ) from None
    if not os.access(wheel / "pytriton/tritonserver/bin/tritonserver", os.X_OK):
        raise SetupError(f"{WHEEL} in {wheel} is incomplete: pip install --force-reinstall --no-deps {WHEEL}")
    return wheel


def _check_numpy() -> None:
    try:
        version = metadata.version("numpy")
    except metadata.PackageNotFoundError:
        raise SetupError(f"numpy is not installed for {sys.executable}: {INSTALL}") from None
    if int(version.split(".")[0]) >= 2:
        raise SetupError(f"numpy {version} crashes the Python stub of this Triton: pip install 'numpy<2'")


def _libpython_folder(stub: Path, bundled: Path) -> Path:
    """The folder with the libpython that the stub is linked against; SetupError for a static Python without one."""
    found = re.search(rb"libpython3[\w.-]*\.so[\w.]*", stub.read_bytes())
    if found is None:
        raise SetupError(f"{stub} names no libpython: pip install --force-reinstall --no-deps {WHEEL}")
    name = found[0].decode()
    libdir = sysconfig.get_config_var("LIBDIR") or "/usr/lib"
    multiarch = sysconfig.get_config_var("MULTIARCH") or ""
    folders = (libdir, f"{libdir}/{multiarch}", f"{sys.base_prefix}/lib", bundled, *_LOADER_FOLDERS)
    for folder in map(Path, folders):
        if (folder / name).is_file():
            return folder
    cure = "install the distribution's libpython package, or use a Python built with --enable-shared"
    raise SetupError(f"{name} is missing in {libdir}, and {sys.executable} is a static Python: {cure}")


def _help(binary: Path, libraries: tuple[Path, ...]) -> str:
    """The binary's list of flags, which also proves that it runs; SetupError with its own words if it does not."""
    env = {"LD_LIBRARY_PATH": os.pathsep.join(map(str, libraries))}
    try:
        done = subprocess.run([binary, "--help"], env=env, capture_output=True, text=True, timeout=60, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise SetupError(f"{binary} does not run ({error}): pip install --force-reinstall --no-deps {WHEEL}") from error
    text = done.stdout + done.stderr
    if "Usage: tritonserver" not in text:
        said = text.strip().splitlines()[-1:] or [f"exit code {done.returncode}"]
        raise SetupError(f"{binary} does not run ({said[0]}): pip install --force-reinstall --no-deps {WHEEL}")
    return text

"""What keeps a server from running here is said in one line before anything is started."""

from __future__ import annotations

import errno
import os
import sys
from collections.abc import Callable
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest

from tokenstream import layout
from tokenstream.diagnosis import SetupError, writing_to
from tokenstream.layout import STUB, cache_root, locate

PYTHON = f"{sys.version_info.major}.{sys.version_info.minor}"


class FakeDistribution:
    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def locate_file(self, name: str) -> Path:
        return self.folder / name


@pytest.fixture
def wheel(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A wheel like nvidia-pytriton's whose server only knows --help, installed beside numpy 1.26."""
    site = tmp_path / "site"
    server = site / "pytriton/tritonserver"
    for folder in ("bin", "backends/python", f"python_backend_stubs/{PYTHON}", "python_backend_stubs/3.8"):
        (server / folder).mkdir(parents=True)
    binary = server / "bin/tritonserver"
    binary.write_text("#!/bin/sh\necho 'Usage: tritonserver [options]'\necho '  --id <string>'\nexit 1\n")
    binary.chmod(0o755)
    (server / f"python_backend_stubs/{PYTHON}" / STUB).write_bytes(b"\x7fELF\0libpython3.77.so.1.0\0")
    (server / "backends/python/libtriton_python.so").touch()
    (server / "backends/python/triton_python_backend_utils.py").touch()
    (site / "nvidia_pytriton.libs").mkdir()
    (site / "nvidia_pytriton.libs/libpython3.77.so.1.0").touch()
    monkeypatch.setattr(metadata, "distribution", lambda name: FakeDistribution(site))
    monkeypatch.setattr(metadata, "version", lambda name: "1.26.4")
    return site


def test_everything_is_found_in_a_whole_wheel(wheel: Path) -> None:
    found = locate()
    assert found.binary == wheel / "pytriton/tritonserver/bin/tritonserver"
    assert found.libraries == (wheel / "nvidia_pytriton.libs", wheel / "nvidia_pytriton.libs")
    assert found.supports("--id")
    assert not found.supports("--i")
    assert not found.supports("--grpc-keepalive-permit-without-calls")


def test_the_backend_folder_has_the_stub_and_belongs_to_one_run(wheel: Path, tmp_path: Path) -> None:
    found = locate()
    for run in ("one", "two"):
        folder = found.link(tmp_path / run)
        names = sorted(path.name for path in (folder / "python").iterdir())
        assert names == ["libtriton_python.so", "triton_python_backend_stub", "triton_python_backend_utils.py"]
        assert all(path.exists() for path in (folder / "python").iterdir())


def test_the_interpreter_comes_first_on_the_path_and_given_libraries_last(wheel: Path) -> None:
    env = locate().environment({"PATH": "/bin", "LD_LIBRARY_PATH": "/mine", "OTHER": "1"})
    assert env["PATH"].split(os.pathsep) == [str(Path(sys.executable).parent), "/bin"]
    assert env["LD_LIBRARY_PATH"].split(os.pathsep)[-2:] == [str(wheel / "nvidia_pytriton.libs"), "/mine"]
    assert env["OTHER"] == "1"


@pytest.fixture
def installed(wheel: Path, tmp_path: Path) -> Path:
    """A folder like /opt/tritonserver in NVIDIA's images, made of the wheel's files."""
    folder, server = tmp_path / "opt", wheel / "pytriton/tritonserver"
    (folder / "backends").mkdir(parents=True)
    (server / "bin").rename(folder / "bin")
    (server / "backends/python").rename(folder / "backends/python")
    (wheel / "nvidia_pytriton.libs").rename(folder / "lib")
    name = f"libpython{PYTHON}.so"
    stub = folder / "backends/python" / STUB
    stub.write_bytes(f"\x7fELF\0{name}\0".encode())
    stub.chmod(0o755)
    (folder / "lib" / name).touch()
    return folder


def test_an_installed_triton_that_the_environment_names_is_taken_instead_of_the_wheel(installed: Path) -> None:
    found = locate({"TOKENSTREAM_TRITON": str(installed), "LD_LIBRARY_PATH": "/usr/local/cuda/lib"})
    assert found.binary == installed / "bin/tritonserver"
    assert found.stub == found.backend / STUB == installed / "backends/python" / STUB
    assert found.libraries[-2:] == (installed / "lib", Path("/usr/local/cuda/lib"))


def test_an_installed_triton_without_its_python_backend_is_one_line(installed: Path) -> None:
    (installed / "backends/python" / STUB).unlink()
    with pytest.raises(SetupError, match=f"{STUB} is missing: let TOKENSTREAM_TRITON name a Triton with"):
        locate({"TOKENSTREAM_TRITON": str(installed)})


def test_an_installed_stub_for_another_python_is_one_line(installed: Path) -> None:
    (installed / "backends/python" / STUB).write_bytes(b"\x7fELF\0libpython3.77.so.1.0\0")
    with pytest.raises(SetupError, match=f"is for another Python than {PYTHON}"):
        locate({"TOKENSTREAM_TRITON": str(installed)})


def absent(_: str) -> Any:
    raise metadata.PackageNotFoundError


FAULTS: dict[str, tuple[Callable[[pytest.MonkeyPatch, Path], object], str]] = {
    "machine": (
        lambda patch, site: patch.setattr("platform.machine", lambda: "aarch64"),
        "needs Linux on x86-64, this is linux on aarch64: use the container image",
    ),
    "glibc": (
        lambda patch, site: patch.setattr(layout, "_libc", lambda: "glibc 2.31"),
        "needs glibc 2.35 or later, this is glibc 2.31: use Debian 12",
    ),
    "musl": (
        lambda patch, site: patch.setattr(layout, "_libc", lambda: "another C library"),
        "needs glibc 2.35 or later, this is another C library",
    ),
    "no wheel": (
        lambda patch, site: patch.setattr(metadata, "distribution", absent),
        "is not installed for .*: pip install 'tokenstream\\[server\\]'",
    ),
    "cut wheel": (
        lambda patch, site: (site / "pytriton/tritonserver/bin/tritonserver").unlink(),
        "is incomplete: pip install --force-reinstall",
    ),
    "numpy 2": (
        lambda patch, site: patch.setattr(metadata, "version", lambda name: "2.1.0"),
        "numpy 2.1.0 crashes the Python stub of this Triton: pip install 'numpy<2'",
    ),
    "no numpy": (
        lambda patch, site: patch.setattr(metadata, "version", absent),
        "numpy is not installed",
    ),
    "no stub": (
        lambda patch, site: (site / "pytriton/tritonserver/python_backend_stubs" / PYTHON / STUB).unlink(),
        f"has no stub for Python {PYTHON}: use one of Python 3.8",
    ),
    "static Python": (
        lambda patch, site: (site / "nvidia_pytriton.libs/libpython3.77.so.1.0").unlink(),
        "libpython3.77.so.1.0 is missing in .*: install the distribution's libpython",
    ),
    "binary that does not run": (
        lambda patch, site: (site / "pytriton/tritonserver/bin/tritonserver").write_text(
            "#!/bin/sh\necho 'libz.so.1: cannot open' >&2\nexit 127\n"
        ),
        "does not run \\(libz.so.1: cannot open\\)",
    ),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_each_fault_of_the_ground_is_one_line_with_its_cure(
    fault: str, wheel: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cause, line = FAULTS[fault]
    cause(monkeypatch, wheel)
    with pytest.raises(SetupError, match=line) as caught:
        locate()
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("number", "line"),
    [(errno.ENOSPC, "no space is left for /x"), (errno.EACCES, "cannot write to /x .*Permission denied")],
)
def test_a_folder_that_cannot_be_written_is_one_line_that_names_the_setting(number: int, line: str) -> None:
    with pytest.raises(SetupError, match=f"{line}.*TOKENSTREAM_CACHE"), writing_to(Path("/x")):
        raise OSError(number, os.strerror(number))


def test_the_cache_is_where_the_user_says() -> None:
    assert cache_root({"TOKENSTREAM_CACHE": "/some/where"}) == Path("/some/where")
    assert cache_root({}).name == "tokenstream"


@pytest.mark.parametrize("path", ["/a b/c", "/m\u00f6del", "/it's", "/a$b"])
def test_a_path_that_triton_cannot_start_a_model_from_is_refused_with_the_cure(path: str) -> None:
    layout.check_path(Path("/plain/path-1.0_x"), "the cache folder", "name another")
    with pytest.raises(SetupError, match=r"the cache folder .* name another"):
        layout.check_path(Path(path), "the cache folder", "name another")

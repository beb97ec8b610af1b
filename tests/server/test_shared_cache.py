"""A cache that holds everything serves a user who cannot write there; the run's own files lie elsewhere, private."""

from __future__ import annotations

import ctypes
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from server.supervised import add_model
from waiting import WAIT

_PR_CAPBSET_DROP, _CAP_DAC_OVERRIDE, _CAP_DAC_READ_SEARCH = 24, 1, 2
IMPORTS = """
import json, os, sys
from pathlib import Path
from tokenstream.local_commands import run_folders, starting
from tokenstream.runfolder import RunFolder, run_root
from tokenstream.server import SetupError, TritonServer
CACHE, MINE = Path(os.environ["TOKENSTREAM_CACHE"]), Path(os.environ["MINE"])
"""


def obey_modes() -> None:
    """Before a program starts: take from root the right to pass over the modes of files."""
    if os.geteuid() == 0:
        for capability in (_CAP_DAC_OVERRIDE, _CAP_DAC_READ_SEARCH):
            ctypes.CDLL(None).prctl(_PR_CAPBSET_DROP, capability, 0, 0, 0)


@pytest.fixture
def cache(tmp_path: Path) -> Iterator[Path]:
    """A cache that holds a folder for runs, and that nobody may write to."""
    folder = tmp_path / "cache"
    (folder / "run").mkdir(parents=True)
    for path in (folder / "run", folder):
        path.chmod(0o555)
    yield folder
    for path in (folder, folder / "run"):
        path.chmod(0o755)


@pytest.fixture
def env(tmp_path: Path, cache: Path) -> dict[str, str]:
    """The environment of a user with a cache of another's, folders for temporary files and one of the own choice."""
    for name in ("runtime", "temporary"):
        (tmp_path / name).mkdir(mode=0o700)
    folders = {"XDG_RUNTIME_DIR": tmp_path / "runtime", "TMPDIR": tmp_path / "temporary", "MINE": tmp_path / "mine"}
    path = os.pathsep.join(path for path in sys.path if path)
    named = {name: str(folder) for name, folder in folders.items()}
    return {**os.environ, **named, "TOKENSTREAM_CACHE": str(cache), "PYTHONPATH": path}


def told(code: str, env: dict[str, str]) -> Any:
    """What `code` tells in JSON, run by somebody who must obey the modes of files."""
    probe = subprocess.run(
        [sys.executable, "-c", "import os; open(os.environ['TOKENSTREAM_CACHE'] + '/x', 'w')"],
        env=env,
        preexec_fn=obey_modes,
        capture_output=True,
        check=False,
    )
    if probe.returncode == 0:
        pytest.skip("this machine lets root write whatever the modes say")
    done = subprocess.run(
        [sys.executable, "-c", IMPORTS + code],
        env=env,
        preexec_fn=obey_modes,
        capture_output=True,
        text=True,
        timeout=WAIT,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


RUN = """
run = RunFolder(run_root(CACHE))
print(json.dumps([str(run.path.parent), oct(run.path.parent.stat().st_mode)[-3:]]))
"""


def test_a_run_lies_in_the_private_folder_of_the_session(tmp_path: Path, env: dict[str, str]) -> None:
    private = str(tmp_path / "runtime/tokenstream")
    assert told(RUN, env) == [private, "700"]


def test_without_a_session_it_lies_in_a_private_folder_for_temporary_files(tmp_path: Path, env: dict[str, str]) -> None:
    del env["XDG_RUNTIME_DIR"]
    private = str(tmp_path / f"temporary/tokenstream-{os.geteuid()}")
    assert told(RUN, env) == [private, "700"]


def test_a_folder_that_others_can_enter_is_not_taken_for_a_private_one(tmp_path: Path, env: dict[str, str]) -> None:
    (tmp_path / "runtime/tokenstream").mkdir()
    (tmp_path / "runtime/tokenstream").chmod(0o755)
    assert told(RUN, env)[0] == str(tmp_path / f"temporary/tokenstream-{os.geteuid()}")


def test_a_run_lies_in_the_folder_that_was_named(tmp_path: Path, env: dict[str, str]) -> None:
    code = (
        "run = RunFolder(run_root(CACHE, MINE), files=MINE); print(json.dumps([str(run.path.parent), str(run.files)]))"
    )
    assert told(code, env) == [str(tmp_path / "mine")] * 2


def test_where_no_private_folder_can_be_had_the_cache_is_named(tmp_path: Path, env: dict[str, str]) -> None:
    for folder in (tmp_path / "runtime/tokenstream", tmp_path / f"temporary/tokenstream-{os.geteuid()}"):
        folder.mkdir()
        folder.chmod(0o755)
    code = """
try:
    RunFolder(run_root(CACHE))
except SetupError as error:
    print(json.dumps(str(error)))
"""
    said = told(code, env)
    assert "/cache/run (Permission denied): set TOKENSTREAM_CACHE to a folder that you can write to" in said


@pytest.mark.parametrize("named", [False, True])
def test_a_server_serves_from_a_cache_that_it_cannot_write_to(tmp_path: Path, env: dict[str, str], named: bool) -> None:
    repository = add_model(tmp_path / "repository")
    code = f"""
with TritonServer(Path({str(repository)!r}), run_dir={"MINE" if named else None}) as server:
    files = server.log_path.parent
    found = [str(files), starting(files), os.listdir(CACHE), os.listdir(CACHE / "run")]
print(json.dumps([*found, server.returncode]))
"""
    files, seen, *rest = told(code, env)
    assert rest == [["run"], [], 0]
    assert seen or named
    assert Path(files) == tmp_path / "mine" if named else Path(files).parent == tmp_path / "runtime/tokenstream"

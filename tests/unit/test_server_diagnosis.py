"""A server's log becomes one line with the cure; the samples are what Triton 2.51 writes."""

from __future__ import annotations

import re
import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest

from tokenstream.diagnosis import explain, full_disk, taken_port

PREFIX = "E1130 03:44:54.813756 4792 model_lifecycle.cc:642] "
FATAL = "\nerror: creating server: Internal - failed to load all models\n"


@pytest.mark.parametrize(("service", "port"), [("GRPC", 18001), ("HTTP", 18000), ("Metrics", 18002)])
def test_a_taken_port_is_named(service: str, port: int) -> None:
    log = f"main.cc:257] \"failed to start {service} service: Unavailable - Socket '127.0.0.1:{port}' already in use \""
    assert taken_port(log) == port
    line = explain(log)
    assert line is not None
    assert line.startswith(f"{service} port {port} is taken")


@pytest.mark.parametrize(
    ("said", "line"),
    [
        (
            r"Internal: RuntimeError: boom: fetch them\n\nAt:\n  /r/bad/1/model.py(3): initialize\n" + '"',
            "model 'bad' failed to load: boom: fetch them",
        ),
        (
            r"Internal: TritonModelException: no weights: fetch them\n\nAt:\n  /r/bad/1/model.py(3): initialize\n"
            + '"',
            "model 'bad' failed to load: no weights: fetch them",
        ),
        (
            r"Internal: ModuleNotFoundError: No module named 'torch'\n\nAt:\n  /r/bad/1/model.py(1): <module>\n" + '"',
            "model 'bad' failed to load: ModuleNotFoundError: No module named 'torch'",
        ),
        (
            "Internal: Unable to initialize shared memory key 'k' to requested size (1048576 bytes). Each Python "
            'backend model instance requires at least 1 MB of shared memory. Error: No space left on device"',
            "model 'bad' failed to load: /dev/shm is full",
        ),
        ("Internal: Stub process 'bad_0_0' is not healthy.\"", "model 'bad' failed to load: its process died"),
    ],
)
def test_a_model_that_failed_to_load_gives_its_own_line(said: str, line: str) -> None:
    explained = explain(f"{PREFIX}\"failed to load 'bad' version 1: {said}{FATAL}")
    assert explained is not None
    assert explained.startswith(line)
    assert "\n" not in explained


def test_a_refused_config_names_its_file() -> None:
    log = f"{PREFIX}\"Poll failed for model directory 'm': failed to read text proto from /r/m/config.pbtxt\"{FATAL}"
    assert explain(log) == "model 'm' was refused: failed to read text proto from /r/m/config.pbtxt"


def test_numpy_2_in_the_stub_has_its_cure() -> None:
    log = "A module that was compiled using NumPy 1.x cannot be run in\nNumPy 2.1.0 as it may crash."
    assert "pip install 'numpy<2'" in str(explain(log))


def test_an_unknown_failure_gives_the_servers_last_word_or_nothing() -> None:
    assert explain("error: creating server: Internal - odd") == "the server could not start: Internal - odd"
    assert explain("I1130 all is well") is None
    assert taken_port("I1130 all is well") is None


def test_a_full_disk_is_told_where_the_log_could_not(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert full_disk(tmp_path) is None
    monkeypatch.setattr(shutil, "disk_usage", lambda _folder: SimpleNamespace(free=40960))
    assert re.match(rf"no space left in {tmp_path} \(40 KiB free\): free some", full_disk(tmp_path) or "")

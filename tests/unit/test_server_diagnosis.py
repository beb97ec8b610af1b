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


UNHEALTHY = f"{PREFIX}\"failed to load 'bad' version 1: Internal: Stub process 'bad_0_0' is not healthy.\"{FATAL}"
TABLE = "| bad | 1 | UNAVAILABLE: Internal: Stub process 'bad_0_0' is not healthy: error. |\n"


@pytest.mark.parametrize(
    "words",
    [
        "Fatal Python error: Segmentation fault",
        "terminate called after throwing an instance of 'std::bad_alloc'",
        "stub: error while loading shared libraries: libpython3.11.so.1.0: cannot open shared object file",
    ],
)
def test_a_process_that_said_why_it_died_is_quoted_and_memory_is_not_blamed(words: str) -> None:
    line = str(explain(f"I1130 loading\ntokenstream: converting\n{words}\n{TABLE}{UNHEALTHY}"))
    assert line == f"model 'bad' failed to load: its process died while it loaded; it said: {words}"


def test_memory_is_blamed_when_the_kernel_killed_somebody_for_it() -> None:
    log = f"warning: an error that does not matter\n{UNHEALTHY}"
    assert "the kernel killed a process for lack of memory" in str(explain(log, out_of_memory=True))
    assert "memory" not in str(explain(log))


def test_a_silent_death_is_not_said_to_be_for_lack_of_memory() -> None:
    line = str(explain(f"tokenstream: reading the weights file\n{TABLE}{UNHEALTHY}"))
    assert "it did not say why, as one that is killed for lack of memory would not" in line


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

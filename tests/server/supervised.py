"""A repository whose model needs no weights, a cache of each test's own, and what its server leaves on the machine.

A test module takes the fixtures `cache` and `repository` by naming them at its top.
It does not know who starts the server or how it ends.
"""

from __future__ import annotations

import contextlib
import textwrap
from pathlib import Path

import pytest

SHARED_MEMORY = Path("/dev/shm")
CONFIG = """
name: "{name}"
backend: "python"
model_transaction_policy {{ decoupled: true }}
input [ {{ name: "COUNT" data_type: TYPE_INT32 dims: [ 1 ] }} ]
output [ {{ name: "INDEX" data_type: TYPE_INT32 dims: [ 1 ] }} ]
instance_group [ {{ kind: KIND_CPU count: 1 }} ]
parameters {{ key: "model" value {{ string_value: "${{TINY_SPEC:-tiny}}" }} }}
"""
MODEL = """
import os
import time
import numpy as np
import triton_python_backend_utils as pb_utils

class TritonPythonModel:
    def initialize(self, args):
        {initialize}

    def execute(self, requests):
        for request in requests:
            sender = request.get_response_sender()
            output = pb_utils.Tensor("INDEX", np.array([1], np.int32))
            sender.send(pb_utils.InferenceResponse([output]), flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)
"""


def add_model(repository: Path, name: str = "tiny", initialize: str = "pass", loading: str | None = None) -> Path:
    version = repository / name / "1"
    version.mkdir(parents=True)
    (repository / name / "config.pbtxt").write_text(CONFIG.format(name=name))
    (version / "model.py").write_text(MODEL.format(initialize=initialize))
    if loading is not None:
        (version / "llm_tools").mkdir()
        (version / "llm_tools" / "__init__.py").touch()
        (version / "llm_tools" / "weights.py").write_text(textwrap.dedent(loading))
    return repository


def regions(run_id: str = "") -> list[str]:
    return [path.name for path in SHARED_MEMORY.glob(f"tokenstream_{run_id}*")]


def processes_under(cache: Path) -> list[int]:
    """Living processes that were given this cache, the test's own apart."""
    mark = f"TOKENSTREAM_CACHE={cache}".encode()
    found = []
    for environ in Path("/proc").glob("[0-9]*/environ"):
        with contextlib.suppress(OSError):
            if mark in environ.read_bytes().split(b"\0"):
                found.append(int(environ.parent.name))
    return found


def run_ids(cache: Path) -> list[str]:
    return [path.name for path in (cache / "run").glob("*") if path.is_dir()]


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("TOKENSTREAM_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    return tmp_path / "repository"

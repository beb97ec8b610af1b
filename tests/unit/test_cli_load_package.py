"""`tokenstream load` with the real package of load tests as its child, against a scripted server or none."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

import tokenstream
from tokenstream.commands import app
from unit.scripted_triton import ScriptedTriton, inputs, token

CLIENT = str(Path(tokenstream.__file__).parent.parent)


def run(*arguments: str) -> Result:
    return CliRunner().invoke(app, ["load", *arguments])


def test_without_the_extra_there_is_one_line_that_says_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "hdrh").mkdir()
    (tmp_path / "hdrh" / "__init__.py").write_text("raise ModuleNotFoundError('No module', name='hdrh')\n")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join((str(tmp_path), CLIENT)))
    result = run("quick", "--out", str(tmp_path / "out"))
    assert (result.exit_code, result.stdout) == (1, "")
    assert result.stderr == "tokenstream: load tests need hdrh: pip install 'tokenstream[loadtest]'\n"
    assert not (tmp_path / "out").exists()


def test_what_the_options_say_of_us_reaches_the_server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TOKENSTREAM_TOKEN", "s3cret")

    def script(request: Any, call: Any) -> Iterator[Any]:
        asked: Any = inputs(request)
        if "operation" in asked:
            yield token(0, json.dumps({"model": "org/x"}), final=True)
        else:
            yield token(0, "one", 1, final=True, finish_reason="stop", fingerprint="print", num_input_tokens=3, seed=1)

    triton = ScriptedTriton(script)
    where = ["--url", triton.url, "--out", str(tmp_path), "--requests", "2", "--concurrency", "1", "--warmup", "0"]
    result = run("quick", *where, "--header", "x-tenant=mine", "--json")
    triton.close()
    summary = json.loads(result.stdout.splitlines()[-1])
    assert [level["ok"] for level in summary["levels"]] == [2], result.output
    assert len(triton.calls) == 3  # one asks who is there
    assert all(call.metadata["authorization"] == "Bearer s3cret" for call in triton.calls)
    assert all(call.metadata["x-tenant"] == "mine" for call in triton.calls)
    assert "s3cret" not in (tmp_path / "run.json").read_text()

"""`tokenstream bench engine` with a child that only pretends to measure: what it is asked, shown and told when it ends.

The child is a model repository's `llm_tools/bench.py`, as in a real one.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

import tokenstream
from tokenstream import engine_bench
from tokenstream.commands import app
from waiting import WAIT

SETUP = {
    "kind": "setup", "model": "org/x", "cpu": "A processor", "cores": 2, "threads": 1, "dtype": "bfloat16",
    "kernels": "native", "exact": "bitwise", "versions": {"torch": "2.13.0"}, "linear_parameters": 1000,
    "head_parameters": 10, "weight_bytes": 269_000_000, "kv_bytes_per_token": 23040, "read_gb_per_second": 48.25,
    "gflop_per_second": 900.0,
}  # fmt: skip
DECODE = {
    "kind": "decode", "rows": 16, "tokens": 256, "samples": 40, "min_ms": 11.0, "median_ms": 12.25, "max_ms": 14.0,
    "rounds_ms": [12.0, 12.5], "host_ms": 1.5,
    "parts_ms": {"linears": 6.0, "attention": 3.0}, "limit_ms": 7.0, "bound": "memory", "ratio": 1.75,
    "tokens_per_second": 1306.1,
}  # fmt: skip
PREFILL = {**DECODE, "kind": "prefill", "rows": 1, "tokens": 2048, "median_ms": 700.4, "bound": "compute"}
CHECK = {
    "kind": "check", "dtype": "bfloat16", "kernels": "native", "tokens": 256, "max_error": 0.707, "mean_error": 0.1,
    "argmax_agreement": 0.984, "mean_kl": 0.00087, "nan": 3, "inf": 0, "skipped": None,
}  # fmt: skip
NOTHING_SOUND = {**CHECK, "max_error": None, "mean_error": None, "argmax_agreement": None, "mean_kl": None}
SKIPPED = {**NOTHING_SOUND, "dtype": "float16", "skipped": "\x1b[2J" + 20 * "[odd] " + "!"}


@pytest.fixture
def repository(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "models"
    (folder / "llm" / "1" / "llm_tools").mkdir(parents=True)
    (folder / "llm" / "1" / "llm_tools" / "__init__.py").touch()
    (folder / "llm" / "config.pbtxt").write_text('parameters { key: "model" value { string_value: "org/served" } }')
    monkeypatch.setattr(engine_bench, "find_repository", lambda: folder)
    return folder


def child(repository: Path, code: str) -> None:
    (repository / "llm" / "1" / "llm_tools" / "bench.py").write_text(f"import json, os, sys, time\n{code}\n")


def reporting(*results: object) -> str:
    lines = [{"stage": "decode, 16 rows", "done": 3, "total": 8}, *({"result": result} for result in results)]
    return "\n".join(f"print({json.dumps(line)!r})" for line in lines)


def run(*arguments: str):
    return CliRunner().invoke(app, ["bench", "engine", *arguments])


def test_a_table_shows_measured_limit_and_ratio(repository):
    child(repository, reporting(SETUP, DECODE, PREFILL))
    result = run()
    assert result.exit_code == 0, result.output
    rows = [" ".join(line.split()) for line in result.stdout.splitlines()]
    assert "decode 16 x 256 12.25 11.00 14.00 12.00 12.50 1.50 7.00 memory 1.75 1306" in rows
    assert "decode 16 x 256 6.00 3.00 1.75 1.50" in rows  # linears, attention, rest, host
    assert any(row.startswith("prefill 2048 700") for row in rows)
    for part in ("org/x: bfloat16, native kernels, bitwise", "2 cores, threads: 1", "reads 48.2 GB/s", "900 GFLOP/s"):
        assert part in result.stdout
    assert "decode, 16 rows" in result.stderr


def test_a_table_of_checks_shows_nan_what_has_no_error_and_what_did_not_run(repository):
    child(repository, reporting(SETUP, CHECK, NOTHING_SOUND, SKIPPED))
    lines = run("--check").stdout.splitlines()
    assert [line.split() for line in lines if "bfloat16 native" in line] == [
        ["bfloat16", "native", "0.71", "0.1", "98.4%", "0.00087", "3", "0"],
        ["bfloat16", "native", "-", "-", "-", "-", "3", "0"],
    ]
    assert lines[-1] == f"float16 native does not run here: {SKIPPED['skipped'].replace(chr(27), '')}"


def test_json_is_one_object_per_measurement_and_nothing_else(repository):
    child(repository, "print('a library says hello')\n" + reporting(SETUP, DECODE))
    result = run("--json")
    assert result.exit_code == 0, result.output
    assert [json.loads(line) for line in result.stdout.splitlines()] == [SETUP, DECODE]


@pytest.mark.parametrize(
    ("given", "asked"),
    [
        ([], ["org/served", "--threads=0"]),
        (["--model", "a/b", "--threads", "2", "--quick", "--check"], ["a/b", "--threads=2", "--quick", "--check"]),
    ],
)
def test_the_child_is_asked_for_what_was_given(repository, given, asked):
    child(repository, "print(json.dumps({'result': {'kind': 'echo', 'arguments': sys.argv[1:]}}))")
    assert json.loads(run("--json", *given).stdout)["arguments"] == asked


@pytest.mark.parametrize(
    ("code", "line"),
    [
        ("print(json.dumps({'error': 'dtype must be one'})); sys.exit(1)", "dtype must be one"),
        ("raise RuntimeError('no memory')", "RuntimeError: no memory (exit code 1)"),
        ("os.kill(os.getpid(), 9)", "killed by signal 9"),
    ],
)
def test_an_error_is_one_line_and_code_1(repository, code, line):
    child(repository, reporting(SETUP) + "\n" + code)
    result = run()
    assert result.exit_code == 1
    assert result.stdout == ""
    assert result.stderr.splitlines()[-1] == f"tokenstream: the engine cannot be measured: {line}"


def test_a_model_without_a_bench_is_told_from_a_failure(repository):
    result = run()
    assert result.exit_code == 1
    assert "has no llm_tools/bench.py" in result.stderr


def test_a_negative_number_of_threads_is_wrong_usage(repository):
    assert run("--threads", "-1").exit_code == 2


def test_ctrl_c_ends_the_child_and_is_code_130(repository):
    child(repository, f"print(json.dumps({{'stage': str(os.getpid())}})); time.sleep({WAIT})")
    code = (
        "import sys; from pathlib import Path; from tokenstream import cli, engine_bench; "
        "folder = Path(sys.argv.pop(1)); engine_bench.find_repository = lambda: folder; cli.main()"
    )
    command = [sys.executable, "-c", code, str(repository), "bench", "engine"]
    path = {**os.environ, "PYTHONPATH": str(Path(tokenstream.__file__).parent.parent)}
    with subprocess.Popen(command, env=path, stderr=subprocess.PIPE, text=True) as process:
        try:
            assert process.stderr is not None
            pid = int(process.stderr.readline())
            process.send_signal(signal.SIGINT)
            assert process.wait(WAIT) == 130
        finally:
            process.kill()
    assert not Path(f"/proc/{pid}").exists()

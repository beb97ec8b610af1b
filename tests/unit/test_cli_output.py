"""A standard output that takes nothing: one line on standard error and exit code 1, whatever the command."""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

import tokenstream
from unit.scripted_triton import WAIT

ENVIRONMENT = {**os.environ, "PYTHONPATH": str(Path(tokenstream.__file__).parent.parent)}
COMMANDS = ("", "generate", "chat", "probe", "drain", "models", "top", "new-model", "serve", "bench client")


def shell(command: str, redirection: str) -> tuple[int, list[str]]:
    """Exit code and lines on standard error."""
    program = "from tokenstream.cli import main; main()"
    words = f"{shlex.quote(sys.executable)} -c {shlex.quote(program)} {command} {redirection}"
    ended = subprocess.run(["sh", "-c", words], env=ENVIRONMENT, capture_output=True, text=True, timeout=3 * WAIT)
    return ended.returncode, ended.stderr.splitlines()


@pytest.mark.parametrize("command", COMMANDS)
@pytest.mark.parametrize(
    ("redirection", "reason"), [(">&-", "standard output is closed"), (">/dev/full", "No space left")]
)
def test_help_that_cannot_be_written_is_one_line(command, redirection, reason):
    code, lines = shell(f"{command} --help", redirection)
    assert code == 1
    assert len(lines) == 1
    assert "cannot write the answer" in lines[0]
    assert reason in lines[0]


@pytest.mark.parametrize("command", ["generate x --url a:1", "models --url a:1", "top --once", "--version"])
def test_a_command_with_a_closed_output_is_one_line_before_it_does_anything(command):
    assert shell(command, ">&-") == (1, ["tokenstream: cannot write the answer: standard output is closed"])


def test_in_json_the_line_is_an_object():
    code, lines = shell("models --json", ">&-")
    assert (code, json.loads(lines[0])["code"], len(lines)) == (1, 1, 1)


def test_a_wrong_url_is_wrong_usage():
    for url in ("127.0.0.1", "127.0.0.1:99999", "localhost:port"):
        code, lines = shell(f"models --url {url}", "")
        assert code == 2
        assert len(lines) == 1
        assert "HOST:PORT" in lines[0]

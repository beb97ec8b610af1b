"""The command line against a scripted server: what is printed where, and how it ends."""

from __future__ import annotations

import json
import os
import pty
import select
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import pytest
from typer.testing import CliRunner

import tokenstream
from tokenstream.commands import app
from tokenstream.display import printable
from unit.scripted_triton import WAIT, Script, ScriptedTriton, answer, failure, inputs, token

COMMAND = [sys.executable, "-c", "from tokenstream.cli import main; main()"]
ENVIRONMENT = {**os.environ, "PYTHONPATH": str(Path(tokenstream.__file__).parent.parent)}


@pytest.fixture
def triton() -> Iterator[ScriptedTriton]:
    server = ScriptedTriton(answer("Hello", " world"))
    yield server
    server.close()


def run(*arguments: str, stdin: str | None = None):
    return CliRunner().invoke(app, list(arguments), input=stdin)


@contextmanager
def start(*arguments: str, **options: object) -> Iterator[subprocess.Popen[bytes]]:
    """A command of its own, gone behind the block however the test ends."""
    with subprocess.Popen([*COMMAND, *arguments], **{"env": ENVIRONMENT, **options}) as child:
        try:
            yield child
        finally:
            child.kill()


def interrupt(child: subprocess.Popen[bytes], done: Callable[[float], bool]) -> None:
    """Press Ctrl-C until it is heard: one that comes just before Python begins to wait is seen only after the wait."""
    for _ in range(5):
        child.send_signal(signal.SIGINT)
        if done(WAIT / 5):
            return
    raise AssertionError("Ctrl-C was not heard")


def ended(child: subprocess.Popen[bytes], seconds: float) -> bool:
    try:
        return child.wait(seconds) is not None
    except subprocess.TimeoutExpired:
        return False


class Terminal:
    """A terminal whose user waits for what is shown. `side` is the end that a command gets."""

    def __init__(self) -> None:
        self._user, self.side = pty.openpty()
        self._shown = b""

    def shows(self, text: bytes, seconds: float = WAIT) -> bool:
        """Whether `text` appears before a pause of `seconds`; what came before it is forgotten."""
        while text not in self._shown:
            if not select.select([self._user], [], [], seconds)[0]:
                return False
            self._shown += os.read(self._user, 1024)
        self._shown = self._shown.partition(text)[2]
        return True

    def type(self, line: bytes) -> None:
        os.write(self._user, line + b"\n")

    def press(self, keys: bytes) -> None:
        os.write(self._user, keys)

    def close(self) -> None:
        os.close(self._user)
        os.close(self.side)


def one_then_hold(seen: threading.Event) -> Script:
    def script(request, call):
        yield token(0, "one", 1)
        seen.set()
        call.over.wait(WAIT)

    return script


def silence(request, call):
    call.over.wait(WAIT)
    yield from ()


def endless(request, call):
    index = 0
    while not call.over.wait(0.001):
        yield token(index, "word\n", 1)
        index += 1


def test_an_answer_goes_to_stdout_and_its_timing_to_stderr(triton):
    options = ["--max-tokens", "5", "--stop", "a", "--stop", "b", "--seed", "3"]
    result = run("generate", "Hi", "--url", triton.url, *options)
    assert result.exit_code == 0
    assert result.stdout == "Hello world\n"
    assert result.stderr.count("\n") == 1
    for part in ("TTFT", "7 tokens in", "2 out", "finished: stop"):
        assert part in result.stderr
    sent = inputs(triton.requests[0])
    assert sent["messages"] == [{"role": "user", "content": "Hi"}]
    assert sent["sampling_parameters"] == {"max_tokens": 5, "stop": ["a", "b"], "seed": 3}


def test_raw_sends_the_text_as_it_is_and_a_dash_reads_standard_input(triton):
    result = run("generate", "-", "--raw", "--url", triton.url, stdin="Once\nupon")
    assert result.exit_code == 0
    assert inputs(triton.requests[0])["text_input"] == "Once\nupon"


def test_json_is_one_object_per_response_and_one_at_the_end(triton):
    result = run("generate", "Hi", "--json", "--url", triton.url)
    lines = [json.loads(line) for line in result.stdout.splitlines()]
    assert lines[:2] == [
        {"text": "Hello", "token_ids": [100], "index": 0},
        {"text": " world", "token_ids": [101], "index": 1},
    ]
    assert lines[2]["finish_reason"] == "stop"
    assert lines[2]["usage"] == {"input_tokens": 7, "output_tokens": 2}
    assert lines[2]["stats"]["ttft"] > 0
    assert len(lines) == 3


@pytest.mark.parametrize("command", [["generate", "x"], ["probe"]])
def test_nobody_listening_is_one_line_with_the_cure(command):
    with socket.create_server(("127.0.0.1", 0)) as closed:
        url = f"127.0.0.1:{closed.getsockname()[1]}"
    result = run(*command, "--url", url)
    assert result.exit_code == 3
    assert result.stderr == (
        f"tokenstream: cannot connect to {url}: connection refused. Is it running? Start one with: tokenstream serve\n"
    )


@pytest.mark.parametrize(
    ("message", "code", "shown"),
    [
        ("top_p must be at most 1 [request=r tokens=0 code=INVALID_ARG]", 4, "top_p must be at most 1"),
        ("Request for unknown model: 'llm' is not found", 4, "--model"),
        ("[request id: r] Exceeds maximum queue size", 4, "Try again"),
        ("the queue is full [request=r tokens=0 code=UNAVAILABLE retry_after=0.25]", 4, "full. Try again in 0.2 s"),
        ("step failed\nin two lines [request=r tokens=0 code=INTERNAL]", 1, "step failed in two lines"),
    ],
)
def test_a_refusal_is_one_line_and_its_own_exit_code(triton, message, code, shown):
    triton.script = lambda request, call: iter([failure(message)])
    result = run("generate", "x", "--url", triton.url)
    assert result.exit_code == code
    assert result.stderr.count("\n") == 1
    assert shown in result.stderr
    assert result.stdout == ""


def test_an_answer_that_takes_too_long_keeps_what_was_printed(triton):
    triton.script = one_then_hold(threading.Event())
    result = run("generate", "x", "--url", triton.url, "--timeout", "0.2")
    assert result.exit_code == 5
    assert result.stdout == "one\n"
    assert "--timeout" in result.stderr


def test_input_that_is_no_text_is_refused_in_one_line(triton):
    for command in (["generate", "-"], ["chat"]):
        arguments = [*COMMAND, *command, "--url", triton.url]
        ended = subprocess.run(arguments, env=ENVIRONMENT, input=b"caf\xe9\n", capture_output=True, timeout=WAIT)
        assert ended.returncode == 4
        assert ended.stderr.count(b"\n") == 1
        assert b"not Unicode text" in ended.stderr


@pytest.mark.parametrize(
    "arguments",
    [
        ["generate"],
        ["generate", "x", "--nonsense"],
        ["generate", "x", "--url", "http://127.0.0.1:8000"],
        ["generate", "x", "--timeout", "0"],
    ],
)
def test_wrong_usage_is_exit_code_2(arguments):
    assert run(*arguments).exit_code == 2


def test_probe_wants_one_token_and_says_how_long_it_took(triton):
    triton.script = answer("x")
    result = run("probe", "--url", triton.url)
    assert result.exit_code == 0
    assert result.stdout.count("\n") == 1
    assert inputs(triton.requests[0])["sampling_parameters"]["max_tokens"] == 1


def test_probe_fails_on_a_server_that_connects_and_never_answers(triton):
    triton.script = silence
    assert run("probe", "--url", triton.url, "--timeout", "0.2").exit_code == 5


def test_chat_from_a_pipe_keeps_the_conversation_until_it_is_reset(triton):
    result = run("chat", "--url", triton.url, "--system", "Be brief.", stdin="one\n\ntwo\n/reset\nthree\n/exit\nfour\n")
    assert result.exit_code == 0
    assert result.stdout == "Hello world\n" * 3
    told = [[(message["role"], message["content"]) for message in inputs(one)["messages"]] for one in triton.requests]
    system = ("system", "Be brief.")
    assert told == [
        [system, ("user", "one")],
        [system, ("user", "one"), ("assistant", "Hello world"), ("user", "two")],
        [system, ("user", "three")],
    ]


def test_chat_from_a_pipe_ends_at_the_first_error(triton):
    triton.script = lambda request, call: iter([failure("too long [code=INVALID_ARG]")])
    result = run("chat", "--url", triton.url, stdin="one\ntwo\n")
    assert result.exit_code == 4
    assert len(triton.requests) == 1


def test_ctrl_c_cancels_the_answer_and_is_exit_code_130(triton):
    triton.script = one_then_hold(threading.Event())
    with start("generate", "x", "--url", triton.url, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as child:
        assert child.stdout.read(3) == b"one"
        interrupt(child, partial(ended, child))
        errors = child.stderr.read()
    assert (child.returncode, errors) == (130, b"")
    assert triton.calls[0].over.wait(WAIT)
    assert triton.calls[0].cancelled


def test_a_reader_that_leaves_ends_the_command_quietly_and_cancels(triton):
    triton.script = endless
    with start("generate", "x", "--url", triton.url, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as child:
        assert child.stdout.read(4) == b"word"
        child.stdout.close()
        errors = child.stderr.read()
        child.wait(WAIT)
    assert (child.returncode, errors) == (0, b"")
    assert triton.calls[0].over.wait(WAIT)


def test_on_a_terminal_ctrl_c_stops_the_answer_and_not_the_chat(triton, tmp_path):
    seen = threading.Event()
    triton.script = one_then_hold(seen)
    terminal = Terminal()
    env = {**ENVIRONMENT, "XDG_STATE_HOME": str(tmp_path)}
    options = {"env": env, "start_new_session": True, **dict.fromkeys(("stdin", "stdout", "stderr"), terminal.side)}
    with start("chat", "--url", triton.url, **options) as child:
        assert terminal.shows(b"> ")
        terminal.type(b"first")
        assert terminal.shows(b"one")
        interrupt(child, partial(terminal.shows, b"> "))
        triton.script = answer("second")
        terminal.type(b"again")
        assert terminal.shows(b"second")
        assert terminal.shows(b"> ")
        interrupt(child, partial(ended, child))
        assert child.returncode == 0
    terminal.close()
    assert triton.calls[0].over.wait(WAIT)
    contents = [message["content"] for message in inputs(triton.requests[1])["messages"]]
    assert contents == ["first", "one", "again"]


def test_help_is_shown_without_loading_grpc():
    code = """
import sys, tokenstream.commands
try:
    tokenstream.commands.app(["--help"])
finally:
    print("grpc" in sys.modules, "numpy" in sys.modules)
"""
    shown = subprocess.run([sys.executable, "-c", code], env=ENVIRONMENT, capture_output=True, text=True, timeout=WAIT)
    assert shown.stdout.splitlines()[-1] == "False False"
    for command in ("serve", "generate", "chat", "probe", "drain", "models", "top", "new-model", "demo", "bench"):
        assert command in shown.stdout


def test_a_missing_repository_is_one_line(tmp_path):
    for command in ("serve", "demo"):
        result = run(command, "--repository", str(tmp_path / "none"))
        assert result.exit_code == 1
        assert "no model repository" in result.stderr.splitlines()[-1]


def test_a_model_cannot_drive_the_terminal():
    assert printable("a\x1b[31mb\x07\r\n\tc\u009b") == "a[31mb\n\tc"


def test_an_empty_prompt_is_wrong_usage() -> None:
    result = CliRunner().invoke(app, ["generate", ""])
    assert result.exit_code == 2
    assert "the prompt is empty" in result.stderr

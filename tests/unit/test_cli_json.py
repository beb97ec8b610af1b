"""What a script sees of the command line: JSON lines, errors of one line, and completion."""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import typer

from tokenstream.commands import app
from unit.scripted_triton import WAIT, ScriptedTriton, answer, failure, token
from unit.test_cli_commands import COMMAND, ENVIRONMENT, run
from unit.test_server_heartbeat import write_beat

INFO = {"model": "org/x", "dtype": "bfloat16", "exact": "bitwise", "max_context": 8192, "running": 3, "waiting": 1}


@pytest.fixture
def triton() -> Iterator[ScriptedTriton]:
    server = ScriptedTriton(answer("Hello", " world"))
    yield server
    server.close()


@pytest.fixture
def nobody() -> str:
    """An address where nobody listens."""
    with socket.create_server(("127.0.0.1", 0)) as closed:
        return f"127.0.0.1:{closed.getsockname()[1]}"


def informs(request, call):
    yield token(0, json.dumps(INFO), final=True)


def test_models_are_listed_with_what_they_say_of_themselves(triton: ScriptedTriton) -> None:
    triton.script = informs
    result = run("models", "--url", triton.url)
    assert (result.exit_code, result.stderr) == (0, "")
    head, _, row = (line.split() for line in result.stdout.splitlines())
    assert head == ["model", "version", "ready", "loads", "dtype", "exact", "context", "running", "waiting"]
    assert row == ["llm", "1", "yes", "org/x", "bfloat16", "bitwise", "8192", "3", "1"]
    (one,) = [json.loads(line) for line in run("models", "--url", triton.url, "--json").stdout.splitlines()]
    assert one == {"name": "llm", "version": "1", "ready": True, "state": "READY", "reason": "", "info": INFO}


def test_models_say_what_they_have_taken_of_the_machine_and_why(triton: ScriptedTriton) -> None:
    taken = {
        "threads": 2,
        "threads_from": "1.5 cores by cpu.max of /sys/fs/cgroup",
        "kv_tokens": 4096,
        "kv_cache_mib": 90.0,
        "kv_cache_from": "what \x1b[2Jfits",
        "weights_mib": 310.6,
        "weights_form": "packed",
    }
    triton.script = lambda request, call: iter([token(0, json.dumps(INFO | taken), final=True)])
    lines = run("models", "--url", triton.url).stdout.splitlines()
    assert lines[2].split()[0] == "llm"
    assert lines[3:] == [
        "llm: threads: 2 (1.5 cores by cpu.max of /sys/fs/cgroup)",
        "llm: KV cache: 4096 tokens, 90.0 MiB (what [2Jfits)",
        "llm: weights: 310.6 MiB (packed)",
    ]


def test_a_model_that_cannot_say_anything_of_itself_is_listed_without(triton: ScriptedTriton) -> None:
    triton.script = lambda request, call: iter([failure("unexpected inference input 'operation' for model 'llm'")])
    assert run("models", "--url", triton.url).stdout.splitlines()[-1].split() == ["llm", "1", "yes", *6 * "-"]
    assert json.loads(run("models", "--url", triton.url, "--json").stdout)["info"] is None


def test_with_json_nothing_but_objects_is_printed(triton: ScriptedTriton) -> None:
    result = run("generate", "Hi", "--json", "--url", triton.url)
    assert (result.exit_code, result.stderr) == (0, "")
    assert len([json.loads(line) for line in result.stdout.splitlines()]) == 3
    told = json.loads(run("probe", "--json", "--url", triton.url).stdout)
    assert (told["model"], told["url"], told["seconds"] > 0) == ("llm", triton.url, True)


@pytest.mark.parametrize("command", [["generate", "x"], ["chat"], ["probe"], ["models"]])
def test_an_error_is_an_object_with_the_exit_code_in_it(command: list[str], nobody: str) -> None:
    result = run(*command, "--json", "--url", nobody, stdin='{"content": "x"}\n')
    assert (result.exit_code, result.stdout) == (3, "")
    (line,) = result.stderr.splitlines()
    error = json.loads(line)
    assert error["code"] == 3
    assert error["error"].startswith(f"cannot connect to {nobody}: connection refused. ")


def test_an_answer_that_breaks_off_ends_with_an_error_behind_its_objects(triton: ScriptedTriton) -> None:
    triton.script = lambda request, call: iter([token(0, "one", 1), failure("step failed [code=INVALID_ARG]")])
    result = run("generate", "x", "--json", "--url", triton.url)
    assert [json.loads(line)["text"] for line in result.stdout.splitlines()] == ["one"]
    assert json.loads(result.stderr) == {"error": "step failed", "code": 4}
    assert result.exit_code == 4


def test_drain_and_the_liveness_probe_speak_json(tmp_path: Path) -> None:
    write_beat(tmp_path, draining=True, live=0)
    assert json.loads(run("probe", "--live", "--json", "--run-dir", str(tmp_path)).stdout) == {"live": True}
    drained = run("drain", "--json", "--run-dir", str(tmp_path))
    assert json.loads(drained.stdout) == {"live": 0}
    write_beat(tmp_path, pid=2**22 + 1)
    dead = run("probe", "--live", "--json", "--run-dir", str(tmp_path))
    assert json.loads(dead.stderr) == {"error": "the process of llm_0_0 (pid 4194305) died", "code": 1}
    none = run("drain", "--json", "--run-dir", str(tmp_path))
    assert (json.loads(none.stderr)["code"], none.exit_code) == (3, 3)


def test_a_new_model_is_told_in_json(tmp_path: Path) -> None:
    folder = tmp_path / "models" / "llm"
    folder.mkdir(parents=True)
    (folder / "config.pbtxt").write_text('name: "llm"\nparameters { key: "model" value { string_value: "a" } }\n')
    arguments = ["new-model", "small", "--model", "org/x", "--repository", str(folder.parent), "--json"]
    assert json.loads(run(*arguments).stdout) == {
        "name": "small",
        "model": "org/x",
        "folder": str(folder.parent / "small"),
        "repository": str(folder.parent),
    }
    again = run(*arguments)
    assert (again.exit_code, json.loads(again.stderr)["code"]) == (1, 1)


@pytest.mark.parametrize("arguments", [["generate", "x", "--model", "\udcff"], ["chat", "--system", "\udcff"]])
def test_what_is_no_text_is_one_line(triton: ScriptedTriton, arguments: list[str]) -> None:
    result = run(*arguments, "--url", triton.url, stdin="one\n")
    assert result.exit_code in (2, 4)
    assert result.stderr.count("\n") == 1
    assert "not Unicode text" in result.stderr


@pytest.mark.parametrize(
    ("arguments", "see"),
    [
        (["generate"], "tokenstream generate --help"),
        (["generate", "x", "--nonsense"], "tokenstream generate --help"),
        (["generate", "x", "--temperature", "hot"], "tokenstream generate --help"),
        (["generate", ""], "tokenstream generate --help"),
        (["frobnicate"], "tokenstream --help"),
        (["bench"], "tokenstream bench --help"),
        (["bench", "engine", "--threads", "-1"], "tokenstream bench engine --help"),
        (["models", "--url", "http://127.0.0.1:8000"], "tokenstream models --help"),
        (["top", "--metrics-url", "ftp://x"], "tokenstream top --help"),
    ],
)
def test_wrong_usage_is_one_line_that_names_the_help(arguments: list[str], see: str) -> None:
    for json_lines in (False, True):
        given = [*arguments, *(["--json"] if json_lines else [])]
        done = subprocess.run([*COMMAND, *given], env=ENVIRONMENT, capture_output=True, text=True, timeout=WAIT)
        assert (done.returncode, done.stdout) == (2, "")
        (line,) = done.stderr.splitlines()
        text = json.loads(line)["error"] if json_lines else line
        assert text.endswith(f". See: {see}")


def test_every_command_that_prints_results_takes_json() -> None:
    group = typer.main.get_command(app)
    commands = dict(group.commands)
    for name in ("bench", "load"):
        commands |= commands.pop(name).commands
    for name, command in commands.items():
        assert any("--json" in option.opts for option in command.params), name


def test_without_a_command_the_help_is_shown() -> None:
    result = run()
    assert result.exit_code == 2
    assert "Usage:" in result.stdout


def completed(line: str, folder: Path) -> list[str]:
    """What bash offers at the end of `line`, by the script that the command itself prints."""
    (folder / "tokenstream").write_text(f'#!/bin/sh\nexec "{sys.executable}" -c "{COMMAND[2]}" "$@"\n')
    (folder / "tokenstream").chmod(0o755)
    env = {**ENVIRONMENT, "PATH": f"{folder}:{os.environ['PATH']}", "_TYPER_COMPLETE_TEST_DISABLE_SHELL_DETECTION": "1"}
    words = line.split(" ")
    script = f"""
eval "$(tokenstream --show-completion bash)"
COMP_WORDS=({" ".join(word or '""' for word in words)})
COMP_CWORD={len(words) - 1}
$(complete -p tokenstream | sed 's/.*-F \\([^ ]*\\).*/\\1/') tokenstream
printf '%s\\n' "${{COMPREPLY[@]}}"
"""
    bash = shutil.which("bash")
    assert bash is not None
    done = subprocess.run(
        [bash, "--norc", "-c", script], env=env, capture_output=True, text=True, timeout=WAIT, check=True
    )
    return done.stdout.split()


def test_bash_completes_commands_and_options(tmp_path: Path) -> None:
    assert completed("tokenstream mo", tmp_path) == ["models"]
    assert set(completed("tokenstream bench ", tmp_path)) == {"engine", "client"}
    assert set(completed("tokenstream generate --to", tmp_path)) == {"--top-p", "--top-k", "--token"}


def test_completion_does_not_load_grpc() -> None:
    code = """
import sys
try:
    from tokenstream.cli import main
    main()
finally:
    print("grpc" in sys.modules, "numpy" in sys.modules, "rich.live" in sys.modules, file=sys.stderr)
"""
    env = {**ENVIRONMENT, "_TOKENSTREAM_COMPLETE": "complete_bash", "COMP_WORDS": "tokenstream ge", "COMP_CWORD": "1"}
    done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, timeout=WAIT)
    assert (done.stdout.split(), done.stderr.split()) == (["generate"], ["False", "False", "False"])

"""Real Locust processes for tests, against whatever server: to their end, or in the test's hands.

Locust patches the process that imports it, so it must never be imported by a test. It does not know what is asserted.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tokenstream_loadtest.results import Run, read_run
from unit.scripted_triton import Script, ScriptedCall, ScriptedTriton, answer, inputs, token
from waiting import WAIT, eventually

LOADTEST = Path(__file__).parents[2] / "loadtest"
LOCUSTFILE = LOADTEST / "locustfile.py"
_QUICK = ("--max-tokens", "8", "--metrics-url", "none", "--drain", "20", "--only-summary")

WORDS = ("one", "two", "three", "four")
Serve = Callable[..., ScriptedTriton]


def introduced(script: Script) -> Script:
    """The same to users, from a server that also says of itself what a driver asks before a test."""

    def both(request: Any, call: ScriptedCall) -> Iterator[Any]:
        if inputs(request).get("operation") == "info":
            yield token(0, json.dumps({"model": "scripted"}), final=True, finish_reason="stop")
        else:
            yield from script(request, call)

    return both


def workers(count: int) -> tuple[str, ...]:
    """Options for so many worker processes, on a port that no other test's master has."""
    port = str(free_port())
    return ("--processes", str(count), "--master-port", port, "--master-bind-port", port)


@contextmanager
def locust(
    folder: Path, url: str, *options: str, file: Path = LOCUSTFILE, headless: bool = True
) -> Iterator[subprocess.Popen[str]]:
    """A Locust that writes its report to `folder` and its output to `folder`/log; killed if it is still there."""
    command = [sys.executable, "-m", "locust", "-f", str(file), *(["--headless"] if headless else [])]
    command += ["--host", url, "--report", str(folder), *_QUICK, *options]
    paths = [str(LOADTEST), str(LOADTEST.parent / "client"), os.environ.get("PYTHONPATH", "")]
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths)), "HOME": str(folder)}
    with (folder / "log").open("w") as log:
        process = subprocess.Popen(
            command, cwd=folder, env=env, stdin=subprocess.DEVNULL, stdout=log, stderr=log, text=True
        )
        try:
            yield process
        finally:
            process.kill()
            process.wait()


def run(
    folder: Path, url: str, *options: str, until: Callable[[], object] | None = None, file: Path = LOCUSTFILE
) -> int:
    """A Locust to its end, which Ctrl-C brings about as soon as `until` holds; its exit code."""
    with locust(folder, url, *options, file=file) as process:
        if until is not None:
            eventually(lambda: until() or process.poll() is not None)
            process.send_signal(signal.SIGINT)
        return process.wait(WAIT)


def output(folder: Path) -> str:
    """What it said."""
    return (folder / "log").read_text()


def result(folder: Path) -> Run:
    """What it measured."""
    assert (folder / "run.json").exists(), output(folder)
    return read_run(folder / "run.json")


def children(pid: int) -> list[int]:
    """The processes that a process has started and that live."""
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def is_driver(pid: int) -> bool:
    """Whether it asks for a Locust process."""
    try:
        return b"tokenstream_loadtest.under_locust.driver" in Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return False


def driver_of(process: subprocess.Popen[str]) -> int:
    """The one driver of a Locust that is alone."""
    (pid,) = filter(is_driver, children(process.pid))
    return pid


def free_port() -> int:
    """A TCP port that nobody has just now."""
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return int(one.getsockname()[1])


def paced(*words: str, gap: float = 0.05) -> Script:
    """Tokens with a pause before each, unless the caller leaves."""
    plain = answer(*words)

    def script(request: Any, call: ScriptedCall) -> Iterator[Any]:
        for response in plain(request, call):
            if call.over.wait(gap):
                return
            yield response

    return script


def is_asked(request: Any) -> bool:
    """Whether a user asked, and not a driver who is there."""
    return bool(request.id.startswith("locust-"))


def asked(server: ScriptedTriton) -> list[Any]:
    """What users have asked so far."""
    return list(filter(is_asked, server.requests))

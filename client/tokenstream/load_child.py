"""Runs the load tests' package as a child process and hears what it says, in lines of JSON.

A line is a message, such as {"event": "progress", ...}, or {"error": "one line", "code": 3} before that exit code. The
first Ctrl-C or SIGTERM is passed on, so that what was measured is still written; the second one kills. It does not know
what messages mean. This process never imports that package: it needs libraries that a client does not.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

from .exits import FAILED
from .process import Process

ORDER = "TOKENSTREAM_LOADTEST_ORDER"  # the variable that holds what is wanted: an environment does not show in `ps`
_POLL_SECONDS = 0.1
_GRACE_SECONDS = 10.0

Message = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Ended:
    """How a child ended: its exit code, its error line ("" without one), the signal that it was passed."""

    code: int
    error: str
    signal: signal.Signals | None


def run_load(arguments: Sequence[str], order: Mapping[str, Any], hear: Callable[[Message], None]) -> Ended:
    """Run `python -m tokenstream_loadtest` to its end; `order` is what it finds in its environment.

    Only in the main thread. OSError if no child can be started; whatever `hear` raises ends it.
    """
    env = {**os.environ, "PYTHONUNBUFFERED": "1", ORDER: json.dumps(order)}
    error = ""
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder) / "load.log"
        # -P: a module in the folder where the command was typed is none of ours.
        child = Process([sys.executable, "-P", "-m", "tokenstream_loadtest", *arguments], env, log, pipe=True)
        try:
            with _passed_on(child) as passed:
                for line in child.lines(_POLL_SECONDS):
                    message = _parse(line)
                    if "error" in message:
                        error = str(message["error"])
                    elif message:
                        hear(message)
                while (code := child.wait(_POLL_SECONDS)) is None:
                    pass
        finally:
            child.close(_GRACE_SECONDS)
        if code and not error and not passed:
            error = _last_words(log, code)
        return Ended(code if code >= 0 else FAILED, error, passed[0] if passed else None)


@contextmanager
def _passed_on(child: Process) -> Iterator[list[signal.Signals]]:
    """Pass the first SIGINT or SIGTERM on as SIGTERM, kill at the second; the signals that came so far."""
    came: list[signal.Signals] = []

    def handle(signum: int, _frame: FrameType | None) -> None:
        came.append(signal.Signals(signum))
        if len(came) == 1:
            child.terminate()
        else:
            child.kill()

    before = {signum: signal.signal(signum, handle) for signum in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield came
    finally:
        for signum, handler in before.items():
            signal.signal(signum, handler)


def _parse(line: str | None) -> dict[str, Any]:
    """The message in a line; what libraries print in between is passed over."""
    try:
        message = json.loads(line or "")
    except ValueError:
        return {}
    return message if isinstance(message, dict) else {}


def _last_words(log: Path, code: int) -> str:
    """How a child ended that did not say it; "" for one that did not even write to standard error."""
    if code < 0:
        return f"the load test ended: killed by {signal.Signals(-code).name}"
    said = [line.strip() for line in log.read_text(errors="replace").splitlines() if line.strip()]
    return f"the load test ended: {said[-1]} (exit code {code})" if said else ""

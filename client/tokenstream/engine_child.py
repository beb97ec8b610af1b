"""Runs a module of a model's own version folder as a child process and hears what it reports, in lines of JSON.

A line is progress, {"stage": "convert", "done": 48, "total": 272}, or {"error": "one line"} before exit code 1, or the
module's own. This module knows that protocol alone: not what a module does, nor what it needs installed.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from .process import Process

_POLL_SECONDS = 0.1
_GRACE_SECONDS = 3.0

Report = Callable[[str, int, int | None], None]


def run_module(
    version: Path,
    module: str,
    arguments: Sequence[str],
    *,
    env: Mapping[str, str],
    log: Path,
    report: Report,
    check: Callable[[], None] = lambda: None,
    hear: Callable[[Mapping[str, Any]], None] = lambda _message: None,
) -> str | None:
    """Run `python -m module` out of a model's `version` folder to its end; return why it failed, or None if it did not.

    `report(stage, done, total)` hears of progress, `hear` every other message but errors; what the child says on stderr
    goes to `log`. `check` is called at least every 0.1 s; whatever it raises ends the child.
    """
    child_env = {**env, "PYTHONPATH": str(version), "PYTHONUNBUFFERED": "1"}
    child = Process([sys.executable, "-m", module, *arguments], child_env, log, pipe=True)
    error: str | None = None
    try:
        for line in child.lines(_POLL_SECONDS):
            check()
            message = _parse(line)
            if "error" in message:
                error = str(message["error"])
            elif "stage" in message:
                report(str(message["stage"]), int(message.get("done") or 0), _count(message.get("total")))
            elif message:
                hear(message)
        while (code := child.wait(_POLL_SECONDS)) is None:
            check()
    finally:
        child.close(_GRACE_SECONDS)
    if error is not None or code == 0:
        return error
    return _last_words(log, code)


def _parse(line: str | None) -> dict[str, Any]:
    """The message in a line; what libraries print in between is passed over."""
    try:
        message = json.loads(line or "")
    except ValueError:
        return {}
    return message if isinstance(message, dict) else {}


def _count(value: object) -> int | None:
    return int(value) if isinstance(value, int | float) else None


def _last_words(log: Path, code: int) -> str:
    """What the child said last, for one that died without the agreed line."""
    said = [line for line in log.read_text(errors="replace").splitlines() if line.strip()]
    how = f"killed by signal {-code}" if code < 0 else f"exit code {code}"
    return f"{said[-1].strip()} ({how})" if said else how

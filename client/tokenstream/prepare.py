"""Has a model's weights converted before its server starts, where progress can be shown and a fault is one line.

The work is done by a child process, `python -m llm_engine.weights SPEC` out of the model, which reports in JSON lines:
{"stage": "convert", "done": 48, "total": 272}, at the end {"path": ...}, or {"error": "one line"} and exit code 1.
This module knows that protocol alone; a model without `llm_engine/weights.py` needs no preparation.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from .diagnosis import SetupError
from .process import Process
from .repository import Model

_POLL_SECONDS = 0.1
_GRACE_SECONDS = 3.0

Report = Callable[[str, int, int | None], None]


def prepare(model: Model, env: Mapping[str, str], log: Path, report: Report, check: Callable[[], None]) -> None:
    """Run the child to its end; `report(stage, done, total)` hears of progress, what it says on stderr goes to `log`.

    `check` is called at least every 0.1 s and ends the child by raising. Raises SetupError with the child's own line.
    """
    if not model.spec or not (model.version / "llm_engine" / "weights.py").is_file():
        return
    command = [sys.executable, "-m", "llm_engine.weights", model.spec]
    child_env = {**env, "PYTHONPATH": str(model.version), "PYTHONUNBUFFERED": "1"}
    child = Process(command, child_env, log, pipe=True)
    error: str | None = None
    try:
        for line in child.lines(_POLL_SECONDS):
            check()
            message = _parse(line)
            if "error" in message:
                error = str(message["error"])
            elif "stage" in message:
                report(str(message["stage"]), int(message.get("done") or 0), _count(message.get("total")))
        while (code := child.wait(_POLL_SECONDS)) is None:
            check()
    finally:
        child.close(_GRACE_SECONDS)
    if code != 0 or error is not None:
        raise SetupError(f"model {model.name!r} cannot be prepared: {error or _last_words(log, code)}")


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

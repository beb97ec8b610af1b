"""Has a model's weights converted before its server starts, where progress can be shown and a fault is one line.

The work is done by a child process, `python -m llm_tools.weights SPEC` out of the model. A model without
`llm_tools/weights.py` needs no preparation. This module does not know what the child does.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

from .diagnosis import SetupError
from .engine_child import Report, run_module
from .repository import Model


def prepare(model: Model, env: Mapping[str, str], log: Path, report: Report, check: Callable[[], None]) -> None:
    """Run the child to its end; `report(stage, done, total)` hears of progress, what it says on stderr goes to `log`.

    `check` is called at least every 0.1 s and ends the child by raising. Raises SetupError with the child's own line.
    """
    if not model.spec or not (model.version / "llm_tools" / "weights.py").is_file():
        return
    arguments = [model.spec]
    failure = run_module(model.version, "llm_tools.weights", arguments, env=env, log=log, report=report, check=check)
    if failure is not None:
        raise SetupError(f"model {model.name!r} cannot be prepared: {failure}")

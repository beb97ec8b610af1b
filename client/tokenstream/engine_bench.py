"""Measures the engine of the model `llm` without a server: `python -m llm_tools.bench` out of the model repository.

The child measures and reports; what its results mean is told by the engine's own bench module. It does not know how
they are shown.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from .diagnosis import SetupError
from .engine_child import Report, run_module
from .repository import find_repository, read_repository

Result = Mapping[str, Any]


def measure_engine(
    report: Report,
    *,
    model: str | None = None,
    threads: int = 0,
    quick: bool = False,
    check: bool = False,
    repository: Path | None = None,
) -> list[Result]:
    """Results in the order of their measurement, each with its `kind`: "setup", "decode", "prefill" or "check".

    `model` is what the engine loads, None for what the repository's `llm` names; `threads` 0 is all cores. Raises
    SetupError with the child's own line if it fails, and if the repository cannot measure.
    """
    served = read_repository(repository or find_repository(), ["llm"])[0]
    if not (served.version / "llm_tools" / "bench.py").is_file():
        raise SetupError(f"the model in {served.version} has no llm_tools/bench.py to measure it with")
    arguments = [model or served.spec, f"--threads={threads}"]
    arguments += [flag for flag, given in (("--quick", quick), ("--check", check)) if given]
    results: list[Result] = []

    def hear(message: Mapping[str, Any]) -> None:
        if isinstance(result := message.get("result"), dict):
            results.append(result)

    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder) / "bench.log"
        failure = run_module(
            served.version, "llm_tools.bench", arguments, env=os.environ, log=log, report=report, hear=hear
        )
    if failure is not None:
        raise SetupError(f"the engine cannot be measured: {failure}")
    return results

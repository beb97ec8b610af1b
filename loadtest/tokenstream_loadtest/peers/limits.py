"""What this machine can do at best with these weights, and what of it the workload leaves: the bound of every server.

Measured once beside a comparison by the engine's own bench, which times memory reads and matrix products in one
process. It does not know the servers.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from tokenstream.engine_bench import measure_engine

from .environments import Say

Bench = Callable[[Say], list[Mapping[str, Any]]]


@dataclass(frozen=True, slots=True)
class Limits:
    """`read_gb_per_second`, `gflop_per_second`: measured. `step_ms`: by rows, the least time of one decode step, from
    both. `prefill_ms_per_token`: the same of a prompt's token. `processor`, `cores`: where.
    """

    processor: str
    cores: int
    read_gb_per_second: float
    gflop_per_second: float
    weight_bytes: int
    step_ms: dict[int, float]
    prefill_ms_per_token: float

    def tokens_per_second(self, rows: int, prompt_tokens: float, output_tokens: float) -> float | None:
        """The most output tokens per second that `rows` callers could get, prompts included; None if not measured.

        An answer costs its prompt once and `output_tokens` steps that it shares with the other rows.
        """
        if rows not in self.step_ms:
            return None
        answer_ms = prompt_tokens * self.prefill_ms_per_token + output_tokens * self.step_ms[rows] / rows
        return output_tokens / answer_ms * 1000


def measured_limits(file: Path, say: Say, *, quick: bool, bench: Bench | None = None) -> Limits:
    """The limits in `file`, measured now if it is not there. SetupError if they cannot be measured."""
    if not file.is_file():
        results = bench(say) if bench else _bench(say, quick=quick)
        half = file.with_suffix(".part")
        half.write_text(json.dumps(asdict(_limits(results)), indent=1))
        half.rename(file)
    values = json.loads(file.read_text())
    values["step_ms"] = {int(rows): ms for rows, ms in values["step_ms"].items()}
    return Limits(**values)


def _bench(say: Say, *, quick: bool) -> list[Mapping[str, Any]]:
    def report(stage: str, done: int, total: int | None) -> None:
        say(f"measuring the machine's limits: {stage}{f', {done} of {total}' if total else ''}")

    return measure_engine(report, quick=quick)


def _limits(results: list[Mapping[str, Any]]) -> Limits:
    setup = next(result for result in results if result["kind"] == "setup")
    prefills = [result for result in results if result["kind"] == "prefill"]
    prompt = min(prefills, key=lambda result: abs(result["tokens"] - 512))
    return Limits(
        setup["cpu"],
        setup["cores"],
        setup["read_gb_per_second"],
        setup["gflop_per_second"],
        setup["weight_bytes"],
        {result["rows"]: result["limit_ms"] for result in results if result["kind"] == "decode"},
        prompt["limit_ms"] / prompt["tokens"],
    )

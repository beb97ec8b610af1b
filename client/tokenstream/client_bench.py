"""Measures this client against a running server: CPU time per token of many streams at once, and what importing costs.

CPU time is that of this process, all its threads, less what it takes when the client is connected and nothing is asked.
It starts no server, and does not know how the results are shown.
"""

from __future__ import annotations

import asyncio
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .aio import AsyncClient
    from .client import Client

PROMPT = "Once upon a time"
IMPORTS = ("import tokenstream", "from tokenstream import Client", "from tokenstream import AsyncClient")
_IDLE_SECONDS = 1.0
_ROUNDS = 5  # measured, behind one that warms up
_LOADS = 5  # fresh interpreters per import
_LOAD = """
import sys, time
sys.path.insert(0, sys.argv[1])
wall, cpu = time.perf_counter(), time.process_time()
exec(sys.argv[2])
print([time.perf_counter() - wall, time.process_time() - cpu])
"""


@dataclass(frozen=True, slots=True)
class Imported:
    """What a statement takes in a fresh interpreter, medians in milliseconds."""

    statement: str
    wall_ms: float
    cpu_ms: float
    kind: str = "import"


@dataclass(frozen=True, slots=True)
class Streamed:
    """What so many streams at once took, their requests and first tokens included: the round of median CPU per token.

    `kind` is "threads" or "tasks"; `cpu_us_per_token` is what is left of `cpu_seconds` when `idle_cpu_share` (seconds
    per second, without any stream) is taken off.
    """

    kind: str
    streams: int
    tokens: int
    seconds: float
    tokens_per_second: float
    cpu_seconds: float
    idle_cpu_share: float
    cpu_us_per_token: float


def measure_imports() -> list[Imported]:
    """Each of IMPORTS; once before that, so that files are cached and compiled."""
    package = str(Path(__file__).parents[1])
    results = []
    for statement in IMPORTS:
        command = [sys.executable, "-c", _LOAD, package, statement]
        runs = [json.loads(subprocess.run(command, capture_output=True, check=True).stdout) for _ in range(1 + _LOADS)]
        wall, cpu = (statistics.median(run[part] for run in runs[1:]) * 1e3 for part in (0, 1))
        results.append(Imported(statement, round(wall, 3), round(cpu, 3)))
    return results


def measure_threads(connect: Callable[[], Client], streams: int, tokens: int) -> Streamed:
    """As many threads, each with one answer of `tokens` tokens, on one client. TokenstreamError."""
    with ThreadPoolExecutor(streams) as pool, connect() as client:

        def listen(most: int) -> int:
            with client.stream(PROMPT, **_asked(most)) as stream:
                return sum(len(chunk.token_ids) for chunk in stream)

        def crowd(most: int) -> int:
            return sum(pool.map(listen, [most] * streams))

        crowd(tokens)
        meter = Meter()
        time.sleep(_IDLE_SECONDS)
        meter.idle_ends()
        return median(meter.result("threads", streams, crowd(tokens)) for _ in range(_ROUNDS))


def measure_tasks(connect: Callable[[], AsyncClient], streams: int, tokens: int) -> Streamed:
    """The same with as many tasks on one asynchronous client."""

    async def main() -> Streamed:
        async with connect() as client:

            async def listen(most: int) -> int:
                async with client.stream(PROMPT, **_asked(most)) as stream:
                    return sum([len(chunk.token_ids) async for chunk in stream])

            async def crowd(most: int) -> int:
                return sum(await asyncio.gather(*(listen(most) for _ in range(streams))))

            await crowd(tokens)
            meter = Meter()
            await asyncio.sleep(_IDLE_SECONDS)
            meter.idle_ends()
            return median([meter.result("tasks", streams, await crowd(tokens)) for _ in range(_ROUNDS)])

    return asyncio.run(main())


def median(rounds: Iterable[Streamed]) -> Streamed:
    """The round of which as many took less CPU per token as took more."""
    ordered = sorted(rounds, key=lambda one: one.cpu_us_per_token)
    return ordered[len(ordered) // 2]


class Meter:
    """Clocks of this process: an idle stretch from its making, and the rounds that are measured behind it."""

    def __init__(self) -> None:
        self._wall, self._cpu = time.monotonic(), time.process_time()
        self._idle_share = 0.0

    def idle_ends(self) -> None:
        """What is measured begins."""
        wall, cpu = time.monotonic(), time.process_time()
        self._idle_share = (cpu - self._cpu) / (wall - self._wall)
        self._wall, self._cpu = wall, cpu

    def result(self, kind: str, streams: int, tokens: int) -> Streamed:
        """A round has ended, and brought so many tokens; the next one begins."""
        wall, cpu_now = time.monotonic(), time.process_time()
        seconds, cpu = wall - self._wall, cpu_now - self._cpu
        self._wall, self._cpu = wall, cpu_now
        per_token = max(0.0, cpu - self._idle_share * seconds) / max(1, tokens) * 1e6
        return Streamed(
            kind,
            streams,
            tokens,
            round(seconds, 6),
            round(tokens / seconds, 3),
            round(cpu, 6),
            round(self._idle_share, 6),
            round(per_token, 3),
        )


def _asked(tokens: int) -> dict[str, Any]:
    """One answer of exactly so many tokens; what breaks is told instead of mended."""
    return {"max_tokens": tokens, "ignore_eos": True, "temperature": 0.0, "retries": 0, "resume": False}

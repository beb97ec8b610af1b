"""What long requests cost those beside them: `python -m llm_tools.beside MODEL` reports JSON lines.

Streams decode on the real engine while one client after the other sends a request whose preparation is long, and others
short ones. Reported is how long the streams wait for their next token, and the newcomers for their first. The long work
runs on the preparer's thread, as it does in a server, or with `--inline` on the thread that accepts requests.

    {"result": {"kind": "beside", "work": "alone", ...}}     one for each work and round
"""

from __future__ import annotations

import argparse
import itertools
import statistics
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial
from uuid import uuid4

from llm_engine.config import ConfigError, EngineConfig, expand
from llm_engine.engine import Engine
from llm_engine.request import Delta, Request, RequestError, SamplingParams
from llm_kernels.cpu_level import CpuLevelError, cap_libraries
from preparer import SWITCH_SECONDS, Preparer
from prompts import PromptEncoder

from .accuracy import TEXT
from .gaps import BenchError, prompt_of
from .json_lines import report

ROWS = 16
CONTEXT = 64  # tokens of each stream's prompt
SECONDS = 4.0  # of each measurement
NEWCOMER_SECONDS = 0.25  # between newcomers
WAIT_SECONDS = 120.0
LONG_BYTES = 1_000_000  # of a text that is tokenized
RESUMED = 2000
BIASES = 1000

Prepare = Callable[[Request], None]


@dataclass(frozen=True, slots=True)
class Beside:
    """Milliseconds between the tokens of `rows` streams, and until the first token of `newcomers`, beside `work`.

    `done` long requests were prepared meanwhile.
    """

    work: str
    inline: bool
    rows: int
    done: int
    itl_p50_ms: float
    itl_p99_ms: float
    itl_max_ms: float
    newcomers: int
    ttft_p50_ms: float
    ttft_max_ms: float
    kind: str = "beside"


class _Streams:
    """Takes the deltas of all streams on the engine thread: when each step's came."""

    def __init__(self) -> None:
        self.times: list[float] = []
        self.begun, self.over = threading.Event(), threading.Event()
        self._open = ROWS

    def __call__(self, deltas: list[Delta]) -> None:
        if sum(bool(delta.token_ids) for delta in deltas) == ROWS:
            self.times.append(time.perf_counter())
            self.begun.set()
        self._open -= sum(delta.terminal for delta in deltas)
        if self._open == 0:
            self.over.set()


class _One:
    """Waits for the end of one request, and notes when its first delta came."""

    def __init__(self) -> None:
        self.sent_at, self.first_at = time.perf_counter(), 0.0
        self.over = threading.Event()

    def __call__(self, deltas: list[Delta]) -> None:
        self.first_at = self.first_at or time.perf_counter()
        if any(delta.terminal for delta in deltas):
            self.over.set()


class Measurement:
    """One engine, and the ways of requests into it."""

    def __init__(self, engine: Engine, *, inline: bool) -> None:
        self._engine = engine
        self._inline = inline
        self._preparer = Preparer()
        self._preparer.start()
        self._prompts = PromptEncoder(engine.tokenizer, engine.config.max_context, engine.vocab_size)
        self._ids = self._prompts.text("text", TEXT)
        self._text = (TEXT * (LONG_BYTES // len(TEXT) + 1))[:LONG_BYTES]
        self._starts = itertools.count()

    def close(self) -> None:
        """End the preparer's thread."""
        self._preparer.stop()

    def works(self) -> dict[str, tuple[SamplingParams, list[int], Prepare] | None]:
        """What is done beside the streams, by name: parameters, resumed tokens, and how the prompt is made."""
        plain = SamplingParams(max_tokens=1)
        resuming = SamplingParams(max_tokens=RESUMED, ignore_eos=True)  # it ends there, so that nothing is computed
        biased = SamplingParams(max_tokens=8, logit_bias=tuple((token, -1.0) for token in range(BIASES)))
        return {
            "alone": None,
            f"tokenizing {LONG_BYTES} bytes": (plain, [], self._tokenize),
            f"replaying {RESUMED} tokens": (resuming, prompt_of(self._ids, 3, RESUMED), self._short),
            f"{BIASES} biases": (biased, [], self._short),
        }

    def measure(self, work: str) -> Beside:
        """Measure the streams beside one work. Raises BenchError."""
        streams, params = _Streams(), SamplingParams(temperature=0.0, ignore_eos=True)
        requests = [Request(uuid4().hex, prompt_of(self._ids, row, CONTEXT), params) for row in range(ROWS)]
        for request in requests:
            self._engine.submit(request, streams)
        if not streams.begun.wait(WAIT_SECONDS):
            raise BenchError("the streams did not begin")
        newcomers, longs = self._disturb(work, time.perf_counter() + SECONDS)
        ended = time.perf_counter()
        heard = all(one.over.wait(WAIT_SECONDS) for one in (*newcomers, *longs))
        for request in requests:
            self._engine.cancel(request.id)
        if not heard or not streams.over.wait(WAIT_SECONDS):
            raise BenchError("a request was not answered")
        times = [at for at in streams.times if at <= ended]
        gaps = sorted(1e3 * (b - a) for a, b in itertools.pairwise(times))
        waits = [1e3 * (one.first_at - one.sent_at) for one in newcomers]
        return Beside(
            work=work,
            inline=self._inline,
            rows=ROWS,
            done=len(longs),
            itl_p50_ms=round(statistics.median(gaps), 2),
            itl_p99_ms=round(gaps[int(0.99 * len(gaps))], 2),
            itl_max_ms=round(gaps[-1], 2),
            newcomers=len(waits),
            ttft_p50_ms=round(statistics.median(waits), 1),
            ttft_max_ms=round(max(waits), 1),
        )

    def _disturb(self, work: str, until: float) -> tuple[list[_One], list[_One]]:
        """Send newcomers at their times and, whenever the last one has ended, a long request."""
        newcomers: list[_One] = []
        longs: list[_One] = []
        asked = self.works()[work]
        due = time.perf_counter()
        while due < until:
            if asked is not None and (not longs or longs[-1].over.is_set()):
                longs.append(self._send_long(*asked))
            newcomer = _One()
            newcomer.sent_at = due  # a thread that is busy with another's work takes it later
            short = Request(uuid4().hex, prompt_of(self._ids, next(self._starts), 8), SamplingParams(max_tokens=1))
            self._engine.submit(short, newcomer)
            newcomers.append(newcomer)
            due += NEWCOMER_SECONDS
            time.sleep(max(0.0, due - time.perf_counter()))
        return newcomers, longs

    def _send_long(self, params: SamplingParams, resumed: list[int], prepare: Prepare) -> _One:
        one = _One()
        request = Request(uuid4().hex, [], params, resume_token_ids=resumed)
        self._engine.enter(request, one)
        job = partial(self._engine.complete, request, prepare)
        if self._inline:
            job()
        else:
            self._preparer.put(LONG_BYTES, job)
        return one

    def _tokenize(self, request: Request) -> None:
        request.prompt_ids = self._prompts.text("text", self._text, fits=True)  # it does not fit

    def _short(self, request: Request) -> None:
        request.prompt_ids = prompt_of(self._ids, next(self._starts), 8)


def main() -> int:
    """Measure what long requests cost those beside them, and report JSON lines."""
    parser = argparse.ArgumentParser(prog="python -m llm_tools.beside", description=main.__doc__)
    parser.add_argument("model", help="folder, .gguf file, package://NAME/FILE or Hugging Face id")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--inline", action="store_true", help="do the long work on the thread that accepts requests")
    given = parser.parse_args()
    sys.setswitchinterval(SWITCH_SECONDS)
    try:
        cap_libraries()
        engine = Engine(EngineConfig(expand(given.model), max_sequences=32, prefix_cache=False))
        measurement = Measurement(engine, inline=given.inline)
        try:
            for _ in range(given.rounds):
                for work in measurement.works():
                    report(result=asdict(measurement.measure(work)))
        finally:
            measurement.close()
            engine.close()
    except (ConfigError, CpuLevelError, RequestError, BenchError) as error:
        report(error=str(error))
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())

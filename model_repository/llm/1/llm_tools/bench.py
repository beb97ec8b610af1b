"""The engine alone beside the limits of its machine: `python -m llm_tools.bench MODEL` reports JSON lines.

Decode steps and prefills go through the real engine; what they must read and multiply at least comes from the model,
and the rates of reading and multiplying are measured in the same process. With `--check`, logits are compared with
transformers' own in float32. It runs on CPU, and does not know Triton, clients, or which number is a good one.

    {"stage": "decode, 16 rows", "done": 3, "total": 18}     while it runs
    {"result": {"kind": "decode", "rows": 16, ...}}          one for each measurement, the setup first
    {"error": "one line"}                                    and exit code 1
"""

from __future__ import annotations

import argparse
import os
import platform
import statistics
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from uuid import uuid4

import torch

from llm_engine import loading
from llm_engine.config import ARITHMETICS, DTYPES, KERNELS, WEIGHT_FORMATS, ConfigError, EngineConfig, expand
from llm_engine.engine import Engine
from llm_engine.request import Delta, Request, RequestError, SamplingParams
from llm_kernels.cpu_level import CpuLevelError, cap_libraries
from llm_kernels.decoder import PARTS

from . import accuracy
from .accuracy import TEXT
from .gaps import GAP, WAIT_SECONDS, BenchError, Gap, longest_gap, prompt_of
from .json_lines import report, report_progress
from .limits import Limits, Work, cpu_name, measure_limits
from .prepared import prepare_source
from .weights import Progress

DECODE_ROWS = (1, 4, 16, 32)
DECODE_CONTEXT = 256
PREFILL_TOKENS = (128, 512, 2048)
ROUNDS = 2


@dataclass(frozen=True, slots=True)
class Effort:
    """How much is measured in each round: decode steps, prefills of each length, seconds for each limit."""

    steps: int = 20
    prefills: int = 10
    seconds: float = 1.0


QUICK = Effort(steps=4, prefills=2, seconds=0.2)


@dataclass(frozen=True, slots=True)
class Setup:
    """What was measured on what. Rates are the best of all passes; linear_parameters leave out the head."""

    model: str
    cpu: str
    cores: int
    threads: int
    dtype: str
    kernels: str
    exact: str
    versions: Mapping[str, str]
    linear_parameters: int
    head_parameters: int
    weight_bytes: int
    kv_bytes_per_token: int
    read_gb_per_second: float
    gflop_per_second: float
    kind: str = "setup"


@dataclass(frozen=True, slots=True)
class Measurement:
    """Milliseconds of a decode step of `rows` sequences, or from submit to first token of one prompt (prefill).

    tokens: context of a sequence, the new token included; of a decode step the mean. rounds_ms: the medians of
    identical rounds. host_ms: median of the time outside the model. parts_ms: mean of the time in each part of a model
    in native form; its launch and its scratch memory are in none. bound: "memory" or "compute", which of the limits is
    the larger one; ratio: measured by limit.
    """

    kind: str
    rows: int
    tokens: int
    samples: int
    min_ms: float
    median_ms: float
    max_ms: float
    rounds_ms: tuple[float, ...]
    host_ms: float
    parts_ms: Mapping[str, float]
    limit_ms: float
    bound: str
    ratio: float
    tokens_per_second: float


Result = Setup | Measurement | Gap


@dataclass(frozen=True, slots=True)
class Sample:
    """One step: its seconds, those in the model and in its parts, its contexts, and how many tokens of each are new."""

    seconds: float
    model_seconds: float
    part_seconds: tuple[float, ...]
    contexts: tuple[int, ...]
    new: int


@dataclass(frozen=True, slots=True)
class Case:
    """What is measured: decode steps of `rows` sequences around `tokens` of context, or prefills of `tokens`."""

    kind: str
    rows: int
    tokens: int

    @property
    def stage(self) -> str:
        """What to call it while it runs."""
        if self.kind == "decode":
            return f"decode, {self.rows} row{'s' * (self.rows > 1)}"
        return f"prefill, {self.tokens} tokens"


def cases(config: EngineConfig, effort: Effort) -> list[Case]:
    """The cases that fit `config`; where the context is short, decode takes half of it."""
    context = min(DECODE_CONTEXT, config.max_context // 2)
    room = config.kv_tokens // (2 * context)
    rows = [n for n in DECODE_ROWS if n <= min(config.max_sequences, room) and effort.steps < context]
    lengths = [n for n in PREFILL_TOKENS if n < config.max_context]
    return [*(Case("decode", n, context) for n in rows), *(Case("prefill", 1, n) for n in lengths)]


class _Reader:
    """Takes the deltas of a case on the engine thread, and a sample of each step in which every sequence got its token.

    `first`: of its first token, else of later ones, so that none was in prefill. `enough` is set behind `wanted`
    samples, `over` when all requests have ended.
    """

    def __init__(self, engine: Engine, rows: int, wanted: int, *, first: bool) -> None:
        self.samples: list[Sample] = []
        self.failure: str | None = None
        self.enough, self.over = threading.Event(), threading.Event()
        self._runner = engine._runner  # the benchmark is the engine's own, and no other reader needs the runner
        self._rows, self._wanted, self._first = rows, wanted, first
        self._open = rows
        self._at, self._model, self._parts = time.perf_counter(), self._runner.model_seconds, self._part_seconds()

    def __call__(self, deltas: list[Delta]) -> None:
        now, model, parts = time.perf_counter(), self._runner.model_seconds, self._part_seconds()
        tokens = [d for d in deltas if d.token_ids and (d.index == 0) == self._first]
        if len(tokens) == self._rows and len(self.samples) < self._wanted:
            contexts = tuple(d.num_input_tokens + d.index for d in tokens)
            new = contexts[0] if self._first else 1
            spent = tuple(after - before for after, before in zip(parts, self._parts, strict=True))
            self.samples.append(Sample(now - self._at, model - self._model, spent, contexts, new))
        errors = [d.error.message for d in deltas if d.error]
        if errors and len(self.samples) < self._wanted:
            self.failure = errors[0]
        self._open -= sum(d.terminal for d in deltas)
        if len(self.samples) >= self._wanted or self._open == 0:
            self.enough.set()
        if self._open == 0:
            self.over.set()
        self._at, self._model, self._parts = now, model, parts

    def _part_seconds(self) -> list[float]:
        steps = self._runner.loaded.steps
        return [] if steps is None else steps.decoder.seconds.tolist()


def run(engine: Engine, case: Case, ids: Sequence[int], effort: Effort) -> list[Sample]:
    """One round of a case, with prompts cut from `ids`, repeated. Raises BenchError if a request fails."""
    if case.kind == "decode":
        length = case.tokens - effort.steps // 2  # so that the mean context is what was asked
        return _answers(engine, [prompt_of(ids, row, length) for row in range(case.rows)], effort.steps, first=False)
    prompts = [prompt_of(ids, number, case.tokens) for number in range(effort.prefills)]
    return [sample for prompt in prompts for sample in _answers(engine, [prompt], 1, first=True)]


def _answers(engine: Engine, prompts: Sequence[list[int]], wanted: int, *, first: bool) -> list[Sample]:
    params = SamplingParams(max_tokens=1 if first else None, temperature=0.0, ignore_eos=True)
    requests = [Request(uuid4().hex, prompt, params) for prompt in prompts]
    reader = _Reader(engine, len(requests), wanted, first=first)
    for request in requests:
        engine.submit(request, reader)
    heard = reader.enough.wait(WAIT_SECONDS)
    for request in requests:
        engine.cancel(request.id)
    if not heard or not reader.over.wait(WAIT_SECONDS):
        raise BenchError(f"the engine said nothing for {WAIT_SECONDS:g} s")
    if len(reader.samples) < wanted:
        raise BenchError(f"{len(reader.samples)} of {wanted} steps were measured: {reader.failure or 'answers ended'}")
    return reader.samples


def _gap(engine: Engine, ids: Sequence[int], effort: Effort, found: Sequence[Measurement]) -> Gap | None:
    """The longest gap beside its bound, if the cases that the bound is made of were measured."""
    rows, tokens = GAP
    decode = next((m.median_ms for m in found if m.kind == "decode" and m.rows > rows), None)
    prefill = next((m.median_ms for m in found if m.kind == "prefill" and m.tokens == tokens), None)
    if decode is None or prefill is None:
        return None
    longest = _ms(max(longest_gap(engine, rows, tokens, ids) for _ in range(effort.prefills)))
    bound = 3 * decode + prefill
    return Gap(rows, tokens, effort.prefills, longest, round(bound, 4), round(longest / bound, 3))


def measure(engine: Engine, work: Work, effort: Effort, progress: Progress) -> list[Result]:
    """Run every case and the limits in ROUNDS identical rounds. Raises BenchError if a request fails."""
    ids = engine.tokenizer(TEXT)["input_ids"]
    wanted = cases(engine.config, effort)
    samples: dict[Case, list[list[Sample]]] = {case: [] for case in wanted}
    found: list[Limits] = []
    total = ROUNDS * (len(wanted) + 1)
    for index in range(ROUNDS):
        done = index * (len(wanted) + 1)
        progress("the machine's limits", done, total)
        found.append(measure_limits(work.dtype, effort.seconds))
        for case in wanted:
            done += 1
            progress(case.stage, done, total)
            samples[case].append(run(engine, case, ids, effort))
    limits = Limits(max(f.bytes_per_second for f in found), max(f.flops_per_second for f in found))
    measured = [summarise(case, samples[case], work, limits) for case in wanted]
    gap = _gap(engine, ids, effort, measured)
    return [_setup(engine, work, limits), *measured, *([] if gap is None else [gap])]


def summarise(case: Case, rounds: Sequence[Sequence[Sample]], work: Work, limits: Limits) -> Measurement:
    """Put samples beside the limit of a typical one, the middle one of the first round."""
    typical = rounds[0][len(rounds[0]) // 2]
    memory = work.read_bytes(typical.contexts, typical.new) / limits.bytes_per_second
    compute = work.flops(typical.contexts, typical.new) / limits.flops_per_second
    every = [sample for samples in rounds for sample in samples]
    median = statistics.median(s.seconds for s in every)
    return Measurement(
        kind=case.kind,
        rows=case.rows,
        tokens=round(statistics.mean(typical.contexts)),
        samples=len(every),
        min_ms=_ms(min(s.seconds for s in every)),
        median_ms=_ms(median),
        max_ms=_ms(max(s.seconds for s in every)),
        rounds_ms=tuple(_ms(statistics.median(s.seconds for s in samples)) for samples in rounds),
        host_ms=_ms(statistics.median(s.seconds - s.model_seconds for s in every)),
        parts_ms={
            name: _ms(statistics.mean(seconds))
            for name, seconds in zip(PARTS, zip(*(s.part_seconds for s in every), strict=True), strict=False)
        },
        limit_ms=_ms(max(memory, compute)),
        bound="memory" if memory > compute else "compute",
        ratio=round(median / max(memory, compute), 3),
        tokens_per_second=round(len(typical.contexts) * typical.new / median, 1),
    )


def _ms(seconds: float) -> float:
    return round(1e3 * seconds, 4)


def _setup(engine: Engine, work: Work, limits: Limits) -> Setup:
    info = engine.info()
    return Setup(
        model=info["model"],
        cpu=cpu_name(),
        cores=len(os.sched_getaffinity(0)),
        threads=torch.get_num_threads(),
        dtype=info["dtype"],
        kernels=info["kernels"],
        exact=info["exact"],
        versions={"python": platform.python_version(), **info["versions"]},
        linear_parameters=work.linear_parameters,
        head_parameters=work.head_parameters,
        weight_bytes=work.weight_bytes,
        kv_bytes_per_token=work.kv_bytes_per_token,
        read_gb_per_second=round(limits.bytes_per_second / 1e9, 2),
        gflop_per_second=round(limits.flops_per_second / 1e9, 1),
    )


def bench(config: EngineConfig, effort: Effort, progress: Progress) -> list[Result]:
    """Load the model that `config` names and measure it. Raises ConfigError with the cure, or BenchError."""
    progress("loading the model", 0, None)
    loaded = loading.load(config)
    work = Work.of(loaded)
    engine = Engine(config, loaded)
    try:
        return measure(engine, work, effort, progress)
    finally:
        engine.close()


def main() -> int:
    """Measure a model's engine on this machine, beside the machine's limits, and report JSON lines."""
    parser = argparse.ArgumentParser(prog="python -m llm_tools.bench", description=main.__doc__)
    parser.add_argument("model", help="folder, .gguf file, package://NAME/FILE or Hugging Face id")
    parser.add_argument("--threads", type=int, default=0, help="0: the machine's cores")
    parser.add_argument("--dtype", choices=DTYPES, default="auto")
    parser.add_argument("--weight-format", choices=WEIGHT_FORMATS, default="auto")
    parser.add_argument("--arithmetic", choices=ARITHMETICS, default="auto")
    parser.add_argument("--kernels", choices=KERNELS, default="auto")
    parser.add_argument("--check", action="store_true", help="also compare logits with float32")
    parser.add_argument("--quick", action="store_true", help="a few steps of each instead of many")
    given = parser.parse_args()

    try:
        cap_libraries()
        config = EngineConfig(
            expand(given.model),
            threads=given.threads,
            dtype=given.dtype,
            weight_format=given.weight_format,
            arithmetic=given.arithmetic,
            kernels=given.kernels,
            max_sequences=DECODE_ROWS[-1],
            kv_tokens=2 * DECODE_ROWS[-1] * DECODE_CONTEXT,
            prefix_cache=False,
            max_request_seconds=WAIT_SECONDS,
        )
        prepared = prepare_source(config.model, progress=report_progress)
        for result in bench(config, QUICK if given.quick else Effort(), report_progress):
            report(result=asdict(result))
        for check in accuracy.check(config, prepared, report_progress) if given.check else ():
            report(result=asdict(check))
    except (ConfigError, CpuLevelError, RequestError, RuntimeError) as error:
        report(error=(str(error).strip().splitlines() or [type(error).__name__])[0])
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())

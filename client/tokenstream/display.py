"""What the command line prints: lines, JSON objects, tables, and the progress of what takes a while.

Text out of values, pure but for `write` and `StageProgress`, which draws on standard error.
It does not know where the values come from.
"""

from __future__ import annotations

import io
import json
import re
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

from .results import Chunk, Completion, Stats, Usage

if TYPE_CHECKING:
    from rich.console import Console
    from rich.progress import Progress, TaskID
    from rich.table import Table

    from .client_bench import Imported, Streamed
    from .inventory import Served

_STAGES = (
    ("layout", "Preparing the server"),
    ("convert", "Converting the weights (once)"),
    ("start", "Starting the server"),
    ("load", "Loading the model"),
)
_TABLE_WIDTH = 100
_WIDEST = 400  # of a table whose rows are not to be cut: a terminal breaks them
_CONTROLS = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")


def write(text: str) -> None:
    """Show a piece of an answer on standard output now; on a terminal, without what could drive it."""
    sys.stdout.write(printable(text) if sys.stdout.isatty() else text)
    sys.stdout.flush()


def printable(text: str) -> str:
    """`text` without control characters but tab and newline: a model must not be able to drive a terminal."""
    return _CONTROLS.sub("", text)


def timing_line(stats: Stats, usage: Usage, finish_reason: str) -> str:
    """One line: `TTFT 0.082 s, 61.3 tokens/s, 24 tokens in, 40 out, finished: stop`."""
    ttft = "no token" if stats.ttft is None else f"TTFT {stats.ttft:.3f} s"
    rate = f", {stats.tokens_per_second:.1f} tokens/s" if stats.tokens_per_second else ""
    return f"{ttft}{rate}, {usage.input_tokens} tokens in, {usage.output_tokens} out, finished: {finish_reason}"


def chunk_json(chunk: Chunk) -> str:
    """A chunk as one line of JSON: index, token_ids, text, and logprobs if there are any."""
    values = asdict(chunk)
    del values["finish_reason"]  # the end has its own line
    if not chunk.logprobs:
        del values["logprobs"]
    return json.dumps(values, ensure_ascii=False)


def end_json(completion: Completion) -> str:
    """The last line of JSON: why it ended, usage, the server's timings and this client's."""
    values = asdict(completion)
    for name in ("text", "token_ids", "logprobs"):  # sent already, piece by piece
        del values[name]
    return json.dumps(values, ensure_ascii=False)


def welcome(http_url: str, grpc_url: str, metrics_url: str, log_path: str) -> str:
    """Where the server listens, and what to try next."""
    body = '{"text_input": "Once upon a time", "max_tokens": 20}'
    return f"""\
Ready. Ctrl-C stops the server.
  gRPC     {grpc_url}
  HTTP     {http_url}
  metrics  {metrics_url}
  log      {log_path}
Try, in another terminal:
  tokenstream generate --url {grpc_url} "Write one sentence about the sea."
  tokenstream chat --url {grpc_url}
  curl -N {http_url}/v2/models/llm/generate_stream -d '{body}'"""


def served_json(served: Served) -> str:
    """A model as one line of JSON."""
    status = served.status
    told = {"name": status.name, "version": status.version, "ready": status.ready}
    more = {"state": status.state, "reason": status.reason, "info": served.info}
    return json.dumps(told | more, ensure_ascii=False)


def models_table(served: Sequence[Served]) -> str:
    """The models as text: a row for each, a line for each that is not ready and says why, and what ours have taken."""
    if not served:
        return "the server's repository holds no model\n"
    from rich.console import Console

    console = Console(file=io.StringIO(), width=_WIDEST)
    table = _table("model", "version", "ready", "loads", "dtype", "exact", "context", "running", "waiting")
    names = ("model", "dtype", "exact", "max_context", "running", "waiting")
    for one in served:
        status, info = one.status, one.info or {}
        cells = (status.name, status.version or "-", "yes" if status.ready else status.state.lower() or "no")
        table.add_row(*(printable(str(cell)) for cell in (*cells, *(info.get(name, "-") for name in names))))
    with console.capture() as capture:
        console.print(table)
        for one in served:
            if one.status.reason and not one.status.ready:
                _print(console, f"{one.status.name}: {' '.join(one.status.reason.split())}")
            for line in _taken(one.info or {}):
                _print(console, f"{one.status.name}: {line}")
    return "".join(f"{line.rstrip()}\n" for line in capture.get().splitlines() if line.strip())


def _taken(info: Mapping[str, object]) -> list[str]:
    """What a model has taken of its machine, and why so much; nothing of one that does not say."""
    if not info.keys() >= {"threads_from", "kv_cache_from", "weights_form"}:
        return []
    return [
        f"threads: {info.get('threads')} ({info['threads_from']})",
        f"KV cache: {info.get('kv_tokens')} tokens, {info.get('kv_cache_mib')} MiB ({info['kv_cache_from']})",
        f"weights: {info.get('weights_mib')} MiB ({info['weights_form']})",
    ]


def bench_report(results: Sequence[Mapping[str, Any]]) -> str:
    """The engine's measurements as text: what was measured on what, then a table of times and one of checks."""
    from rich.console import Console

    console = Console(file=io.StringIO(), width=_TABLE_WIDTH)
    with console.capture() as capture:
        for result in results:
            if result["kind"] == "setup":
                _print(console, _setup_text(result))
        if times := [result for result in results if result["kind"] in ("decode", "prefill")]:
            console.print(_times_table(times))
            if split := [time for time in times if time["parts_ms"]]:
                console.print(_parts_table(split))
        for gap in (result for result in results if result["kind"] == "gap"):
            _print(console, _gap_text(gap))
        if checks := [result for result in results if result["kind"] == "check"]:
            console.print(_checks_table(check for check in checks if not check["skipped"]))
        for check in checks:
            if check["skipped"]:
                _print(console, f"{check['dtype']} {check['kernels']} does not run here: {check['skipped']}")
    return capture.get()


def _print(console: Console, text: str) -> None:
    """Print text of others: as it is, but without what could drive a terminal."""
    console.print(printable(text), markup=False, highlight=False, soft_wrap=True)


def _setup_text(setup: Mapping[str, Any]) -> str:
    versions = ", ".join(f"{name} {version}" for name, version in setup["versions"].items())
    return f"""\
{setup["model"]}: {setup["dtype"]}, {setup["kernels"]} kernels, {setup["exact"]}
{setup["cpu"]}, {setup["cores"]} cores, threads: {setup["threads"]}; {versions}
reads {setup["read_gb_per_second"]:.1f} GB/s, multiplies {setup["gflop_per_second"]:.0f} GFLOP/s; \
a step reads {setup["weight_bytes"] / 1e6:.0f} MB of weights and {setup["kv_bytes_per_token"] / 1e3:.1f} kB per token"""


def _times_table(times: Iterable[Mapping[str, Any]]) -> Table:
    table = _table("milliseconds", "median", "min", "max", "rounds", "host", "limit", "ratio", "tokens/s")
    for time in times:
        table.add_row(
            _case(time),
            *(_short(time[name]) for name in ("median_ms", "min_ms", "max_ms")),
            " ".join(_short(median) for median in time["rounds_ms"]),
            _short(time["host_ms"]),
            f"{_short(time['limit_ms'])} {time['bound']}",
            f"{time['ratio']:.2f}",
            f"{time['tokens_per_second']:.0f}",
        )
    return table


def _parts_table(times: Sequence[Mapping[str, Any]]) -> Table:
    """Where a step's time goes: means, of which `rest` is the launch of the model and its scratch memory."""
    table = _table("mean milliseconds in", *times[0]["parts_ms"], "rest", "host")
    for time in times:
        parts = time["parts_ms"]
        rest = max(0.0, time["median_ms"] - time["host_ms"] - sum(parts.values()))
        table.add_row(_case(time), *(_short(ms) for ms in (*parts.values(), rest, time["host_ms"])))
    return table


def _gap_text(gap: Mapping[str, Any]) -> str:
    return f"""\
longest gap in {gap["rows"]} streams while a prompt of {gap["tokens"]} tokens enters: {_short(gap["longest_ms"])} ms, \
worst of {gap["samples"]};
three decode steps and the prefill take {_short(gap["bound_ms"])} ms, ratio {gap["ratio"]:.2f}"""


def _case(time: Mapping[str, Any]) -> str:
    return f"decode {time['rows']:2} x {time['tokens']}" if time["kind"] == "decode" else f"prefill {time['tokens']}"


def _short(ms: float) -> str:
    return f"{ms:.2f}" if ms < 100 else f"{ms:.0f}"


def _checks_table(checks: Iterable[Mapping[str, Any]]) -> Table:
    table = _table("logits, against float32", "max error", "mean error", "same token", "mean KL", "NaN", "inf")
    for check in checks:
        agreement = "-" if check["argmax_agreement"] is None else f"{check['argmax_agreement']:.1%}"
        errors = ["-" if check[key] is None else f"{check[key]:.2g}" for key in ("max_error", "mean_error", "mean_kl")]
        name = f"{check['dtype']} {check['kernels']}"
        table.add_row(name, *errors[:2], agreement, errors[2], str(check["nan"]), str(check["inf"]))
    return table


def client_report(streamed: Iterable[Streamed], imported: Iterable[Imported]) -> str:
    """What `bench client` measured."""
    from rich.console import Console

    streams = _table("client", "streams", "tokens", "tokens/s", "CPU us/token", "CPU s", "idle CPU")
    for one in streamed:
        figures = (f"{one.tokens_per_second:.0f}", f"{one.cpu_us_per_token:.0f}", f"{one.cpu_seconds:.2f}")
        streams.add_row(one.kind, str(one.streams), str(one.tokens), *figures, f"{one.idle_cpu_share:.1%}")
    imports = _table("in a fresh interpreter", "ms", "CPU ms")
    for load in imported:
        imports.add_row(load.statement, f"{load.wall_ms:.1f}", f"{load.cpu_ms:.1f}")
    console = Console(file=io.StringIO(), width=_TABLE_WIDTH)
    with console.capture() as capture:
        console.print(streams)
        console.print(imports)
    return capture.get()


def _table(first: str, *others: str) -> Table:
    from rich import box
    from rich.table import Table

    table = Table(box=box.SIMPLE_HEAD)
    table.add_column(first, no_wrap=True)
    for name in others:
        table.add_column(name, justify="right", no_wrap=True)
    return table


class StageProgress:
    """Draws the stages of a long command on standard error: a bar where the total is known, and the time.

    Where standard error is no terminal, each stage is one line, or nothing without `lines`.
    """

    def __init__(self, *, lines: bool = True) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, Progress, TextColumn

        self._console = Console(stderr=True)
        self._lines = lines
        seconds = TextColumn("{task.fields[seconds]:.0f} s")
        columns = (TextColumn("{task.description}"), BarColumn(bar_width=30), seconds)
        self._progress: Progress = Progress(*columns, console=self._console, transient=True)
        self._task: TaskID | None = None
        self._stage = ""
        self._stopped = False

    def __enter__(self) -> Self:
        """Begin to draw."""
        if self._console.is_terminal:
            self._progress.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """Clear what was drawn."""
        self.stop()

    def stop(self) -> None:
        """Clear what was drawn, and draw no more; harmless if repeated."""
        self._stopped = True
        if self._console.is_terminal:
            self._progress.stop()

    def __call__(self, stage: str, done: int, total: int | None, elapsed: float) -> None:
        """Show how far `stage` is."""
        if self._stopped:
            return
        total = None if stage == "load" else total  # models ready: one or none says nothing of how long it takes
        if stage != self._stage:
            self._stage = stage
            words = next((words for name, words in _STAGES if name == stage), stage)
            if self._lines and not self._console.is_terminal:
                self._console.print(words, markup=False)
            if self._task is not None:
                self._progress.remove_task(self._task)
            self._task = self._progress.add_task(words, total=total, seconds=elapsed)
        if self._task is not None:
            self._progress.update(self._task, completed=done, total=total, seconds=elapsed)

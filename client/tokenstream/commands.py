"""The command `tokenstream`: start, probe and drain a server, ask it, talk to it, measure it, add a model to it.

Exit codes: 0 done, 1 failed, 2 wrong usage, 3 no connection, 4 the server refused, 5 too late, 130 Ctrl-C.
Every error is one line on standard error that says the cure. It knows how to ask and to print; all else is imported
when a command needs it, so that `--help` is quick.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from io import TextIOWrapper
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from . import __version__
from .diagnosis import ServerFailed, writing_to
from .drain import DRAIN_SECONDS, POLL_SECONDS, Drain
from .errors import TokenstreamError
from .exits import FAILED, NO_CONNECTION, OK, TERMINATED, one_line, one_line_errors
from .heartbeat import find_fault, lives, read_heartbeats
from .params import DEFAULT_URL, Sampling
from .timeouts import Timeout

if TYPE_CHECKING:
    from .client import Client
    from .stream import TokenStream

DEMO_PROMPT = "Write one sentence about the sea."

app = typer.Typer(no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False)
bench = typer.Typer(no_args_is_help=True, help="Measure, always beside the machine's own limits.")
app.add_typer(bench, name="bench")

Url = Annotated[str, typer.Option(envvar="TOKENSTREAM_URL", help="HOST:PORT of the server's gRPC endpoint.")]
ModelName = Annotated[str, typer.Option(help="Name of the model on the server.")]
Seconds = Annotated[float | None, typer.Option("--timeout", help="Seconds for the whole answer.")]
MaxTokens = Annotated[int | None, typer.Option(help="Most tokens to generate.")]
Temperature = Annotated[float | None, typer.Option(help="0 is greedy; unset: the model's own.")]
TopP = Annotated[float | None, typer.Option(help="Draw from the smallest set with this probability.")]
TopK = Annotated[int | None, typer.Option(help="Draw from so many most likely tokens.")]
Seed = Annotated[int | None, typer.Option(help="Same seed, same answer.")]
Stop = Annotated[list[str] | None, typer.Option(help="End before this text; may be repeated.")]
RunDir = Annotated[
    Path | None, typer.Option(envvar="TOKENSTREAM_RUN_DIR", help="Run folder of the server; unset: all of this user's.")
]
Repository = Annotated[Path | None, typer.Option(help="Model repository; unset: the one that came along.")]


@app.callback(invoke_without_command=True)
def root(
    version: Annotated[bool, typer.Option("--version", is_eager=True, help="Print the version.")] = False,
) -> None:
    """Stream the tokens of language models served by NVIDIA Triton.

    Exit codes: 0 done, 1 failed, 2 wrong usage, 3 no connection, 4 the server refused, 5 too late, 130 Ctrl-C.
    """
    if version:
        typer.echo(f"tokenstream {__version__}")
        raise typer.Exit


@app.command()
def generate(
    prompt: Annotated[str, typer.Argument(help="The prompt; - reads standard input.")],
    max_tokens: MaxTokens = None,
    temperature: Temperature = None,
    top_p: TopP = None,
    top_k: TopK = None,
    seed: Seed = None,
    stop: Stop = None,
    raw: Annotated[bool, typer.Option("--raw", help="Continue the text as it is, without the chat template.")] = False,
    json_lines: Annotated[
        bool, typer.Option("--json", help="One JSON object per response, and one at the end.")
    ] = False,
    url: Url = DEFAULT_URL,
    model: ModelName = "llm",
    timeout: Seconds = None,
) -> None:
    """Answer one prompt, printed as it is made; timing goes to standard error."""
    sampling = _sampling(max_tokens, temperature, top_p, top_k, seed, stop)
    with one_line_errors(), _client(url, model, timeout) as client:
        text = sys.stdin.read() if prompt == "-" else prompt
        if not text:
            raise typer.BadParameter("the prompt is empty: give at least one character")
        stream = client.stream(text, **sampling) if raw else client.chat(_message(text), **sampling)
        _show(stream, json_lines=json_lines)


@app.command()
def chat(
    system: Annotated[str | None, typer.Option(help="What the model is told before the first message.")] = None,
    max_tokens: MaxTokens = None,
    temperature: Temperature = None,
    top_p: TopP = None,
    top_k: TopK = None,
    seed: Seed = None,
    stop: Stop = None,
    url: Url = DEFAULT_URL,
    model: ModelName = "llm",
    timeout: Seconds = None,
) -> None:
    """Hold a conversation. Ctrl-C stops an answer; /reset begins anew; /exit, Ctrl-D or Ctrl-C at the prompt leaves."""
    from .conversation import Conversation, typed_lines

    with one_line_errors(), _client(url, model, timeout) as client:
        talk = Conversation(client, _sampling(max_tokens, temperature, top_p, top_k, seed, stop), system)
        interactive = sys.stdin.isatty()
        for line in typed_lines(interactive):
            try:
                talk.say(line)
            except TokenstreamError as error:
                if not interactive:
                    raise
                typer.echo(one_line(error), err=True)


@app.command()
def probe(
    url: Url = DEFAULT_URL,
    model: ModelName = "llm",
    timeout: Annotated[float, typer.Option(help="Seconds within which one token must arrive.")] = 5.0,
    live: Annotated[
        bool, typer.Option("--live", help="Ask for nothing: see whether every model instance on this machine lives.")
    ] = False,
    run_dir: RunDir = None,
) -> None:
    """Ask for one token; exit code 0 only if it arrives in time. For health checks: it sees what readiness does not.

    A full server may take longer than that and yet be well, so whoever restarts servers asks with --live.
    """
    with one_line_errors():
        if live:
            fault = find_fault(_run_folders(run_dir))
            typer.echo(fault or "live", err=fault is not None)
            raise typer.Exit(FAILED if fault else OK)
        with _client(url, model, timeout) as client:
            started = time.monotonic()
            client.generate("ok", max_tokens=1, temperature=0.0, seed=0)
            typer.echo(f"{model} at {url} answered in {time.monotonic() - started:.3f} s")


@app.command()
def drain(
    seconds: Annotated[float, typer.Option(min=0.0, help="How long live requests may go on; then they are ended.")] = (
        DRAIN_SECONDS
    ),
    run_dir: RunDir = None,
) -> None:
    """Have the server on this machine refuse new requests and end the live ones; for whatever stops it afterwards."""
    with one_line_errors():
        folders = [folder for folder in _run_folders(run_dir) if any(lives(b.pid) for b in read_heartbeats(folder))]
        if not folders:
            where = f"in {run_dir}" if run_dir else "of this user"
            cure = "start one with `tokenstream serve`, or name its run folder with --run-dir"
            typer.echo(f"tokenstream: no server {where} can be drained, none is serving: {cure}", err=True)
            raise typer.Exit(NO_CONNECTION)
        with writing_to(folders[0]):
            begun = Drain(folders, seconds)
        while not begun.over():
            time.sleep(POLL_SECONDS)
        if not begun.complete:
            typer.echo(f"tokenstream: not drained {seconds + 5:g} s later: see the server's log, or stop it", err=True)
            raise typer.Exit(FAILED)
        typer.echo(f"drained: {begun.by_themselves} of {begun.live} live requests ended by themselves")


@app.command()
def serve(
    repository: Repository = None,
    http_port: Annotated[int, typer.Option(help="0: a free one.")] = 8000,
    grpc_port: Annotated[int, typer.Option(help="0: a free one.")] = 8001,
    metrics_port: Annotated[int, typer.Option(help="0: a free one.")] = 8002,
    host: Annotated[str, typer.Option(help="Address to listen on; 0.0.0.0 is every network.")] = "127.0.0.1",
    drain_seconds: Annotated[
        float, typer.Option(min=0.0, help="How long live requests may go on behind Ctrl-C or SIGTERM.")
    ] = DRAIN_SECONDS,
    run_dir: Annotated[
        Path | None,
        typer.Option(envvar="TOKENSTREAM_RUN_DIR", help="Folder for log and heartbeats; unset: one in the cache."),
    ] = None,
) -> None:
    """Run a Triton server on this machine until Ctrl-C; one that died or hangs is started again."""
    from .display import StageProgress, welcome
    from .server import TritonServer, find_repository, serve_until_signal

    with one_line_errors(), StageProgress() as progress:
        server = TritonServer(
            repository or find_repository(),
            http_port=http_port,
            grpc_port=grpc_port,
            metrics_port=metrics_port,
            host=host,
            progress=progress,
            drain_seconds=drain_seconds,
            run_dir=run_dir,
        )
        greeted = False

        def greet() -> None:
            nonlocal greeted
            progress.stop()
            urls = (server.http_url, server.grpc_url, server.metrics_url)
            typer.echo("Ready again." if greeted else welcome(*urls, str(server.log_path)))
            greeted = True

        def mourn(failure: ServerFailed) -> None:
            typer.echo(one_line(failure), err=True)

        def tell(live: int, seconds: float) -> None:
            typer.echo(f"draining: {live} live requests, up to {seconds:g} s", err=True)

        code = serve_until_signal(server, on_ready=greet, on_death=mourn, on_drain=tell)
    raise typer.Exit(code)


@app.command()
def demo(repository: Repository = None) -> None:
    """Start a server on free ports, stream one answer, stop the server."""
    from .client import Client
    from .display import StageProgress
    from .server import TritonServer, find_repository

    signal.signal(signal.SIGTERM, lambda *_: sys.exit(TERMINATED))
    with one_line_errors(), StageProgress() as progress:
        with TritonServer(repository or find_repository(), progress=progress) as server:
            progress.stop()
            typer.echo(f"> {DEMO_PROMPT}")
            with Client(server.grpc_url) as client:
                first = _show(client.chat(_message(DEMO_PROMPT), max_tokens=48, temperature=0.0))
        if began := os.environ.get("TOKENSTREAM_STARTED_AT"):
            typer.echo(f"command to first token: {first - float(began):.1f} s", err=True)


@app.command()
def new_model(
    name: Annotated[str, typer.Argument(help="Name of the new model.")],
    model: Annotated[str, typer.Option(help="What it loads: a Hugging Face id, a folder, a .gguf or package:// path.")],
    repository: Repository = None,
) -> None:
    """Add a model to a repository: a copy of `llm` under another name, loading another model."""
    from .scaffold import new_model as make
    from .server import find_repository

    with one_line_errors():
        target = repository or find_repository()
        source = target if (target / "llm").is_dir() else find_repository()
        made = make(name, model, source / "llm", target)
        typer.echo(f"{made} loads {model}. Serve it with: tokenstream serve --repository {target}")


@bench.command("engine")
def bench_engine(
    model: Annotated[
        str | None, typer.Option(help="A Hugging Face id, a folder, a .gguf or package:// path; unset: what llm loads.")
    ] = None,
    threads: Annotated[int, typer.Option(min=0, help="0: one per core.")] = 0,
    quick: Annotated[bool, typer.Option("--quick", help="A few steps of each instead of many.")] = False,
    check: Annotated[
        bool, typer.Option("--check", help="Also compare the logits of every dtype with float32.")
    ] = False,
    json_lines: Annotated[bool, typer.Option("--json", help="One JSON object per measurement.")] = False,
) -> None:
    """Measure the engine alone, without a server: decode steps and prefills, each beside its limit on this machine."""
    from .display import StageProgress, bench_report, write
    from .engine_bench import measure_engine

    with one_line_errors(), StageProgress() as progress:
        started = time.monotonic()

        def report(stage: str, done: int, total: int | None) -> None:
            progress(stage, done, total, time.monotonic() - started)

        results = measure_engine(report, model=model, threads=threads, quick=quick, check=check)
        progress.stop()
        write("".join(json.dumps(result) + "\n" for result in results) if json_lines else bench_report(results))


def run() -> None:
    """Read the command line and do what it says."""
    os.environ.setdefault("GRPC_VERBOSITY", "NONE")  # its own log lines would stand beside our one line
    # A model may write what the terminal's encoding lacks; what is read and is no text is refused where it is sent.
    for stream, errors in ((sys.stdin, "surrogateescape"), (sys.stdout, "replace"), (sys.stderr, "replace")):
        if isinstance(stream, TextIOWrapper):
            stream.reconfigure(errors=errors)
    app()


def _run_folders(run_dir: Path | None) -> list[Path]:
    """The folder that was named, else those of this user's live servers."""
    from .layout import cache_root
    from .runfolder import live_files

    return [run_dir] if run_dir else live_files(cache_root() / "run")


def _client(url: str, model: str, total: float | None) -> Client:
    from .client import Client

    try:
        return Client(url, model=model, timeout=Timeout(total=total))
    except ValueError as error:
        raise typer.BadParameter(str(error)) from error


def _sampling(
    max_tokens: int | None,
    temperature: float | None,
    top_p: float | None,
    top_k: int | None,
    seed: int | None,
    stop: list[str] | None,
) -> Sampling:
    return Sampling(
        max_tokens=max_tokens, temperature=temperature, top_p=top_p, top_k=top_k, seed=seed, stop=stop or None
    )


def _message(text: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": text}]


def _show(stream: TokenStream, *, json_lines: bool = False) -> float:
    """Print an answer as it comes, then its timing; returns when the first response was here (seconds of the epoch)."""
    from .display import chunk_json, end_json, timing_line, write

    first = 0.0
    with stream:
        try:
            for chunk in stream:
                first = first or time.time()
                write(chunk_json(chunk) + "\n" if json_lines else chunk.text)
        finally:
            if stream.text and not json_lines:
                write("\n")
        answer = stream.final()
    if json_lines:
        write(end_json(answer) + "\n")
    typer.echo(timing_line(answer.stats, answer.usage, answer.finish_reason), err=True)
    return first

"""The command `tokenstream`: start, probe, watch and drain a server, ask it, talk to it, measure it, add a model.

Exit codes: 0 done, 1 failed, 2 wrong usage, 3 no connection, 4 the server refused, 5 too late, 130 Ctrl-C.
Every error is one line on standard error that says the cure. It knows how to ask and to print; all else is imported
when a command needs it, so that `--help` is quick.
"""

from __future__ import annotations

import json
import os
import sys
import time
from dataclasses import asdict
from io import TextIOWrapper
from typing import TYPE_CHECKING, Annotated

import typer

from . import __version__
from .command_options import JsonLines, ModelName, RunDir, SamplingOptions, Seconds, ServerOptions, with_groups
from .exits import FAILED, OK, WRONG_USAGE, OneLineGroup, failure, one_line_errors
from .heartbeat import NOT_SERVING, find_fault
from .load_commands import load
from .local_commands import demo, drain, new_model, no_server, run_folders, serve, starting

if TYPE_CHECKING:
    from .client_bench import Imported, Streamed

app = typer.Typer(cls=OneLineGroup, pretty_exceptions_enable=False)
bench = typer.Typer(help="Measure, always beside the machine's own limits.")


@app.callback(invoke_without_command=True)
def root(
    context: typer.Context,
    version: Annotated[bool, typer.Option("--version", is_eager=True, help="Print the version.")] = False,
) -> None:
    """Stream the tokens of language models served by NVIDIA Triton.

    Exit codes: 0 done, 1 failed, 2 wrong usage, 3 no connection, 4 the server refused, 5 too late, 130 Ctrl-C.

    With --json, results are one JSON object per line on standard output and errors are {"error": ..., "code": ...} on
    standard error, where code is the exit code; nothing else is printed.
    """
    if version:
        typer.echo(f"tokenstream {__version__}")
        raise typer.Exit
    if context.invoked_subcommand is None:
        typer.echo(context.get_help())
        raise typer.Exit(WRONG_USAGE)


@app.command()
@with_groups
def generate(
    prompt: Annotated[str, typer.Argument(help="The prompt; - reads standard input.")],
    sampling: SamplingOptions,
    server: ServerOptions,
    raw: Annotated[bool, typer.Option("--raw", help="Continue the text as it is, without the chat template.")] = False,
    json_lines: JsonLines = False,
    model: ModelName = "llm",
    timeout: Seconds = None,
) -> None:
    """Answer one prompt, printed as it is made; timing goes to standard error.

    --json: {"text", "token_ids", "index"} per response, and at the end {"finish_reason", "usage", "stats", ...}.
    """
    from .answers import show_json, show_text

    how = sampling.keywords
    with one_line_errors(json_lines=json_lines), server.client(model, timeout) as client:
        text = sys.stdin.read() if prompt == "-" else prompt
        if not text:
            raise typer.BadParameter("the prompt is empty: give at least one character")
        message = [{"role": "user", "content": text}]
        stream = client.stream(text, **how) if raw else client.chat(message, **how)
        show = show_json if json_lines else show_text
        show(stream)


@app.command()
@with_groups
def chat(
    sampling: SamplingOptions,
    server: ServerOptions,
    system: Annotated[str | None, typer.Option(help="What the model is told before the first message.")] = None,
    json_lines: JsonLines = False,
    model: ModelName = "llm",
    timeout: Seconds = None,
) -> None:
    """Hold a conversation. Ctrl-C stops an answer; /help lists the commands; /exit or Ctrl-D leaves.

    From a pipe each line is a message. --json: each line is {"content": "..."}, or with "role": "system", or
    {"command": "/retry"}; answers come as those of `generate --json`.
    """
    from .chat import chat_at_terminal, chat_from_pipe, chat_in_json

    talk = chat_in_json if json_lines else chat_at_terminal if sys.stdin.isatty() else chat_from_pipe
    with one_line_errors(json_lines=json_lines), server.client(model, timeout) as client:
        talk(client, sampling.keywords, system)


@app.command()
@with_groups
def probe(
    server: ServerOptions,
    model: ModelName = "llm",
    timeout: Annotated[float, typer.Option(help="Seconds within which one token must arrive.")] = 5.0,
    live: Annotated[
        bool, typer.Option("--live", help="Ask for nothing: see whether every model instance on this machine lives.")
    ] = False,
    run_dir: RunDir = None,
    json_lines: JsonLines = False,
) -> None:
    """Ask for one token; exit code 0 only if it arrives in time. For health checks: it sees what readiness does not.

    A full server may take longer than that and yet be well, so whoever restarts servers asks with --live.
    --json: {"model", "url", "seconds"}, or with --live {"live": true}.
    """
    with one_line_errors(json_lines=json_lines):
        if live:
            fault = find_fault(run_folders(run_dir))
            if fault == NOT_SERVING and not starting(run_dir):
                fault = no_server(run_dir, "is serving")
            if fault is None:
                typer.echo(json.dumps({"live": True}) if json_lines else "live")
                raise typer.Exit(OK)
            if json_lines:
                raise failure(fault, FAILED, json_lines=True)
            typer.echo(fault, err=True)  # not an error of this command: what it was asked to find out
            raise typer.Exit(FAILED)
        with server.client(model, timeout) as client:
            started = time.monotonic()
            client.generate("ok", max_tokens=1, temperature=0.0, seed=0, retries=0)
            seconds = time.monotonic() - started
        told = {"model": model, "url": client.url, "seconds": round(seconds, 6)}
        typer.echo(json.dumps(told) if json_lines else f"{model} at {client.url} answered in {seconds:.3f} s")


app.command()(drain)


@app.command()
@with_groups
def models(server: ServerOptions, json_lines: JsonLines = False) -> None:
    """List what the server serves, and what our models say of themselves.

    --json: {"name", "version", "ready", "state", "reason", "info"} per model; info is null for a model that is not
    ready, or another backend's.
    """
    from .display import models_table, served_json, write
    from .inventory import list_models

    with one_line_errors(json_lines=json_lines):
        served = list_models(server.client)
        write("".join(served_json(one) + "\n" for one in served) if json_lines else models_table(served))


@app.command()
def top(
    metrics_url: Annotated[
        str, typer.Option(envvar="TOKENSTREAM_METRICS_URL", help="Triton's metrics page.")
    ] = "http://127.0.0.1:8002/metrics",
    interval: Annotated[
        float,
        typer.Option(
            min=0.1, max=3600.0, help="Seconds between two looks; the models renew their numbers once a second."
        ),
    ] = 1.0,
    once: Annotated[bool, typer.Option("--once", help="Print one interval as text and leave.")] = False,
    json_lines: JsonLines = False,
) -> None:
    """Show what the models of a server do, live; q or Ctrl-C leaves. Percentiles are those of the last interval.

    --json: one object per interval, with all instances. A server that is gone is waited for, unless --once is given.
    """
    from .top import watch

    with one_line_errors(json_lines=json_lines):
        try:
            watch(metrics_url, interval, once=once, json_lines=json_lines)
        except ValueError as error:
            raise typer.BadParameter(str(error)) from error


app.command()(new_model)
app.command()(serve)
app.command()(demo)
app.add_typer(bench, name="bench")
app.add_typer(load, name="load")


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
    json_lines: JsonLines = False,
) -> None:
    """Measure the engine alone, without a server: decode steps and prefills, each beside its limit on this machine.

    --json: one object per measurement.
    """
    from .display import StageProgress, bench_report, write
    from .engine_bench import measure_engine

    with one_line_errors(json_lines=json_lines), StageProgress(lines=not json_lines) as progress:
        started = time.monotonic()

        def report(stage: str, done: int, total: int | None) -> None:
            progress(stage, done, total, time.monotonic() - started)

        results = measure_engine(report, model=model, threads=threads, quick=quick, check=check)
        progress.stop()
        write("".join(json.dumps(result) + "\n" for result in results) if json_lines else bench_report(results))


@bench.command("client")
@with_groups
def bench_client(
    server: ServerOptions,
    streams: Annotated[int, typer.Option(min=1, help="Answers at once.")] = 16,
    tokens: Annotated[int, typer.Option(min=1, help="Length of each.")] = 128,
    model: ModelName = "llm",
    json_lines: JsonLines = False,
) -> None:
    """Measure the client against a running server: CPU time per token, by threads and by tasks, and its import.

    The server must have a seat for each stream, or a place in its queue. --json: one object per measurement.
    """
    from .client_bench import measure_imports, measure_tasks, measure_threads
    from .display import StageProgress, client_report, write

    with one_line_errors(json_lines=json_lines), StageProgress(lines=not json_lines) as progress:
        progress("threads", 0, None, 0.0)
        streamed = [measure_threads(lambda: server.client(model), streams, tokens)]
        progress("tasks", 0, None, 0.0)
        streamed.append(measure_tasks(lambda: server.async_client(model), streams, tokens))
        progress("imports", 0, None, 0.0)
        imported = measure_imports()
        progress.stop()
        told: list[Streamed | Imported] = [*streamed, *imported]
        write(
            "".join(json.dumps(asdict(one)) + "\n" for one in told) if json_lines else client_report(streamed, imported)
        )


def run() -> None:
    """Read the command line and do what it says."""
    os.environ.setdefault("GRPC_VERBOSITY", "NONE")  # its own log lines would stand beside our one line
    # A model may write what the terminal's encoding lacks; what is read and is no text is refused where it is sent.
    for stream, errors in ((sys.stdin, "surrogateescape"), (sys.stdout, "replace"), (sys.stderr, "replace")):
        if isinstance(stream, TextIOWrapper):
            stream.reconfigure(errors=errors)
    app(prog_name="tokenstream")

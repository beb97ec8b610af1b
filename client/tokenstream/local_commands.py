"""The commands that work on this machine itself: serve, demo, drain, new-model.

They start servers, read run folders and write files; they do not know how a prompt or an answer looks.
"""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from typing import Annotated, Any

import typer

from .command_options import JsonLines, Repository, RunDir
from .diagnosis import ServerFailed, writing_to
from .drain import DRAIN_SECONDS, POLL_SECONDS, Drain
from .exits import FAILED, NO_CONNECTION, complain, explained, failure, one_line_errors, unwound_by_sigterm
from .heartbeat import lives, read_heartbeats

DEMO_PROMPT = "Write one sentence about the sea."


def drain(
    seconds: Annotated[float, typer.Option(min=0.0, help="How long live requests may go on; then they are ended.")] = (
        DRAIN_SECONDS
    ),
    run_dir: RunDir = None,
    json_lines: JsonLines = False,
) -> None:
    """Have the server on this machine refuse new requests and end the live ones; for whatever stops it afterwards.

    --json: {"live"}, how many requests there were.
    """
    with one_line_errors(json_lines=json_lines):
        folders = [folder for folder in run_folders(run_dir) if any(lives(b.pid) for b in read_heartbeats(folder))]
        if not folders:
            raise failure(no_server(run_dir, "can be drained, none is serving"), NO_CONNECTION, json_lines=json_lines)
        with writing_to(folders[0]):
            begun = Drain(folders, seconds)
        while not begun.over():
            time.sleep(POLL_SECONDS)
        if not begun.complete:
            message = "not drained: the server gave no sign of it, or died; see its log, or stop it"
            raise failure(message, FAILED, json_lines=json_lines)
        if json_lines:
            typer.echo(json.dumps({"live": begun.live}))
        else:
            typer.echo(f"drained: {begun.live} requests were live, and all have ended")


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
    json_lines: JsonLines = False,
) -> None:
    """Run a Triton server on this machine until Ctrl-C; one that died or hangs is started again.

    --json: {"event": "ready", "grpc_url", "http_url", "metrics_url", "log"} at each start,
    {"event": "draining", "live", "seconds"} before the end.
    """
    from .display import StageProgress, welcome
    from .server import TritonServer, find_repository, serve_until_signal

    with one_line_errors(json_lines=json_lines), StageProgress(lines=not json_lines) as progress:
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
            http, grpc, metrics, log = server.http_url, server.grpc_url, server.metrics_url, str(server.log_path)
            if json_lines:
                _event("ready", http_url=http, grpc_url=grpc, metrics_url=metrics, log=log)
            else:
                typer.echo("Ready again." if greeted else welcome(http, grpc, metrics, log))
            greeted = True

        def mourn(death: ServerFailed) -> None:
            complain(explained(death), FAILED, json_lines=json_lines)

        def tell(live: int, seconds: float) -> None:
            if json_lines:
                _event("draining", live=live, seconds=seconds)
            else:
                typer.echo(f"draining: {live} live requests, up to {seconds:g} s", err=True)

        code = serve_until_signal(server, on_ready=greet, on_death=mourn, on_drain=tell)
    raise typer.Exit(code)


def demo(
    repository: Repository = None,
    failover: Annotated[
        bool, typer.Option("--failover", help="Start two, kill -9 the one that answers, and compare the answer.")
    ] = False,
    json_lines: JsonLines = False,
) -> None:
    """Start a server on free ports, stream one answer, stop the server.

    --json: the answer as by `generate --json`; with --failover also {"event": "asked"}, "killed", "resumed" and
    {"event": "compared", "same", "tokens", "seed", "resumes"}. Not the same is exit code 1.
    """
    from .answers import show_json, show_text
    from .client import Client
    from .display import StageProgress
    from .server import TritonServer, find_repository

    lines = not json_lines
    with unwound_by_sigterm(), one_line_errors(json_lines=json_lines), StageProgress(lines=lines) as progress:
        if failover:
            from .failover import rehearse

            if not rehearse(repository or find_repository(), progress, json_lines=json_lines):
                difference = "the answer that was cut differs from the one that was not"
                raise failure(difference, FAILED, json_lines=json_lines)
            return
        with TritonServer(repository or find_repository(), progress=progress) as server:
            progress.stop()
            if not json_lines:
                typer.echo(f"> {DEMO_PROMPT}")
            show = show_json if json_lines else show_text
            with Client(server.grpc_url) as client:
                message = [{"role": "user", "content": DEMO_PROMPT}]
                first = show(client.chat(message, max_tokens=48, temperature=0.0))
        if not json_lines and (began := os.environ.get("TOKENSTREAM_STARTED_AT")):
            typer.echo(f"command to first token: {first - float(began):.1f} s", err=True)


def new_model(
    name: Annotated[str, typer.Argument(help="Name of the new model.")],
    model: Annotated[str, typer.Option(help="What it loads: a Hugging Face id, a folder, a .gguf or package:// path.")],
    repository: Repository = None,
    json_lines: JsonLines = False,
) -> None:
    """Add a model to a repository: a copy of `llm` under another name, loading another model.

    --json: {"name", "model", "folder", "repository"}.
    """
    from .scaffold import new_model as make
    from .server import find_repository

    with one_line_errors(json_lines=json_lines):
        target = repository or find_repository()
        source = target if (target / "llm").is_dir() else find_repository()
        made = make(name, model, source / "llm", target)
        if json_lines:
            told = {"name": name, "model": model, "folder": str(made), "repository": str(target)}
            typer.echo(json.dumps(told, ensure_ascii=False))
        else:
            typer.echo(f"{made} loads {model}. Serve it with: tokenstream serve --repository {target}")


def no_server(run_dir: Path | None, why: str) -> str:
    """One line: there is no server here, `why` that matters, and the cure."""
    where = f"in {run_dir}" if run_dir else "of this user"
    return f"no server {where} {why}: start one with `tokenstream serve`, or name its run folder with --run-dir"


def starting(run_dir: Path | None) -> bool:
    """Whether a live server of this user has its files there, whether or not it serves yet; None: anywhere."""
    found = run_folders(None)
    return bool(found) if run_dir is None else run_dir.resolve() in [folder.resolve() for folder in found]


def run_folders(run_dir: Path | None) -> list[Path]:
    """The folder that was named, else those of this user's live servers."""
    from .layout import cache_root
    from .runfolder import live_files, run_roots

    return [run_dir] if run_dir else [folder for root in run_roots(cache_root()) for folder in live_files(root)]


def _event(name: str, **values: Any) -> None:
    typer.echo(json.dumps({"event": name, **values}, ensure_ascii=False))

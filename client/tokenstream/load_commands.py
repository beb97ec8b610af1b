"""The commands `tokenstream load ...`: run a scenario against a server, list what there is, compare and report runs.

They check what was typed, start the load tests' package as a child and show what it says. They know neither how load
is made nor what a run holds.
"""

from __future__ import annotations

import copy
import json
import shlex
import signal
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Annotated, Any, Literal
from urllib.parse import urlsplit

import typer
from typer.core import TyperGroup

from .command_options import JsonLines, ModelName, ServerOptions, with_groups
from .exits import FAILED, INTERRUPTED, OK, TERMINATED, WRONG_USAGE, complain, failure, one_line_errors
from .params import DEFAULT_URL

_RUN = "SCENARIO"  # the command that is meant where no other is named
_HELP = ("--help",)
_SECRET_OPTIONS = ("--token", "--header")
_LOAD, _REQUESTS, _RESULTS = "Load", "Requests", "Results"  # the panels of --help
_Arrivals = Literal["poisson", "constant", "gamma", "bursts"]
_Target = Literal["tokenstream", "openai", "triton"]
_RunFile = Annotated[
    Path, typer.Argument(exists=True, dir_okay=False, readable=True, help="The run.json of a run.", metavar="RUN.json")
]


def _option(panel: str, words: str, *names: str, **more: Any) -> Any:
    return typer.Option(*names, help=words, rich_help_panel=panel, **more)


@dataclass(frozen=True, slots=True)
class LoadOptions:
    """What is to be other than the scenario says; None: as it says."""

    concurrency: Annotated[
        int | None, _option(_LOAD, "So many callers, each asking again once answered; of a search: its start.", min=1)
    ] = None
    rate: Annotated[
        float | None,
        _option(_LOAD, "So many requests per second, whatever the server does; of a search: its start.", min=0.001),
    ] = None
    arrivals: Annotated[_Arrivals | None, _option(_LOAD, "How those of --rate are spread; poisson if unset.")] = None
    burstiness: Annotated[
        float | None, _option(_LOAD, "Shape of gamma arrivals: 1 is poisson, less is burstier.", min=0.01)
    ] = None
    burst: Annotated[int | None, _option(_LOAD, "How many arrive at once in bursts.", min=2)] = None
    seconds: Annotated[float | None, _option(_LOAD, "Length of each stage.", min=0.1)] = None
    requests: Annotated[int | None, _option(_LOAD, "Requests of each stage, instead of --seconds.", min=1)] = None
    repeats: Annotated[int | None, _option(_LOAD, "Measure everything so many times.", min=1)] = None
    warmup: Annotated[int | None, _option(_LOAD, "Requests before each stage that do not count.", min=0)] = None
    seed: Annotated[int, _option(_REQUESTS, "Same seed, same requests at the same moments.")] = 0
    workload: Annotated[str | None, _option(_REQUESTS, "A name of `tokenstream load list`, or a path.")] = None
    max_tokens: Annotated[int | None, _option(_REQUESTS, "Most tokens of every answer.", min=1)] = None
    fixed_length: Annotated[
        bool | None,
        _option(
            _REQUESTS, "Every answer of exactly its most tokens, or ended by the model.", "--fixed-length/--natural"
        ),
    ] = None
    slo: Annotated[
        list[str] | None,
        _option(
            _RESULTS,
            "An objective, like ttft_p95=500ms, itl_p99=60ms or errors=1%; may be repeated; replaces the scenario's.",
            metavar="METRIC=LIMIT",
        ),
    ] = None

    def check(self) -> None:
        """BadParameter for options that exclude each other, or mean nothing without another."""
        if self.concurrency is not None and self.rate is not None:
            raise typer.BadParameter("--concurrency and --rate exclude each other: callers who wait, or a fixed rate")
        if self.seconds is not None and self.requests is not None:
            raise typer.BadParameter("--seconds and --requests exclude each other: one of them ends a stage")
        if self.rate is None and self.arrivals is not None:
            raise typer.BadParameter("--arrivals says how those of --rate are spread: give --rate too")
        if self.burstiness is not None and self.arrivals != "gamma":
            raise typer.BadParameter("--burstiness is for --arrivals gamma")
        if self.burst is not None and self.arrivals != "bursts":
            raise typer.BadParameter("--burst is for --arrivals bursts")


class ScenarioFirst(TyperGroup):
    """Commands of which one has no name: what begins with no other's is the scenario, or an option, of a run."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Split the words; help anywhere before another command is the help of this one."""
        if (not args and not ctx.resilient_parsing) or (args and args[0] not in self.commands):
            args = list(_HELP) if _HELP[0] in args else [_RUN, *args]
        return super().parse_args(ctx, args)

    def resolve_command(self, ctx: Any, args: list[str]) -> tuple[str | None, Any, list[str]]:
        """The command; the one without a name shows none in messages."""
        name, command, rest = super().resolve_command(ctx, args)
        return ("" if name == _RUN else name), command, rest

    def shell_complete(self, ctx: Any, incomplete: str) -> list[Any]:
        """What a shell may offer: the other commands, and the options of a run."""
        if incomplete.startswith("-"):
            return self.commands[_RUN].shell_complete(ctx, incomplete)
        return [item for item in super().shell_complete(ctx, incomplete) if item.value != _RUN]

    def format_help(self, ctx: Any, formatter: Any) -> None:
        """With the options of a run."""
        shown = copy.copy(self)
        shown.params = self.commands[_RUN].params
        TyperGroup.format_help(shown, ctx, formatter)


load = typer.Typer(
    cls=ScenarioFirst,
    subcommand_metavar="",
    help="""Put a server under load and judge it: a scenario by name, or the path of a TOML file.

    Exit codes: 0 every objective was met and the run is valid; 1 one was missed, or the run is not valid;
    2 wrong usage; 3 no connection; 4 refused by the server, as for an unknown model; 5 no answer in time;
    130 Ctrl-C, with what was measured written all the same.

    --json: {"event": "progress"} a few times a second, and at the end {"event": "summary"}; seconds throughout.""",
)


@load.command(_RUN)
@with_groups
def run_scenario(
    scenario: Annotated[str, typer.Argument(help="A name of `tokenstream load list`, or the path of a TOML file.")],
    options: LoadOptions,
    server: ServerOptions,
    target: Annotated[
        _Target, _option("Server", "What the server speaks: our gRPC, OpenAI's HTTP, or a plain Triton model's.")
    ] = "tokenstream",
    model: ModelName = "llm",
    metrics_url: Annotated[
        str | None,
        _option(
            "Server",
            "Triton's metrics page, or none; unset: port 8002 beside a --url of port 8001.",
            envvar="TOKENSTREAM_METRICS_URL",
            metavar="URL|none",
        ),
    ] = None,
    out: Annotated[
        Path | None, _option(_RESULTS, "Folder for the files; unset: loadtest-results/NAME-TIME.", file_okay=False)
    ] = None,
    overwrite: Annotated[bool, _option(_RESULTS, "Replace a run that is in that folder.", "--overwrite")] = False,
    name: Annotated[str | None, _option(_RESULTS, "What the run is called; unset: as its scenario.")] = None,
    json_lines: JsonLines = False,
) -> None:
    """Run it, and write run.json, run.csv and report.html."""
    from .load_display import LoadProgress, summary_text

    options.check()
    url = _address(server.url, target, encrypted=server.tls or bool(server.tls_ca or server.tls_cert))
    _check_server(server, target, url, model)
    order = {
        "scenario": scenario,
        "target": target,
        "url": url,
        "model": model,
        "metrics_url": _metrics_url(metrics_url, target, server.url),
        "out": str(out) if out else None,
        "overwrite": overwrite,
        "name": name,
        "command": _command(sys.argv[1:]),
        "load": asdict(options),
        "server": {key: str(value) if isinstance(value, Path) else value for key, value in asdict(server).items()},
    }
    with LoadProgress(shown=not json_lines) as progress:
        summary = _hear(["run"], order, progress.hear, end="summary", json_lines=json_lines)
    if not json_lines:
        _write(summary_text(summary))
    met = summary.get("valid") and summary.get("met")
    raise typer.Exit(OK if met else FAILED)


@load.command("list")
def list_scenarios(json_lines: JsonLines = False) -> None:
    """List the scenarios and the workloads that came along.

    --json: {"event": "scenario" or "workload", "name", "title", "about"} for each.
    """
    from .load_display import list_text

    found: list[Mapping[str, Any]] = []
    _hear(["list"], {}, found.append, end="workload", json_lines=json_lines)
    if not json_lines:
        _write(list_text(found))


@load.command("compare")
def compare_runs(before: _RunFile, after: _RunFile, json_lines: JsonLines = False) -> None:
    """Compare two runs load by load, with confidence intervals where they were repeated.

    --json: one {"event": "comparison"}.
    """
    from .load_display import comparison_text

    compared = _hear(["compare", str(before), str(after)], {}, _ignore, end="comparison", json_lines=json_lines)
    if not json_lines:
        _write(comparison_text(compared))


@load.command("report")
def report_run(
    run: _RunFile,
    out: Annotated[Path | None, typer.Option(help="The file; unset: report.html beside the run.")] = None,
    json_lines: JsonLines = False,
) -> None:
    """Write the HTML report of a run anew.

    --json: one {"event": "report", "html"}.
    """
    target = out or run.with_name("report.html")
    written = _hear(["report", str(run), str(target)], {}, _ignore, end="report", json_lines=json_lines)
    if not json_lines:
        _write(f"{written.get('html')}\n")


def _hear(
    arguments: Sequence[str],
    order: Mapping[str, Any],
    show: Callable[[Mapping[str, Any]], None],
    *,
    end: str,
    json_lines: bool,
) -> Mapping[str, Any]:
    """Run the child and hear it out; its last message, of event `end`. Exits unless it ended well."""
    from .load_child import run_load

    last: Mapping[str, Any] = {}

    def hear(message: Mapping[str, Any]) -> None:
        nonlocal last
        last = message
        if json_lines:
            typer.echo(json.dumps(message, ensure_ascii=False))
        else:
            show(message)

    with one_line_errors(json_lines=json_lines):
        ended = run_load(arguments, order, hear)
    complete = last.get("event") == end
    if ended.signal is not None:
        if ended.error:
            complain(ended.error, ended.code, json_lines=json_lines)
        elif complete and end == "summary" and not json_lines:
            from .load_display import summary_text

            _write(summary_text(last))
        raise typer.Exit(TERMINATED if ended.signal is signal.SIGTERM else INTERRUPTED)
    if ended.code == WRONG_USAGE:
        raise typer.BadParameter(ended.error)
    if ended.error and complete and end == "summary" and not json_lines:
        from .load_display import summary_text

        _write(summary_text(last))  # of a run whose files could not be written
    if ended.error or ended.code or not complete:
        raise failure(ended.error or "the load test ended without a word", ended.code or FAILED, json_lines=json_lines)
    return last


def _ignore(_message: Mapping[str, Any]) -> None:
    """What is only of interest at its end."""


def _write(text: str) -> None:
    from .display import write

    with one_line_errors():
        write(text)


def _address(url: str, target: str, *, encrypted: bool) -> str:
    """As the target wants it: http://HOST:PORT for OpenAI's interface, else HOST:PORT."""
    if target == "openai" and "://" not in url:
        return f"{'https' if encrypted else 'http'}://{url}"
    return url


def _check_server(server: ServerOptions, target: str, url: str, model: str) -> None:
    """BadParameter for what a client would refuse, before a child is started; it asks nobody."""
    if target == "openai":
        parts = urlsplit(url)
        encrypted = parts.scheme == "https"
        try:
            port = parts.port or (443 if encrypted else 80)
        except ValueError as error:
            raise typer.BadParameter(f"--url: {error}") from None
        server = replace(server, url=f"{parts.hostname or ''}:{port}", tls=server.tls or encrypted)
    server.client(model).close()


def _metrics_url(given: str | None, target: str, url: str) -> str | None:
    """The page to watch; None for none. Only beside our server's usual port its usual port is taken for it."""
    if given is not None:
        return None if given == "none" else given
    usual = DEFAULT_URL.rpartition(":")[2]
    host, _, port = url.rpartition(":")
    return f"http://{host}:8002/metrics" if target == "tokenstream" and port == usual else None


def _command(arguments: Sequence[str]) -> str:
    """The command line as it may be shown: what may be secret is left out."""
    shown: list[str] = []
    for argument in arguments:
        option, equals, _ = argument.partition("=")
        if shown and shown[-1] in _SECRET_OPTIONS:
            shown.append("...")
        else:
            shown.append(f"{option}=..." if equals and option in _SECRET_OPTIONS else argument)
    return shlex.join(["tokenstream", *shown])

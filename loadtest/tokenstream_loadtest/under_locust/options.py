"""What the load test adds to Locust's command line, and what it comes to.

Locust sends the options of its master to all workers as they were typed, and lets its web page change them: so they are
read anew when a test begins. It does not know users or events.
"""

from __future__ import annotations

import os
from argparse import ArgumentTypeError, Namespace
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_args

from ..files import check_writable, free_folder
from ..results import Arrivals, Stage
from ..slo import Objective
from ..workloads import Workload, read_workload
from .shapes import SHAPES
from .wire import Open

TARGETS = ("tokenstream", "openai")
_HOSTS = {"tokenstream": "127.0.0.1:8001", "openai": "http://127.0.0.1:9000"}
_OPEN = tuple(name for name in get_args(Arrivals) if name != "closed")


def add_options(parser: Any) -> None:
    """To Locust's parser, for its event `init_command_line_parser`."""
    group = parser.add_argument_group("Token streaming", "Load tests of servers that stream tokens.")

    def add(name: str, *, in_web_ui: bool = True, **words: Any) -> None:
        action = group.add_argument(name, **words)
        # Locust's parser sets these; an argument group of its parser does not.
        action.include_in_web_ui, action.is_secret, action.is_required, action.is_multiple = (
            in_web_ui,
            False,
            False,
            False,
        )

    add("--target", choices=TARGETS, default="tokenstream", help="What speaks at --host: gRPC, or OpenAI's HTTP.")
    add("--model", default="llm", help="Name of the model.")
    add("--workload", default="chat", help="Shipped workload, or path of a .toml file.")
    add("--fixed-length", action="store_true", help="Every answer has exactly as many tokens as it may have.")
    add("--max-tokens", type=int, default=0, help="Of every answer, in place of what the workload says.")
    add("--seed", type=int, default=0, help="Of prompts and arrivals.")
    add("--rate", type=float, default=0.0, help="Requests per second, whatever users wait for: an open loop.")
    add("--arrivals", choices=_OPEN, default="poisson", help="Of --rate.")
    add("--shape", choices=("", *SHAPES), default="", help="How the number of users changes; --users is its peak.")
    add("--shape-steps", type=int, default=5, help="How many steps --shape steps has.")
    add("--shape-seconds", type=float, default=15.0, help="How long each step of --shape ramp is.")
    add("--drain", type=float, default=60.0, help="Seconds that requests may take when the test is over.")
    add(
        "--ignore-flaws",
        action="store_true",
        help="Exit by the objectives alone, even if the run is not to be trusted.",
    )
    add("--report", default="", help="Folder for the run's JSON, HTML and CSV; NAME-2 if it holds a run.")
    add(
        "--metrics-url",
        default=os.environ.get("TOKENSTREAM_METRICS_URL", ""),
        help="Triton's metrics page; 'none': do not look. By default port 8002 beside a --host of port 8001.",
    )
    add("--server-ca", default="", in_web_ui=False, help="PEM file of the authority to trust: turns TLS on.")
    add(
        "--slo",
        action="append",
        default=[],
        type=_objective,
        in_web_ui=False,
        help="An objective, like ttft_p95=500ms or errors=1%%; may be given more than once. Missed: exit code 1.",
    )


@dataclass(frozen=True, slots=True)
class Choices:
    """The options, read and checked."""

    target: str
    url: str
    model: str
    workload: Workload
    seed: int
    objectives: tuple[Objective, ...]
    drain: float
    report: str
    ignore_flaws: bool
    metrics_url: str | None
    ca: str | None
    stage: Stage | None  # of an open loop

    @staticmethod
    def read(options: Namespace, host: str | None) -> Choices:
        """ValueError in one line."""
        target = str(options.target)
        url = host or _HOSTS[target]
        workload = read_workload(options.workload)
        rate = float(options.rate or 0)
        if rate < 0:
            raise ValueError(f"--rate must be above 0, got {rate:g}")
        if rate and options.shape:
            raise ValueError("--shape changes the number of users, and --rate does not look at it: give one of them")
        if options.shape == "ramp" and not options.slo:
            raise ValueError("--shape ramp goes on until an objective is missed: give one with --slo")
        if target == "tokenstream" and "://" in url:
            raise ValueError(f"--host is HOST:PORT for gRPC, got {url}; for OpenAI's HTTP give --target openai")
        return Choices(
            target=target,
            url=url,
            model=str(options.model),
            workload=workload.with_answers(
                max_tokens=int(options.max_tokens) or None, fixed_length=bool(options.fixed_length)
            ),
            seed=int(options.seed),
            objectives=tuple(Objective.parse(text) for text in options.slo),
            drain=float(options.drain),
            report=str(options.report or ""),
            ignore_flaws=bool(options.ignore_flaws),
            metrics_url=_metrics_url(str(options.metrics_url or ""), target, url),
            ca=str(options.server_ca) or None,
            stage=Stage(arrivals=options.arrivals, rate=rate) if rate else None,
        )

    @property
    def order(self) -> Open:
        """For the driver."""
        return Open(self.target, self.url, self.model, ca=self.ca, metrics_url=self.metrics_url)


def check_report(wanted: str) -> None:
    """ValueError in one line if files cannot be written to this folder of `--report`."""
    if not wanted:
        return
    try:
        check_writable(free_folder(Path(wanted)))
    except OSError as error:
        raise ValueError(f"--report cannot be written: {wanted}: {(error.strerror or str(error)).lower()}") from None


def _objective(text: str) -> str:
    try:
        return str(Objective.parse(text))
    except ValueError as error:
        raise ArgumentTypeError(str(error)) from None


def _metrics_url(given: str, target: str, url: str) -> str | None:
    if given:
        return None if given == "none" else given
    host, _, port = url.rpartition(":")
    return f"http://{host}:8002/metrics" if target == "tokenstream" and port == "8001" else None

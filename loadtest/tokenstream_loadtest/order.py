"""What the command `tokenstream load` asks of this package, and the plan that follows from it.

The order comes as JSON in an environment variable, for it may hold credentials. It does not know how a plan is carried
out.
"""

from __future__ import annotations

import re
import time
from collections.abc import MutableMapping
from dataclasses import dataclass
from pathlib import Path

from pydantic import BaseModel, ConfigDict

from tokenstream import TLS

from .bench import Plan
from .files import RUN_FILE
from .results import Arrivals
from .scenarios import read_scenario
from .slo import Objective
from .targets import TargetOptions

VARIABLE = "TOKENSTREAM_LOADTEST_ORDER"
_RESULTS = Path("loadtest-results")
_UNFIT = re.compile(r"[^\w.-]+")  # for the name of a folder


class _Part(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class Load(_Part):
    """What is to be other than the scenario says; None: as it says."""

    concurrency: int | None = None
    rate: float | None = None
    arrivals: Arrivals | None = None
    burstiness: float | None = None
    burst: int | None = None
    seconds: float | None = None
    requests: int | None = None
    repeats: int | None = None
    warmup: int | None = None
    seed: int = 0
    workload: str | None = None
    max_tokens: int | None = None
    fixed_length: bool | None = None
    slo: tuple[str, ...] | None = None


class Server(_Part):
    """How a server is reached and knows us, in the words of the command's options."""

    url: str = ""
    tls: bool = False
    tls_ca: Path | None = None
    tls_cert: Path | None = None
    tls_key: Path | None = None
    token: str | None = None
    header: tuple[str, ...] | None = None
    allow_insecure_credentials: bool = False

    def options(self) -> TargetOptions:
        """The same in the words of targets."""
        pairs = [header.partition("=") for header in self.header or ()]
        headers = {name.strip().lower(): value for name, _, value in pairs}
        if self.token is not None:
            headers = {"authorization": f"Bearer {self.token}"} | headers
        encrypted = self.tls or self.tls_ca or self.tls_cert
        tls = TLS(self.tls_ca, self.tls_key, self.tls_cert) if encrypted else None
        return TargetOptions(headers=headers, tls=tls, allow_insecure_credentials=self.allow_insecure_credentials)


class Order(_Part):
    """A run that is wanted. `url` as the target wants it; `out`: where its files go, over others if `overwrite`."""

    scenario: str
    target: str
    url: str
    model: str
    metrics_url: str | None = None
    out: Path | None = None
    overwrite: bool = False
    name: str | None = None
    command: str = ""
    load: Load = Load()
    server: Server = Server()


@dataclass(frozen=True, slots=True)
class Planned:
    """A plan, the folder for the files, and what is to be said before it begins."""

    plan: Plan
    folder: Path
    notes: tuple[str, ...] = ()


def take_order(environment: MutableMapping[str, str]) -> Order:
    """The order, which no child of ours is to find there again. KeyError without one."""
    return Order.model_validate_json(environment.pop(VARIABLE))


def planned(order: Order) -> Planned:
    """What follows from the scenario and what was given beside it. ValueError in one line."""
    load = order.load.model_dump(exclude={"seed", "slo"})
    scenario = read_scenario(order.scenario).override(**load, objectives=order.load.slo)
    name = order.name or scenario.name
    stamp = time.strftime("%Y%m%dT%H%M%SZ", time.gmtime())
    folder = order.out or _RESULTS / f"{_UNFIT.sub('-', name)}-{stamp}"
    if not order.overwrite and (folder / RUN_FILE).exists():
        raise ValueError(f"{folder} holds another run: name another folder with --out, or replace it with --overwrite")
    workload = scenario.read_workload()
    if order.target == "triton" and workload.chats:
        raise ValueError(
            f"a plain Triton model takes text, not the messages of a chat as in {workload.name}: give --workload fixed,"
            " or one of your own whose kinds have chat = false"
        )
    objectives = tuple(Objective.parse(text) for text in scenario.objectives)
    plan = Plan(
        scenario=name,
        title=scenario.title,
        workload=workload,
        stages=scenario.stages,
        url=order.url,
        target=order.target,
        model=order.model,
        options=order.server.options(),
        metrics_url=order.metrics_url,
        repeats=scenario.repeats,
        warmup=scenario.warmup,
        seed=order.load.seed,
        objectives=objectives,
        search=scenario.search,
        command=order.command,
    )
    return Planned(plan, folder, _notes(order.load, plan))


def _notes(load: Load, plan: Plan) -> tuple[str, ...]:
    search = plan.search
    if search is None or (load.rate is None and load.concurrency is None):
        return ()
    first, last = (search.stage(at).label for at in (search.start, search.most))
    return (f"{plan.scenario} searches for a load: it starts at {first} and goes up to {last}",)

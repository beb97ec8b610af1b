"""The document of a run: what was asked for, what was measured, on which machine, and whether it can be trusted.

It is written as JSON and read back by reports and comparisons; numbers are derived from it, never stored twice. Times
are seconds; what could not be measured is None. It does not know how measuring is done.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from pydantic import TypeAdapter, ValidationError

from .tally import Group, Tally

SCHEMA = 1
Arrivals = Literal["closed", "poisson", "constant", "gamma", "bursts"]


@dataclass(frozen=True, slots=True)
class Stage:
    """Load of one kind. "closed": `concurrency` callers who each ask again once answered; else `rate` per second.

    `burstiness`: the shape of "gamma" gaps (1: Poisson; less: burstier). `burst`: requests that come at once in
    "bursts". Of `seconds` and `requests` one ends the stage.
    """

    arrivals: Arrivals = "closed"
    concurrency: int | None = None
    rate: float | None = None
    burstiness: float = 1.0
    burst: int = 1
    seconds: float | None = None
    requests: int | None = None

    @property
    def label(self) -> str:
        """For people: "16 at once", "4/s poisson"."""
        return f"{self.concurrency} at once" if self.arrivals == "closed" else f"{self.rate:g}/s {self.arrivals}"

    @property
    def load(self) -> float:
        """Its place on the axis of load: callers, or requests per second."""
        return float(self.concurrency or 0) if self.arrivals == "closed" else float(self.rate or 0)


@dataclass(frozen=True, slots=True)
class Sample:
    """One look at the server's metrics page, `at` seconds since the measurement began; summed over all instances."""

    at: float
    running: int
    waiting: int
    kv_usage: float
    generation_tokens_per_second: float
    prompt_tokens_per_second: float
    rows_per_step: float | None


@dataclass(frozen=True, slots=True)
class Stall:
    """No response came for so many `seconds` from `at` on (since the measurement began), though requests were live."""

    at: float
    seconds: float


@dataclass(frozen=True, slots=True)
class Cores:
    """CPU used in the measurement, in cores: by the generator, the server's processes, anything else, the host."""

    generator: float
    server: float | None
    others: float
    stolen: float


@dataclass(frozen=True, slots=True)
class ServerCounts:
    """What the server's own metrics say happened in the measurement, over all instances. Times are means.

    `ttft`: the model's and, before it, Triton's queue.
    """

    requests: int
    input_tokens: int
    output_tokens: int
    ttft: float | None
    itl: float | None
    queue: float | None
    preemptions: int
    prefix_hits: float | None


@dataclass(frozen=True, slots=True)
class Measurement:
    """One stage of one repeat. `seconds`: from its begin to the end of its last request. `flaws`: why not to trust it.

    `notes`: what a reader should know that is no flaw, such as that concurrency was capped.
    """

    stage: Stage
    repeat: int
    started_at: float  # of the epoch
    seconds: float
    tally: Tally
    samples: tuple[Sample, ...] = ()
    stalls: tuple[Stall, ...] = ()
    cores: Cores | None = None
    server: ServerCounts | None = None
    flaws: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()

    @property
    def all(self) -> Group:
        """What all its requests came to."""
        return self.tally.all

    @property
    def valid(self) -> bool:
        """Whether it can be trusted."""
        return not self.flaws

    @property
    def tokens_per_second(self) -> float:
        """Output tokens over the whole time, ramp and tail included."""
        return self.all.output_tokens / self.seconds

    @property
    def requests_per_second(self) -> float:
        """Requests that were answered, over the whole time."""
        return self.all.outcomes.get("ok", 0) / self.seconds

    @property
    def goodput(self) -> float:
        """Requests per second that met every objective; without objectives those that were answered."""
        return self.all.good / self.seconds


@dataclass(frozen=True, slots=True)
class Machine:
    """Where the generator ran; the server too, where `local`."""

    processor: str
    cores: int
    memory_bytes: int
    system: str
    local: bool
    load_before: float  # the 1-minute load average when the run began


@dataclass(frozen=True, slots=True)
class Found:
    """What a search for the highest load that keeps every objective came to. Its trials are measurements of the run.

    `stage`: of the trials that kept them that of the highest goodput, None if none did. `goodput`: of that one.
    `trials`: how many were made and judged. `notes`: what a reader should know of the search.
    """

    stage: Stage | None
    goodput: float | None
    trials: int
    notes: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Run:
    """A whole run. `command`: how it was started. `server`: what the server says of its model, as strings.

    `interrupted`: not everything was measured. `found`: where it was a search, whose trials need not all keep the
    objectives.

    `versions`: of this package, of Python and of the libraries that measure. `limits`: what this machine can do at
    best, if it was measured beside the run, by name with its unit in it ("read_GB_per_s").
    """

    scenario: str
    title: str
    workload: str
    target: str
    url: str
    command: str
    seed: int
    started_at: float  # of the epoch
    machine: Machine
    objectives: tuple[str, ...] = ()
    versions: dict[str, str] = field(default_factory=dict)
    server: dict[str, str] = field(default_factory=dict)
    limits: dict[str, float] = field(default_factory=dict)
    measurements: tuple[Measurement, ...] = ()
    interrupted: bool = False
    found: Found | None = None
    schema: int = SCHEMA


_RUN = TypeAdapter(Run)


def dump_run(run: Run) -> bytes:
    """As JSON."""
    return _RUN.dump_json(run, indent=1)


def read_run(path: Path) -> Run:
    """The run in a file. ValueError in one line if it holds none, or one of another schema; OSError as open does."""
    try:
        run = _RUN.validate_json(path.read_bytes())
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(str(part) for part in first["loc"])
        raise ValueError(f"{path} holds no run of `tokenstream load`: {where or 'JSON'}: {first['msg']}") from None
    if run.schema != SCHEMA:
        raise ValueError(f"{path} was written by another version: its schema is {run.schema}, not {SCHEMA}")
    return run

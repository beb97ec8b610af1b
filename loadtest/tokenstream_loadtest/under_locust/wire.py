"""What a Locust process and its driver say to each other: one JSON object per line, in both directions.

Times are of `time.perf_counter`, which on Linux is one clock for all processes of a machine. It does not know gevent,
asyncio, nor any protocol of a server, so that both sides can import it.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated, Literal, TypeVar

from pydantic import Field, TypeAdapter, ValidationError

from ..records import Record
from ..requests import Request
from ..results import Sample, ServerCounts, Stall
from ..tally import Group

LONGEST_LINE = 1 << 26  # bytes; a prompt of a long context is some megabytes


@dataclass(frozen=True, slots=True)
class Open:
    """Begin a test of this server; the one before is over. Answered by `Opened` of the same number.

    With `metrics_url` the server's metrics page is watched, of which `Looked` and `Counted` tell. `ca`: trust this
    authority, and encrypt.
    """

    target: str
    url: str
    model: str
    ca: str | None = None
    metrics_url: str | None = None
    number: int = 0
    type: Literal["open"] = "open"


@dataclass(frozen=True, slots=True)
class Ask:
    """Send this request now; it should have been sent at `scheduled_at`. Answered by `Answer` of the same number."""

    number: int
    request: Request
    scheduled_at: float
    type: Literal["ask"] = "ask"


@dataclass(frozen=True, slots=True)
class Cut:
    """Leave all requests that are under way; each is answered as one that took too long."""

    type: Literal["cut"] = "cut"


@dataclass(frozen=True, slots=True)
class Finish:
    """The test is over; `gap` is the median time between tokens, in seconds. Answered by `Finished`."""

    gap: float | None = None
    type: Literal["finish"] = "finish"


@dataclass(frozen=True, slots=True)
class Count:
    """All requests of the test have ended, and came to this. Answered by `Counted`."""

    told: Group
    type: Literal["count"] = "count"


@dataclass(frozen=True, slots=True)
class Opened:
    """The server can be asked from `began` on, unless `error` says why not. `server`: what it says of itself."""

    number: int
    began: float
    error: str = ""
    server: dict[str, str] = field(default_factory=dict)
    type: Literal["opened"] = "opened"


@dataclass(frozen=True, slots=True)
class Answer:
    """What came of a request."""

    number: int
    record: Record
    type: Literal["answer"] = "answer"


@dataclass(frozen=True, slots=True)
class Finished:
    """What the whole test showed beside its records. `cores`: CPU time of the driver over the time of the test."""

    stalls: tuple[Stall, ...]
    cores: float
    type: Literal["finished"] = "finished"


@dataclass(frozen=True, slots=True)
class Looked:
    """What the metrics page shows, now and then."""

    sample: Sample
    type: Literal["looked"] = "looked"


@dataclass(frozen=True, slots=True)
class Counted:
    """What the metrics page says of the whole test; None if it cannot be read.

    `lost`: it could be read when the test began. `restarted`: the server is not the one it was.
    """

    server: ServerCounts | None
    lost: bool = False
    restarted: bool = False
    type: Literal["counted"] = "counted"


Order = Annotated[Open | Ask | Cut | Finish | Count, Field(discriminator="type")]
Report = Annotated[Opened | Answer | Finished | Looked | Counted, Field(discriminator="type")]
Message = TypeVar("Message")
_ORDERS: TypeAdapter[Order] = TypeAdapter(Order)
_REPORTS: TypeAdapter[Report] = TypeAdapter(Report)


def order_line(order: Order) -> bytes:
    """To the driver."""
    return _ORDERS.dump_json(order) + b"\n"


def read_order(line: bytes) -> Order:
    """In the driver. ValueError for anything else."""
    return _read(_ORDERS, line)


def report_line(report: Report) -> bytes:
    """From the driver."""
    return _REPORTS.dump_json(report) + b"\n"


def read_report(line: bytes) -> Report:
    """In the Locust process. ValueError for anything else."""
    return _read(_REPORTS, line)


def _read(adapter: TypeAdapter[Message], line: bytes) -> Message:
    try:
        return adapter.validate_json(line)
    except ValidationError:
        raise ValueError(f"no message between Locust and its driver: {line[:80]!r}") from None

"""What the processes of a Locust test saw, put together: parts, each of what came since the one before, and their sums.

Parts are added in any order and lose nothing: two workers come to what one would have counted. It does not know how
parts travel, nor gevent and Locust.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field

from pydantic import TypeAdapter, ValidationError

from ..records import Record
from ..results import Sample, Stall
from ..slo import Objective, good
from ..tally import Group, Tally

PERCENTILES = (50.0, 95.0, 99.0)


@dataclass(frozen=True, slots=True)
class Last:
    """What a process tells with its last part. `cores`: of it and its driver, the one that used more CPU."""

    cores: float
    server: dict[str, str]
    stalls: tuple[Stall, ...] = ()
    flaws: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Part:
    """What one process saw since its part before, which had one `number` less.

    `test` tells the tests of one Locust process apart. `seconds`: from the begin of the test to the last end so far.
    """

    test: int
    number: int
    tally: Tally
    seconds: float
    live: int
    last: Last | None = None


_PART = TypeAdapter(Part)


def dump_part(part: Part) -> str:
    """As JSON."""
    return _PART.dump_json(part).decode()


def read_part(text: str) -> Part:
    """ValueError for anything else."""
    try:
        return _PART.validate_json(text)
    except ValidationError:
        raise ValueError(f"no part of a test: {text[:80]!r}") from None


class Counter:
    """Of one process in one test, which began at `began` in the clock of its records."""

    def __init__(self, test: int, began: float, objectives: tuple[Objective, ...]) -> None:
        self.test, self.began, self._objectives = test, began, objectives
        self._number, self._seconds = 0, 0.0
        self._tally = Tally()

    def add(self, record: Record) -> None:
        """Count one request."""
        self._tally.add(record, began=self.began, good=good(record, self._objectives))
        self._seconds = max(self._seconds, record.ended_at - self.began)

    def part(self, live: int, last: Last | None = None) -> Part:
        """What was counted since the last call."""
        tally, self._tally = self._tally, Tally()
        self._number += 1
        return Part(self.test, self._number, tally, self._seconds, live, last)


@dataclass(frozen=True, slots=True)
class Point:
    """What is drawn of some seconds that end `at` seconds after the begin: of the requests that ended in them.

    `ttft` and `itl`: at PERCENTILES, in seconds; None if there was nothing.
    """

    at: float
    users: int
    requests: int
    errors: int
    ttft: tuple[float, ...] | None
    itl: tuple[float, ...] | None


@dataclass(slots=True)
class Totals:
    """Of one test. `expected`: the processes that take part. `samples`: of the server's metrics page, as they come."""

    test: int
    objectives: tuple[Objective, ...]
    expected: frozenset[str] = frozenset()
    tally: Tally = field(default_factory=Tally)
    seconds: float = 0.0
    points: list[Point] = field(default_factory=list)
    samples: list[Sample] = field(default_factory=list)
    peak_users: int = 0
    lasts: dict[str, Last] = field(default_factory=dict)
    step: Group = field(default_factory=Group)
    started_at: float = field(default_factory=time.time)
    _numbers: dict[str, int] = field(default_factory=dict)
    _live: dict[str, int] = field(default_factory=dict)
    _lost: int = 0
    _window: Group = field(default_factory=Group)

    def add(self, name: str, part: Part) -> None:
        """What the process of this name saw; of another test nothing is taken."""
        if part.test != self.test:
            return
        self._lost += part.number - self._numbers.get(name, 0) - 1
        self._numbers[name] = part.number
        self._live[name] = part.live
        self.tally.merge([part.tally])
        self._window.merge(part.tally.all)
        self.step.merge(part.tally.all)
        self.seconds = max(self.seconds, part.seconds)
        if part.last is not None:
            self.lasts[name] = part.last

    @property
    def live(self) -> int:
        """Requests under way, when the processes last told."""
        return sum(self._live.values())

    @property
    def silent(self) -> set[str]:
        """The processes that have not yet told how they ended."""
        return (set(self.expected) | set(self._numbers)) - set(self.lasts)

    def see_users(self, users: int) -> None:
        """How many there are now."""
        self.peak_users = max(self.peak_users, users)

    def mark(self, at: float, users: int) -> None:
        """End a window, `at` seconds after the begin."""
        window, self._window = self._window, Group()
        self.see_users(users)
        ttft, itl = (_percentiles(window, name) for name in ("ttft", "itl"))
        self.points.append(Point(at, users, window.requests, window.errors, ttft, itl))

    def begin_step(self) -> None:
        """From here on `step` counts anew."""
        self.step = Group()

    def missed(self, group: Group) -> list[Objective]:
        """The objectives that these requests do not meet."""
        return [objective for objective in self.objectives if not objective.met(group)]

    def flaws(self) -> tuple[str, ...]:
        """Why not to trust the sums."""
        found = [flaw for last in self.lasts.values() for flaw in last.flaws]
        if self._lost:
            found.append(f"{self._lost} reports of workers were lost on the way: their requests are missing")
        for name in sorted(self.silent):
            found.append(f"worker {name} did not tell how it ended: its last requests are missing")
        return tuple(dict.fromkeys(found))


def _percentiles(group: Group, name: str) -> tuple[float, ...] | None:
    histogram = group.histograms[name]
    values = tuple(value for share in PERCENTILES if (value := histogram.percentile(share)) is not None)
    return values or None

"""Everything that a report needs to know of many requests, in parts that add up across workers.

A `Tally` holds a `Group` for all requests, one for each kind of request and one for each priority. It does not know
how requests were asked, nor what limits they should have met but the `good` ones that it is told.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Annotated

from pydantic import PlainSerializer, PlainValidator

from .histograms import Histogram
from .records import PLANNED, Outcome, Record

METRICS = ("ttft", "ttft_sent", "itl", "tpot", "e2e", "queue", "lag")
ALL = "all"
_MOST_EXAMPLES = 5


def _read(value: object) -> Histogram:
    return value if isinstance(value, Histogram) else Histogram.decode(str(value))


Encoded = Annotated[Histogram, PlainValidator(_read), PlainSerializer(Histogram.encode, return_type=str)]


@dataclass(slots=True)
class Group:
    """What some requests came to.

    Histograms in seconds, by METRICS: `lag` of all requests, `ttft`, `ttft_sent`, `itl` and `queue` of all that told
    them, `tpot` and `e2e` of those that ended "ok". `good`: met every objective. `responses`: those with tokens.
    `examples`: the error lines of a few, by outcome.
    """

    histograms: dict[str, Encoded] = field(default_factory=lambda: {name: Histogram() for name in METRICS})
    outcomes: dict[Outcome, int] = field(default_factory=dict)
    examples: dict[Outcome, list[str]] = field(default_factory=dict)
    good: int = 0
    input_tokens: int = 0
    cached_tokens: int = 0
    output_tokens: int = 0
    responses: int = 0
    preemptions: int = 0
    resumes: int = 0

    def add(self, record: Record, *, good: bool) -> None:
        """Count one request."""
        self.outcomes[record.outcome] = self.outcomes.get(record.outcome, 0) + 1
        self.good += good
        self.input_tokens += record.input_tokens or 0
        self.cached_tokens += record.cached_tokens or 0
        self.output_tokens += record.output_tokens
        self.responses += len(record.times)
        self.preemptions += record.preemptions or 0
        self.resumes += record.resumes
        self.histograms["lag"].add(record.lag)
        if record.outcome not in PLANNED:
            examples = self.examples.setdefault(record.outcome, [])
            if len(examples) < _MOST_EXAMPLES and record.error not in examples:
                examples.append(record.error)
        self.histograms["itl"].extend(record.gaps)
        for name, value in (("ttft", record.ttft), ("ttft_sent", record.ttft_sent), ("queue", record.queue)):
            if value is not None:
                self.histograms[name].add(value)
        if record.outcome == "ok":
            self.histograms["e2e"].add(record.latency)
            if record.tpot is not None:
                self.histograms["tpot"].add(record.tpot)

    def merge(self, other: Group) -> None:
        """Count what the other has counted."""
        for name, histogram in other.histograms.items():
            self.histograms[name].merge(histogram)
        for outcome, count in other.outcomes.items():
            self.outcomes[outcome] = self.outcomes.get(outcome, 0) + count
        for outcome, lines in other.examples.items():
            own = self.examples.setdefault(outcome, [])
            own.extend([line for line in lines if line not in own][: _MOST_EXAMPLES - len(own)])
        for name in ("good", "input_tokens", "cached_tokens", "output_tokens", "responses", "preemptions", "resumes"):
            setattr(self, name, getattr(self, name) + getattr(other, name))

    @property
    def requests(self) -> int:
        """How many have ended."""
        return sum(self.outcomes.values())

    @property
    def errors(self) -> int:
        """How many ended as nobody had planned."""
        return sum(count for outcome, count in self.outcomes.items() if outcome not in PLANNED)


@dataclass(slots=True)
class Second:
    """What happened in one second of a run: requests sent, ended and failed, tokens that arrived."""

    sent: int = 0
    ended: int = 0
    errors: int = 0
    tokens: int = 0

    def merge(self, other: Second) -> None:
        """Add the other second, of another worker."""
        self.sent += other.sent
        self.ended += other.ended
        self.errors += other.errors
        self.tokens += other.tokens


@dataclass(slots=True)
class Tally:
    """All requests of one measurement, of one worker or of several. `groups` by ALL, "kind=NAME", "priority=N".

    `seconds`: by the whole seconds since the measurement began, for the timeline.
    """

    groups: dict[str, Group] = field(default_factory=lambda: {ALL: Group()})
    seconds: dict[int, Second] = field(default_factory=dict)

    @property
    def all(self) -> Group:
        """What all requests came to."""
        return self.groups[ALL]

    def add(self, record: Record, *, began: float, good: bool) -> None:
        """Count one request of a measurement that began at `began`, in the clock of the records."""
        names = [ALL, f"kind={record.kind}"]
        if record.priority is not None:
            names.append(f"priority={record.priority}")
        for name in names:
            self._group(name).add(record, good=good)
        self._second(record.sent_at - began).sent += 1
        end = self._second(record.ended_at - began)
        end.ended += 1
        end.errors += record.outcome not in PLANNED
        for at, tokens in zip(record.times, record.tokens, strict=True):
            self._second(at - began).tokens += tokens

    def merge(self, others: Iterable[Tally]) -> None:
        """Count what others have counted, whose measurements began at the same moment."""
        for other in others:
            for name, group in other.groups.items():
                self._group(name).merge(group)
            for at, second in other.seconds.items():
                self.seconds.setdefault(at, Second()).merge(second)

    def _group(self, name: str) -> Group:
        if name not in self.groups:  # not by setdefault: its histograms are milliseconds in the making
            self.groups[name] = Group()
        return self.groups[name]

    def _second(self, at: float) -> Second:
        return self.seconds.setdefault(int(at), Second())

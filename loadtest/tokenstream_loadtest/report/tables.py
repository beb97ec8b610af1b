"""The tables of a report: what every load came to, errors, kinds of requests, the server's own numbers, CPU, terms.

Times are in milliseconds. Over several repeats a cell holds the one value of `figures`, and the range beside it.
It does not know in which order the tables are shown.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from .. import figures
from ..checks import alike, comparable
from ..figures import NOTHING, Figure, Judged, Level, Spread, duration, latency, milliseconds, number, together
from ..histograms import Histogram
from ..records import PLANNED
from ..results import Measurement, Run
from ..slo import ERRORS
from ..tally import Group
from .markup import Child, Markup, join, tag

Head = Sequence[tuple[str, Sequence[str]]]  # groups of columns, "" for one column that needs no group
_LOAD = (figures.REQUESTS, figures.OK, figures.ABANDONED, figures.ERRORS, figures.SECONDS)
_RATES = (figures.TOKENS_PER_SECOND, figures.REQUESTS_PER_SECOND, figures.GOODPUT)
_TIMES = (
    ("TTFT", "ttft", ("p50", "p95", "p99")),
    ("ITL", "itl", ("p50", "p95", "p99")),
    ("TPOT", "tpot", ("p50",)),
    ("End to end", "e2e", ("p50", "p95")),
    ("Queue", "queue", ("p50", "p95")),
    ("Lag", "lag", ("p99",)),
)
_MEANINGS = {
    "ok": "answered to the end",
    "abandoned": "the caller left, as planned",
    "overloaded": "refused: too many requests",
    "invalid": "refused: the request was wrong",
    "timeout": "no end in time",
    "connection": "no connection, or it broke",
    "incomplete": "the stream ended early",
    "unauthorized": "refused: no right to ask",
    "internal": "the server failed",
}


@dataclass(frozen=True, slots=True)
class Term:
    """A metric in one line, with the names that three other tools have for it ("" if they have none)."""

    name: str
    meaning: str
    vllm: str
    aiperf: str
    genai_perf: str


TERMS = (
    Term(
        "TTFT",
        "from when a request was due to be sent to its first response with tokens",
        "ttft",
        "time to first token",
        "time to first token",
    ),
    Term(
        "ITL",
        "from one response with tokens to the next of the same answer",
        "itl",
        "inter-chunk latency",
        "only in its plots",
    ),
    Term(
        "TPOT",
        "of one answer: the time behind its first response, by the tokens that came in it",
        "tpot",
        "inter-token latency",
        "inter-token latency",
    ),
    Term(
        "End to end",
        "from when a request was due to be sent to the end of its answer",
        "e2el",
        "request latency",
        "request latency",
    ),
    Term("Queue", "how long the server says that the request waited for a seat", "", "", ""),
    Term("Lag", "how late the generator sent a request that was due", "", "replay sched lag", ""),
    Term(
        "Tokens/s",
        "output tokens, by all of the time from begin to the last end",
        "output throughput",
        "output token throughput",
        "output token throughput",
    ),
    Term(
        "Requests/s",
        "requests that were answered, by the same time",
        "request throughput",
        "request throughput",
        "request throughput",
    ),
    Term("Goodput", "requests/s that met every objective themselves", "request goodput", "goodput", "request goodput"),
    Term("Percentile", "p95 is the value that 95 % do not exceed, off by 0.1 % at most", "percentiles", "p95", "p95"),
)


def table(caption: str, head: Head, rows: Iterable[Sequence[Child]], class_: str = "") -> Markup:
    """A table whose first column names the rows. A cell that is Markup is taken as it is."""
    groups = [tag("td") if head[0][0] == "" else tag("th", head[0][0], scope="colgroup", colspan=len(head[0][1]))]
    groups += [tag("th", name, scope="colgroup", colspan=len(columns)) for name, columns in head[1:]]
    two = any(name for name, _ in head)
    columns = [tag("th", column, scope="col") for _, columns in head for column in columns]
    body = [tag("tr", tag("th", row[0], scope="row"), *(tag("td", cell) for cell in row[1:])) for row in rows]
    return tag(
        "div",
        tag(
            "table",
            tag("caption", caption),
            *(tag("colgroup", *(tag("col") for _ in columns)) for _, columns in head),
            tag("thead", tag("tr", *groups) if two else None, tag("tr", *columns)),
            tag("tbody", *body),
            class_=class_ or None,
        ),
        class_="scroll",
        tabindex="0",
        role="region",
        aria_label=caption,
    )


def loads(levels: Sequence[Level]) -> Markup:
    """How much each load came to."""
    head = [
        ("", ["load"]),
        ("Requests", [figure.title for figure in _LOAD]),
        ("Per second", ["tokens", "requests", "goodput"]),
    ]
    rows = [[_level(level), *(_cell(level, figure) for figure in (*_LOAD, *_RATES))] for level in levels]
    return table("Throughput at each load", head, rows)


def latencies(levels: Sequence[Level]) -> Markup:
    """How long things took at each load."""
    head: Head = [("", ["load"]), *((name, points) for name, _, points in _TIMES)]
    shown = [latency(metric, point) for _, metric, points in _TIMES for point in points]
    rows = [[_level(level), *(_cell(level, figure) for figure in shown)] for level in levels]
    return table("Latency at each load, ms", head, rows)


def objectives(judged: Sequence[Judged]) -> Markup:
    """Each load by what it was held against."""
    names = list(dict.fromkeys(str(one.objective) for one in judged))
    by_load: dict[str, list[Child]] = {}
    for one in judged:
        by_load.setdefault(one.level.name, [one.level.name]).append(_judged(one))
    head = [("", ["load", *(name.replace("=", " ≤ ") for name in names)])]
    return table("Objectives", head, by_load.values(), "words")


def errors(levels: Sequence[Level]) -> Markup | None:
    """How requests failed, with what was said; None if none did."""
    rows = []
    for level in levels:
        for outcome, count in sorted(level.group.outcomes.items()):
            if outcome not in PLANNED:
                lines = [tag("code", line) for line in level.group.examples.get(outcome, []) if line]
                share = _share(count / level.group.requests)
                said = tag("ul", *(tag("li", line) for line in lines)) if lines else None
                rows.append([level.name, outcome, f"{count:,}", share, _MEANINGS[outcome], said])
    head = [("", ["load", "error", "count", "of requests", "meaning", "what was said"])]
    return table("Failed requests", head, rows, "words") if rows else None


def groups(levels: Sequence[Level], prefix: str, title: str) -> Markup | None:
    """The requests of each kind or priority at each load; None if there are none, or all are of one."""
    names = sorted(
        {name for level in levels for m in level.measurements for name in m.tally.groups if name.startswith(prefix)}
    )
    if len(names) < 2:
        return None
    head = [
        ("", ["load"]),
        (title, [""]),
        ("Requests", ["all", "ok", "good", "errors"]),
        ("Tokens", ["in", "cached", "out"]),
        ("TTFT, ms", ["p50", "p95"]),
        ("ITL, ms", ["p50", "p95"]),
        ("End to end, ms", ["p50", "p95"]),
        ("Queue, ms", ["p95"]),
    ]
    rows = []
    for level in levels:
        for name in names:
            group = together(level.measurements, name)
            if group.requests:
                rows.append([level.name, name.removeprefix(prefix), *_group(group)])
    return table(f"By {title.lower()}, all repeats together", head, rows)


def agreement(levels: Sequence[Level]) -> Markup | None:
    """What the client counted beside what the server's metrics say; None without any."""
    rows = [
        [level.named(measurement), *_agreement(measurement)]
        for level in levels
        for measurement in level.measurements
        if measurement.server is not None
    ]
    head = [
        ("", ["load"]),
        ("Requests", ["client", "server"]),
        ("Output tokens", ["client", "server"]),
        ("TTFT from sending, mean ms", ["client", "server", "apart"]),
        ("ITL, mean ms", ["client", "server", "apart"]),
        ("Queue, mean ms", ["client", "server"]),
        ("Server only", ["preempted", "prefix hits"]),
    ]
    return table("Client and server", head, rows) if rows else None


def processors(levels: Sequence[Level]) -> Markup | None:
    """CPU by who used it; None if it was not measured."""
    rows: list[Sequence[Child]] = []
    for level in levels:
        for measurement in level.measurements:
            if (cores := measurement.cores) is not None:
                cost = figures.overhead(measurement)  # None if no tokens came: then there is nothing to share
                share = _share(cores.generator / cores.server) if cores.server and cost is not None else NOTHING
                used = [number(value) for value in (cores.generator, cores.server, cores.others, cores.stolen)]
                rows.append([level.named(measurement), *used, figures.OVERHEAD.text(cost), share])
    head = [
        ("", ["load"]),
        ("Cores used by", ["generator", "server", "others", "the host"]),
        ("Generator", ["µs per token", "of the server's"]),
    ]
    return table("Cores in use", head, rows) if rows else None


def terms() -> Markup:
    """What each name means."""
    rows = [
        [term.name, term.meaning, *(name or NOTHING for name in (term.vllm, term.aiperf, term.genai_perf))]
        for term in TERMS
    ]
    heads = ["name", "meaning", "vLLM's name", "AIPerf's name", "GenAI-Perf's name"]
    return table("What the names mean", [("", heads)], rows, "words")


def facts(caption: str, pairs: Iterable[tuple[str, str]]) -> Markup | None:
    """Names with values; None of nothing."""
    there = [tag("div", tag("dt", name), tag("dd", value)) for name, value in pairs if value]
    return join(tag("h3", caption), tag("dl", *there)) if there else None


def machine(run: Run) -> Iterable[tuple[str, str]]:
    """Where it was measured."""
    yield "processor", run.machine.processor
    yield "cores", f"{run.machine.cores}"
    yield "memory", f"{run.machine.memory_bytes / 2**30:.1f} GiB"
    yield "system", run.machine.system
    yield "server", "on this machine" if run.machine.local else "on another machine"
    yield "load average before", number(run.machine.load_before)
    for name, value in run.limits.items():
        yield f"limit: {name.replace('_', ' ')}", number(value)


def _judged(one: Judged) -> Markup:
    text = _share if one.objective.metric == ERRORS else duration
    word = tag("span", "✓ met" if one.ok else "✗ missed", class_="met" if one.ok else "missed")
    repeats = len(one.level.measurements)
    split = f" missed in {repeats - one.met} of {repeats} repeats" if 0 < one.met < repeats else ""
    return join(word, " ", _spread(one.values, text), tag("small", split) if split else None)


def _group(group: Group) -> list[str]:
    counts = [group.requests, group.outcomes.get("ok", 0), group.good, group.errors]
    tokens = [group.input_tokens, group.cached_tokens, group.output_tokens]
    points = (("ttft", 50), ("ttft", 95), ("itl", 50), ("itl", 95), ("e2e", 50), ("e2e", 95), ("queue", 95))
    return [f"{count:,}" for count in (*counts, *tokens)] + [
        milliseconds(group.histograms[metric].percentile(share)) for metric, share in points
    ]


def _agreement(measurement: Measurement) -> list[Child]:
    group, server = measurement.all, measurement.server
    if server is None:
        return []

    def means(histogram: Histogram, told: float | None) -> tuple[str, str]:
        return milliseconds(histogram.mean), milliseconds(told)

    def apart(own: float | None, told: float | None, *, absolute: bool) -> str:
        if own is None or not told or not comparable(measurement):
            return NOTHING
        share = f"{100 * (own / told - 1):+.1f} %"
        return f"{1e3 * (own - told):+.1f} ({share})" if absolute else share

    same = alike(group, server)
    ttft, itl = group.histograms["ttft_sent"], group.histograms["itl"]
    return [
        *_counts(group.requests, server.requests, alike=same or server.requests > group.requests),
        *_counts(group.output_tokens, server.output_tokens, alike=same),
        *(*means(ttft, server.ttft), apart(ttft.mean, server.ttft, absolute=True)),
        *(*means(itl, server.itl), apart(itl.mean, server.itl, absolute=False)),
        *means(group.histograms["queue"], server.queue),
        f"{server.preemptions:,}",
        NOTHING if server.prefix_hits is None else _share(server.prefix_hits),
    ]


def _counts(own: int, told: int, *, alike: bool) -> tuple[Child, Child]:
    """`alike`: both should be the same."""
    if own == told:
        return f"{own:,}", f"{told:,}"
    return f"{own:,}", tag("span", f"≠ {told:,}", class_="missed" if alike else None)


def _cell(level: Level, figure: Figure) -> Child:
    return _spread(level.spread(figure), figure.text)


def _spread(values: Spread | None, text: figures.Text) -> Child:
    if values is None:
        return NOTHING
    if values.count == 1 or text(values.low) == text(values.high):
        return text(values.value)
    return join(text(values.value), " ", tag("small", f"{text(values.low)}–{text(values.high)}"))  # noqa: RUF001 - a range


def _level(level: Level) -> Child:
    return (
        level.name if level.valid else join(level.name, " ", tag("abbr", "⚠", title="not to be trusted: see the flaws"))
    )


def _share(value: float) -> str:
    return f"{number(value * 100)} %"

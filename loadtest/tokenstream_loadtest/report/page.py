"""One HTML page about a run: verdict, numbers, charts and what they were measured with, and nothing from elsewhere.

It needs no network and no script: the page's policy forbids all but its own style and its own small script, which only
shows tips faster. Whatever comes from files and servers is shown as text. It does not know how numbers are derived.
"""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Sequence
from datetime import UTC, datetime
from importlib.resources import files
from pathlib import Path

from ..figures import (
    GOODPUT,
    OVER_REPEATS,
    TOKENS_PER_SECOND,
    Judged,
    Level,
    best_level,
    decisive,
    duration,
    highest_kept,
    judge,
    levels,
    number,
    trusted,
)
from ..results import Found, Run
from ..sayings import told
from ..slo import Objective
from . import plots, tables, timeline
from .markup import Child, Markup, tag


def write_report(run: Run, path: Path) -> None:
    """Write the page. OSError as `open` does; ValueError if the run holds an objective that is none."""
    path.write_text(report(run), encoding="utf-8", errors="replace")


def report(run: Run) -> str:
    """The page as text."""
    own = files(__package__)
    style, script = ((own / name).read_text(encoding="utf-8") for name in ("page.css", "page.js"))
    policy = (
        f"default-src 'none'; style-src {_hash(style)}; script-src {_hash(script)}; base-uri 'none'; form-action 'none'"
    )
    title = run.title or run.scenario
    head = tag(
        "head",
        tag("meta", charset="utf-8"),
        tag("meta", http_equiv="Content-Security-Policy", content=policy),
        tag("meta", name_="viewport", content="width=device-width, initial-scale=1"),
        tag("meta", name_="color-scheme", content="light dark"),
        tag("title", f"{title}: load test"),
        tag("style", Markup(style)),
    )
    body = tag("body", _header(run, title), tag("main", *_sections(run)), tag("script", Markup(script)))
    return f"<!doctype html>\n{tag('html', head, body, lang='en')}\n"


def _sections(run: Run) -> list[Child]:
    found = levels(run)
    if not found:
        return [_verdict(run, found, []), _command(run), tag("p", "Nothing was measured."), _setup(run)]
    judged = list(judge(run, found))
    goals = [Objective.parse(text) for text in run.objectives]
    both = ("ttft", "itl")
    return [
        _verdict(run, found, judged),
        _command(run),
        _section("Numbers", tables.loads(found), tables.latencies(found), _reading(found)),
        _charts("Throughput against latency", *(plots.throughput(found, goals, metric) for metric in both)),
        _charts("Percentiles", *(plots.percentiles(found, metric) for metric in both)),
        _charts("Distributions", *(plots.distribution(found, metric) for metric in both)),
        _timelines(found),
        _charts("Goodput", plots.goodput(found, goals)),
        _section("Errors", tables.errors(found) or tag("p", "No request failed.")),
        _section("Kinds of requests", tables.groups(found, "kind=", "Kind")),
        _section("Priorities", tables.groups(found, "priority=", "Priority")),
        _section(
            "Agreement with the server",
            tables.agreement(found) or tag("p", "The server's metrics were not read."),
        ),
        _section("CPU", tables.processors(found) or tag("p", "CPU was not measured.")),
        _setup(run),
        _section("Terms", tables.terms()),
    ]


def _header(run: Run, title: str) -> Markup:
    seeds = f"seed {run.seed}"
    repeats = len({measurement.repeat for measurement in run.measurements})
    facts = [
        f"scenario {run.scenario}",
        f"workload {run.workload}",
        f"{run.target} at {run.url}",
        _moment(run.started_at),
        f"{seeds}, {repeats} repeats" if repeats > 1 and run.found is None else seeds,
    ]
    return tag("header", tag("h1", title), tag("p", *(tag("span", fact) for fact in facts), class_="facts"))


def _verdict(run: Run, found: Sequence[Level], judged: Sequence[Judged]) -> Markup | None:
    valid = trusted(run)
    flaws = [tag("li", line) for level in found for line in told(level, lambda each: each.flaws)]
    notes = [line for level in found for line in told(level, lambda each: each.notes)]
    notes += run.found.notes if run.found else ()
    return _section(
        "Verdict",
        tag("div", _trust(run, flaws, valid=valid), _goals(run, found, judged), class_="cards"),
        _tiles(run, found),
        tables.objectives(judged) if judged else None,
        tag("ul", *(tag("li", note) for note in notes), class_="notes") if notes else None,
    )


def _trust(run: Run, flaws: Sequence[Markup], *, valid: bool) -> Markup:
    listed = [tag("ul", *flaws)] if flaws else []
    if not valid:
        why = "It was interrupted: not everything was measured." if run.interrupted else None
        return _card(False, "Not to be trusted", why, *listed)
    why = "Trials with a flaw count as failed:" if flaws else "No flaw was found in how it was measured."
    return _card(True, "Valid", why, *listed)


def _goals(run: Run, found: Sequence[Level], judged: Sequence[Judged]) -> Markup:
    if run.found is not None:
        return _searched(run, run.found, found)
    if not run.objectives or not found:
        words = tag("p", "No limits were set, so every answer is good.")
        return tag("div", tag("b", "No objectives"), words, class_="card")
    failed = len({one.level.name for one in judged if not one.ok})
    goal = f"Objectives missed at {failed} of {len(found)} loads" if failed else "Objectives met"
    return _card(not failed, goal, _tightest(judged))


def _searched(run: Run, search: Found, found: Sequence[Level]) -> Markup:
    goals = " and ".join(run.objectives)
    trials = "1 trial" if search.trials == 1 else f"{search.trials} trials"
    if search.stage is None:
        return _card(False, f"No load was found that keeps {goals}", f"There were {trials}.")
    word = "highest" if search.stage.load >= highest_kept(run) else "best"
    title = f"The {word} load{' so far' if run.interrupted else ''} that keeps {goals}: {search.stage.label}"
    words = f"{number(search.goodput)} good requests/s, found by {trials}."
    return _card(True, title, f"{words} {_tightest(decisive(run, found))}")


def _card(good: bool, title: str, words: str | None, *more: Markup) -> Markup:
    sign = tag("span", "✓" if good else "✗", aria_hidden="true")
    return tag(
        "div",
        tag("b", sign, " ", title),
        tag("p", words) if words else None,
        *more,
        class_=f"card {'yes' if good else 'no'}",
    )


def _tightest(judged: Sequence[Judged]) -> str:
    """The objective that was missed by most, or met by least, in words."""
    there = [one for one in judged if one.values is not None and one.objective.limit > 0]
    if not there:
        return "Nothing was measured that they could be held against."
    one = max(there, key=lambda one: one.values.value / one.objective.limit if one.values else 0.0)
    value = one.values.value if one.values else 0.0
    text = f"{number(value * 100)} %" if one.objective.metric == "errors" else duration(value)
    limit = str(one.objective).split("=")[1]
    word = "Closest to its limit" if one.ok else "Furthest off"
    return f"{word}: {one.objective.name} was {text} at {one.level.name}, its limit is {limit}."


def _tiles(run: Run, found: Sequence[Level]) -> Markup | None:
    if not found:
        return None
    best, speeds = best_level(run, found), [(level, level.spread(TOKENS_PER_SECOND)) for level in found]
    fastest = max(speeds, key=lambda pair: pair[1].value if pair[1] else 0.0)
    good = best.spread(GOODPUT) if best else None
    requests, failed = (sum(of) for of in zip(*((one.group.requests, one.group.errors) for one in found), strict=True))
    stalls = [stall for level in found for measurement in level.measurements for stall in measurement.stalls]
    longest = f"longest {duration(max(stall.seconds for stall in stalls))}" if stalls else "every stream kept moving"
    name = "within every objective" if run.objectives else "answered"
    return tag(
        "dl",
        _tile(f"best requests/s {name}", number(good.value if good else None), best.name if best else _why_none(found)),
        _tile("most tokens/s", number(fastest[1].value if fastest[1] else None), fastest[0].name),
        _tile("requests", f"{requests:,}", f"{failed:,} failed"),
        _tile("stalls", f"{len(stalls):,}", longest),
        class_="tiles",
    )


def _why_none(found: Sequence[Level]) -> str:
    return "at no load" if any(level.valid for level in found) else "no load can be trusted"


def _tile(name: str, value: str, below: str) -> Markup:
    return tag("div", tag("dt", name), tag("dd", tag("b", value), tag("span", below)))


def _command(run: Run) -> Markup | None:
    copy = tag("button", "Copy", type="button", hidden="", data_copy="command")
    return _section(
        "Command", tag("div", tag("pre", tag("code", run.command, id="command"), tabindex="0"), copy, class_="command")
    )


def _reading(found: Sequence[Level]) -> Markup | None:
    repeats = max(len(level.measurements) for level in found)
    return tag("p", f"{OVER_REPEATS} Small: the range of {repeats} repeats.", class_="note") if repeats > 1 else None


def _charts(title: str, *charts: Markup | None) -> Markup | None:
    there = [chart for chart in charts if chart is not None]
    return _section(title, tag("div", *there, class_="charts")) if there else None


def _timelines(found: Sequence[Level]) -> Markup | None:
    first = [timeline.timeline(level, level.measurements[0]) for level in found]
    others = [timeline.timeline(level, each) for level in found for each in level.measurements[1:]]
    shown, folded = ([chart for chart in some if chart is not None] for some in (first, others))
    if not shown and not folded:
        return None
    more = tag("details", tag("summary", "Other repeats"), tag("div", *folded, class_="charts")) if folded else None
    return _section("What happened when", tag("div", *shown, class_="charts"), more)


def _setup(run: Run) -> Markup | None:
    return _section(
        "Measured with",
        tables.facts("Machine", tables.machine(run)),
        tables.facts("Server", run.server.items()),
        tables.facts("Versions", run.versions.items()),
    )


def _section(title: str, *children: Child) -> Markup | None:
    there = [child for child in children if child]
    return tag("section", tag("h2", title), *there) if there else None


def _moment(seconds: float) -> str:
    return datetime.fromtimestamp(seconds, UTC).strftime("%Y-%m-%d %H:%M UTC")


def _hash(text: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"

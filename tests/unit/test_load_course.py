"""The way through a plan over a bench that only pretends to measure, and the summary of what it came to."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tokenstream_loadtest import course
from tokenstream_loadtest.course import Done, carry_out
from tokenstream_loadtest.measure import Plan, Progress
from tokenstream_loadtest.records import Record
from tokenstream_loadtest.requests import Request
from tokenstream_loadtest.results import Cores, Machine, Measurement, Run, Stage
from tokenstream_loadtest.shapes import Search
from tokenstream_loadtest.slo import Objective, good
from tokenstream_loadtest.summary import summarise
from tokenstream_loadtest.tally import Tally

OBJECTIVE = Objective.parse("ttft_p50=500ms")
STAGES = (Stage(concurrency=1, seconds=10.0), Stage(concurrency=2, requests=10))
Carry = Callable[..., tuple[Done, list[dict[str, Any]]]]
FILES = {"json": Path("run.json")}


class Words:
    name = "words"

    def draw(self, seed: int) -> Iterator[Request]:
        raise AssertionError("nothing is asked here")


PLAN = Plan(
    scenario="mine",
    title="Mine",
    workload=Words(),
    stages=STAGES,
    url="127.0.0.1:1",
    repeats=2,
    objectives=(OBJECTIVE,),
)


def measured(stage: Stage, repeat: int, ttft: float, *flaws: str) -> Measurement:
    """Ten answers of two tokens, and an error, in ten seconds."""
    tally = Tally()
    for number in range(10):
        times = (ttft, ttft + 0.01)
        record = Record(str(number), "x", 0.0, 0.0, 1.0, "ok", times=times, tokens=(1, 1), output_tokens=2)
        tally.add(record, began=0.0, good=good(record, [OBJECTIVE]))
    tally.add(Record("last", "x", 0.0, 0.0, 1.0, "overloaded", error="full"), began=0.0, good=False)
    cores = Cores(0.1, 1.5, 0.0, 0.0)
    return Measurement(stage, repeat, 0.0, 10.0, tally, cores=cores, flaws=flaws, notes=("a note",))


class Bench:
    """Stands in for the real one. `answer` makes the measurement of a stage in a repeat."""

    answer: Callable[[Stage, int], Measurement]

    def __init__(self, plan: Plan, hear: Callable[[Progress], None]) -> None:
        self.interrupted = False
        self.plan, self.hear = plan, hear
        self.done: list[Measurement] = []

    async def __aenter__(self) -> Bench:
        return self

    async def __aexit__(self, *_: object) -> None:
        pass

    async def measure(self, stage: Stage, repeat: int = 0, index: int = 0) -> Measurement:
        self.hear(Progress(stage.label, repeat, self.plan.repeats, index, len(self.plan.stages), 4.0, 6, 5, 0, 1, 90))
        measurement = type(self).answer(stage, repeat)
        self.done.append(measurement)
        self.interrupted = any("interrupted" in flaw for flaw in measurement.flaws)
        return measurement

    def run(self) -> Run:
        machine = Machine("a processor", 2, 1, "Linux", True, 0.0)
        plan, objectives = self.plan, tuple(str(objective) for objective in self.plan.objectives)
        named = (plan.scenario, plan.title, plan.workload.name, plan.target, plan.url, plan.command, plan.seed)
        return Run(*named, 0.0, machine, objectives, measurements=tuple(self.done))


@pytest.fixture
def carry(monkeypatch: pytest.MonkeyPatch) -> Carry:
    """Carry PLAN out with measurements of `answer`; what was done, and the messages."""

    def carry(
        answer: Callable[[Stage, int], Measurement], wanted: Search | None = None
    ) -> tuple[Done, list[dict[str, Any]]]:
        told: list[dict[str, Any]] = []
        monkeypatch.setattr(Bench, "answer", staticmethod(answer), raising=False)
        monkeypatch.setattr(course, "Bench", Bench)
        return asyncio.run(carry_out(PLAN, wanted, told.append)), told

    return carry


def placed(done: Done) -> list[tuple[str, int]]:
    return [(measurement.stage.label, measurement.repeat) for measurement in done.run.measurements]


def test_all_stages_of_all_repeats_are_measured_and_told(carry: Carry) -> None:
    done, told = carry(lambda stage, repeat: measured(stage, repeat, 0.1))
    assert placed(done) == [("1 at once", 0), ("2 at once", 0), ("1 at once", 1), ("2 at once", 1)]
    assert (done.found, done.interrupted) == (None, False)
    assert [(one["event"], one["repeat"], one["stage_index"]) for one in told] == [
        ("progress", repeat, index) for repeat in range(2) for index in range(2)
    ]
    assert [one["left"] for one in told[:2]] == [6.0, 4.0]  # by the clock; by the requests that are left
    assert json.loads(json.dumps(told)) == told


def test_an_interrupted_stage_is_kept_and_is_the_last(carry: Carry) -> None:
    flaws = {("2 at once", 0): "interrupted"}
    done, _ = carry(
        lambda stage, repeat: measured(stage, repeat, 0.1, *filter(None, [flaws.get((stage.label, repeat))]))
    )
    assert placed(done) == [("1 at once", 0), ("2 at once", 0)]
    assert done.interrupted


def test_cancelling_between_stages_keeps_what_was_measured(carry: Carry) -> None:
    def answer(stage: Stage, repeat: int) -> Measurement:
        if stage.concurrency == 2:
            raise asyncio.CancelledError
        return measured(stage, repeat, 0.1)

    done, _ = carry(answer)
    assert placed(done) == [("1 at once", 0)]
    assert done.interrupted
    summary = summarise(done.run, None, FILES, interrupted=done.interrupted)
    assert (summary["interrupted"], summary["valid"], summary["met"]) == (True, False, True)


def test_a_search_tells_each_trial(carry: Carry) -> None:
    wanted = Search(by="concurrency", start=1, most=8, seconds=3)
    done, told = carry(lambda stage, repeat: measured(stage, repeat, 0.1 if stage.load <= 3 else 0.9), wanted)
    assert [label for label, _ in placed(done)] == ["1 at once", "2 at once", "4 at once", "3 at once"]
    trials = [one for one in told if one["event"] == "trial"]
    assert [(one["load"], one["held"]) for one in trials][-2:] == [("4 at once", False), ("3 at once", True)]
    assert [one["trial"] for one in told if one["event"] == "progress"] == [1, 2, 3, 4]
    assert done.found is not None
    assert done.found.best is not None
    summary = summarise(done.run, done.found, FILES, interrupted=done.interrupted)
    assert (summary["valid"], summary["met"]) == (True, True)  # that 4 at once broke the objective is what was sought
    assert summary["search"] == {"load": done.found.best.stage.label, "goodput": 1.0}
    assert [one["met"] for one in summary["objectives"]] == [True]


def test_a_search_that_finds_nothing_is_not_met(carry: Carry) -> None:
    wanted = Search(by="concurrency", start=1, most=8, seconds=3)
    done, _ = carry(lambda stage, repeat: measured(stage, repeat, 0.9), wanted)
    summary = summarise(done.run, done.found, FILES, interrupted=False)
    assert (summary["valid"], summary["met"], summary["objectives"]) == (True, False, [])
    assert summary["search"] == {"load": None, "goodput": None}
    noisy, _ = carry(lambda stage, repeat: measured(stage, repeat, 0.1, "noise"), wanted)
    told = summarise(noisy.run, noisy.found, FILES, interrupted=False)
    assert (told["valid"], told["met"]) == (False, False)
    assert "1 at once, repeat 2: noise" in told["flaws"]


def test_a_summary_has_medians_and_judges_the_worst_repeat(carry: Carry) -> None:
    ttft = {("2 at once", 1): 0.7}
    done, _ = carry(lambda stage, repeat: measured(stage, repeat, ttft.get((stage.label, repeat), 0.1)))
    summary = summarise(done.run, None, FILES, interrupted=False)
    one, two = summary["levels"]
    assert (one["load"], one["repeats"], one["ok"], one["errors"], one["tokens_per_second"]) == (
        "1 at once", 2, 10, 1, 2.0,
    )  # fmt: skip
    assert one["ttft_p50"] == pytest.approx(0.1, rel=1e-3)
    assert two["ttft_p50"] == pytest.approx(0.4, rel=1e-3)
    assert one["itl_p99"] == pytest.approx(0.01, rel=1e-2)
    assert (one["generator_cores"], one["server_cores"]) == (0.1, 1.5)
    assert one["overhead_per_token"] == pytest.approx(0.1 * 10 / 20)
    first, second = summary["objectives"]
    assert (first["name"], first["load"], first["limit"], first["met"]) == ("ttft_p50", "1 at once", 0.5, True)
    assert (second["load"], second["met"]) == ("2 at once", False)
    assert second["value"] == pytest.approx(0.7, rel=1e-3)
    assert (summary["met"], summary["valid"]) == (False, True)
    assert summary["notes"][0] == "1 at once, repeat 1: a note"
    assert summary["files"] == {"json": "run.json"}
    assert json.loads(json.dumps(summary)) == summary

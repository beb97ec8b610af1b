"""The way through a plan over a bench that only pretends to measure, and what is told of it."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tokenstream_loadtest import measure as course
from tokenstream_loadtest.bench import Plan, Progress
from tokenstream_loadtest.checks import INTERRUPTED, RESTARTED
from tokenstream_loadtest.figures import OVER_REPEATS
from tokenstream_loadtest.measure import measure
from tokenstream_loadtest.messages import progress, summarise, trial
from tokenstream_loadtest.records import Record
from tokenstream_loadtest.report.page import report
from tokenstream_loadtest.requests import Request
from tokenstream_loadtest.results import (
    Cores,
    Found,
    Machine,
    Measurement,
    Run,
    ServerCounts,
    Stage,
    Stall,
    dump_run,
    read_run,
)
from tokenstream_loadtest.shapes import Search
from tokenstream_loadtest.slo import Objective, good
from tokenstream_loadtest.tally import Tally
from unit.invented_runs import measurement_of, run_of
from unit.invented_runs import record as invented

OBJECTIVE = Objective.parse("ttft_p50=500ms")
STAGES = (Stage(concurrency=1, seconds=10.0), Stage(concurrency=2, requests=10))
Carry = Callable[..., tuple[Run, list[dict[str, Any]]]]
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
    """Stands in for the real one. `answer` makes the measurement of a stage in a repeat; None: it was interrupted."""

    answer: Callable[[Stage, int], Measurement | None]

    def __init__(self, plan: Plan, hear: Callable[[Progress], None]) -> None:
        self.interrupted = False
        self.plan, self.hear = plan, hear
        self.done: list[Measurement] = []

    async def __aenter__(self) -> Bench:
        return self

    async def __aexit__(self, *_: object) -> None:
        pass

    async def measure(self, stage: Stage, repeat: int = 0, index: int = 0) -> Measurement | None:
        trial = index if self.plan.search else 0
        place = (stage.label, repeat, self.plan.repeats, index, len(self.plan.stages))
        self.hear(Progress(*place, 4.0, 6, 5, 0, 1, 90, None, trial))
        measurement = type(self).answer(stage, repeat)
        if measurement is not None:
            self.done.append(measurement)
        self.interrupted = measurement is None or INTERRUPTED in measurement.flaws
        return measurement

    def run(self, found: Found | None = None) -> Run:
        machine = Machine("a processor", 2, 1, "Linux", True, 0.0)
        plan, objectives = self.plan, tuple(str(objective) for objective in self.plan.objectives)
        named = (plan.scenario, plan.title, plan.workload.name, plan.target, plan.url, plan.command, plan.seed)
        done = {"measurements": tuple(self.done), "interrupted": self.interrupted, "found": found}
        return Run(*named, 0.0, machine, objectives, **done)  # type: ignore[arg-type]


@pytest.fixture
def carry(monkeypatch: pytest.MonkeyPatch) -> Carry:
    """Carry PLAN out with measurements of `answer`; the run, and the messages."""

    def carry(
        answer: Callable[[Stage, int], Measurement | None], wanted: Search | None = None
    ) -> tuple[Run, list[dict[str, Any]]]:
        told: list[dict[str, Any]] = []
        monkeypatch.setattr(Bench, "answer", staticmethod(answer), raising=False)
        monkeypatch.setattr(course, "Bench", Bench)
        plan = PLAN if wanted is None else replace(PLAN, stages=(), search=wanted)
        hear = lambda each: told.append(progress(each))  # noqa: E731
        return asyncio.run(measure(plan, hear, lambda each, held: told.append(trial(each, held)))), told

    return carry


def placed(run: Run) -> list[tuple[str, int]]:
    return [(measurement.stage.label, measurement.repeat) for measurement in run.measurements]


def test_all_stages_of_all_repeats_are_measured_and_told(carry: Carry) -> None:
    run, told = carry(lambda stage, repeat: measured(stage, repeat, 0.1))
    assert placed(run) == [("1 at once", 0), ("2 at once", 0), ("1 at once", 1), ("2 at once", 1)]
    assert (run.found, run.interrupted) == (None, False)
    assert [(one["event"], one["repeat"], one["stage_index"], one["trial"]) for one in told] == [
        ("progress", repeat, index, 0) for repeat in range(2) for index in range(2)
    ]
    assert json.loads(json.dumps(told)) == told


def test_an_interrupted_stage_is_kept_and_is_the_last(carry: Carry) -> None:
    flaws = {("2 at once", 0): INTERRUPTED}
    run, _ = carry(
        lambda stage, repeat: measured(stage, repeat, 0.1, *filter(None, [flaws.get((stage.label, repeat))]))
    )
    assert placed(run) == [("1 at once", 0), ("2 at once", 0)]
    assert run.interrupted


def test_cancelling_between_stages_keeps_what_was_measured(carry: Carry) -> None:
    run, _ = carry(lambda stage, repeat: None if stage.concurrency == 2 else measured(stage, repeat, 0.1))
    assert placed(run) == [("1 at once", 0)]
    assert run.interrupted
    summary = summarise(run, FILES)
    assert (summary["interrupted"], summary["valid"], summary["met"]) == (True, False, True)


def test_a_search_tells_each_trial_and_the_run_what_was_found(carry: Carry, tmp_path: Path) -> None:
    wanted = Search(by="concurrency", start=1, most=8, seconds=3)
    run, told = carry(lambda stage, repeat: measured(stage, repeat, 0.1 if stage.load <= 3 else 0.9), wanted)
    assert [label for label, _ in placed(run)] == ["1 at once", "2 at once", "4 at once", "3 at once"]
    trials = [one for one in told if one["event"] == "trial"]
    assert [(one["load"], one["held"]) for one in trials][-2:] == [("4 at once", False), ("3 at once", True)]
    assert [one["trial"] for one in told if one["event"] == "progress"] == [1, 2, 3, 4]
    assert run.found is not None
    assert (run.found.goodput, run.found.trials) == (1.0, 4)
    (tmp_path / "run.json").write_bytes(dump_run(run))
    for each in (run, read_run(tmp_path / "run.json")):
        summary = summarise(each, FILES)
        assert (summary["valid"], summary["met"]) == (True, True)  # that 4 at once broke the objective was sought
        assert summary["search"] == {"load": "3 at once", "goodput": 1.0, "trials": 4}
        assert [(one["load"], one["met"]) for one in summary["objectives"]] == [("3 at once", True)]


def test_a_search_that_finds_nothing_is_not_met(carry: Carry) -> None:
    wanted = Search(by="concurrency", start=1, most=8, seconds=3)
    run, _ = carry(lambda stage, repeat: measured(stage, repeat, 0.9), wanted)
    summary = summarise(run, FILES)
    assert (summary["valid"], summary["met"], summary["objectives"]) == (True, False, [])
    assert summary["search"] == {"load": None, "goodput": None, "trials": 1}
    noisy, _ = carry(lambda stage, repeat: measured(stage, repeat, 0.1, "noise"), wanted)
    told = summarise(noisy, FILES)
    assert (told["valid"], told["met"]) == (False, False)
    assert "1 at once (2): noise" in told["flaws"]


def test_a_search_that_is_interrupted_keeps_the_cut_trial_and_what_it_had_found(carry: Carry) -> None:
    wanted = Search(by="concurrency", start=1, most=8, seconds=3)
    run, _ = carry(
        lambda stage, repeat: measured(stage, repeat, 0.1, *([INTERRUPTED] if stage.load == 2 else [])), wanted
    )
    assert placed(run) == [("1 at once", 0), ("2 at once", 0)]
    assert run.found is not None
    assert (run.found.stage, run.found.trials) == (run.measurements[0].stage, 1)
    assert (run.interrupted, summarise(run, FILES)["valid"]) == (True, False)


def test_a_summary_has_one_value_for_each_name_and_judges_all_repeats_together(carry: Carry) -> None:
    ttft = {("2 at once", 1): 0.7}
    run, _ = carry(lambda stage, repeat: measured(stage, repeat, ttft.get((stage.label, repeat), 0.1)))
    summary = summarise(run, FILES)
    one, two = summary["levels"]
    assert (one["load"], one["repeats"], one["ok"], one["errors"], one["tokens_per_second"]) == (
        "1 at once", 2, 20, 2, 2.0,
    )  # fmt: skip
    assert one["ttft_p50"] == pytest.approx(0.1, rel=1e-3)
    assert two["ttft_p50"] == pytest.approx(0.1, rel=1e-3)
    assert two["ttft_p95"] == pytest.approx(0.7, rel=1e-3)
    assert summary["reading"] == OVER_REPEATS
    assert one["itl_p99"] == pytest.approx(0.01, rel=1e-2)
    assert (one["generator_cores"], one["server_cores"]) == (0.1, 1.5)
    assert one["overhead_per_token"] == pytest.approx(0.1 * 10 / 20)
    first, second = summary["objectives"]
    assert (first["name"], first["load"], first["limit"], first["met"]) == ("ttft_p50", "1 at once", 0.5, True)
    assert (second["load"], second["met"]) == ("2 at once", True)
    assert second["value"] == two["ttft_p50"]
    assert (summary["met"], summary["valid"]) == (True, True)
    assert summary["notes"][0] == "1 at once, all 2 repeats: a note"
    assert summary["files"] == {"json": "run.json"}
    assert json.loads(json.dumps(summary)) == summary


def test_errors_and_stalls_are_counted_over_all_repeats(carry: Carry) -> None:
    def answer(stage: Stage, repeat: int) -> Measurement:
        one = measured(stage, repeat, 0.1)
        return replace(one, stalls=(Stall(1.0, 1.5 + repeat),)) if stage.concurrency == 2 else one

    summary = summarise(carry(answer)[0], FILES)
    assert summary["errors"] == [{"kind": "overloaded", "count": 4, "example": "full"}]
    assert summary["stalls"] == [{"load": "2 at once", "count": 2, "longest": 2.5}]
    assert [level["stalls"] for level in summary["levels"]] == [0, 2]


def beside(ours: float, theirs: float, repeat: int = 0, **parts: Any) -> Measurement:
    """Two answers of two tokens, 100 ms apart, by the clocks of a caller and of the server."""
    counts = ServerCounts(2, 0, 4, ttft=theirs, itl=0.08, queue=None, preemptions=0, prefix_hits=None)
    return measurement_of([invented([ours, ours + 0.1])] * 2, 1.0, repeat=repeat, **({"server": counts} | parts))


def clocks(*measurements: Measurement) -> dict[str, Any] | None:
    found: dict[str, Any] | None = summarise(run_of(measurements), FILES)["clocks"]
    return found


def test_the_repeat_whose_clocks_are_farthest_apart_is_told_in_seconds_and_shares() -> None:
    # 30 % of 10 ms is less of a fault than 15 % of 1 s.
    found = clocks(beside(0.1, 0.1, 0), beside(1.15, 1.0, 1), beside(0.013, 0.01, 2), beside(0.1, 0.1, 3))
    assert found is not None
    assert found["load"] == "1 at once, repeat 2"
    assert found["ttft_seconds"] == pytest.approx(0.15, rel=1e-2)
    assert found["ttft_share"] == pytest.approx(0.15, rel=1e-2)
    assert found["itl_share"] == pytest.approx(0.25, rel=1e-2)
    assert found["of_limit"] == pytest.approx(1.5, rel=1e-2)


LEFT = [invented([0.1, 0.2]), invented([0.1, 0.2], outcome="abandoned")]
RESUMED = [invented([0.1, 0.2]), invented([0.1, 0.2], resumes=1)]


@pytest.mark.parametrize(
    "one",
    [
        measurement_of(LEFT, 1.0, server=beside(1.0, 1.0).server),
        measurement_of(RESUMED, 1.0, server=beside(1.0, 1.0).server),
        *(
            beside(0.1, 0.2, server=ServerCounts(requests, 0, tokens, 0.2, 0.1, None, 0, None))
            for requests, tokens in ((3, 4), (1, 4), (2, 5))
        ),
        beside(0.1, 0.2, flaws=(INTERRUPTED,)),
        beside(0.1, 0.2, flaws=(RESTARTED,)),
        beside(0.1, 0.2, server=None),
    ],
    ids=["left", "resumed", "others too", "requests lost", "tokens differ", "interrupted", "restarted", "unknown"],
)
def test_clocks_are_not_compared_where_their_means_may_be_of_other_requests(one: Measurement) -> None:
    assert clocks(one) is None
    words = report(run_of([one]))
    assert "%)" not in words[words.find("Client and server") : words.find("Cores in use")]

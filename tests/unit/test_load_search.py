"""The search for the highest load, over a model of a server whose TTFT grows with it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tokenstream_loadtest.records import Record
from tokenstream_loadtest.results import Measurement, Stage
from tokenstream_loadtest.search import Searched, search
from tokenstream_loadtest.slo import Objective, good
from tokenstream_loadtest.tally import Tally

OBJECTIVES = [Objective.parse("ttft_p95=500ms")]
RATE = Stage(arrivals="poisson", rate=1.0, seconds=10.0)
CALLERS = Stage(concurrency=1, seconds=10.0)
REQUESTS = 20


@cache
def answers(ttft: float) -> Tally:
    """Twenty answers that all began after `ttft` seconds."""
    tally = Tally()
    for number in range(REQUESTS):
        record = Record(str(number), "x", 0.0, 0.0, ttft, "ok", times=(ttft,), tokens=(1,), output_tokens=1)
        tally.add(record, began=0.0, good=good(record, OBJECTIVES))
    return tally


def measured(stage: Stage, ttft: float, *flaws: str) -> Measurement:
    return Measurement(stage, 1, 0.0, REQUESTS / stage.load, answers(ttft), flaws=flaws)


class Server:
    """Meets the objective up to `limit`. `flawed` tells the flaw of the nth trial at a load; `last`: the last load."""

    def __init__(
        self, limit: float, flawed: Callable[[float, int], str] = lambda _load, _nth: "", last: float = 0.0
    ) -> None:
        self.limit = limit
        self.last = last
        self.flawed = flawed
        self.loads: list[float] = []

    async def trial(self, stage: Stage, nth: int) -> Measurement | None:
        assert nth == self.loads.count(stage.load)
        self.loads.append(stage.load)
        if stage.load == self.last:
            return None
        flaw = self.flawed(stage.load, nth)
        return measured(stage, 0.1 if stage.load <= self.limit else 0.9, *([flaw] if flaw else []))

    def search(self, stage: Stage = RATE, most: float = 1000.0, **options: Any) -> Searched:
        return asyncio.run(search(self.trial, stage, most, OBJECTIVES, **options))


def test_the_load_is_doubled_and_then_bisected() -> None:
    server = Server(limit=11.3)
    found = server.search()
    assert server.loads == [1, 2, 4, 8, 16, 12, 10, 11, 11.5]
    assert found.best is not None
    assert found.best.stage.rate == 11
    assert found.best is found.trials[7]
    assert [trial.stage.load for trial in found.trials] == server.loads
    assert found.notes == ()


@settings(deadline=None, max_examples=40)
@given(limit=st.floats(0.05, 900.0), start=st.floats(0.1, 50.0))
def test_the_limit_of_a_rate_is_found_within_a_tenth(limit: float, start: float) -> None:
    server = Server(limit)
    found = server.search(Stage(arrivals="constant", rate=start, seconds=1.0), most_trials=40)
    assert found.best is not None
    assert limit / 1.1 < found.best.stage.load <= limit
    assert len(server.loads) == len(set(server.loads)) < 30


@settings(deadline=None, max_examples=40)
@given(limit=st.integers(1, 500), start=st.integers(1, 64))
def test_the_limit_of_callers_is_found_in_whole_callers(limit: int, start: int) -> None:
    server = Server(limit)
    found = server.search(Stage(concurrency=start, seconds=1.0), most_trials=40)
    assert found.best is not None
    best = found.best.stage.concurrency
    assert best is not None
    assert best == limit or limit / 1.1 < best < limit
    assert all(load == int(load) for load in server.loads)


def test_a_start_that_is_too_high_is_halved() -> None:
    server = Server(limit=3.0)
    found = server.search(Stage(arrivals="poisson", rate=16.0, seconds=10.0), within=0.2)
    assert server.loads[:4] == [16, 8, 4, 2]
    assert found.best is not None
    assert found.best.stage.rate == 3


def test_a_server_that_never_holds_gives_nothing_and_ends() -> None:
    callers, rate = Server(limit=0.0), Server(limit=0.0)
    assert callers.search(CALLERS).best is None
    assert callers.loads == [1]
    assert rate.search(RATE).best is None
    assert len(rate.loads) < 10


def test_what_holds_to_the_last_is_said_not_to_be_the_limit() -> None:
    server = Server(limit=1e9)
    found = server.search(CALLERS, most=10)
    assert server.loads == [1, 2, 4, 8, 10]
    assert found.best is not None
    assert found.best.stage.concurrency == 10
    assert found.notes == ("every objective still held at 10, the most that was to be tried: the limit is higher",)


def test_the_number_of_trials_is_bounded() -> None:
    server = Server(limit=777.0)
    found = server.search(most_trials=5)
    assert server.loads == [1, 2, 4, 8, 16]
    assert found.best is not None
    assert found.best.stage.rate == 16
    assert found.notes == ("ended after 5 trials",)


def test_a_flawed_trial_is_made_again_and_the_second_counts() -> None:
    server = Server(limit=5.0, flawed=lambda load, nth: "noisy" if load == 4 and nth == 0 else "")
    found = server.search(CALLERS)
    assert server.loads == [1, 2, 4, 4, 8, 6, 5]
    assert found.best is not None
    assert found.best.stage.concurrency == 5
    assert [(trial.stage.load, trial.valid) for trial in found.trials[2:4]] == [(4, False), (4, True)]
    assert found.notes == ()


def test_a_trial_that_is_flawed_twice_counts_as_failed_and_is_noted() -> None:
    server = Server(limit=5.0, flawed=lambda load, _nth: "the machine was not quiet" if load >= 4 else "")
    found = server.search(CALLERS)
    assert server.loads == [1, 2, 4, 4, 3]
    assert found.best is not None
    assert found.best.stage.concurrency == 3
    assert found.notes == ("4 at once counts as failed: it could not be measured soundly (the machine was not quiet)",)


def test_a_trial_that_is_not_made_ends_the_search_with_what_was_found() -> None:
    server = Server(limit=5.0, last=4)
    found = server.search(CALLERS)
    assert server.loads == [1, 2, 4]
    assert found.best is not None
    assert found.best.stage.concurrency == 2
    assert found.notes == ()


def test_the_highest_goodput_wins_not_the_highest_load() -> None:
    server = Server(limit=8.0)

    async def slower_at_eight(stage: Stage, nth: int) -> Measurement | None:
        measurement = await server.trial(stage, nth)
        if measurement is None or stage.load != 8:
            return measurement
        return Measurement(stage, 1, 0.0, 60.0, measurement.tally)

    found = asyncio.run(search(slower_at_eight, CALLERS, 8, OBJECTIVES))
    assert found.best is not None
    assert found.best.stage.concurrency == 4
    assert found.notes[-1] == "every objective held at 8 too, with less goodput"


def test_each_trial_is_told_with_its_verdict() -> None:
    told: list[tuple[str, bool]] = []
    Server(limit=2.0).search(CALLERS, tell=lambda measurement, held: told.append((measurement.stage.label, held)))
    assert told == [("1 at once", True), ("2 at once", True), ("4 at once", False), ("3 at once", False)]


@pytest.mark.parametrize(("objectives", "most", "says"), [([], 8, "needs an objective"), (OBJECTIVES, 0.5, "start")])
def test_a_search_that_makes_no_sense_is_refused(objectives: list[Objective], most: float, says: str) -> None:
    with pytest.raises(ValueError, match=says):
        asyncio.run(search(Server(1.0).trial, CALLERS, most, objectives))

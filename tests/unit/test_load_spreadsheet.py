"""The CSV has a row for each load and repeat, whose numbers are those that were measured."""

from __future__ import annotations

import csv
from pathlib import Path

import pytest

from tokenstream_loadtest.results import Cores, Run, ServerCounts, Stage, Stall
from tokenstream_loadtest.spreadsheet import write_csv
from unit.invented_runs import measurement_of, record, run_of


def rows(run: Run, folder: Path) -> list[dict[str, str]]:
    write_csv(run, folder / "run.csv")
    with (folder / "run.csv").open(encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file))


def test_every_load_and_repeat_has_a_row(tmp_path: Path):
    stages = [Stage(concurrency=1, requests=2), Stage(arrivals="poisson", rate=4.0, seconds=5.0)]
    made = [measurement_of([record([0.1])], 1.0, stage, repeat=repeat) for repeat in range(2) for stage in stages]
    told = [(row["load"], row["repeat"], row["stage_rate"]) for row in rows(run_of(made), tmp_path)]
    assert told == [
        ("1 at once", "1", ""),
        ("1 at once", "2", ""),
        ("4/s poisson", "1", "4.0"),
        ("4/s poisson", "2", "4.0"),
    ]


def test_numbers_are_those_that_were_measured_in_seconds(tmp_path: Path):
    records = [
        record([0.5, 0.6, 0.9], sent=0.1, input_tokens=30, cached_tokens=16, queue=0.25),
        record(sent=0.2, outcome="overloaded", error="full"),
    ]
    made = measurement_of(
        records,
        2.0,
        stalls=(Stall(0.1, 0.4), Stall(1.0, 0.2)),
        cores=Cores(0.3, 1.5, 0.0, 0.0),
        server=ServerCounts(2, 30, 3, 0.4, 0.2, 0.25, 1, 0.5),
        flaws=("late", "noisy"),
    )
    (row,) = rows(run_of([made]), tmp_path)
    exact = {"requests": 2, "errors": 1, "outcome_ok": 1, "outcome_overloaded": 1, "good": 1, "stalls": 2}
    near = {
        "errors_share": 0.5,
        "tokens_per_second": 1.5,
        "requests_per_second": 0.5,
        "goodput": 0.5,
        "ttft_p50": 0.5,
        "ttft_sent_mean": 0.4,
        "itl_max": 0.3,
        "tpot_p50": 0.2,
        "e2e_mean": 0.9,
        "queue_p95": 0.25,
        "lag_p99": 0.2,
        "overhead_per_token": 0.2,
        "longest_stall": 0.4,
        "cores_server": 1.5,
        "server_ttft": 0.4,
    }
    assert {name: float(row[name]) for name in exact} == exact
    assert {name: float(row[name]) for name in near} == pytest.approx(near, rel=2e-3)
    assert (row["valid"], row["flaws"]) == ("False", "late; noisy")


def test_what_was_not_measured_is_empty(tmp_path: Path):
    (row,) = rows(run_of([measurement_of([], 0.0)]), tmp_path)
    for name in ("ttft_p50", "goodput", "tokens_per_second", "cores_server", "server_requests", "longest_stall"):
        assert row[name] == ""
    assert rows(run_of([]), tmp_path) == []


@pytest.mark.parametrize("name", ["=1+2", "+1", "-1", "@sum", "\tx"])
def test_a_name_is_never_a_formula(tmp_path: Path, name: str):
    (row,) = rows(run_of([measurement_of([record([0.1])], 1.0)], scenario=name), tmp_path)
    assert row["scenario"] == f"'{name}"


def test_a_negative_number_stays_a_number(tmp_path: Path):
    (row,) = rows(run_of([measurement_of([record([0.1])], 1.0)], seed=-3), tmp_path)
    assert row["seed"] == "-3"

"""What a Locust test comes to: its document, its verdict, its table, and the numbers of its page."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import pytest

from tokenstream_loadtest.files import write_files
from tokenstream_loadtest.records import Record
from tokenstream_loadtest.results import Cores, Run, Sample, ServerCounts, read_run
from tokenstream_loadtest.under_locust.numbers import numbers
from tokenstream_loadtest.under_locust.options import Choices, add_options
from tokenstream_loadtest.under_locust.outcome import conclude, passes, table
from tokenstream_loadtest.under_locust.totals import Counter, Last, Totals

QUIET = Cores(0.1, 1.0, 0.0, 0.0)


def choices(*arguments: str) -> Choices:
    parser = argparse.ArgumentParser()
    add_options(parser)
    return Choices.read(parser.parse_args(arguments), "127.0.0.1:8001")


def record(at: float, lag: float = 0.001, outcome: str = "ok", error: str = "") -> Record:
    ok = outcome == "ok"
    times, tokens = ([at + 0.1, at + 0.2], [1, 1]) if ok else ([], [])
    return Record(
        id="r",
        kind="chat",
        scheduled_at=at,
        sent_at=at + lag,
        ended_at=at + 0.25,
        outcome=outcome,  # type: ignore[arg-type]
        times=times,
        tokens=tokens,
        output_tokens=len(tokens),
        error=error,
    )


def run_of(
    *records: Record, slo: tuple[str, ...] = (), counts: ServerCounts | None = None, last: Last | None = None
) -> Run:
    wanted = choices("--metrics-url", "none", *(part for one in slo for part in ("--slo", one)))
    counter, totals = Counter(1, 0.0, wanted.objectives), Totals(1, wanted.objectives)
    for one in records:
        counter.add(one)
    totals.add("local", counter.part(0, last or Last(0.1, {})))
    totals.see_users(3)
    return conclude(totals, wanted, QUIET, counts, server={"model": "tiny"}, shape="", told=("a note",))


def test_a_run_holds_what_was_asked_and_measured():
    run = run_of(record(0.0), record(1.0), slo=("ttft_p95=500ms",))
    (measurement,) = run.measurements
    assert measurement.stage.label == "3 at once"
    assert measurement.seconds == pytest.approx(1.25)
    assert measurement.tokens_per_second == pytest.approx(4 / 1.25)
    assert measurement.notes == ("a note",)
    assert (run.workload, run.objectives, run.server) == ("chat", ("ttft_p95=500ms",), {"model": "tiny"})
    assert "locust" in run.versions


@pytest.mark.parametrize(("slo", "ok"), [("ttft_p95=500ms", True), ("ttft_p95=50ms", False)])
def test_an_objective_decides(slo, ok):
    run = run_of(*(record(at) for at in range(10)), slo=(slo,))
    assert run.measurements[0].flaws == ()
    assert passes(run, ignore_flaws=False) is ok
    assert ("met    " if ok else "MISSED ") + slo in table(run)


def test_a_late_generator_fails_unless_nobody_minds():
    run = run_of(*(record(at, lag=0.09) for at in range(10)), slo=("ttft_p95=500ms",))
    assert "the generator itself was late" in run.measurements[0].flaws[0]
    assert not passes(run, ignore_flaws=False)
    assert passes(run, ignore_flaws=True)
    assert "flaw: the generator itself was late" in table(run)


def test_a_flaw_that_a_worker_tells_fails():
    run = run_of(record(0.0), last=Last(0.1, {}, (), ("the driver process ended 1 times in the test",)))
    assert not passes(run, ignore_flaws=False)


def test_counts_that_disagree_with_the_server_are_a_flaw():
    counts = ServerCounts(1, 0, 9, None, None, None, 0, None)
    run = run_of(record(0.0), counts=counts)
    assert "the server counted 9 output tokens, the generator 2" in run.measurements[0].flaws


def test_the_busiest_event_loop_is_judged_and_not_the_sum_of_all():
    run = run_of(record(0.0), last=Last(0.95, {}))
    assert "the generator was at its limit: it used 0.95 of one core" in run.measurements[0].flaws


def test_the_table_shows_each_error_and_no_measured_nothing():
    text = table(run_of(record(0.0), record(0.5, outcome="overloaded", error="no room"), slo=("errors=10%",)))
    assert "1 ok, 1 overloaded" in text
    assert "overloaded: no room" in text
    assert "MISSED errors=10%: 50 %" in text
    assert "\nqueue " not in text


def test_nothing_measured_is_told_and_fails():
    run = run_of(slo=("ttft_p95=1s",))
    assert "nothing ended" in table(run)
    assert not passes(run, ignore_flaws=True)


def test_all_files_are_written_and_can_be_read_back(tmp_path: Path):
    run = run_of(record(0.0), record(1.0), slo=("ttft_p95=500ms",))
    paths = write_files(run, tmp_path / "new" / "folder")
    assert {kind: path.name for kind, path in paths.items()} == {
        "json": "run.json",
        "csv": "run.csv",
        "html": "report.html",
    }
    assert all(path.stat().st_size for path in paths.values())
    again = read_run(paths["json"])
    assert again.measurements[0].all.outcomes == {"ok": 2}
    assert table(again) == table(run)


def test_the_page_has_numbers_before_within_and_of_a_test():
    assert numbers(None)["points"] == []
    totals, counter = Totals(1, ()), Counter(1, 0.0, ())
    assert json.dumps(numbers(totals))
    for at in range(900):
        counter.add(record(float(at)))
        totals.samples.append(Sample(float(at), at, 0, 0.0, 0.0, 0.0, None))
        totals.mark(float(at), at)
    totals.add("local", counter.part(0))
    told = numbers(totals)
    for key in ("points", "tokens", "samples"):
        assert 200 <= len(told[key]) <= 400
    assert told["points"][-1]["at"] == told["samples"][-1][0] == 899.0
    assert told["rows"][0] == {"metric": "TTFT", "p50": pytest.approx(100, rel=2e-3)} | {
        key: pytest.approx(100, rel=2e-3) for key in ("p95", "p99", "max")
    } | {"count": 900}

"""What a Locust test comes to: its document, its verdict, its table, and the numbers of its page."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import pytest

from tokenstream.load_display import summary_text
from tokenstream_loadtest.files import write_files
from tokenstream_loadtest.messages import summarise
from tokenstream_loadtest.records import Record
from tokenstream_loadtest.results import Cores, Run, Sample, ServerCounts, Stall, read_run
from tokenstream_loadtest.under_locust.numbers import Standing, numbers
from tokenstream_loadtest.under_locust.options import Choices, add_options
from tokenstream_loadtest.under_locust.outcome import conclude, passes, text
from tokenstream_loadtest.under_locust.totals import Counter, Last, Totals
from tokenstream_loadtest.under_locust.wire import Counted

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


def run_of(*records: Record, slo: tuple[str, ...] = (), counts: Counted | None = None, last: Last | None = None) -> Run:
    wanted = choices("--metrics-url", "none", *(part for one in slo for part in ("--slo", one)))
    counter, totals = Counter(1, 0.0, wanted.objectives), Totals(1, wanted.objectives)
    for one in records:
        counter.add(one)
    totals.add("local", counter.part(0, last or Last(0.1, {})))
    totals.see_users(3)
    return conclude(
        totals, wanted, QUIET, counts or Counted(None), server={"model": "tiny"}, shape="", told=("a note",)
    )


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
    assert f"{'met   ' if ok else 'MISSED'}  ttft_p95 at 3 at once: 100 ms, limit" in text(run, {})


def test_a_late_generator_fails_unless_nobody_minds():
    run = run_of(*(record(at, lag=0.09) for at in range(10)), slo=("ttft_p95=500ms",))
    assert "the generator itself was late" in run.measurements[0].flaws[0]
    assert not passes(run, ignore_flaws=False)
    assert passes(run, ignore_flaws=True)
    assert "not valid: 3 at once: the generator itself was late" in text(run, {})
    assert "NOT VALID" in text(run, {})


def test_a_flaw_that_a_worker_tells_fails():
    run = run_of(record(0.0), last=Last(0.1, {}, (), ("the driver process ended 1 times in the test",)))
    assert not passes(run, ignore_flaws=False)


def test_counts_that_disagree_with_the_server_are_a_flaw():
    counts = Counted(ServerCounts(1, 0, 9, None, None, None, 0, None))
    run = run_of(record(0.0), counts=counts)
    assert "the server counted 9 output tokens, the generator 2" in run.measurements[0].flaws


@pytest.mark.parametrize(
    ("counted", "flaw"),
    [
        (Counted(None, lost=True), "the server's metrics page could be read at the begin and not at the end"),
        (Counted(None, restarted=True), "the server was started anew"),
    ],
)
def test_a_server_that_is_gone_or_another_one_in_the_end_is_a_flaw(counted, flaw):
    (measurement,) = run_of(record(0.0), counts=counted).measurements
    assert any(line.startswith(flaw) for line in measurement.flaws)
    assert measurement.notes == ("a note",)


def test_the_busiest_event_loop_is_judged_and_not_the_sum_of_all():
    run = run_of(record(0.0), last=Last(0.95, {}))
    assert "the generator was at its limit: it used 0.95 of one core" in run.measurements[0].flaws


def test_the_terminal_shows_each_error_and_no_measured_nothing():
    told = text(run_of(record(0.0), record(0.5, outcome="overloaded", error="no room"), slo=("errors=10%",)), {})
    assert "1 ok, 1 overloaded" in told
    assert "1 overloaded: no room" in told
    assert "MISSED  errors at 3 at once: 50.00%, limit 10.00%" in told
    assert "\nqueue " not in told


def test_the_terminal_tells_what_tokenstream_load_does():
    last = Last(0.1, {}, (Stall(0.3, 1.9),))
    run = run_of(record(0.0), last=last, counts=Counted(ServerCounts(1, 0, 2, 0.09, 0.1, None, 0, None)))
    told = text(run, {"json": Path("there/run.json")})
    assert told.endswith(summary_text(summarise(run, {"json": Path("there/run.json")})))
    for line in (
        "1 stall, the longest 1.9 s, at 3 at once",
        "note: 3 at once: a note",
        "generator: 0.10 cores at 3 at once",
        "10% of the server's CPU",
        "beside the server's own clocks: mean TTFT",
        "\nvalid\n",
        "there/run.json",
    ):
        assert line in told
    for metric in ("ttft", "itl", "tpot", "e2e", "lag"):
        assert f"\n{metric} " in told


def test_nothing_measured_is_told_and_fails():
    run = run_of(slo=("ttft_p95=1s",))
    assert "nothing ended" in text(run, {})
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
    assert text(again, paths) == text(run, paths)


def test_the_page_has_numbers_before_within_and_of_a_test():
    running = Standing("running")
    assert numbers(None, Standing())["points"] == []
    totals, counter = Totals(1, ()), Counter(1, 0.0, ())
    assert json.dumps(numbers(totals, running))
    for at in range(900):
        counter.add(record(float(at)))
        totals.samples.append(Sample(float(at), at, 0, 0.0, 0.0, 0.0, None))
        totals.mark(float(at), at)
    totals.add("local", counter.part(0))
    told = numbers(totals, running)
    for key in ("points", "tokens", "samples"):
        assert 200 <= len(told[key]) <= 400
    assert told["points"][-1]["at"] == told["samples"][-1][0] == 899.0
    assert told["rows"][0] == {"metric": "TTFT", "p50": pytest.approx(100, rel=2e-3)} | {
        key: pytest.approx(100, rel=2e-3) for key in ("p95", "p99", "max")
    } | {"count": 900}


def test_the_page_says_why_a_test_could_not_begin_and_what_came_of_one():
    refused = numbers(None, Standing("refused", "unknown model: 'x'"))["standing"]
    assert (refused["state"], refused["why"]) == ("refused", "unknown model: 'x'")
    over = json.loads(json.dumps(numbers(Totals(1, ()), Standing("over", "", ("late",), "a/report.html"))))["standing"]
    assert (over["flaws"], over["report"]) == (["late"], "a/report.html")


def test_an_objective_is_neither_met_nor_missed_before_a_request_has_ended():
    wanted = choices("--slo", "ttft_p95=50ms").objectives
    totals, counter = Totals(1, wanted), Counter(1, 0.0, wanted)
    assert [one["met"] for one in numbers(totals, Standing("running"))["objectives"]] == [None]
    counter.add(record(0.0))
    totals.add("local", counter.part(0))
    assert [one["met"] for one in numbers(totals, Standing("running"))["objectives"]] == [False]

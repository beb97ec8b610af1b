"""The page tells what was measured, whatever was: nothing in it comes from elsewhere, and names stay names."""

from __future__ import annotations

import base64
import hashlib
import re
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path

import pytest

from tokenstream_loadtest.figures import OVER_REPEATS, best_level, judge, levels
from tokenstream_loadtest.report.markup import tag
from tokenstream_loadtest.report.page import report, write_report
from tokenstream_loadtest.results import Cores, Found, Measurement, Run, ServerCounts, Stage, dump_run, read_run
from unit.invented_runs import OBJECTIVES, measurement_of, paper_run, record, run_of

VOID = {"meta", "col"}
EVIL = "<img src=x onerror=alert(1)>\"'&</title></script><script>alert(2)</script>"


class Page(HTMLParser):
    """A page taken apart; an element that is closed by another's end is an error."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.text: list[str] = []
        self._open: list[str] = []
        self.feed(text)
        self.close()
        assert self._open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag not in VOID:
            self._open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self._open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self._open and self._open[-1] not in {"script", "style"}:
            self.text.append(data)

    @property
    def words(self) -> str:
        return " ".join(" ".join(self.text).split())

    def attributes(self, tag: str) -> list[dict[str, str | None]]:
        return [attributes for name, attributes in self.tags if name == tag]


@pytest.fixture(scope="module")
def whole() -> Run:
    return paper_run(rates=(2, 16), repeats=2, seconds=8.0)


def one_load(measurement: Measurement, **more: object) -> Page:
    return Page(report(run_of([measurement], **more)))


def test_sections_come_in_the_order_of_what_is_asked_first(whole: Run):
    found = re.findall(r"<h2>(.*?)</h2>", report(whole))
    assert found == [
        "Verdict",
        "Command",
        "Numbers",
        "Throughput against latency",
        "Percentiles",
        "Distributions",
        "What happened when",
        "Goodput",
        "Errors",
        "Kinds of requests",
        "Priorities",
        "Agreement with the server",
        "CPU",
        "Measured with",
        "Terms",
    ]


def test_nothing_comes_from_elsewhere_and_only_the_pages_own_style_and_script_may_run(whole: Run):
    text = report(whole)
    page = Page(text)
    assert not {tag for tag, _ in page.tags} & {"link", "img", "iframe", "object", "a", "base"}
    assert not any(name in attributes for _, attributes in page.tags for name in ("src", "href", "style", "srcdoc"))
    assert not any(name.startswith("on") for _, attributes in page.tags for name in attributes)
    assert "url(" not in text
    (policy,) = [meta["content"] for meta in page.attributes("meta") if meta.get("http-equiv")]
    assert policy is not None
    assert policy.startswith("default-src 'none'; ")
    for kind, element in (("style-src", "style"), ("script-src", "script")):
        (own,) = re.findall(rf"<{element}>(.*?)</{element}>", text, re.DOTALL)
        digest = base64.b64encode(hashlib.sha256(own.encode()).digest()).decode()
        assert f"{kind} 'sha256-{digest}'" in policy
    assert "unsafe" not in policy


def test_names_from_files_and_servers_stay_text():
    evil = measurement_of(
        [record([0.1], kind=EVIL), record([0.2]), record(outcome="internal", error=EVIL)],
        2.0,
        flaws=(EVIL,),
        notes=(EVIL,),
    )
    named = dict.fromkeys(("scenario", "title", "workload", "target", "url", "command"), EVIL)
    text = report(run_of([evil], **named, server={EVIL: EVIL}, versions={EVIL: EVIL}, limits={EVIL: 1.0}))
    page = Page(text)
    assert page.words.count("<img src=x onerror=alert(1)>") > 10
    assert len(page.attributes("script")) == 1
    assert page.attributes("img") == []


def test_an_attribute_cannot_be_left():
    (one,) = Page(tag("p", EVIL, class_=EVIL)).tags
    assert one == ("p", {"class": EVIL})


def test_the_verdict_says_what_was_missed_with_value_and_limit():
    slow = measurement_of([record([0.9])] * 3, 2.0)
    page = one_load(slow, objectives=("ttft_p95=500ms", "errors=1%"))
    assert (
        "Objectives missed at 1 of 1 loads Furthest off: ttft_p95 was 900 ms at 1 at once, its limit is 500ms."
        in page.words
    )
    assert "✗ missed 900 ms ✓ met 0 %" in page.words


def test_the_verdict_says_what_is_met_and_that_nothing_was_wrong():
    page = one_load(measurement_of([record([0.1])], 2.0), objectives=("ttft_p95=500ms",))
    assert "✓ Valid No flaw was found" in page.words
    assert "✓ Objectives met Closest to its limit: ttft_p95 was 100 ms" in page.words


def ladder(*ttfts: float, flaws: tuple[str, ...] = ()) -> list[Measurement]:
    """Trials of 1, 2, 4 ... requests per second; the last one may have flaws."""
    goal, last = ("ttft_p95=500ms",), len(ttfts) - 1
    return [
        measurement_of(
            [record([ttft])] * 2**n, 1.0, Stage("poisson", rate=2.0**n), goal, flaws=flaws if n == last else ()
        )
        for n, ttft in enumerate(ttfts)
    ]


def test_a_search_is_judged_by_what_it_found_not_by_the_trials_beyond():
    trials = ladder(0.1, 0.2, 0.9, flaws=("the machine was not quiet",))
    found = Found(trials[1].stage, trials[1].goodput, 3, ("a note of the search",))
    words = one_run(trials, found).words
    assert "✓ The highest load that keeps ttft_p95=500ms: 2/s poisson 2 good requests/s, found by 3 trials." in words
    assert "Closest to its limit: ttft_p95 was 200 ms at 2/s poisson, its limit is 500ms." in words
    assert "Objectives missed" not in words
    assert "✓ Valid Trials with a flaw count as failed: 4/s poisson: the machine was not quiet" in words
    assert "a note of the search" in words
    assert "best requests/s within every objective 2 2/s poisson" in words
    lower = one_run(ladder(0.1, 0.2), Found(trials[0].stage, trials[0].goodput, 2)).words
    assert "The best load that keeps ttft_p95=500ms: 1/s poisson" in lower


def test_a_search_without_a_find_says_so():
    words = one_run(ladder(0.9), Found(None, None, 1)).words
    assert "✗ No load was found that keeps ttft_p95=500ms There were 1 trial." in words
    assert "best requests/s within every objective – at no load" in words  # noqa: RUF001


def one_run(trials: list[Measurement], found: Found, **more: object) -> Page:
    return Page(report(run_of(trials, objectives=("ttft_p95=500ms",), found=found, **more)))


def test_an_interrupted_run_is_not_valid_whatever_was_measured():
    trials = ladder(0.1)
    words = one_run(trials, Found(trials[0].stage, trials[0].goodput, 1), interrupted=True).words
    assert "✗ Not to be trusted It was interrupted: not everything was measured." in words
    assert "The highest load so far that keeps" in words


def test_flaws_are_told_in_their_words_and_mark_their_load():
    page = one_load(measurement_of([record([0.1])], 2.0, flaws=("the generator itself was late",)))
    assert "✗ Not to be trusted 1 at once: the generator itself was late" in page.words
    assert "1 at once ⚠" in page.words
    assert "No objectives No limits were set" in page.words


def test_an_objective_is_judged_by_all_repeats_together():
    made = [measurement_of([record([ttft])], 1.0, repeat=n) for n, ttft in enumerate((0.1, 0.2, 0.9))]
    run = run_of(made, objectives=("ttft_p95=500ms",))
    (judged,) = judge(run, levels(run))
    assert (judged.ok, judged.met) == (False, 2)
    assert "✗ missed 900 ms 100 ms–900 ms missed in 1 of 3 repeats" in Page(report(run)).words  # noqa: RUF001
    (middle,) = judge(replace(run, objectives=("ttft_p50=500ms",)), levels(run))
    assert (middle.ok, middle.met, middle.values and middle.values.value) == (True, 2, pytest.approx(0.2, rel=1e-3))


def test_over_repeats_the_one_value_and_the_range_are_shown():
    made = [measurement_of([record([ttft])], 1.0, repeat=n) for n, ttft in enumerate((0.1, 0.2, 0.4))]
    words = Page(report(run_of(made))).words
    assert f"{OVER_REPEATS} Small: the range of 3 repeats." in words
    assert "1 at once 3 3 0 0 3 1" in words  # requests, ok, abandoned, errors and seconds are sums, the rate is not
    assert "200 100–400" in words  # noqa: RUF001


def test_the_best_load_is_the_one_of_the_highest_goodput_that_can_be_trusted_and_met_everything():
    goal = ("ttft_p95=400ms",)
    stages = [Stage(arrivals="poisson", rate=rate, seconds=1.0) for rate in (1.0, 2.0, 4.0, 8.0)]
    made = [
        measurement_of([record([0.9 if count == 8 else 0.1])] * count, 1.0, stage, goal, flaws=flaws)
        for stage, count, flaws in zip(stages, (1, 2, 4, 8), ((), (), ("late",), ()), strict=True)
    ]
    run = run_of(made, objectives=goal)
    best = best_level(run, levels(run))
    assert best is not None
    assert best.name == "2/s poisson"


def test_a_load_that_comes_again_is_a_level_of_its_own():
    stages = [Stage(arrivals="poisson", rate=rate, seconds=1.0) for rate in (1.0, 9.0, 1.0)]
    made = [measurement_of([record([0.1])], 1.0, stage, repeat=repeat) for repeat in range(2) for stage in stages]
    found = levels(run_of(made))
    assert [level.name for level in found] == ["1/s poisson", "9/s poisson", "1/s poisson (2)"]
    assert [len(level.measurements) for level in found] == [2, 2, 2]


def test_every_table_names_its_columns_and_rows_and_every_chart_says_what_it_shows(whole: Run):
    page = Page(report(whole))
    assert all(head.get("scope") in {"col", "row", "colgroup"} for head in page.attributes("th"))
    assert len(page.attributes("caption")) == len(page.attributes("table")) >= 9
    charts = page.attributes("svg")
    names = [chart["aria-labelledby"] for chart in charts]
    assert len(set(names)) == len(charts) >= 11
    ids = {attributes.get("id") for _, attributes in page.tags}
    assert all(part in ids for name in names if name for part in name.split())
    assert len(page.attributes("desc")) == len(charts)


def test_every_row_is_as_wide_as_its_table(whole: Run):
    text = report(whole)
    for table in re.findall(r"<table.*?</table>", text, re.DOTALL):
        width = table.count("<col>")
        rows = re.findall(r"<tr>(.*?)</tr>", table, re.DOTALL)
        for row in rows:
            spans = [int(span) for span in re.findall(r'colspan="(\d+)"', row)]
            assert row.count("<td") + row.count("<th") - len(spans) + sum(spans) == width


def test_errors_are_told_with_what_was_said():
    records = [record([0.1]), *[record(outcome="overloaded", error="the queue is full")] * 3]
    words = one_load(measurement_of(records, 1.0)).words
    assert "1 at once overloaded 3 75 % refused: too many requests the queue is full" in words
    assert "No request failed." in one_load(measurement_of([record([0.1])], 1.0)).words


def test_client_and_server_are_set_against_each_other(whole: Run):
    first = whole.measurements[0]
    assert first.server is not None
    count = first.all.requests
    other = replace(first, server=replace(first.server, requests=count + 5))
    assert f"{count} {count} " in Page(report(replace(whole, measurements=(first,)))).words
    assert f"{count} ≠ {count + 5} " in Page(report(replace(whole, measurements=(other,)))).words


def test_a_count_that_differs_because_callers_left_is_no_fault():
    left = record([0.1, 0.2], outcome="abandoned")
    counts = ServerCounts(2, 0, 9, ttft=None, itl=None, queue=None, preemptions=0, prefix_hits=None)
    for other, faults in ((left, 0), (record([0.1, 0.2]), 1)):
        page = one_load(measurement_of([record([0.1, 0.2]), other], 2.0, server=counts))
        assert "≠ 9" in page.words
        assert sum("missed" in (span.get("class") or "") for span in page.attributes("span")) == faults


def test_clocks_are_told_in_milliseconds_and_percent():
    counts = ServerCounts(1, 0, 2, ttft=0.08, itl=0.1, queue=None, preemptions=0, prefix_hits=None)
    words = one_load(measurement_of([record([0.1, 0.2])], 2.0, server=counts)).words
    assert "100 80 +20.0 (+25.0 %) 100 100 " in words


def test_every_tool_that_is_compared_has_its_names_among_the_terms(whole: Run):
    words = Page(report(whole)).words
    assert "name meaning vLLM's name AIPerf's name GenAI-Perf's name" in words
    assert "request goodput goodput request goodput" in words


def test_without_a_token_the_generator_has_no_share_of_the_servers_cpu():
    made = measurement_of([record(outcome="invalid")], 10.0, cores=Cores(0.5, 0.1, 0.0, 0.0))
    assert "1 at once 0.5 0.1 0 0 – –" in one_load(made).words  # noqa: RUF001


def test_tokens_of_others_are_no_fault_of_their_own_beside_the_requests_of_others():
    counts = ServerCounts(2, 0, 9, ttft=None, itl=None, queue=None, preemptions=0, prefix_hits=None)
    page = one_load(measurement_of([record([0.1, 0.2])], 2.0, server=counts))
    assert "1 ≠ 2 2 ≠ 9" in page.words
    assert sum("missed" in (span.get("class") or "") for span in page.attributes("span")) == 1


def test_the_generators_own_cost_is_told_per_token():
    made = measurement_of([record([0.1], tokens=[500])], 10.0, cores=Cores(0.01, 2.0, 0.0, 0.0))
    assert "1 at once 0.01 2 0 0 200 0.5 %" in one_load(made).words


def test_the_command_can_be_copied_as_it_was():
    page = Page(report(run_of([], command="tokenstream load 'a b' --slo ttft_p95=1s")))
    assert "tokenstream load 'a b' --slo ttft_p95=1s" in page.text


@pytest.mark.parametrize(
    "measurements",
    [
        [],
        [measurement_of([], 0.0)],
        [measurement_of([record([0.1])], 0.5)],
        [measurement_of([record([0.1], tokens=[1])], 0.5, stage=Stage(arrivals="bursts", rate=0.5, burst=4))],
        [measurement_of([record(outcome="connection", error="refused")] * 5, 3.0, flaws=("no request was answered",))],
        [measurement_of([record([0.0, 0.0, 0.0])], 0.1)],
        [measurement_of([record([second + 0.5], sent=float(second)) for second in range(2000)], 2000.0)],
        [measurement_of([record([0.1 * n])], 1.0, Stage(concurrency=n)) for n in range(1, 21)],
    ],
    ids=["nothing", "no request", "one request", "one burst", "no answer", "no time", "2000 seconds", "20 loads"],
)
def test_whatever_was_measured_can_be_shown(measurements: list[Measurement], tmp_path: Path):
    for objectives in ((), OBJECTIVES):
        run = run_of(measurements, objectives=objectives)
        write_report(run, tmp_path / "report.html")
        text = (tmp_path / "report.html").read_text(encoding="utf-8")
        words = Page(text).words
        assert "A ladder of loads" in words
        assert not re.search(r"\b(nan|inf|None)\b", text)
        assert len(text) < 400_000


def test_a_run_that_was_written_and_read_gives_the_same_page(whole: Run, tmp_path: Path):
    (tmp_path / "run.json").write_bytes(dump_run(whole))
    assert report(read_run(tmp_path / "run.json")) == report(whole)

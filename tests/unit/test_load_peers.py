"""The comparison with other servers: rounds that go on, fair pairs, and pages that say it all."""

import os
import re
import xml.etree.ElementTree as ElementTree
from contextlib import contextmanager
from dataclasses import replace

import pytest

from tokenstream_loadtest.figures import TOKENS_PER_SECOND, latency
from tokenstream_loadtest.host import machine_seconds
from tokenstream_loadtest.peers import page, rounds
from tokenstream_loadtest.peers.contestants import (
    CONTESTANTS,
    OURS,
    Contestant,
    Place,
    Serving,
)
from tokenstream_loadtest.peers.environments import Unavailable
from tokenstream_loadtest.peers.limits import Limits, measured_limits
from tokenstream_loadtest.peers.models import Models
from tokenstream_loadtest.peers.plot import draw
from tokenstream_loadtest.peers.quiet import wait_quiet
from tokenstream_loadtest.peers.rounds import Settings, Workload, open_folder, run_rounds
from tokenstream_loadtest.peers.standings import ratio, standings
from tokenstream_loadtest.records import Record
from tokenstream_loadtest.results import Cores, Machine, Measurement, Run, Stage
from tokenstream_loadtest.tally import Tally

SETTINGS = Settings("capacity", (1, 4), (2, 8), None, 1, "Small-v1", 2, ("tokenstream 1",))
WORKLOAD = Workload("capacity", "Capacity", None, "make bench-peers", 6)
TTFT50 = latency("ttft", "p50")


def silent(_line):
    pass


@pytest.fixture
def place(tmp_path):
    models = Models(tmp_path / "model", tmp_path / "endless", "package://nothing/x.gguf")
    return Place(tmp_path, models, (0, 1), silent, silent, patience=0.0)


@pytest.fixture
def folder(tmp_path):
    return open_folder(tmp_path / "results", SETTINGS, fresh=False)


def measurement(callers, speed, *, repeat=0, flaws=()):
    """One answer of 10 tokens at `speed` tokens per second, its first after a tenth of the time."""
    seconds = 10 / speed
    times = [seconds * (at + 1) / 10 for at in range(10)]
    tally = Tally()
    record = Record("id", "short", 0.0, 0.0, seconds, "ok", times, [1] * 10, output_tokens=10, input_tokens=100)
    tally.add(record, began=0.0, good=True)
    cores = Cores(0.02, 1.9, 0.01, 0.0)
    return Measurement(Stage(concurrency=callers), repeat, 0.0, seconds, tally, cores=cores, flaws=flaws)


def run_of(*measurements, server=None):
    machine = Machine("Zen", 2, 8 << 30, "Linux", True, 0.1)
    told = server or {rounds.LAUNCH: "serve --it", f"{rounds.VERSION}thing": "1.2"}
    return Run(
        "capacity", "Capacity", "fixed", "openai", "u", "c", 1, 0.0, machine, server=told, measurements=measurements
    )


def contestant(name, started, *, cannot=None, ends=None):
    """A server that only notes that it was started."""

    def ready(_place):
        if cannot:
            raise Unavailable(cannot)

    @contextmanager
    def serve(_place, _log):
        if ends:
            raise Unavailable(ends)
        started.append(name)
        yield Serving("openai", f"http://{name}:1", name, f"serve {name}", {"thing": "1.2"})
        started.append(f"{name} stopped")

    return Contestant(name, name.title(), ready, serve)


@pytest.fixture
def plans(monkeypatch):
    """Every plan that was measured, in order."""
    seen = []

    async def measure(plan, _hear):
        seen.append(plan)
        return run_of(measurement(plan.stages[0].concurrency, 100.0), server={"says": "hello"})

    monkeypatch.setattr(rounds, "measure", measure)
    monkeypatch.setattr(rounds, "wait_quiet", lambda _say, seconds: 0.0)
    return seen


# Quiet


def test_busy_time_counts_everything_but_waiting(monkeypatch, tmp_path):
    (tmp_path / "stat").write_text("cpu  100 10 20 5000 700 3 4 5 90 9\ncpu0 1 2 3")
    monkeypatch.setattr("tokenstream_loadtest.host.PROC", tmp_path)
    busy, stolen = machine_seconds()
    ticks = os.sysconf("SC_CLK_TCK")
    assert busy * ticks == pytest.approx(100 + 10 + 20 + 3 + 4)
    assert stolen * ticks == pytest.approx(5)


def test_a_machine_that_stays_busy_is_waited_for_only_so_long(monkeypatch):
    monkeypatch.setattr("tokenstream_loadtest.peers.quiet.LOOK_SECONDS", 0.01)
    heard = []
    assert wait_quiet(heard.append, most=-1.0, seconds=0.05) >= 0.0
    assert heard


# Rounds


def test_one_server_is_alive_at_a_time_and_rounds_alternate(place, folder, plans):
    started = []
    peers = [contestant("ours", started), contestant("other", started)]
    assert run_rounds(peers, 2, WORKLOAD, place, folder) == []
    assert started == ["ours", "ours stopped", "other", "other stopped"] * 2


def test_every_server_gets_the_same_prompts_and_every_round_others(place, folder, plans):
    run_rounds([contestant("ours", []), contestant("other", [])], 2, WORKLOAD, place, folder)
    by_server = {name: [(p.seed, p.stages, p.warmup) for p in plans if p.model == name] for name in ("ours", "other")}
    assert by_server["ours"] == by_server["other"]
    assert len({seed for seed, *_ in by_server["ours"]}) == 2


def test_a_comparison_goes_on_where_it_stopped(place, folder, plans):
    started = []
    run_rounds([contestant("ours", started)], 1, WORKLOAD, place, folder)
    again = open_folder(folder.path.parent, SETTINGS, fresh=False)
    assert again.path == folder.path
    run_rounds([contestant("ours", started), contestant("other", started)], 1, WORKLOAD, place, again)
    assert started.count("ours") == 1
    assert started.count("other") == 1


def test_a_comparison_with_other_settings_begins_anew(folder):
    other = open_folder(folder.path.parent, replace(SETTINGS, seed=2), fresh=False)
    assert other.path != folder.path
    assert open_folder(folder.path.parent, SETTINGS, fresh=False).path == folder.path
    assert open_folder(folder.path.parent, SETTINGS, fresh=True).path not in (folder.path, other.path)


def test_a_server_that_cannot_be_had_is_left_out_and_the_others_are_measured(place, folder, plans):
    started = []
    peers = [
        contestant("ours", started),
        contestant("absent", started, cannot="no wheel for this platform"),
        contestant("broken", started, ends="it ended: out of memory"),
        contestant("last", started),
    ]
    left = run_rounds(peers, 2, WORKLOAD, place, folder)
    assert [(one.title, one.reason) for one in left] == [
        ("Absent", "no wheel for this platform"),
        ("Broken", "it ended: out of memory"),
    ]
    assert started.count("ours") == started.count("last") == 2


def test_an_interrupted_measurement_is_not_kept(place, folder, monkeypatch):
    async def measure(plan, _hear):
        return replace(run_of(measurement(1, 100.0)), interrupted=True)

    monkeypatch.setattr(rounds, "measure", measure)
    monkeypatch.setattr(rounds, "wait_quiet", lambda _say, seconds: 0.0)
    with pytest.raises(KeyboardInterrupt):
        run_rounds([contestant("ours", [])], 1, WORKLOAD, place, folder)
    assert not folder.file("ours", 0).exists()


def test_a_server_that_answers_nothing_is_left_out_with_its_error(place, folder, plans, monkeypatch):
    async def measure(plan, _hear):
        tally = Tally()
        tally.add(Record("id", "short", 0.0, 0.0, 1.0, "invalid", error="no such model"), began=0.0, good=False)
        return run_of(Measurement(plan.stages[0], 0, 0.0, 1.0, tally))

    monkeypatch.setattr(rounds, "measure", measure)
    (left,) = run_rounds([contestant("ours", [])], 1, WORKLOAD, place, folder)
    assert left.reason == "no request was answered: no such model"
    assert not folder.file("ours", 0).exists()


def test_a_run_says_how_its_server_was_started(place, folder, plans):
    run_rounds([contestant("ours", [])], 1, WORKLOAD, place, folder)
    (run,) = folder.runs("ours", 1).values()
    assert run.server == {"says": "hello", "launch": "serve ours", "version of thing": "1.2"}
    assert [m.stage.concurrency for m in run.measurements] == [1, 4]
    assert all("cores were used by others just before" in m.notes[-1] for m in run.measurements)


# What it came to


@pytest.fixture
def found(folder):
    """Ours at 100 and 300 tokens/s, the other at 50 and 100, in two rounds."""
    for repeat, factor in enumerate((1.0, 0.5)):
        for name, speeds in ((OURS, (100.0, 300.0)), ("vllm", (50.0, 100.0))):
            run = run_of(
                *(measurement(at, speed * factor, repeat=repeat) for at, speed in zip((1, 4), speeds, strict=True))
            )
            folder.write(name, repeat, run)
    return standings([each for each in CONTESTANTS if each.name in (OURS, "vllm")], 2, folder)


def test_ratios_are_of_pairs_of_the_same_round(found):
    ours, vllm = found
    one = ratio(ours, vllm, 1, TOKENS_PER_SECOND)
    assert (one.value, one.low, one.high, one.count) == pytest.approx((2.0, 2.0, 2.0, 2))
    assert ratio(ours, vllm, 4, TTFT50).value == pytest.approx(1 / 3, rel=0.01)
    assert ratio(ours, vllm, 16, TOKENS_PER_SECOND) is None


LIMITS = Limits("Zen", 2, 40.0, 900.0, 269_000_000, {1: 5.0, 4: 8.0}, 0.25)


def comparison(found, **changes):
    values = {"found": found, "left": [], "limits": LIMITS, "quick": False}
    return page.Comparison(SETTINGS, "2026-01-02T030405Z", "make bench-peers", **{**values, **changes})


def test_the_bound_is_the_prompt_once_and_steps_that_are_shared():
    assert LIMITS.tokens_per_second(4, 100, 10) == pytest.approx(10 / (100 * 0.25e-3 + 10 * 8e-3 / 4))
    assert LIMITS.tokens_per_second(2, 100, 10) is None


def test_limits_are_measured_once(tmp_path):
    results = [
        {"kind": "setup", "cpu": "Zen", "cores": 2, "read_gb_per_second": 40.0, "gflop_per_second": 900.0}
        | {"weight_bytes": 269},
        {"kind": "decode", "rows": 4, "tokens": 257, "limit_ms": 8.0},
        {"kind": "prefill", "rows": 1, "tokens": 2048, "limit_ms": 600.0},
        {"kind": "prefill", "rows": 1, "tokens": 512, "limit_ms": 128.0},
    ]
    asked = []

    def bench(_say):
        asked.append(1)
        return results

    first, again = (measured_limits(tmp_path / "limits.json", silent, quick=True, bench=bench) for _ in range(2))
    assert first == again == Limits("Zen", 2, 40.0, 900.0, 269, {4: 8.0}, 0.25)
    assert len(asked) == 1


def rows_of(text):
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in text.splitlines() if line.startswith("|")]


def test_the_short_table_has_rates_ratios_and_the_limit(found):
    rows = rows_of(page.short(comparison(found), "docs/peers.md", "docs/peers.svg"))
    assert rows[0] == ["at once", "tokenstream", "vLLM", "this machine's limit"]
    assert rows[2][:3] == ["1", "75", "37.5 (2.00)"]
    assert rows[3][:3] == ["4", "225", "75 (3.00)"]


def test_the_page_names_launches_versions_limits_and_what_was_left_out(found):
    left = [rounds.Left("llama.cpp", "cmake failed")]
    text = page.full(comparison(found, left=left), "peers.svg")
    for part in (
        "serve --it",
        "thing 1.2",
        "40 GB/s",
        "900 GFLOP/s",
        "Left out: llama.cpp. cmake failed",
        "2026-01-02",
    ):
        assert part in text
    assert "No measurement has a flaw." in text


def test_what_cannot_be_relied_on_is_marked_and_named(folder):
    folder.write(OURS, 0, run_of(measurement(1, 100.0, flaws=("the machine was not quiet: others used 0.61 cores",))))
    found = standings(CONTESTANTS, 1, folder)
    assert "100 *" in page.short(comparison(found), "docs/peers.md", "docs/peers.svg")
    assert "round 1: the machine was not quiet" in page.full(comparison(found), "peers.svg")


def test_every_table_has_as_many_cells_in_each_row_as_in_its_head(found):
    text = page.full(comparison(found), "peers.svg")
    for table in re.findall(r"(?:^\|.*\n)+", text, re.MULTILINE):
        assert len({len(row) for row in rows_of(table)}) == 1


def test_only_what_stands_between_the_markers_is_replaced(tmp_path):
    readme = tmp_path / "README.md"
    readme.write_text(f"before\n{page.BEGIN}\nold\n{page.END}\nafter\n")
    assert page.place_between_markers(readme, "new \\1\n")
    assert readme.read_text() == f"before\n{page.BEGIN}\nnew \\1\n{page.END}\nafter\n"
    readme.write_text("no markers\n")
    assert not page.place_between_markers(readme, "new\n")
    assert readme.read_text() == "no markers\n"


def test_the_plot_is_one_svg_file_that_holds_every_value(found):
    text = draw(found)
    root = ElementTree.fromstring(text)
    assert root.tag == "{http://www.w3.org/2000/svg}svg"
    tips = [node.text for node in root.iter("{http://www.w3.org/2000/svg}title")]
    for tip in ("tokenstream, 1 at once: 75", "vLLM, 4 at once: 75"):
        assert tip in tips
    assert "prefers-color-scheme: dark" in text
    assert not re.search(r"(?:href|src)=|url\(|@import", text)

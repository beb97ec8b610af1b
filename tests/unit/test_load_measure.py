"""A whole run against a scripted server: the same prompts for the same seed, and what makes a measurement invalid."""

from __future__ import annotations

import asyncio
import json
import random
import time
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
from tritonclient.grpc import service_pb2 as pb

from tokenstream.intervals import Page
from tokenstream_loadtest import bench
from tokenstream_loadtest.bench import WARM_UP, Bench, Plan, Progress
from tokenstream_loadtest.checks import INTERRUPTED, flaws, notes
from tokenstream_loadtest.generator import Measured
from tokenstream_loadtest.measure import measure
from tokenstream_loadtest.records import Record
from tokenstream_loadtest.requests import Request
from tokenstream_loadtest.results import Cores, Measurement, Run, ServerCounts, Stage, dump_run, read_run
from tokenstream_loadtest.slo import Objective
from tokenstream_loadtest.tally import Group, Tally
from tokenstream_loadtest.targets import Failed
from tokenstream_loadtest.watch import Watch
from unit.scripted_triton import ScriptedCall, ScriptedTriton, inputs, token
from waiting import WAIT

TWO_AT_ONCE, ONE = Stage(concurrency=2, requests=6), Stage(concurrency=1, requests=3)
OPEN = Stage("poisson", rate=50.0, requests=4)
QUIET = Cores(generator=0.1, server=1.0, others=0.0, stolen=0.0)


class Words:
    """A workload whose prompts are a seed's random numbers."""

    name = "words"

    def draw(self, seed: int) -> Iterator[Request]:
        source = random.Random(seed)
        while True:
            yield Request("word", 3, prompt=str(source.getrandbits(64)))


def script(request: pb.ModelInferRequest, call: ScriptedCall) -> Iterator[pb.ModelStreamInferResponse]:
    if inputs(request).get("operation") == "info":
        told = json.dumps({"model": "scripted", "max_context": 64, "exact": "bitwise"})
        yield token(0, told, final=True, finish_reason="stop")
        return
    for index in range(3):
        last = index == 2
        yield token(index, "x", 5, final=last, finish_reason="length" if last else "", num_input_tokens=2)


@pytest.fixture
def server() -> Iterator[ScriptedTriton]:
    server = ScriptedTriton(script)
    yield server
    server.close()


def plan(server: ScriptedTriton, *stages: Stage, **options: Any) -> Plan:
    return Plan(scenario="s", title="S", workload=Words(), stages=stages, url=server.url, **options)


def go(wanted: Plan, told: list[Progress] | None = None) -> Run:
    return asyncio.run(measure(wanted, (told if told is not None else []).append))


def prompts(server: ScriptedTriton) -> list[str]:
    asked = [str(inputs(request)["text_input"]) for request in server.requests if "operation" not in inputs(request)]
    server.requests.clear()
    return asked


def test_every_stage_of_every_repeat_is_measured_without_its_warm_up(server, tmp_path):
    told: list[Progress] = []
    objective = Objective.parse("ttft_p95=10s")
    run = go(plan(server, TWO_AT_ONCE, OPEN, repeats=2, warmup=3, objectives=(objective,), command="load s"), told)
    found = [(one.repeat, one.stage, one.all.outcomes, one.all.output_tokens) for one in run.measurements]
    both = [(TWO_AT_ONCE, {"ok": 6}, 18), (OPEN, {"ok": 4}, 12)]
    assert found == [(repeat, *one) for repeat in range(2) for one in both]
    assert len(prompts(server)) == 2 * (6 + 4 + 3 + 3)
    assert (run.scenario, run.title, run.workload, run.command) == ("s", "S", "words", "load s")
    assert run.server == {"model": "scripted", "max_context": "64", "exact": "bitwise"}
    assert run.objectives == (str(objective),)
    assert run.machine.local
    assert {"tokenstream", "python", "grpcio", "hdrhistogram"} <= run.versions.keys()
    assert all(one.all.good == one.all.requests for one in run.measurements)
    (tmp_path / "run.json").write_bytes(dump_run(run))
    assert dump_run(read_run(tmp_path / "run.json")) == dump_run(run)
    assert {one.stage_label for one in told} == {WARM_UP, TWO_AT_ONCE.label, OPEN.label}
    assert {(one.repeat, one.stage_index) for one in told} == {(0, 0), (0, 1), (1, 0), (1, 1)}
    assert told[-1].ended == told[-1].sent == 4
    assert told[-1].left == 0  # by the requests that are left
    assert {one.left for one in told if one.stage_label == WARM_UP or not one.ended} == {None}


def test_prompts_depend_on_seed_stage_and_repeat_alone(server):
    def asked(*stages: Stage, **options: Any) -> list[str]:
        go(plan(server, *stages, **options))
        return prompts(server)

    first = asked(ONE, ONE, repeats=2, seed=5)
    assert first == asked(ONE, ONE, repeats=2, seed=5)
    assert first == asked(ONE, ONE, repeats=2, seed=5, objectives=(Objective.parse("errors=1%"),))
    assert len(set(first)) == 12  # no stage and no repeat shares any
    assert not set(first) & set(asked(ONE, ONE, repeats=2, seed=6))
    warmed = asked(ONE, warmup=2, seed=5)
    assert warmed[2:] == first[:3]
    assert not set(warmed[:2]) & set(first)


@pytest.mark.parametrize("warmup", [0, 5])
def test_an_interrupted_run_keeps_what_it_has(warmup):
    asked = 0

    def hang_at_ten(request: pb.ModelInferRequest, call: ScriptedCall) -> Iterator[pb.ModelStreamInferResponse]:
        nonlocal asked
        asked += 1
        if asked > 10:
            call.over.wait()
        else:
            yield from script(request, call)

    server = ScriptedTriton(hang_at_ten)

    async def main() -> Run:
        hanging = asyncio.Event()

        def hear(told: Progress) -> None:
            if asked > 10:
                hanging.set()

        running = asyncio.create_task(measure(plan(server, TWO_AT_ONCE, TWO_AT_ONCE, repeats=3, warmup=warmup), hear))
        await hanging.wait()
        running.cancel()
        return await running

    try:
        run = asyncio.run(main())
        assert all(call.over.wait(WAIT) for call in server.calls)
    finally:
        server.close()
    if warmup:  # one question, five to warm up, four of six
        (cut,) = run.measurements
    else:  # one question, six and three
        whole, cut = run.measurements
        assert INTERRUPTED not in whole.flaws
    assert INTERRUPTED in cut.flaws
    assert cut.all.outcomes.get("ok", 0) <= 4


def test_a_stage_that_is_interrupted_while_the_servers_counts_are_awaited_is_kept(server, monkeypatch):
    async def main() -> tuple[Measurement | None, Run]:
        awaited = asyncio.Event()

        class Slow(Watch):
            async def settled(self) -> Page:
                return Page([])

            async def counts(self, before: Page, expected: Group) -> ServerCounts | None:
                awaited.set()
                await asyncio.Event().wait()
                return None

        monkeypatch.setattr(bench, "Watch", Slow)
        async with Bench(plan(server, ONE, metrics_url="http://127.0.0.1:9/metrics"), lambda told: None) as own:
            measuring = asyncio.create_task(own.measure(ONE))
            await awaited.wait()
            measuring.cancel()
            return await measuring, own.run()

    measurement, run = asyncio.run(main())
    assert measurement is not None
    assert measurement.all.outcomes == {"ok": 3}
    assert measurement.flaws[0] == INTERRUPTED
    assert run.measurements == (measurement,)
    assert (run.interrupted, measurement.notes) == (True, ())


def test_a_run_that_is_interrupted_between_stages_says_so(server):
    async def main() -> Run:
        async with Bench(plan(server, ONE, ONE), lambda told: None) as bench:
            await bench.measure(ONE)
            bench.interrupted = True
            return bench.run()

    run = asyncio.run(main())
    (measured,) = run.measurements
    assert run.interrupted
    assert measured.notes == ("the run was interrupted behind this stage",)
    assert INTERRUPTED not in measured.flaws


def test_nobody_there_is_told_before_anything_is_measured(server):
    server.close()
    with pytest.raises(Failed) as error:
        go(plan(server, ONE))
    assert error.value.outcome == "connection"


def test_stages_can_be_decided_one_by_one(server):
    async def main() -> Run:
        async with Bench(plan(server), lambda told: None) as bench:
            for requests in (1, 2):
                measured = await bench.measure(Stage(concurrency=1, requests=requests))
                assert measured is not None
                assert measured.all.requests == requests
            return bench.run()

    assert [one.all.requests for one in asyncio.run(main()).measurements] == [1, 2]


def test_without_a_metrics_page_there_are_no_numbers_of_the_server(server):
    (measured,) = go(plan(server, ONE)).measurements
    assert (measured.samples, measured.server, measured.notes) == ((), None, ())
    page = "http://127.0.0.1:9/metrics"
    (measured,) = go(plan(server, ONE, metrics_url=page)).measurements
    assert (measured.samples, measured.server) == ((), None)
    assert measured.notes == (f"the server's own numbers are missing: {page} could not be read",)


@pytest.mark.parametrize("comes_back", [True, False])
def test_a_server_whose_page_is_gone_at_the_end_is_a_flaw(server, monkeypatch, comes_back):
    class Dying(Watch):
        async def settled(self) -> Page:
            return Page([])

        async def counts(self, before: Page, expected: Group) -> ServerCounts | None:
            return counted(requests=3, input_tokens=6, output_tokens=9, ttft=None) if comes_back else None

    monkeypatch.setattr(bench, "Watch", Dying)
    (measured,) = go(plan(server, ONE, metrics_url="http://127.0.0.1:9/metrics")).measurements
    gone = [flaw for flaw in measured.flaws if "could be read at the begin and not at the end" in flaw]
    assert len(gone) == (0 if comes_back else 1)
    assert measured.notes == ()


# --- whether it can be trusted


def record(**parts: Any) -> Record:
    at = time.perf_counter()
    usual: dict[str, Any] = {
        "id": "r",
        "kind": "k",
        "scheduled_at": at,
        "sent_at": at,
        "ended_at": at + 0.5,
        "outcome": "ok",
        "times": [at + 0.1, at + 0.2],
        "tokens": [1, 1],
        "output_tokens": 2,
        "input_tokens": 7,
    }
    changed = usual | parts
    return Record(**(changed | {"sent_at": changed["scheduled_at"] + parts.get("sent_at", 0.0)}))


def measured(*records: Record, **parts: Any) -> Measured:
    tally = Tally()
    for one in records:
        tally.add(one, began=one.scheduled_at, good=True)
    return Measured(0.0, 0.0, 1.0, tally, **parts)


def counted(**parts: Any) -> ServerCounts:
    usual = ServerCounts(2, 14, 4, ttft=0.099, itl=0.1, queue=0.0, preemptions=0, prefix_hits=None)
    return replace(usual, **parts)


TWO = (record(), record())


def judged(what: Measured, *, stage: Stage = TWO_AT_ONCE, cores: Cores = QUIET, **parts: Any) -> tuple[str, ...]:
    return flaws(what, stage, cores, counted(**parts), local=True)


def test_a_measurement_on_which_both_sides_agree_has_no_flaw():
    assert judged(measured(*TWO)) == ()
    assert flaws(measured(*TWO), TWO_AT_ONCE, QUIET, None, local=True) == ()


@pytest.mark.parametrize(
    ("found", "words"),
    [
        (judged(measured(*TWO, interrupted=True)), INTERRUPTED),
        (judged(measured(*TWO, capped=True), stage=OPEN), "too many were under way"),
        (judged(measured(record(outcome="overloaded", times=[], tokens=[])), requests=1), "no request was answered"),
        (judged(measured(record(sent_at=0.06), TWO[0]), ttft=0.07), "the generator itself was late: by 60 ms"),
        (judged(measured(*TWO), cores=replace(QUIET, generator=0.95)), "at its limit: it used 0.95"),
        (judged(measured(*TWO), cores=replace(QUIET, others=0.61)), "not quiet: others used 0.61 cores"),
        (judged(measured(*TWO), cores=replace(QUIET, stolen=0.2)), "took 0.20 cores away"),
        (judged(measured(*TWO), requests=3), "the server served others at the same time: 1 further"),
        (judged(measured(*TWO), requests=1), "the server counted 1 requests, the generator 2"),
        (judged(measured(*TWO), output_tokens=5), "the server counted 5 output tokens, the generator 4"),
        (judged(measured(*TWO), input_tokens=5), "the server counted 5 input tokens, the generator 14"),
        (judged(measured(*TWO), output_tokens=5, ttft=0.05), "the server counted 5 output tokens"),
        (
            judged(measured(*TWO), ttft=0.05),
            "the mean TTFT from sending is 100 ms here and 50 ms by the server's own clock",
        ),
        (judged(measured(*TWO), ttft=0.0885), "the mean TTFT from sending is 100 ms here and 88.5 ms"),
    ],
)
def test_every_flaw_is_told_in_plain_words(found, words):
    assert len(found) == 1
    assert words in found[0]


def test_a_server_that_was_started_anew_is_a_flaw_and_its_counts_are_not_compared():
    found = flaws(measured(*TWO), TWO_AT_ONCE, QUIET, counted(output_tokens=1), local=True, restarted=True)
    assert found == ("the server was started anew during the measurement",)


def test_a_flaw_of_clocks_says_where_the_difference_lies():
    (late,) = judged(measured(*TWO), ttft=0.05)
    where = "in gRPC, Triton's front, the network or this process"
    assert late.endswith(f": what lies between the two, {where}, is in no number of the server's")
    (early,) = judged(measured(*TWO), ttft=0.2)
    assert early.endswith("is 100 ms here and 200 ms by the server's own clock")


@pytest.mark.parametrize(("ours", "theirs"), [(0.1, 0.0915), (0.013, 0.0035), (2.0, 1.85)])
def test_what_lies_between_a_caller_and_the_model_is_no_disagreement_of_clocks(ours, theirs):
    at = time.perf_counter()
    one = record(scheduled_at=at, times=[at + ours, at + ours + 0.1], ended_at=at + ours + 0.1)
    assert judged(measured(one, one), ttft=theirs) == ()


def test_counts_need_not_agree_where_both_cannot_have_seen_the_same():
    left = record(outcome="abandoned", output_tokens=1)
    assert judged(measured(left, TWO[0]), output_tokens=9, input_tokens=3, ttft=9.0) == ()
    assert judged(measured(record(resumes=1), TWO[0]), requests=1) == ()


def test_others_do_not_matter_on_a_machine_without_the_server():
    assert flaws(measured(*TWO), TWO_AT_ONCE, replace(QUIET, others=2.0, server=None), None, local=False) == ()


def test_a_late_generator_may_be_late_by_a_tenth_of_a_long_ttft():
    at = time.perf_counter()
    slow = record(scheduled_at=at, sent_at=0.15, times=[at + 2.0, at + 2.1])
    assert judged(measured(slow, slow), ttft=1.85) == ()


def test_what_a_reader_should_know_is_noted():
    capped = replace(OPEN, concurrency=8)
    assert flaws(measured(*TWO, capped=True), capped, QUIET, None, local=True) == ()
    (cap, resumes, tokens) = notes(
        measured(record(resumes=1, output_tokens=5), TWO[0], capped=True), capped, watched=None, counts=None
    )
    assert "not more than 8 requests" in cap
    assert "1 cut streams" in resumes
    assert "1.75 tokens" in tokens
    assert notes(measured(*TWO), TWO_AT_ONCE, watched="http://x", counts=counted()) == ()

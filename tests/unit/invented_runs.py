"""Runs that nobody measured: records with known times, and whole runs of a server that exists on paper only.

The paper server has as many seats as it is told; who finds none waits, and its tokens slow down with its load.
"""

from __future__ import annotations

import heapq
import random
from collections.abc import Sequence
from dataclasses import replace

from tokenstream_loadtest.records import Outcome, Record
from tokenstream_loadtest.results import Cores, Machine, Measurement, Run, Sample, ServerCounts, Stage, Stall
from tokenstream_loadtest.slo import Objective, good
from tokenstream_loadtest.tally import Tally

BEGAN = 1000.0
MACHINE = Machine("Paper 9000", 8, 32 * 2**30, "Linux 6.1", local=True, load_before=0.04)
OBJECTIVES = ("ttft_p95=400ms", "itl_p99=60ms", "errors=1%")
FAILURES: tuple[tuple[Outcome, str], ...] = (
    ("overloaded", "the queue is full (64 wait) [code=OVERLOADED]"),
    ("timeout", "no seat within 10 s"),
    ("incomplete", "the stream ended without its end"),
)


def record(
    times: Sequence[float] = (),
    *,
    sent: float = 0.0,
    tokens: Sequence[int] | None = None,
    ended: float | None = None,
    scheduled: float = 0.0,
    outcome: Outcome = "ok",
    kind: str = "chat",
    **more: object,
) -> Record:
    """A request that was due at BEGAN + `scheduled`; all times count from BEGAN."""
    counts = list(tokens) if tokens is not None else [1] * len(times)
    end = ended if ended is not None else (times[-1] if times else sent)
    made = Record(
        id="request",
        kind=kind,
        scheduled_at=BEGAN + scheduled,
        sent_at=BEGAN + sent,
        ended_at=BEGAN + end,
        outcome=outcome,
        times=[BEGAN + time for time in times],
        tokens=counts,
        output_tokens=sum(counts),
    )
    return replace(made, **more)  # type: ignore[arg-type]


def tally_of(records: Sequence[Record], objectives: Sequence[str] = ()) -> Tally:
    """What the records come to."""
    parsed = [Objective.parse(text) for text in objectives]
    tally = Tally()
    for one in records:
        tally.add(one, began=BEGAN, good=good(one, parsed))
    return tally


def measurement_of(
    records: Sequence[Record],
    seconds: float,
    stage: Stage | None = None,
    objectives: Sequence[str] = (),
    **more: object,
) -> Measurement:
    """A measurement of these records."""
    load = stage or Stage(concurrency=1, requests=1)
    made = Measurement(load, 0, 1_796_000_000.0, seconds, tally_of(records, objectives))
    return replace(made, **more)  # type: ignore[arg-type]


def run_of(measurements: Sequence[Measurement], **more: object) -> Run:
    """A run of these measurements."""
    made = Run(
        scenario="ladder",
        title="A ladder of loads",
        workload="mixed",
        target="tokenstream",
        url="127.0.0.1:8001",
        command="tokenstream load ladder --seed 7",
        seed=7,
        started_at=1_796_000_000.0,
        machine=MACHINE,
        versions={"tokenstream": "0.1.0", "python": "3.11.2"},
        server={"model": "paper-135m", "fingerprint": "f00d"},
        measurements=tuple(measurements),
    )
    return replace(made, **more)  # type: ignore[arg-type]


def paper_records(rate: float, seconds: float, seed: int, seats: int = 16, failing: float = 0.0) -> list[Record]:
    """Poisson arrivals at a server with `seats`, each answer 20 to 80 tokens."""
    draw = random.Random(seed)
    free = [0.0] * seats
    records = []
    at = draw.expovariate(rate)
    while at < seconds:
        sent = at + draw.lognormvariate(-8, 0.5)
        if draw.random() < failing:
            outcome, line = draw.choice(FAILURES)
            records.append(record(sent=sent, scheduled=at, ended=sent + 0.01, outcome=outcome, error=line))
        else:
            begin = max(sent, heapq.heappop(free))
            busy = sum(end > begin for end in free)
            prompt = draw.choice((32, 128, 512))
            times = [begin + 0.02 + prompt * 2e-4 * draw.lognormvariate(0, 0.2)]
            for _ in range(draw.randint(20, 80)):
                times.append(times[-1] + (0.008 + 0.0012 * busy) * draw.lognormvariate(0, 0.25))
            if draw.random() < 0.002:
                times[-1] += 1.2
            heapq.heappush(free, times[-1])
            leaves = draw.random() < 0.04
            kept = times[: len(times) // 2] if leaves else times
            records.append(
                record(
                    kept,
                    sent=sent,
                    scheduled=at,
                    outcome="abandoned" if leaves else "ok",
                    kind={32: "chat", 128: "summary", 512: "long prompt"}[prompt],
                    input_tokens=prompt,
                    cached_tokens=16,
                    queue=begin - sent,
                    priority=draw.choice((1, 2, 2, 3)),
                )
            )
        at += draw.expovariate(rate)
    return records


def paper_measurement(rate: float, repeat: int, seconds: float, objectives: Sequence[str] = OBJECTIVES) -> Measurement:
    """One stage of the paper server, with everything that can be measured of it."""
    records = paper_records(rate, seconds, seed=round(rate * 100) + repeat, failing=0.03 if rate >= 16 else 0.0)
    tally = tally_of(records, objectives)
    length = max(each.ended_at for each in records) - BEGAN
    samples = []
    for second in range(int(length)):
        now = BEGAN + second
        running = sum(bool(each.times) and each.times[0] <= now < each.ended_at for each in records)
        waiting = sum(bool(each.times) and each.sent_at <= now < each.times[0] for each in records)
        tokens = tally.seconds[second].tokens if second in tally.seconds else 0
        samples.append(Sample(second, running, waiting, running / 20, tokens * 0.97, 40.0, running or None))
    everything = tally.all
    server = ServerCounts(
        requests=everything.requests,
        input_tokens=everything.input_tokens,
        output_tokens=everything.output_tokens,
        ttft=(everything.histograms["ttft_sent"].mean or 0.0) * 0.98,
        itl=(everything.histograms["itl"].mean or 0.0) * 1.004,
        queue=everything.histograms["queue"].mean,
        preemptions=3,
        prefix_hits=0.31,
    )
    late = rate >= 16 and repeat == 1
    return Measurement(
        stage=Stage(arrivals="poisson", rate=rate, seconds=seconds),
        repeat=repeat,
        started_at=1_796_000_000.0 + 60 * repeat,
        seconds=length,
        tally=tally,
        samples=tuple(samples),
        stalls=(Stall(seconds * 0.6, 1.7),) if rate >= 8 else (),
        cores=Cores(0.06 + rate * 0.004, 1.7, 0.31 if late else 0.04, 0.0),
        server=server,
        flaws=("the machine was not quiet: others used 0.31 cores",) if late else (),
        notes=("responses held 1.02 tokens on average",) if rate >= 8 else (),
    )


def paper_run(rates: Sequence[float] = (1, 2, 4, 8, 16), repeats: int = 3, seconds: float = 40.0) -> Run:
    """A whole run of the paper server."""
    measurements = [paper_measurement(rate, repeat, seconds) for repeat in range(repeats) for rate in rates]
    return run_of(measurements, objectives=OBJECTIVES, limits={"read_GB_per_s": 82.0})

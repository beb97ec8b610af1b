"""The generator against the real server: its counts are the server's, its clocks agree, and it costs little."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Iterator
from typing import Any

from server.conftest import WITH_THE_DEFAULT_MODEL
from tokenstream import Client
from tokenstream.server import TritonServer
from tokenstream_loadtest.bench import Plan
from tokenstream_loadtest.measure import measure
from tokenstream_loadtest.requests import Request
from tokenstream_loadtest.results import Measurement, Stage
from tokenstream_loadtest.watch import PERIOD
from waiting import eventually

LARGEST_SHARE = 0.15  # of the server's CPU


class Stories:
    """A workload of prompts that no other seed gives."""

    name = "stories"

    def __init__(self, words: int = 40, **parts: Any) -> None:
        self._words = words
        self._parts = {"kind": "story", "max_tokens": 16, "ignore_eos": True} | parts

    def draw(self, seed: int) -> Iterator[Request]:
        source = random.Random(seed)
        while True:
            words = " ".join(str(source.randrange(1000)) for _ in range(self._words))
            yield Request(prompt=f"Once upon a time, in the year {words}", **self._parts)


def run(server: TritonServer, workload: Stories, *stages: Stage, **options: Any) -> tuple[Measurement, ...]:
    plan = Plan(
        scenario="test",
        title="Test",
        workload=workload,
        stages=stages,
        url=server.grpc_url,
        metrics_url=server.metrics_url,
        **options,
    )
    return asyncio.run(measure(plan, lambda told: None)).measurements


def agree(flaws: tuple[str, ...]) -> bool:
    return not [flaw for flaw in flaws if "late" in flaw or "TTFT" in flaw]


def disturbed(flaws: tuple[str, ...]) -> bool:
    return bool([flaw for flaw in flaws if "others used" in flaw or "took" in flaw])


def test_both_sides_count_the_same_and_their_clocks_agree(server: TritonServer) -> None:
    stages = (Stage(concurrency=4, requests=8), Stage("poisson", rate=3.0, requests=6))
    measurements = run(server, Stories(), *stages, repeats=2, warmup=1, seed=3)
    assert len(measurements) == 4
    for one in measurements:
        assert one.all.outcomes == {"ok": one.stage.requests}, one.all.examples
        assert one.server is not None
        assert one.server.requests == one.stage.requests
        assert one.server.output_tokens == one.all.output_tokens == 16 * one.all.requests
        assert one.server.input_tokens == one.all.input_tokens > 40 * one.all.requests
        assert one.all.responses == one.all.output_tokens
        assert one.cores is not None
        assert one.cores.server is not None
        assert one.samples or one.seconds < 2 * PERIOD  # the first look is behind a PERIOD
        assert not [flaw for flaw in one.flaws if "counted" in flaw or "others at the same time" in flaw]
    # Whoever else uses this machine may delay one or the other, but hardly all while it is quiet.
    for stage in stages:
        repeats = [one.flaws for one in measurements if one.stage == stage]
        assert any(agree(flaws) or disturbed(flaws) for flaws in repeats), repeats


def test_callers_that_leave_free_their_seats(server: TritonServer, client: Client) -> None:
    (one,) = run(server, Stories(max_tokens=4000, abandon_after=3), Stage(concurrency=4, requests=8), seed=4)
    assert one.all.outcomes == {"abandoned": 8}
    assert one.all.output_tokens >= 24
    assert one.server is not None
    assert one.server.requests == 8
    assert one.server.output_tokens < 8 * 4000 / 4
    eventually(lambda: (client.info().details["running"], client.info().details["waiting"]) == (0, 0))


@WITH_THE_DEFAULT_MODEL  # whose steps cost as much as a model's do
def test_sixty_four_streams_cost_a_small_part_of_what_they_cost_the_server(server: TritonServer) -> None:
    (one,) = run(server, Stories(words=4, max_tokens=24), Stage(concurrency=64, requests=64), seed=5)
    assert one.all.outcomes == {"ok": 64}, one.all.examples
    assert one.cores is not None
    assert one.cores.server is not None
    share = one.cores.generator / one.cores.server
    micros = one.cores.generator * one.seconds / one.all.responses * 1e6
    print(f"the generator used {share:.1%} of the server's CPU, {micros:.0f} us per token")
    assert share < LARGEST_SHARE

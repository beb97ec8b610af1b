"""The order that the command line gives to the load tests' package, and the plan that follows from it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tokenstream_loadtest.order import VARIABLE, Order, planned, take_order

SCENARIO = """
title = "Steps"
about = "For a test."
workload = "chat"
objectives = ["errors=1%"]
warmup = 3

[steps]
concurrency = [1, 2]
seconds = 5
"""
SEARCH = """
title = "Ramp"
about = "For a test."
workload = "chat"
objectives = ["errors=1%"]

[search]
by = "concurrency"
start = 1
most = 8
seconds = 5
"""


def order(path: Path, text: str = SCENARIO, **given: Any) -> Order:
    scenario = path / "mine.toml"
    scenario.write_text(text)
    said = {"scenario": str(scenario), "target": "tokenstream", "url": "127.0.0.1:1", "model": "llm", **given}
    environment = {VARIABLE: json.dumps(said), "HOME": "x"}
    taken = take_order(environment)
    assert environment == {"HOME": "x"}  # no child of ours is to find credentials there
    return taken


def test_a_scenario_becomes_a_plan(tmp_path: Path) -> None:
    made = planned(order(tmp_path, metrics_url="http://h:2/metrics", command="tokenstream load mine"))
    plan = made.plan
    assert [stage.label for stage in plan.stages] == ["1 at once", "2 at once"]
    assert (plan.scenario, plan.title, plan.warmup, plan.repeats, plan.seed) == ("mine", "Steps", 3, 1, 0)
    assert (plan.url, plan.model, plan.metrics_url) == ("127.0.0.1:1", "llm", "http://h:2/metrics")
    assert [str(objective) for objective in plan.objectives] == ["errors=1%"]
    assert plan.command == "tokenstream load mine"
    assert made.plan.search is None
    assert made.folder.parent == Path("loadtest-results")
    assert made.folder.name.startswith("mine-2")


def test_what_was_given_stands_over_the_scenario(tmp_path: Path) -> None:
    load = {"rate": 4.0, "arrivals": "gamma", "burstiness": 0.5, "requests": 9, "repeats": 2, "warmup": 0, "seed": 7}
    load |= {"max_tokens": 5, "fixed_length": True, "slo": ["ttft_p95=1s"]}
    made = planned(order(tmp_path, load=load, name="a/b c", out=str(tmp_path / "out")))
    (stage,) = made.plan.stages
    assert (stage.label, stage.burstiness, stage.requests, stage.seconds) == ("4/s gamma", 0.5, 9, None)
    assert (made.plan.repeats, made.plan.warmup, made.plan.seed) == (2, 0, 7)
    assert [str(objective) for objective in made.plan.objectives] == ["ttft_p95=1s"]
    request = next(made.plan.workload.draw(1))
    assert (request.max_tokens, request.ignore_eos) == (5, True)
    assert (made.plan.scenario, made.folder) == ("a/b c", tmp_path / "out")
    assert planned(order(tmp_path, name="a/b c")).folder.name.startswith("a-b-c-2")


def test_credentials_reach_the_target(tmp_path: Path) -> None:
    server = {"token": "s3cret", "header": ["X-Tenant = a=b"], "allow_insecure_credentials": True, "tls_ca": "ca.pem"}
    options = planned(order(tmp_path, server=server)).plan.options
    assert options.headers == {"authorization": "Bearer s3cret", "x-tenant": " a=b"}
    assert options.allow_insecure_credentials
    assert options.tls is not None
    assert options.tls.root_certificates == Path("ca.pem")
    bare = planned(order(tmp_path)).plan.options
    assert (bare.headers, bare.tls) == ({}, None)


def test_a_search_takes_the_place_of_stages(tmp_path: Path) -> None:
    made = planned(order(tmp_path, SEARCH, load={"slo": ["ttft_p95=1s"]}))
    assert made.plan.search is not None
    assert made.plan.search.most == 8
    assert made.notes == ()
    moved = planned(order(tmp_path, SEARCH, load={"concurrency": 3}))
    assert moved.plan.search is not None
    assert (moved.plan.search.start, moved.plan.search.most) == (3, 8)
    assert moved.notes == ("mine searches for a load: it starts at 3 at once and goes up to 8 at once",)


def test_a_folder_that_holds_a_run_is_not_written_into_unless_asked(tmp_path: Path) -> None:
    out = tmp_path / "out"
    out.mkdir()
    (out / "notes.txt").touch()
    assert planned(order(tmp_path, out=str(out))).folder == out
    (out / "run.json").touch()
    with pytest.raises(ValueError, match=r"holds another run: .*--overwrite"):
        planned(order(tmp_path, out=str(out)))
    assert planned(order(tmp_path, out=str(out), overwrite=True)).folder == out


def test_messages_of_a_chat_for_a_plain_triton_model_are_refused_before_anything_is_sent(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="takes text, not the messages of a chat as in chat: give --workload fixed"):
        planned(order(tmp_path, target="triton"))
    planned(order(tmp_path, target="triton", load={"workload": "fixed"}))

"""Scenarios: shapes come to their stages, a command line can change them, and what is wrong is said in one line."""

from __future__ import annotations

from itertools import islice
from pathlib import Path

import pytest
from pydantic import ValidationError

from tokenstream_loadtest.data_files import shipped_names
from tokenstream_loadtest.results import Stage
from tokenstream_loadtest.scenarios import Scenario, list_scenarios, read_scenario
from tokenstream_loadtest.slo import Objective

HEAD = 'title = "T"\nabout = "A"\nworkload = "chat"\n'
SHIPPED = shipped_names("scenarios")
DOCUMENT = (Path(__file__).parents[2] / "docs/loadtest.md").read_text(encoding="utf-8")
WANTED = {
    *("quick", "chat", "capacity", "steady", "bursts", "spike", "ramp", "soak", "long-prefill", "conversations"),
    *("code", "summarise", "abandon", "slow-readers", "priorities"),
}


def read(folder: Path, text: str) -> Scenario:
    path = folder / "own.toml"
    path.write_text(text)
    return read_scenario(str(path))


def refusal(folder: Path, text: str) -> str:
    with pytest.raises(ValueError) as refused:
        read(folder, text)
    message = str(refused.value)
    assert "\n" not in message
    assert message.startswith(str(folder / "own.toml"))
    return message


def test_what_is_promised_is_shipped() -> None:
    assert set(SHIPPED) >= WANTED
    assert [scenario.name for scenario in list_scenarios()] == SHIPPED


@pytest.mark.parametrize("name", SHIPPED)
def test_a_shipped_scenario_asks_a_question_and_can_be_run(name: str) -> None:
    scenario = read_scenario(name)
    assert "?" in scenario.about
    assert bool(scenario.stages) != (scenario.search is not None)
    assert next(scenario.read_workload().draw(1)).max_tokens >= 1
    for text in scenario.objectives:
        assert str(Objective.parse(text)) == text
    if name not in ("soak", "ramp"):
        assert sum(stage.seconds or 0 for stage in scenario.stages) * scenario.repeats <= 180


def test_capacity_wants_answers_of_equal_length() -> None:
    scenario = read_scenario("capacity")
    requests = list(islice(scenario.read_workload().draw(1), 9))
    assert {(request.ignore_eos, request.max_tokens) for request in requests} == {(True, 64)}
    assert [stage.concurrency for stage in scenario.stages] == [1, 4, 16, 32]
    assert scenario.repeats == 3


def test_stages_stand_as_they_are_written(tmp_path: Path) -> None:
    text = HEAD + (
        "[[stages]]\nconcurrency = 3\nrequests = 9\n"
        "[[stages]]\nrate = 2.5\nseconds = 4\n"
        '[[stages]]\narrivals = "gamma"\nburstiness = 0.5\nrate = 1\nseconds = 5\n'
        '[[stages]]\narrivals = "bursts"\nburst = 4\nrate = 1\nseconds = 6\n'
    )
    assert read(tmp_path, text).stages == (
        Stage("closed", concurrency=3, requests=9),
        Stage("poisson", rate=2.5, seconds=4),
        Stage("gamma", rate=1, burstiness=0.5, seconds=5),
        Stage("bursts", rate=1, burst=4, seconds=6),
    )


def test_shapes_come_to_stages(tmp_path: Path) -> None:
    steps = read(tmp_path, HEAD + "[steps]\nconcurrency = [1, 8]\nseconds = 5")
    assert steps.stages == (Stage(concurrency=1, seconds=5), Stage(concurrency=8, seconds=5))
    rates = read(tmp_path, HEAD + '[steps]\narrivals = "constant"\nrate = [1, 2.5]\nseconds = 5')
    assert rates.stages == (Stage("constant", rate=1, seconds=5), Stage("constant", rate=2.5, seconds=5))
    spike = read(tmp_path, HEAD + "[spike]\nbase = 1\npeak = 6\nseconds = 7")
    assert spike.stages == tuple(Stage("poisson", rate=rate, seconds=7) for rate in (1, 6, 1))
    soak = read(tmp_path, HEAD + "[soak]\nconcurrency = 2\nminutes = 90")
    assert soak.stages == (Stage(concurrency=2, seconds=5400),)


def test_a_search_has_trials_and_no_stages(tmp_path: Path) -> None:
    objectives = 'objectives = ["ttft_p95 = 0.5s", "errors=1%"]\n'
    found = read(tmp_path, HEAD + objectives + "[search]\nstart = 1\nmost = 32\nseconds = 9")
    assert found.stages == ()
    assert found.objectives == ("ttft_p95=500ms", "errors=1%")
    assert found.search is not None
    assert found.search.stage(2.5) == Stage("poisson", rate=2.5, seconds=9)
    callers = read(
        tmp_path, HEAD + objectives + '[search]\nby = "concurrency"\nstart = 1\nmost = 32\nseconds = 9'
    ).search
    assert callers is not None
    assert callers.stage(2.6) == Stage(concurrency=3, seconds=9)


def test_a_scenario_cannot_be_changed() -> None:
    scenario = read_scenario("quick")
    with pytest.raises(ValidationError):
        scenario.repeats = 5


def test_a_workload_file_is_looked_for_beside_the_scenario(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "p.txt").write_text("hello\n")
    kind = '[[kinds]]\nname = "k"\nsource = "prompts"\nfile = "p.txt"\nmax_tokens = 3\n'
    (tmp_path / "w.toml").write_text(f'title = "W"\nabout = "A"\n{kind}')
    monkeypatch.chdir("/")
    scenario = read(tmp_path, HEAD.replace('"chat"', '"w.toml"') + "[[stages]]\nconcurrency = 1\nseconds = 1")
    assert next(scenario.read_workload().draw(1)).messages[0].content == "hello"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (HEAD, "should hold one of stages, steps, spike, soak, search, not none of them"),
        (
            HEAD + "[[stages]]\nconcurrency = 1\nseconds = 1\n[spike]\nbase = 1\npeak = 2\nseconds = 1",
            "stages and spike",
        ),
        (HEAD + "[[stages]]\nseconds = 5", "stages[0]: give one of concurrency (a closed loop) and rate (an open one)"),
        (HEAD + "[[stages]]\nconcurrency = 1\nrate = 1\nseconds = 5", "stages[0]: give one of concurrency"),
        (HEAD + "[[stages]]\nconcurrency = 1", "stages[0]: give one of seconds and requests, which ends a stage"),
        (
            HEAD + "[[stages]]\nconcurrency = 1\nseconds = 1\nrequests = 1",
            "stages[0]: give one of seconds and requests",
        ),
        (
            HEAD + "[[stages]]\nconcurrency = 0\nseconds = 1",
            "stages[0].concurrency = 0: input should be greater than or",
        ),
        (HEAD + "[[stages]]\nrate = -1\nseconds = 1", "stages[0].rate = -1: input should be greater than 0"),
        (HEAD + "[[stages]]\nrate = inf\nseconds = 1", "stages[0].rate = inf: "),
        (HEAD + '[[stages]]\narrivals = "constant"\nconcurrency = 1\nseconds = 1', "constant arrivals need a rate"),
        (HEAD + '[[stages]]\narrivals = "closed"\nrate = 1\nseconds = 1', "closed arrivals need a concurrency"),
        (
            HEAD + '[[stages]]\narrivals = "often"\nrate = 1\nseconds = 1',
            "stages[0].arrivals = 'often': input should be",
        ),
        (HEAD + "[[stages]]\nrate = 1\nburst = 2\nseconds = 1", 'burst (2 or more) and arrivals = "bursts" need each'),
        (HEAD + '[[stages]]\narrivals = "bursts"\nrate = 1\nseconds = 1', "burst (2 or more) and arrivals"),
        (HEAD + "[[stages]]\nrate = 1\nburstiness = 2.0\nseconds = 1", 'burstiness needs arrivals = "gamma"'),
        (HEAD + "[steps]\nconcurrency = [4, 0]\nseconds = 1", "steps.concurrency[1] = 0: input should be greater"),
        (HEAD + "[steps]\nseconds = 1", "steps: give one of concurrency"),
        (HEAD + "[spike]\nbase = 2\npeak = 1\nseconds = 1", "spike: peak (1) should be more than base (2)"),
        (HEAD + "[search]\nstart = 1\nmost = 4\nseconds = 1", "a search needs objectives"),
        (HEAD + 'objectives = ["ttft=1"]\n[[stages]]\nrate = 1\nseconds = 1', "objectives[0] = 'ttft=1': no objective"),
        (HEAD + "repeats = 0\n[[stages]]\nrate = 1\nseconds = 1", "repeats = 0: input should be greater than or equal"),
        (HEAD + "workers = 2\n[[stages]]\nrate = 1\nseconds = 1", "workers: there is no such field"),
    ],
)
def test_what_is_wrong_is_said_in_one_line(tmp_path: Path, text: str, message: str) -> None:
    assert message in refusal(tmp_path, text)


def test_an_unknown_name_is_told_what_there_is() -> None:
    with pytest.raises(ValueError, match=r"no scenario 'quik': .*quick"):
        read_scenario("quik")


def test_nothing_given_changes_nothing() -> None:
    for scenario in list_scenarios():
        assert scenario.override() == scenario
        assert scenario.override(rate=None, seconds=None, objectives=None) == scenario


def test_a_load_that_is_given_stands_in_place_of_all_stages() -> None:
    chat = read_scenario("chat")
    assert chat.override(concurrency=7).stages == (Stage(concurrency=7, seconds=30),)
    assert chat.override(rate=2, seconds=5).stages == (Stage("poisson", rate=2, seconds=5),)
    assert chat.override(rate=2, requests=50).stages == (Stage("poisson", rate=2, requests=50),)
    given = chat.override(rate=2, arrivals="gamma", burstiness=0.5).stages
    assert given == (Stage("gamma", rate=2, burstiness=0.5, seconds=30),)


def test_what_ends_a_stage_can_be_given_for_all() -> None:
    stages = read_scenario("bursts").override(requests=20).stages
    assert [(stage.seconds, stage.requests, stage.rate) for stage in stages] == [(None, 20, 1.0)] * 3
    assert [stage.arrivals for stage in stages] == ["poisson", "gamma", "bursts"]
    search = read_scenario("ramp").override(seconds=2).search
    assert search is not None
    assert search.seconds == 2


def test_a_load_that_is_given_is_where_a_search_starts() -> None:
    ramp = read_scenario("ramp")
    assert ramp.search is not None
    start = ramp.search.start
    by_rate, high, callers = (
        ramp.override(**given).search for given in ({"rate": 2 * start}, {"rate": 1000}, {"concurrency": 3})
    )
    assert by_rate == ramp.search.model_copy(update={"start": 2 * start})
    assert high == ramp.search.model_copy(update={"start": 1000, "most": 16000})
    assert callers == ramp.search.model_copy(update={"by": "concurrency", "start": 3, "most": 48})
    assert ramp.override(concurrency=3).stages == ()


def test_answers_repeats_and_objectives_can_be_given() -> None:
    given = read_scenario("capacity").override(
        max_tokens=5, fixed_length=False, repeats=1, warmup=0, objectives=["e2e_p50=2s"], workload="chat"
    )
    request = next(given.read_workload().draw(1))
    assert (request.kind, request.max_tokens, request.ignore_eos) == ("chat", 5, False)
    assert (given.repeats, given.warmup, given.objectives) == (1, 0, ("e2e_p50=2s",))


@pytest.mark.parametrize(
    ("name", "given", "message"),
    [
        ("quick", {"concurrency": 0}, "the command line: concurrency = 0: "),
        ("quick", {"concurrency": 1, "rate": 1}, "the command line: give one of concurrency"),
        ("quick", {"seconds": 1, "requests": 1}, "the command line: give one of seconds and requests"),
        ("quick", {"arrivals": "poisson"}, "need a rate beside them"),
        ("quick", {"concurrency": 1, "burst": 3}, "burst (2 or more) and arrivals"),
        ("quick", {"objectives": ["fast"]}, "no objective: 'fast'"),
        ("ramp", {"requests": 5}, "the trials of a search end by seconds"),
        ("ramp", {"rate": 5, "arrivals": "constant"}, "the arrivals of a search by rate are poisson"),
        ("ramp", {"rate": 5, "concurrency": 5}, "give one of concurrency and rate"),
        ("quick", {"speed": 5}, "the command line: speed: there is no such field"),
    ],
)
def test_a_wrong_command_line_is_told_so_in_one_line(name: str, given: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError) as refused:
        read_scenario(name).override(**given)
    assert message in str(refused.value)
    assert "\n" not in str(refused.value)


def test_the_documented_scenario_is_one(tmp_path: Path) -> None:
    scenario = read(tmp_path, DOCUMENT.split("### Write one")[1].split("```toml\n")[1].split("```")[0])
    assert scenario.stages == (Stage(concurrency=12, seconds=60),)
    assert len(scenario.objectives) == 3


@pytest.mark.parametrize("name", SHIPPED)
def test_every_scenario_is_documented(name: str) -> None:
    assert f"`{name}`" in DOCUMENT.split("## Scenarios")[1].split("### Write one")[0]

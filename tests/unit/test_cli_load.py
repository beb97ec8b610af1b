"""`tokenstream load` with a child that only pretends to measure: what it is asked, what is shown, and how it ends.

The child is a package `tokenstream_loadtest` that is found before the real one.
"""

from __future__ import annotations

import json
import os
import pty
import select
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

import tokenstream
from tokenstream.commands import app
from waiting import WAIT

COMMAND = [sys.executable, "-c", "from tokenstream.cli import main; main()"]
CLIENT = str(Path(tokenstream.__file__).parent.parent)
PROGRESS = {
    "event": "progress", "stage_label": "4 at once", "repeat": 0, "repeats": 1, "stage_index": 0, "stages": 1,
    "seconds": 2.0, "sent": 12, "ended": 8, "errors": 1, "live": 4, "tokens": 300, "left": 18.2, "trial": 0,
}  # fmt: skip
POINTS = {f"{name}_{point}": 0.0125 for name in ("ttft", "itl") for point in ("p50", "p95")}
LEVEL = {
    "load": "4 at once", "repeats": 1, "valid": True, "requests": 41, "ok": 40, "errors": 1,
    "tokens_per_second": 612.5, "goodput": 3.98, **POINTS, "ttft_p99": 1.234, "itl_p99": None, "lag_p99": 0.0004,
    "generator_cores": 0.08, "server_cores": 1.6, "others_cores": 0.0, "overhead_per_token": 84e-6,
}  # fmt: skip
CLOCKS = {"load": "4 at once", "ttft_seconds": 0.0024, "ttft_share": 0.0312, "itl_share": -0.004, "of_limit": 0.24}
MET = {"name": "ttft_p95", "load": "4 at once", "value": 0.312, "limit": 0.5, "met": True}
MISSED = {"name": "errors", "load": "4 at once", "value": 0.0244, "limit": 0.01, "met": False}
SUMMARY: dict[str, Any] = {
    "event": "summary", "scenario": "quick", "title": "Quick", "valid": True, "met": True, "interrupted": False,
    "levels": [LEVEL], "objectives": [MET], "search": None,
    "errors": [], "stalls": [], "clocks": CLOCKS, "reading": None, "flaws": [], "notes": [],
    "files": {"json": "there/run.json", "csv": "there/run.csv", "html": "there/report.html"},
}  # fmt: skip


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "tokenstream_loadtest"
    folder.mkdir()
    (folder / "__init__.py").touch()
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join((str(tmp_path), CLIENT)))
    monkeypatch.delenv("TOKENSTREAM_METRICS_URL", raising=False)
    return folder


def child(package: Path, code: str) -> None:
    lines = ("import json, os, signal, sys, time", "def say(m): print(json.dumps(m), flush=True)", code)
    (package / "__main__.py").write_text("\n".join(lines) + "\n")


def saying(*messages: object) -> str:
    return "\n".join(f"print({json.dumps(message)!r}, flush=True)" for message in messages)


ECHO = "say({**json.loads(os.environ['TOKENSTREAM_LOADTEST_ORDER']), 'argv': sys.argv[1:]})"


def run(*arguments: str) -> Result:
    return CliRunner().invoke(app, ["load", *arguments])


def asked(*arguments: str) -> dict[str, Any]:
    """The order of a child that repeats it."""
    (line,) = run(*arguments, "--json").stdout.splitlines()
    order: dict[str, Any] = json.loads(line)
    return order


def test_the_child_is_asked_for_what_was_given(package: Path) -> None:
    child(package, ECHO)
    given = ["--rate", "4", "--arrivals", "gamma", "--burstiness", "0.5", "--requests", "30", "--repeats", "3"]
    given += ["--warmup", "2", "--seed", "7", "--max-tokens", "64", "--fixed-length", "--workload", "code"]
    order = asked("chat", *given, "--slo", "ttft_p95=1s", "--slo", "errors=1%", "--name", "mine", "--out", "there")
    assert order["load"] == {
        "concurrency": None, "rate": 4.0, "arrivals": "gamma", "burstiness": 0.5, "burst": None, "seconds": None,
        "requests": 30, "repeats": 3, "warmup": 2, "seed": 7, "workload": "code", "max_tokens": 64,
        "fixed_length": True, "slo": ["ttft_p95=1s", "errors=1%"],
    }  # fmt: skip
    assert (order["scenario"], order["name"], order["out"], order["argv"]) == ("chat", "mine", "there", ["run"])
    assert (order["target"], order["url"], order["model"]) == ("tokenstream", "127.0.0.1:8001", "llm")


def test_what_was_not_given_is_left_to_the_scenario(package: Path) -> None:
    child(package, ECHO)
    load = asked("my/own.toml")["load"]
    assert load.pop("seed") == 0
    assert set(load.values()) == {None}
    assert asked("--natural", "quick")["load"]["fixed_length"] is False  # options may stand before the scenario


@pytest.mark.parametrize(
    ("given", "url", "page"),
    [
        ([], "127.0.0.1:8001", "http://127.0.0.1:8002/metrics"),
        (["--url", "far.example:8001"], "far.example:8001", "http://far.example:8002/metrics"),
        (["--url", "127.0.0.1:9001"], "127.0.0.1:9001", None),
        (["--metrics-url", "none"], "127.0.0.1:8001", None),
        (["--metrics-url", "http://h:1/m"], "127.0.0.1:8001", "http://h:1/m"),
        (["--target", "triton"], "127.0.0.1:8001", None),
        (["--target", "openai", "--url", "127.0.0.1:9000"], "http://127.0.0.1:9000", None),
        (["--target", "openai", "--url", "https://far.example/v1"], "https://far.example/v1", None),
    ],
)
def test_a_metrics_page_is_only_taken_for_granted_beside_our_usual_port(
    package: Path, given: list[str], url: str, page: str | None
) -> None:
    child(package, ECHO)
    order = asked("quick", *given)
    assert (order["url"], order["metrics_url"]) == (url, page)


def test_credentials_travel_in_the_environment_and_never_show(package: Path) -> None:
    child(package, f"{ECHO}\nsay({{'cmdline': open('/proc/self/cmdline').read()}})")
    secret = ["--token", "s3cret", "--header=x-api-key=s3cret", "--header", "x-tenant=s3cret"]
    command = [*COMMAND, "load", "quick", *secret, "--json"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=WAIT, check=False)
    order, told = (json.loads(line) for line in done.stdout.splitlines())
    assert order["server"]["token"] == "s3cret"
    assert order["server"]["header"] == ["x-api-key=s3cret", "x-tenant=s3cret"]
    assert order["command"] == "tokenstream load quick --token ... --header=... --header ... --json"
    assert "s3cret" not in told["cmdline"]


def test_a_secret_is_not_sent_to_another_machine_in_the_clear(package: Path) -> None:
    child(package, ECHO)
    for given in (["--url", "far.example:8001"], ["--target", "openai", "--url", "http://far.example"]):
        result = run("quick", "--token", "s3cret", *given)
        assert result.exit_code == 2
        assert "would travel unencrypted" in result.stderr
        assert asked("quick", "--token", "s3cret", *given, "--allow-insecure-credentials")["server"]["token"]
    assert asked("quick", "--token", "s3cret", "--target", "openai", "--url", "https://far.example")


@pytest.mark.parametrize(
    ("given", "says"),
    [
        (["--rate", "1", "--concurrency", "2"], "--concurrency and --rate exclude each other"),
        (["--seconds", "1", "--requests", "2"], "--seconds and --requests exclude each other"),
        (["--arrivals", "poisson"], "give --rate too"),
        (["--rate", "1", "--burstiness", "0.5"], "--burstiness is for --arrivals gamma"),
        (["--rate", "1", "--burst", "3"], "--burst is for --arrivals bursts"),
        (["--rate", "0"], "--rate"),
        (["--target", "carrier pigeon"], "--target"),
        (["--target", "openai", "--url", "http://x:port"], "--url"),
        (["too", "much"], "too much"),
    ],
)
def test_wrong_usage_is_one_line_and_no_child_is_started(package: Path, given: list[str], says: str) -> None:
    child(package, "say({'event': 'started'})")
    result = run("quick", *given, "--json")
    assert (result.exit_code, result.stdout) == (2, "")
    assert says in json.loads(result.stderr)["error"]


def test_the_help_shows_the_options_of_a_run_and_the_other_commands(package: Path) -> None:
    for arguments in (["--help"], ["quick", "--rate", "1", "--help"]):
        result = run(*arguments)
        assert result.exit_code == 0
        for part in ("--rate", "--slo", "--token", "--metrics-url", "compare", "report", "list"):
            assert part in result.stdout
    assert "--rate" not in run("list", "--help").stdout
    assert run().exit_code == 2


@pytest.mark.parametrize(
    ("words", "offered"),
    [("", ["list", "compare", "report"]), ("co", ["compare"]), ("--see", ["--seed"]), ("quick --rat", ["--rate"])],
)
def test_a_shell_is_offered_commands_and_the_options_of_a_run(words: str, offered: list[str]) -> None:
    line = f"tokenstream load {words}"
    env = {"_TOKENSTREAM_COMPLETE": "complete_bash", "COMP_WORDS": line, "COMP_CWORD": str(line.count(" "))}
    done = subprocess.run(COMMAND, env={**os.environ, **env}, stdout=subprocess.PIPE, text=True, timeout=WAIT)
    assert done.stdout.split() == offered


def test_a_summary_is_a_table_with_verdicts_overhead_and_files(package: Path) -> None:
    child(package, saying(PROGRESS, "no message", SUMMARY))
    result = run("quick")
    assert result.exit_code == 0, result.output
    lines = [" ".join(line.split()) for line in result.stdout.splitlines()]
    assert "4 at once 40 1 612 3.98 12.5 12.5 1234 12.5 12.5 - 0.4" in lines
    assert "met ttft_p95 at 4 at once: 312 ms, limit 500 ms" in lines
    assert "generator: 0.08 cores at 4 at once, 84 us per token, 5% of the server's CPU" in lines
    assert "beside the server's own clocks: mean TTFT +2.4 ms (+3.1%), mean ITL -0.4% at 4 at once" in lines
    assert lines[-4:] == ["valid", "json there/run.json", "csv there/run.csv", "html there/report.html"]
    assert result.stderr == "4 at once: 12 sent, 8 ended, 1 errors, 150 tokens/s, 18 s left\n"


def test_what_was_measured_is_shown_though_its_files_could_not_be_written(package: Path) -> None:
    child(package, saying({**SUMMARY, "files": {}}, {"error": "out/run.json: no space left on device", "code": 1}))
    result = run("quick")
    assert result.exit_code == 1
    assert "4 at once" in result.stdout
    assert result.stdout.endswith("valid\n")
    assert result.stderr == "tokenstream: out/run.json: no space left on device\n"


def test_a_missed_objective_is_code_1_and_says_value_and_limit(package: Path) -> None:
    child(package, saying({**SUMMARY, "met": False, "objectives": [MET, MISSED, {**MISSED, "value": None}]}))
    result = run("quick")
    assert result.exit_code == 1
    assert "MISSED  errors at 4 at once: 2.44%, limit 1.00%" in result.stdout
    assert "MISSED  errors at 4 at once: nothing was measured, limit 1.00%" in result.stdout


def test_an_invalid_run_is_code_1_and_says_why(package: Path) -> None:
    flaw = "4 at once: the generator \x1b[2Jitself was late"
    bare = {key: None for key in LEVEL if key.endswith(("_cores", "_token"))}
    levels = [{**LEVEL, "load": "[bold]\x1b[2J", "repeats": 3, "valid": False, **bare}]
    told = {**SUMMARY, "valid": False, "flaws": [flaw], "notes": ["a note"], "levels": levels, "clocks": None}
    child(package, saying(told))
    result = run("quick")
    assert result.exit_code == 1
    assert "not valid: 4 at once: the generator [2Jitself was late\nnote: a note\nNOT VALID" in result.stdout
    assert "[bold][2J x3 !" in result.stdout
    assert "\x1b" not in result.stdout


def test_a_search_shows_its_trials_and_what_it_found(package: Path) -> None:
    trial = {"event": "trial", "load": "4 at once", "held": True, "goodput": 3.5, "flaws": []}
    refused, flawed = {**trial, "held": False}, {**trial, "held": False, "flaws": ["it was noisy"]}
    found = {"load": "6 at once", "goodput": 5.25}
    child(package, saying({**PROGRESS, "trial": 2}, trial, refused, flawed, {**SUMMARY, "search": found}))
    result = run("ramp")
    assert result.stderr.splitlines() == [
        "trial 2: 4 at once: 12 sent, 8 ended, 1 errors, 150 tokens/s, 18 s left",
        "4 at once: holds, 3.50 good requests/s",
        "4 at once: does not hold, 3.50 good requests/s",
        "4 at once: flawed (it was noisy), 3.50 good requests/s",
    ]
    assert "every objective holds up to 6 at once: 5.25 good requests/s" in result.stdout
    child(package, saying({**SUMMARY, "met": False, "search": {"load": None, "goodput": None}}))
    none = run("ramp")
    assert none.exit_code == 1
    assert "no load was found at which every objective holds" in none.stdout


def test_json_is_what_the_child_says_and_nothing_else(package: Path) -> None:
    child(package, f"print('a library says hello')\n{saying(PROGRESS, SUMMARY)}")
    result = run("quick", "--json")
    assert (result.exit_code, result.stderr) == (0, "")
    assert [json.loads(line) for line in result.stdout.splitlines()] == [PROGRESS, SUMMARY]


@pytest.mark.parametrize("code", [1, 2, 3, 4, 5])
def test_an_error_of_the_child_keeps_its_code(package: Path, code: int) -> None:
    child(package, f"{saying({'error': 'it cannot be', 'code': code})}\nsys.exit({code})")
    result = run("quick")
    assert (result.exit_code, result.stdout, result.stderr.count("\n")) == (code, "", 1)
    assert "it cannot be" in result.stderr
    error = json.loads(run("quick", "--json").stderr)
    assert error["code"] == code
    assert "it cannot be" in error["error"]


@pytest.mark.parametrize(
    ("code", "line"),
    [
        ("raise RuntimeError('no memory')", "the load test ended: RuntimeError: no memory (exit code 1)"),
        ("os.kill(os.getpid(), 9)", "the load test ended: killed by SIGKILL"),
        ("sys.exit(1)", "the load test ended without a word"),
        ("", "the load test ended without a word"),
    ],
)
def test_a_child_that_dies_is_one_line_and_code_1(package: Path, code: str, line: str) -> None:
    child(package, f"{saying(PROGRESS)}\n{code}")
    result = run("quick")
    assert (result.exit_code, result.stdout) == (1, "")
    assert result.stderr.splitlines()[1:] == [f"tokenstream: {line}"]


def test_the_lists_are_shown(package: Path) -> None:
    quick = {"event": "scenario", "name": "quick", "title": "Quick", "about": "Does it answer at all?"}
    child(package, saying(quick, {"event": "workload", "name": "chat", "title": "Chat", "about": "Talk."}))
    result = run("list")
    assert result.exit_code == 0
    lines = [" ".join(line.split()) for line in result.stdout.splitlines()]
    assert "quick Does it answer at all?" in lines
    assert "chat Talk." in lines
    assert json.loads(run("list", "--json").stdout.splitlines()[0]) == quick


def test_compare_and_report_hand_files_to_the_child(package: Path, tmp_path: Path) -> None:
    before, after = tmp_path / "a.json", tmp_path / "b.json"
    before.touch()
    child(package, "say({'event': 'comparison', 'lines': sys.argv[1:]})")
    assert run("compare", str(before), str(after)).exit_code == 2  # there is no b.json yet
    after.touch()
    assert run("compare", str(before), str(after)).stdout.splitlines() == ["compare", str(before), str(after)]
    child(package, "say({'event': 'report', 'html': ' '.join(sys.argv[1:])})")
    assert run("report", str(before)).stdout == f"report {before} {tmp_path / 'report.html'}\n"
    assert run("report", str(before), "--out", "x.html").stdout == f"report {before} x.html\n"


def test_the_command_itself_loads_nothing_that_only_load_tests_need(package: Path) -> None:
    child(package, saying(PROGRESS, SUMMARY))
    program = (
        "import sys; from tokenstream.commands import app; app(['load', 'quick'], standalone_mode=False); "
        "print(*sorted({name.partition('.')[0] for name in sys.modules}))"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=WAIT, check=True)
    modules = set(done.stdout.splitlines()[-1].split())
    assert "tokenstream" in modules
    assert not modules & {
        "tokenstream_loadtest",
        "hdrh",
        "httpx2",
        "locust",
        "gevent",
    }  # typer takes pydantic if it is there


# A child that measures until it is asked to end, and then takes a moment for its files.
PATIENT = f"""
def end(*_):
    say({{'event': 'note', 'note': 'ending'}})
    {saying({**SUMMARY, "valid": False, "interrupted": True})}
    sys.exit(0)
signal.signal(signal.SIGTERM, end)
signal.signal(signal.SIGINT, signal.SIG_IGN)
say({{'event': 'note', 'note': str(os.getpid())}})
time.sleep({WAIT})
"""
STUBBORN = f"""
signal.signal(signal.SIGTERM, lambda *_: say({{'event': 'note', 'note': 'never'}}))
say({{'event': 'note', 'note': str(os.getpid())}})
while True:
    time.sleep({WAIT})
"""


@contextmanager
def started(**options: Any) -> Iterator[subprocess.Popen[str]]:
    """The command in a process of its own."""
    options = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, **options}
    with subprocess.Popen([*COMMAND, "load", "quick"], text=True, **options) as process:
        try:
            yield process
        finally:
            process.kill()


@pytest.mark.parametrize(("signum", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_ends_the_load_and_what_was_measured_is_shown(package: Path, signum: int, code: int) -> None:
    child(package, PATIENT)
    with started() as process:
        assert process.stderr is not None
        pid = int(process.stderr.readline())
        process.send_signal(signum)
        out, err = process.communicate(timeout=WAIT)
        assert process.returncode == code
    assert err == "ending\n"
    assert "there/report.html" in out
    assert not Path(f"/proc/{pid}").exists()


def test_a_second_ctrl_c_ends_a_child_that_does_not_listen(package: Path) -> None:
    child(package, STUBBORN)
    with started() as process:
        assert process.stderr is not None
        pid = int(process.stderr.readline())
        process.send_signal(signal.SIGINT)
        assert process.stderr.readline() == "never\n"
        process.send_signal(signal.SIGINT)
        assert process.wait(WAIT) == 130
    assert not Path(f"/proc/{pid}").exists()


def test_on_a_terminal_progress_is_drawn_and_cleared(package: Path) -> None:
    child(package, saying(PROGRESS, {**PROGRESS, "ended": 9}) + f"\ntime.sleep(0.5)\n{saying(SUMMARY)}")
    ours, theirs = pty.openpty()
    with started(stderr=theirs, env={**os.environ, "TERM": "xterm-256color", "COLUMNS": "120"}) as process:
        os.close(theirs)
        drawn = b""
        while select.select([ours], [], [], WAIT)[0]:
            try:
                drawn += os.read(ours, 65536)
            except OSError:  # the other end has closed
                break
        assert process.wait(WAIT) == 0
        assert process.stdout is not None
        assert "there/report.html" in process.stdout.read()
    os.close(ours)
    assert b"9 ended, 1 errors, 150 tokens/s" in drawn
    assert b"\x1b[2K" in drawn  # lines were erased

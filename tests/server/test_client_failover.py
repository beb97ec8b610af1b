"""Kill -9 of tritonserver itself while it answers: the command that shows it, and many callers at once."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import threading
import uuid
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from llm_kernels.cpu_level import VARIABLE, runnable
from server import tiny
from server.conftest import WITH_THE_DEFAULT_MODEL
from server.serving import COMMAND, ENVIRONMENT
from server.supervised import SHARED_MEMORY
from tokenstream import Client, Completion, ServerInfo
from tokenstream.runfolder import RUN_ID
from tokenstream.server import TritonServer
from waiting import WAIT

CROWD, TOKENS = 16, 60
PACE = 0.1  # seconds per step of the server that is killed: its answers are far from their end
MARK = "TOKENSTREAM_TEST_MARK"


def environments(mark: str) -> dict[int, dict[str, str]]:
    """The environment of every process that inherited `mark`, by process id."""
    found = {}
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            entries = (folder / "environ").read_bytes().decode(errors="replace").split("\0")
        except OSError:  # it has ended, or is not ours
            continue
        values = dict(entry.split("=", 1) for entry in entries if "=" in entry)
        if values.get(MARK) == mark:
            found[int(folder.name)] = values
    return found


@WITH_THE_DEFAULT_MODEL
def test_the_demo_loses_a_server_in_mid_answer_and_no_token_and_leaves_nothing(info: ServerInfo) -> None:
    mark = str(uuid.uuid4())
    lines: list[dict[str, Any]] = []
    run_ids: set[str] = set()
    command = [*COMMAND, "demo", "--failover", "--json"]
    with subprocess.Popen(command, env={**ENVIRONMENT, MARK: mark}, stdout=subprocess.PIPE, text=True) as child:
        assert child.stdout is not None
        for line in child.stdout:
            lines.append(json.loads(line))
            if lines[-1].get("event") == "asked":  # both servers live
                run_ids = {values[RUN_ID] for values in environments(mark).values() if RUN_ID in values}
    code = child.returncode
    events = {line["event"]: line for line in lines if "event" in line}
    chunks = [line for line in lines if "event" not in line]
    assert list(events) == ["asked", "killed", "resumed", "compared"]
    assert [events["killed"]["url"], events["resumed"]["url"]] == events["asked"]["urls"]
    assert [chunk["index"] for chunk in chunks] == list(range(len(chunks)))
    assert events["compared"]["resumes"] == 1
    if info.exact == "bitwise":
        assert (code, events["compared"]["same"], events["compared"]["tokens"]) == (0, True, len(chunks))
    assert len(run_ids) == 2
    assert environments(mark) == {}
    assert [entry.name for entry in SHARED_MEMORY.iterdir() if any(one in entry.name for one in run_ids)] == []


def asked(number: int) -> dict[str, Any]:
    """Greedy, drawn, and drawn with penalties, in turn."""
    kinds: tuple[dict[str, Any], ...] = (
        {"temperature": 0.0},
        {"temperature": 1.2, "seed": 2**62 + number, "top_p": 0.9},
        {"temperature": 0.8, "seed": number, "repetition_penalty": 1.3, "frequency_penalty": 0.4},
    )
    return {"max_tokens": TOKENS, "ignore_eos": True, **kinds[number % len(kinds)]}


def question(number: int) -> list[dict[str, str]]:
    return [{"role": "user", "content": f"Tell me of the sea \N{WATER WAVE} and of mountain {number}."}]


@pytest.fixture
def doomed() -> Iterator[TritonServer]:
    """A server that is to be killed: nothing is asked of how it ends."""
    with TritonServer(tiny.repository()) as server, tiny.paced(server.log_path.parent, PACE):
        yield server


def test_sixteen_threads_lose_their_server_at_once_and_none_of_them_notices(
    doomed: TritonServer, server: TritonServer, client: Client, info: ServerInfo
) -> None:
    all_speak = threading.Barrier(CROWD + 1, timeout=WAIT)

    def listen(number: int) -> tuple[Completion, int]:
        with both.chat(question(number), **asked(number)) as stream:
            for _ in range(1 + number):  # cut at as many places
                next(stream)
            all_speak.wait()
            return stream.final(), stream.resumes

    with Client([doomed.grpc_url, server.grpc_url]) as both, ThreadPoolExecutor(CROWD) as pool, ExitStack() as stack:
        stack.callback(all_speak.abort)  # a listener that failed must not hold the others
        answers = [pool.submit(listen, number) for number in range(CROWD)]
        all_speak.wait()
        os.kill(doomed.pid, signal.SIGKILL)
        said = [answer.result(WAIT) for answer in answers]
    for number, (completion, resumes) in enumerate(said):
        uncut = client.chat(question(number), **asked(number)).final()
        assert resumes == 1
        assert completion.usage == uncut.usage
        if info.exact == "bitwise":
            assert (completion.token_ids, completion.text) == (uncut.token_ids, uncut.text)


@pytest.mark.skipif(len(runnable()) < 3, reason=f"this CPU runs {[level.name for level in runnable()]} alone")
@pytest.mark.parametrize("arithmetic", ["fma32", "q8dot"])
def test_an_answer_cut_on_a_server_with_avx2_goes_on_bit_for_bit_on_one_with_more(
    monkeypatch: pytest.MonkeyPatch, arithmetic: str
) -> None:
    monkeypatch.setenv("TOKENSTREAM_ARITHMETIC", arithmetic)
    with TritonServer(tiny.repository()) as native:
        monkeypatch.setenv(VARIABLE, "x86-64-v3")
        with TritonServer(tiny.repository()) as capped, tiny.paced(capped.log_path.parent, PACE):
            with Client([capped.grpc_url, native.grpc_url]) as both, both.chat(question(0), **asked(1)) as stream:
                next(stream)
                os.kill(capped.pid, signal.SIGKILL)
                answer, resumes = stream.final(), stream.resumes
            with Client(native.grpc_url) as client:
                uncut = client.chat(question(0), **asked(1)).final()
                told = client.info()
    assert resumes == 1
    assert (answer.token_ids, answer.text, answer.usage) == (uncut.token_ids, uncut.text, uncut.usage)
    assert told.exact == "bitwise"
    assert told.details["arithmetic"].startswith(f"{arithmetic} ")

"""What `demo --failover` says of an answer that is the same, and of one that is not; its servers are scripted."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator
from typing import Any

import grpc
import pytest
from typer.testing import CliRunner

from tokenstream import failover
from tokenstream.commands import app
from unit.scripted_triton import WAIT, Script, ScriptedTriton, answer, inputs

WORDS = tuple(f"word{number} " for number in range(failover.KILL_AT + 8))


@pytest.fixture
def rehearsed(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """Run the command over scripts of its two servers; "kill" cuts what the first one says."""
    handler, killed = signal.getsignal(signal.SIGTERM), threading.Event()
    running: list[ScriptedTriton] = []

    def cut(request: Any, call: Any) -> Iterator:
        assert killed.wait(WAIT)
        call.context.abort(grpc.StatusCode.UNAVAILABLE, "Socket closed")
        yield

    def run(second: Script) -> Any:
        scripts = [answer(*WORDS, cut=cut, at=failover.KILL_AT), second]

        class Pretended:
            pid = 4711

            def __init__(self, repository: Any, *, progress: Any) -> None:
                running.append(ScriptedTriton(scripts.pop(0)))
                self.grpc_url = running[-1].url

            def __enter__(self) -> Pretended:
                return self

            def __exit__(self, *exception: object) -> None:
                pass

        monkeypatch.setattr(failover, "TritonServer", Pretended)
        monkeypatch.setattr(os, "kill", lambda pid, signum: killed.set() if (pid, signum) == (4711, 9) else None)
        return CliRunner().invoke(app, ["demo", "--failover"])

    yield run
    signal.signal(signal.SIGTERM, handler)
    for server in running:
        server.close()


def test_the_same_answer_is_shown_with_its_break_and_ends_with_0(rehearsed: Any) -> None:
    result = rehearsed(answer(*WORDS))
    assert result.exit_code == 0
    asked, begun, kill, resumed, rest, verdict = result.stdout.splitlines()
    assert begun + rest == "".join(WORDS)
    assert (asked[:2], kill.startswith("--- kill -9 4711:")) == ("> ", True)
    assert resumed.endswith(f"goes on, from token {failover.KILL_AT} ---")
    assert f"the same {len(WORDS)} tokens as without the break" in verdict


def test_another_answer_is_told_apart_and_ends_with_1(rehearsed: Any) -> None:
    def second(request: Any, call: Any) -> Iterator:
        words = WORDS if "resume_token_ids" in inputs(request) else (*WORDS[:-1], "end")
        yield from answer(*words)(request, call)

    result = rehearsed(second)
    assert result.exit_code == 1
    assert "NOT the same" in result.stdout
    assert result.stderr == "tokenstream: the answer that was cut differs from the one that was not\n"

"""A process that forks while a stream runs: the child harms nothing, and is told what it cannot do."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

import tokenstream
from unit.scripted_triton import WAIT, ScriptedTriton, answer, token

ENVIRONMENT = {**os.environ, "PYTHONPATH": str(Path(tokenstream.__file__).parent.parent)}
BEFORE = """
import asyncio, os, sys
from tokenstream import AsyncClient, Client
client = Client(sys.argv[1], retries=0, resume=False)
stream = client.stream("x")
next(stream)
child = os.fork()
if child == 0:
"""
EXITS = "    sys.exit(7)\n"
ASKS = """
    told = 0
    for ask in (lambda: client.generate("x"), lambda: next(stream), client.models, client.ready):
        try:
            ask()
        except RuntimeError as error:
            told += "make a client after the fork" in str(error)
    stream.cancel()
    client.close()
    del stream, client
    sys.exit(10 + told)
"""
AFTER = """
print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
print(stream.final().text, stream.resumes, flush=True)
"""


IDLE = """
import os, sys
from tokenstream import Client
client, other = (Client(sys.argv[1], retries=0, resume=False) for _ in range(2))
client.generate("x")
stream = other.stream("x")
next(stream)
child = os.fork()
if child == 0:
    sys.exit(0)
os.waitpid(child, 0)
client.generate("x")
"""


def test_a_child_process_that_ends_leaves_the_parent_all_its_connections():
    server = ScriptedTriton(answer("a", "b"))
    subprocess.run([sys.executable, "-c", IDLE, server.url], env=ENVIRONMENT, check=True, timeout=3 * WAIT)
    first, other, second = (call.context.peer() for call in server.calls)
    assert first == second != other
    server.close()


@pytest.mark.parametrize(("child", "status"), [(EXITS, 7), (ASKS, 14)])
def test_a_child_process_can_neither_use_nor_harm_the_parents_stream(child, status):
    child_is_gone = threading.Event()

    def script(request, call) -> Iterator:
        yield token(0, "a", 100)
        child_is_gone.wait(WAIT)
        yield token(1, "b", 101, final=True, finish_reason="stop")

    server = ScriptedTriton(script)
    command = [sys.executable, "-c", BEFORE + child + AFTER, server.url]
    with subprocess.Popen(command, env=ENVIRONMENT, stdout=subprocess.PIPE, text=True) as parent:
        deadline = threading.Timer(3 * WAIT, parent.kill)
        deadline.start()
        assert parent.stdout is not None
        assert parent.stdout.readline() == f"{status}\n"
        child_is_gone.set()
        assert parent.stdout.readline() == "ab 0\n"
        deadline.cancel()
    assert parent.returncode == 0
    assert len(server.requests) == 1
    server.close()

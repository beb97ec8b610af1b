"""What the client costs its process: modules, threads and memory, over thousands of answers."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

import tokenstream
from tokenstream import Client, Completion
from unit.scripted_triton import ScriptedCall, ScriptedTriton, answer, inputs, token
from waiting import WAIT

ENVIRONMENT = {**os.environ, "PYTHONPATH": str(Path(tokenstream.__file__).parent.parent)}
THREADS = 50
TOKENS = 500
DEEP = os.environ.get("HYPOTHESIS_PROFILE") == "deep"
BYTES_PER_ROUND = 1024
LOADED = """
import asyncio, json, sys
from tokenstream import AsyncClient, Client

async def ask():
    async with AsyncClient(sys.argv[1]) as client:
        return (await client.generate("x")).text

with Client(sys.argv[1]) as client:
    texts = [client.generate("x").text, asyncio.run(ask())]
print(json.dumps({"texts": texts, "modules": sorted({name.partition(".")[0] for name in sys.modules})}))
"""
# How often the threads of gRPC's EventEngine have slept, by the end of an answer.
WOKEN = """
import asyncio, json, sys
from pathlib import Path
from tokenstream import FACE as Face

def woken():
    lines = [path.read_text() for path in Path("/proc/self/task").glob("*/status")]
    engine = [text for text in lines if text.startswith("Name:\\tevent_engine")]
    return sum(int(text.partition("\\nvoluntary_ctxt_switches:")[2].split()[0]) for text in engine)

async def ask():
    async with Face(sys.argv[1]) as client:
        await client.generate("x")
        return woken()

if hasattr(Face, "__aenter__"):
    print(json.dumps(asyncio.run(ask())))
else:
    with Face(sys.argv[1]) as client:
        client.generate("x")
        print(json.dumps(woken()))
"""
# Rounds in a process of their own, where nobody else takes memory; the memory is that behind each tenth of them.
COUNTED = """
import gc, json, os, sys, threading
from pathlib import Path
from tokenstream import Client

def look():
    gc.collect()
    for thread in threading.enumerate():  # a watchman ends a moment behind the last stream
        if thread is not threading.main_thread():
            thread.join(60)
    return len(os.listdir("/proc/self/task")), int(Path("/proc/self/statm").read_text().split()[1]) * 4096

def turn(client, number):
    with client.stream("x") as stream:
        next(stream)
        if number % 2:  # the others are left in mid-answer
            stream.final()

url, rounds, shared = sys.argv[1], int(sys.argv[2]), sys.argv[3] == "shared"
looks = []
with Client(url) as client:
    for count in (200, *[rounds // 10] * 10):
        for number in range(count):
            if shared:
                turn(client, number)
            else:
                with Client(url) as own:
                    turn(own, number)
        looks.append(look())
print(json.dumps(looks))
"""


def child(program: str, *arguments: str) -> Any:
    """What a program prints, as JSON."""
    command = [sys.executable, "-c", program, *arguments]
    return json.loads(subprocess.run(command, env=ENVIRONMENT, stdout=subprocess.PIPE, timeout=WAIT, check=True).stdout)


def test_the_client_loads_no_framework_of_the_engine_or_the_gateway(serve) -> None:
    server, _ = serve(answer("a", "b"))
    told = child(LOADED, server.url)
    assert told["texts"] == ["ab", "ab"]
    assert {"tokenstream", "grpc"} <= set(told["modules"])
    heavy = {
        "torch",
        "transformers",
        "tokenizers",
        "fastapi",
        "starlette",
        "uvicorn",
        "llm_engine",
        "nvidia",
        "pytriton",
    }
    assert not heavy & set(told["modules"])


def echo(request: Any, call: ScriptedCall) -> Iterator:
    """The words of the prompt, with the seed behind each."""
    asked: Any = inputs(request)
    words = asked["text_input"].split()
    for index, word in enumerate(words):
        last = index == len(words) - 1
        first = {"fingerprint": "print", "num_input_tokens": len(words)} if index == 0 else {}
        text = f"{word}/{asked['sampling_parameters']['seed']} "
        yield token(index, text, 100 + index, final=last, finish_reason="stop" if last else "", **first)


@pytest.mark.parametrize("chosen", [None, "", "-event_engine_client"])
def test_how_grpc_is_loaded_is_the_users_choice_and_no_childs_inheritance(chosen: str | None) -> None:
    code = "import os, json; from tokenstream import Client; print(json.dumps(os.environ.get('GRPC_EXPERIMENTS')))"
    env = {name: value for name, value in ENVIRONMENT.items() if name != "GRPC_EXPERIMENTS"}
    env |= {} if chosen is None else {"GRPC_EXPERIMENTS": chosen}
    said = subprocess.run(
        [sys.executable, "-c", code], env=env, capture_output=True, text=True, check=True, timeout=WAIT
    )
    assert json.loads(said.stdout) == chosen


@pytest.mark.parametrize("face", ["Client", "AsyncClient"])
def test_tokens_do_not_pass_through_grpcs_event_engine(serve: Any, face: str) -> None:
    server, _ = serve(answer(*("word " for _ in range(TOKENS))))
    assert child(WOKEN.replace("FACE", face), server.url) < TOKENS / 4


def test_fifty_threads_on_one_client_have_the_answers_that_one_thread_has() -> None:
    server = ScriptedTriton(echo, workers=THREADS + 2)
    together = threading.Barrier(THREADS, timeout=WAIT)

    def ask(client: Client, number: int, *, wait: bool) -> list[tuple[Any, ...]]:
        if wait:
            together.wait()
        said: list[Completion] = [
            client.generate(" ".join(f"{number}.{turn}.{word}" for word in range(number % 7 + 2)), seed=number)
            for turn in range(4)
        ]
        return [(one.text, one.token_ids, one.usage, one.seed, one.finish_reason, one.resumes) for one in said]

    with Client(server.url) as client:
        alone = [ask(client, number, wait=False) for number in range(THREADS)]
        with ThreadPoolExecutor(THREADS) as pool:
            shared = list(pool.map(lambda number: ask(client, number, wait=True), range(THREADS)))
    server.close()
    assert len({one[0] for answers in alone for one in answers}) == 4 * THREADS
    assert shared == alone


@pytest.mark.parametrize(("client", "rounds"), [("shared", 5_000), ("one each", 5_000 if DEEP else 1_000)])
def test_streams_opened_and_left_by_the_thousand_leave_neither_threads_nor_memory(serve, client, rounds) -> None:
    server, _ = serve(answer("a", "b", "c", "d"))
    looks = child(COUNTED, server.url, str(rounds), client)
    threads, memory = zip(*looks, strict=True)
    assert len(server.requests) == 200 + rounds
    # gRPC adds one to its own, or ends one, whenever it finds itself too busy; a leak adds with the rounds.
    assert threads[-1] - threads[0] < rounds / 100, threads
    # From the lowest of the first looks to the lowest of the last: what was taken for a moment is no leak.
    grown = min(memory[-3:]) - min(memory[:3])
    assert grown / (rounds * 0.8) < BYTES_PER_ROUND, memory

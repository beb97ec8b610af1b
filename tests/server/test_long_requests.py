"""Sixteen streams, and megabytes of text beside them: streams get their tokens and newcomers their seats meanwhile."""

from __future__ import annotations

import json
from contextlib import ExitStack

from server.conftest import LONG
from server.raw import Call, Wire, infer
from waiting import eventually

STREAMS = 16
MEGABYTE = "".join(f"word {number}, " for number in range(100_000))[: 10**6]
AT_ONCE = 4  # megabytes: the first may be done before anybody else has come


def waiting(wire: Wire) -> int:
    """Requests that wait, those whose text is being tokenized among them; the model tells this at once."""
    return int(json.loads(wire.ask(operation="info")[0]["text_output"])["waiting"])


def drop(stream: Call) -> None:
    """Read what has arrived of a stream that has not ended."""
    while not stream.silent:
        assert stream.next()


def test_megabytes_of_text_keep_nobody_from_tokens_or_seats(wire: Wire) -> None:
    with ExitStack() as calls:
        streams = [calls.enter_context(wire.call(infer(text_input="Once upon", **LONG))) for _ in range(STREAMS)]
        for stream in streams:
            assert stream.next()
        longs = [calls.enter_context(wire.call(infer(text_input=MEGABYTE, max_tokens=1))) for _ in range(AT_ONCE)]
        eventually(lambda: waiting(wire) >= AT_ONCE // 2)
        for stream in streams:
            drop(stream)
        newcomer = wire.ask(text_input="Next", max_tokens=1, ignore_eos=True)[-1]
        tokens = [stream.next() for stream in streams]
        ends = [long.rest() for long in longs]
        last = max(end[-1].at for end in ends)
    assert newcomer["finish_reason"] == "length"
    assert newcomer.at < last
    assert all(token is not None and token.at < last for token in tokens)
    assert all("tokens; at most" in end[-1].error for end in ends)

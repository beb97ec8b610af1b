"""A rehearsal of the worst case: a server is killed while it answers, another goes on, and the answer is checked.

It starts two servers on this machine, prints what a caller of `Client` sees, and asks the same again without a break.
It does not know how an answer is taken up: nothing here helps the client to do it.
"""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Iterator
from pathlib import Path

from .client import Client
from .display import StageProgress, chunk_json, write
from .params import Options, draw_seed
from .results import Chunk
from .server import TritonServer
from .stream import TokenStream

PROMPT = "Tell me a short story about a lighthouse."
KILL_AT = 24  # tokens that have been read when the server is killed


def rehearse(repository: Path, progress: StageProgress, *, json_lines: bool) -> bool:
    """Whether the answer that lost its server is, token for token, the one that is given without a break.

    With `json_lines` each chunk is an object as by `generate --json`, and each event one with the name `event`.
    Raises SetupError if a server does not start, and what iterating a stream raises if nobody goes on.
    """
    question = [{"role": "user", "content": PROMPT}]
    asked = Options(min_tokens=3 * KILL_AT, max_tokens=4 * KILL_AT, temperature=0.7, seed=draw_seed())
    with TritonServer(repository, progress=progress) as first, TritonServer(repository, progress=progress) as second:
        progress.stop()
        report = _Report(json_lines=json_lines)
        report.event(f"> {PROMPT}", "asked", urls=[first.grpc_url, second.grpc_url])
        with Client([first.grpc_url, second.grpc_url]) as client, client.chat(question, **asked) as stream:
            for chunk in _killing(stream, first, second, report):
                report.chunk(chunk)
        with Client(second.grpc_url) as client:
            whole = client.chat(question, **asked).final()
        same = stream.resumes == 1 and (stream.token_ids, stream.text) == (whole.token_ids, whole.text)
        count = len(whole.token_ids)
        verdict = f"the same {count} tokens" if same else f"NOT the same {count} tokens"
        sentence = f"asked again with seed {stream.seed}: {verdict} as without the break"
        report.event(sentence, "compared", same=same, tokens=count, seed=stream.seed, resumes=stream.resumes)
        return same


def _killing(stream: TokenStream, first: TritonServer, second: TritonServer, report: _Report) -> Iterator[Chunk]:
    """The chunks of `stream`; behind KILL_AT of them nothing is left of the `first` server's process."""
    resumed = False
    for chunk in stream:
        if stream.resumes and not resumed:
            resumed = True
            mark = f"--- {second.grpc_url} goes on, from token {chunk.index} ---"
            report.event(mark, "resumed", url=second.grpc_url, token=chunk.index)
        yield chunk
        if chunk.index + 1 == KILL_AT:
            pid = first.pid
            os.kill(pid, signal.SIGKILL)
            report.event(f"--- kill -9 {pid}: {first.grpc_url} is dead ---", "killed", url=first.grpc_url, pid=pid)


class _Report:
    """Prints chunks and events on standard output, as text, where an event has a line of its own, or as JSON lines."""

    def __init__(self, *, json_lines: bool) -> None:
        self._json_lines = json_lines
        self._line_begun = False

    def chunk(self, chunk: Chunk) -> None:
        self._line_begun = True
        write(f"{chunk_json(chunk)}\n" if self._json_lines else chunk.text)

    def event(self, text: str, name: str, **values: object) -> None:
        line = json.dumps({"event": name, **values}) if self._json_lines else text
        if self._line_begun and not self._json_lines:
            write("\n")
        self._line_begun = False
        write(f"{line}\n")

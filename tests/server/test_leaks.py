"""What a server leaves behind: nothing while it runs, and nothing when it ends.

A leak raises memory with every request, where the allocator takes and gives back megabytes now and then. So the slope
is that of the lower envelope over the second half of the run, by Theil and Sen (the median over all pairs), which one
step does not bend much. A step of 2 MB in the 500 requests that count is still 5 KB for each of them, hence the wide
bound; of thousands (20,000 with HYPOTHESIS_PROFILE=deep) the slope is a few dozen bytes.
"""

from __future__ import annotations

import itertools
import os
import statistics
from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

from server.conftest import copied, parameters, run_id, running
from server.raw import Wire, infer, tokens
from server.supervised import SHARED_MEMORY, regions
from tokenstream.runfolder import processes

DEEP = os.environ.get("HYPOTHESIS_PROFILE") == "deep"
REQUESTS, SLOPE = (20_000, 1024) if DEEP else (1_000, 12 * 1024)  # SLOPE is in bytes per request
BATCH = 20  # requests between two looks
ENVELOPE = 5  # looks of which the lowest counts


@dataclass(frozen=True, slots=True)
class Usage:
    """Bytes resident in the server's and the stub's memory, the stub's threads, and the run's shared memory."""

    server: int
    stub: int
    threads: int
    shared: tuple[tuple[str, int], ...]


def resident(pid: int) -> int:
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def usage(server: int, stub: int, run: str) -> Usage:
    threads = len(list(Path(f"/proc/{stub}/task").iterdir()))
    shared = tuple(sorted((name, (SHARED_MEMORY / name).stat().st_size) for name in regions(run)))
    return Usage(resident(server), resident(stub), threads, shared)


def answer_batch(wire: Wire, first: int) -> None:
    """Short requests, all at once, and one that is refused."""
    numbers = range(first, first + BATCH - 1)
    requests = [infer(text_input=f"Request {i}", max_tokens=1 + i % 2, stream=i % 5 > 0) for i in numbers]
    for answer in wire.together(requests):
        assert tokens(answer)
    assert "max_tokens" in wire.refusal(infer(text_input="x", max_tokens=-1 - first))


def slope(values: Sequence[int]) -> float:
    """How much the lower envelope of `values`, one per batch, grows per request."""
    low = [min(values[i : i + ENVELOPE]) for i in range(0, len(values), ENVELOPE)]
    rises = ((b - a) / (j - i) for (i, a), (j, b) in itertools.combinations(enumerate(low), 2))
    return statistics.median(rises) / (ENVELOPE * BATCH)


def test_a_thousand_requests_leave_memory_flat_and_the_end_leaves_nothing(tmp_path: Path) -> None:
    # A small cache, so that all of it was touched before the first look.
    changes = parameters(kv_tokens=1024, max_context=512)
    with running(copied(tmp_path / "repository", changes)) as server:
        run = run_id(server)
        (stub,) = (pid for pid in processes(run) if b"backend_stub" in Path(f"/proc/{pid}/cmdline").read_bytes())
        seen = []
        with closing(Wire(server.grpc_url)) as wire:
            for first in range(0, REQUESTS, BATCH):
                answer_batch(wire, first)
                seen.append(usage(server.pid, stub, run))
        half = seen[len(seen) // 2 :]
        assert slope([look.server for look in half]) < SLOPE
        assert slope([look.stub for look in half]) < SLOPE
        assert {look.threads for look in half} == {seen[0].threads}
        assert {look.shared for look in half} == {seen[0].shared}
    assert processes(run) == []
    assert regions(run) == []

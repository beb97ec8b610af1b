"""What a server leaves behind: nothing while it runs, and nothing when it ends."""

from __future__ import annotations

import os
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

from server.conftest import copied, running
from server.raw import Wire, infer, tokens
from tokenstream.runfolder import RUN_ID, processes

SHARED_MEMORY = Path("/dev/shm")
GROWTH = 64 * 2**20  # bytes: the CPU kernels of new numbers of rows are compiled and kept; 200 KB a request is a leak


@dataclass(frozen=True, slots=True)
class Usage:
    """Bytes of the stub's memory, its threads, and bytes of the run's shared memory."""

    memory: int
    threads: int
    shared: int


def run_id(pid: int) -> str:
    environ = dict(entry.split(b"=", 1) for entry in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0") if entry)
    return environ[RUN_ID.encode()].decode()


def regions(run: str) -> list[Path]:
    return list(SHARED_MEMORY.glob(f"tokenstream_{run}*"))


def usage(run: str) -> Usage:
    (stub,) = (pid for pid in processes(run) if b"backend_stub" in Path(f"/proc/{pid}/cmdline").read_bytes())
    pages = int(Path(f"/proc/{stub}/statm").read_text().split()[1])
    threads = len(list(Path(f"/proc/{stub}/task").iterdir()))
    return Usage(pages * os.sysconf("SC_PAGE_SIZE"), threads, sum(region.stat().st_size for region in regions(run)))


def answer_many(wire: Wire, first: int, count: int) -> None:
    """Short requests, 16 at a time, and one that is refused."""
    for start in range(first, first + count, 16):
        requests = [
            infer(text_input=f"Request {i}", max_tokens=1 + i % 2, stream=i % 5 > 0) for i in range(start, start + 16)
        ]
        for answer in wire.together(requests):
            assert tokens(answer)
        assert "max_tokens" in wire.refusal(infer(text_input="x", max_tokens=-start))


def test_hundreds_of_requests_leave_memory_flat_and_the_end_leaves_nothing(tmp_path: Path) -> None:
    # A small cache, so that all of it was touched before the first look.
    changes = {
        r'(key: "kv_tokens" value \{ string_value: )"\d+"': r'\1"1024"',
        r'(key: "max_context" value \{ string_value: )"\d+"': r'\1"512"',
    }
    with running(copied(tmp_path / "repository", changes)) as server:
        run = run_id(server.pid)
        with closing(Wire(server.grpc_url)) as wire:
            answer_many(wire, 1, 80)
            before = usage(run)
            answer_many(wire, 81, 304)
            after = usage(run)
        assert after.shared == before.shared
        assert after.threads == before.threads
        assert after.memory - before.memory < GROWTH
    assert processes(run) == []
    assert regions(run) == []

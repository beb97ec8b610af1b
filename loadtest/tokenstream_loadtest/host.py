"""The machine that a run happens on, as Linux's /proc shows it: what it is, and who uses its processors.

The server's processes are the one that listens on its port and all its descendants: tritonserver and the stubs of its
models, for instance. Where that one cannot be seen (another machine, another user's process) its share is unknown and
counts with others'. It does not know what is measured.
"""

from __future__ import annotations

import os
import platform
import socket
import time
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from urllib.parse import urlsplit

import tokenstream

from .results import Cores, Machine

PROC = Path("/proc")
_LISTENS = "0A"  # the state of a listening socket in /proc/net/tcp
_TICKS = os.sysconf("SC_CLK_TCK")


def describe_machine(*, local: bool) -> Machine:
    """This machine; `local`: whether the server is on it too."""
    return Machine(
        processor=_field(PROC / "cpuinfo", "model name") or platform.machine(),
        cores=len(os.sched_getaffinity(0)),
        memory_bytes=int((_field(PROC / "meminfo", "MemTotal") or "0").split()[0]) * 1024,
        system=f"{platform.system()} {platform.release()} {platform.machine()}",
        local=local,
        load_before=os.getloadavg()[0],
    )


def versions(*libraries: str) -> dict[str, str]:
    """Of this package, of Python, and of those of the libraries that are installed."""
    found = {"tokenstream": tokenstream.__version__, "python": platform.python_version()}
    for name in libraries:
        with suppress(PackageNotFoundError):
            found[name] = version(name)
    return found


def host_and_port(url: str) -> tuple[str, int]:
    """Of HOST:PORT (the first, if there are several) or of a url of HTTP. ValueError for anything else."""
    first = url.split(",")[0].strip()
    parts = urlsplit(first if "://" in first else f"//{first}")
    if parts.hostname is None:
        raise ValueError(f"no host in {url!r}")
    return parts.hostname, parts.port or (443 if parts.scheme == "https" else 80)


def is_here(host: str) -> bool:
    """Whether a name or address is this machine's own: one that can be bound to."""
    try:
        found = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)
    except OSError:
        return False
    return any(_can_bind(family, address) for family, _, _, _, address in found)


def listener(port: int) -> int | None:
    """The process that listens on a TCP port of this machine; None if none is seen."""
    sockets = {f"socket:[{inode}]" for table in ("tcp", "tcp6") for inode in _listening(PROC / "net" / table, port)}
    if not sockets:
        return None
    return next((pid for pid in sorted(_processes()) if sockets & set(_open_files(pid))), None)


def descendants(pid: int) -> set[int]:
    """The process and all that it and its children have started and that still live with them."""
    children: dict[int, list[int]] = {}
    for one in _processes():
        if (fields := _stat(one)) is not None:
            children.setdefault(int(fields[1]), []).append(one)
    found, left = set(), [pid]
    while left:
        one = left.pop()
        found.add(one)
        left.extend(child for child in children.get(one, ()) if child not in found)
    return found


def machine_seconds() -> tuple[float, float]:
    """Seconds that all processors were busy since boot, and those that the host took from them."""
    user, nice, system, _, _, irq, softirq, steal = map(int, (PROC / "stat").read_text().split(None, 9)[1:9])
    return (user + nice + system + irq + softirq) / _TICKS, steal / _TICKS


class Meter:
    """Measures CPU from now on. `port`: where a server on this machine listens; None: the server is elsewhere."""

    def __init__(self, port: int | None) -> None:
        self._port = port
        self.restarted = False  # whether another process listened there when it was last read
        server = None if port is None else listener(port)
        own = os.getpid()
        # A server within this very process, as tests have it, cannot be told from the generator.
        self._server = None if server == own else server
        self._before = self._look()

    def read(self) -> Cores:
        """Cores used since the begin, on average."""
        before, after = self._before, self._look()
        if self._server is not None and self._port is not None:
            self.restarted = listener(self._port) not in (None, self._server)
        seconds = max(after.at - before.at, 1e-6)
        generator = _grown(before.generator, after.generator)
        server = _grown(before.server, after.server)
        others = after.busy - before.busy - generator - server
        return Cores(
            generator=generator / seconds,
            server=None if self._server is None else server / seconds,
            others=max(others, 0.0) / seconds,
            stolen=(after.stolen - before.stolen) / seconds,
        )

    def _look(self) -> _Look:
        server = set() if self._server is None else descendants(self._server)
        own = descendants(os.getpid()) - server
        busy, stolen = machine_seconds()
        return _Look(time.perf_counter(), _seconds(own), _seconds(server), busy, stolen)


@dataclass(frozen=True, slots=True)
class _Look:
    """CPU seconds at one moment: by process of the generator and of the server, of all, and stolen."""

    at: float
    generator: dict[int, float]
    server: dict[int, float]
    busy: float
    stolen: float


def _grown(before: dict[int, float], after: dict[int, float]) -> float:
    return sum(seconds - before.get(pid, 0.0) for pid, seconds in after.items())


def _seconds(pids: Iterable[int]) -> dict[int, float]:
    """User and system time of each process that still lives."""
    found = {}
    for pid in pids:
        if (fields := _stat(pid)) is not None:
            found[pid] = (int(fields[11]) + int(fields[12])) / _TICKS
    return found


def _processes() -> list[int]:
    return [int(entry.name) for entry in PROC.iterdir() if entry.name.isdigit()]


def _stat(pid: int) -> list[str] | None:
    """The fields of /proc/PID/stat behind its name, state first; None if it has ended."""
    try:
        return (PROC / str(pid) / "stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None


def _listening(table: Path, port: int) -> list[str]:
    """The inodes of listening sockets."""
    try:
        rows = [line.split() for line in table.read_text().splitlines()[1:]]
    except OSError:
        return []
    return [row[9] for row in rows if row[3] == _LISTENS and int(row[1].rpartition(":")[2], 16) == port]


def _open_files(pid: int) -> list[str]:
    """What the file descriptors of a process stand for; nothing if that is not for us to see."""
    found = []
    try:
        for entry in (PROC / str(pid) / "fd").iterdir():
            with suppress(FileNotFoundError):  # closed meanwhile
                found.append(str(entry.readlink()))
    except OSError:
        return []
    return found


def _field(file: Path, name: str) -> str | None:
    """The first value of a name in a file of `name: value` lines."""
    try:
        lines = file.read_text().splitlines()
    except OSError:
        return None
    return next((line.partition(":")[2].strip() for line in lines if line.split(":")[0].strip() == name), None)


def _can_bind(family: int, address: object) -> bool:
    try:
        with socket.socket(family, socket.SOCK_STREAM) as probe:
            probe.bind(address)  # type: ignore[arg-type]
    except OSError:
        return False
    return True

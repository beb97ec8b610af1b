"""The signs of life that model instances leave in a server's run folder, and what is wrong when they fail.

    heartbeat-INSTANCE.json   {"pid": 123, "at": 1764480000.1, "live": 3, "stalled": false, "draining": false}

An instance renews its file every 0.5 s from when it is ready, however full it is, and removes it when it is unloaded;
one that never wrote a file is never missed. Process ids are looked up here, so this must run where the server runs (in
the same container). It does not know who starts a server, nor what is done about a fault.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from .diagnosis import full_disk

STALE_SECONDS = 5.0
NOT_SERVING = "not serving yet"
_PREFIX = "heartbeat-"
_LONGEST_GAP = 1.0  # seconds of silence that one look may add
_SECOND_LOOK_SECONDS = 1.5  # three beats
_POLL_SECONDS = 0.1


@dataclass(frozen=True, slots=True)
class Heartbeat:
    """What one instance last said of itself, at `at` (seconds of the epoch); `live` counts requests not yet ended."""

    instance: str
    pid: int
    at: float
    live: int
    stalled: bool
    draining: bool

    @property
    def drained(self) -> bool:
        """Whether it takes no requests and has none left."""
        return self.draining and self.live == 0

    def fault(self, *, silent: bool) -> str | None:
        """Why it cannot serve, None if it can; `silent` says that no other beat has come for too long."""
        who = f"{self.instance} (pid {self.pid})"
        if not lives(self.pid):
            return f"the process of {who} died"
        if silent:
            return f"{who} gives no sign of life any more"
        if self.stalled:
            return f"{who} has work and makes no progress"
        return None


def read_heartbeats(folder: Path) -> tuple[Heartbeat, ...]:
    """The heartbeats in `folder` by name of instance; a file that is no heartbeat is passed over."""
    found = []
    for path in sorted(folder.glob(f"{_PREFIX}*.json")):
        with suppress(OSError, ValueError, KeyError, TypeError):  # removed meanwhile, or another program's
            said = json.loads(path.read_text())
            found.append(
                Heartbeat(
                    path.stem.removeprefix(_PREFIX),
                    int(said["pid"]),
                    float(said["at"]),
                    int(said["live"]),
                    bool(said["stalled"]),
                    bool(said["draining"]),
                )
            )
    return tuple(found)


def remove_heartbeats(folder: Path) -> None:
    """Remove what instances that are gone have left."""
    for path in folder.glob(f"{_PREFIX}*"):
        path.unlink(missing_ok=True)


def lives(pid: int) -> bool:
    """Whether the process exists and is no zombie."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return False
    return state not in "ZX"


@dataclass(frozen=True, slots=True)
class _Heard:
    """When an instance said it wrote its last beat, and for how many seconds nothing has come since."""

    at: float
    silence: float


class Pulse:
    """Watches the heartbeats of one folder.

    Silence is counted by this process's own clock, and only while it looks: a clock that is set, a machine that sleeps
    or a container that is frozen for a minute is no death. Nor is a full disk, on which no beat can be written.
    """

    def __init__(self, folder: Path, clock: Callable[[], float] = time.monotonic) -> None:
        self._folder = folder
        self._clock = clock
        self._looked = clock()
        self._heard: dict[str, _Heard] = {}

    def fault(self) -> str | None:
        """What is wrong with the first instance that cannot serve, None if all can; to be asked every 0.1 s or so."""
        now = self._clock()
        gap, self._looked = min(now - self._looked, _LONGEST_GAP), now
        beats = read_heartbeats(self._folder)
        self._heard = {beat.instance: self._hear(beat, gap) for beat in beats}
        for beat in beats:
            silent = self._heard[beat.instance].silence > STALE_SECONDS and full_disk(self._folder) is None
            if fault := beat.fault(silent=silent):
                return fault
        return None

    def _hear(self, beat: Heartbeat, gap: float) -> _Heard:
        last = self._heard.get(beat.instance)
        silence = 0.0 if last is None or last.at != beat.at else last.silence + gap
        return _Heard(beat.at, silence)


def find_fault(folders: Sequence[Path]) -> str | None:
    """Look once at the servers of these run folders: why one of them is not alive, None if all are.

    A beat that seems old, or written in the future, is waited for before it counts: the clock may have been set.
    """
    first = _by_name(folders)
    if not first or {folder for folder, _ in first} != set(folders):
        return NOT_SERVING
    suspects = {name: beat for name, beat in first.items() if abs(time.time() - beat.at) > STALE_SECONDS}
    deadline = time.monotonic() + _SECOND_LOOK_SECONDS
    while (now := _by_name(folders)) and time.monotonic() < deadline:
        if all(name not in now or now[name].at != beat.at or not lives(beat.pid) for name, beat in suspects.items()):
            break
        time.sleep(_POLL_SECONDS)
    for name, beat in now.items():
        silent = name in suspects and beat.at == suspects[name].at and full_disk(name[0]) is None
        if fault := beat.fault(silent=silent):
            return fault
    return None if now else NOT_SERVING


def _by_name(folders: Sequence[Path]) -> dict[tuple[Path, str], Heartbeat]:
    return {(folder, beat.instance): beat for folder in folders for beat in read_heartbeats(folder)}

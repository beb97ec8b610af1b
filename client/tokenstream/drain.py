"""Drain: a server refuses new requests, lets live ones end for a while, and ends the rest, so that it can be stopped.

The wish is a file `drain` in the run folder, {"seconds": 20.0}, which every model instance looks for; its heartbeat
tells how far it is. The file stays until the server stops, so a drained server serves no more.
It does not know how a server is stopped, and prints nothing.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from .heartbeat import Heartbeat, lives, read_heartbeats

DRAIN_SECONDS = 20.0  # what the commands take unless told otherwise
POLL_SECONDS = 0.05
_FILE = "drain"
_GRACE_SECONDS = 5.0  # what ends the rest, and says so, is a step and a beat or two


class Drain:
    """A drain of the instances that beat in `folders`, asked for by its making.

    `live` is the most requests that the heartbeats told of, waiting ones included; `complete`, whether every instance
    has said that it is drained. Raises OSError when the wish cannot be written.
    """

    def __init__(self, folders: Sequence[Path], seconds: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._folders = tuple(folders)
        self._seconds = seconds
        self._clock = clock
        beats = self._beats()
        self.instances = len(beats)
        self.live = _total(beats)
        self.complete = False
        for folder in self._folders:
            _write(folder, seconds)
        self._began = clock()

    def over(self) -> bool:
        """Whether there is nothing more to wait for: all is drained, nobody beats, or it took 5 s more than allowed."""
        waited = self._clock() - self._began
        beats = self._beats()
        self.live = max(self.live, _total(beats))  # some may have come before the wish was read
        gone = self.instances > 0 and not beats
        self.complete = not gone and all(beat.drained for beat in beats)
        return gone or self.complete or waited > self._seconds + _GRACE_SECONDS

    def _beats(self) -> list[Heartbeat]:
        return [beat for folder in self._folders for beat in read_heartbeats(folder) if lives(beat.pid)]


def withdraw(folder: Path) -> None:
    """Remove the wish: the next server in this folder is to serve."""
    (folder / _FILE).unlink(missing_ok=True)


def _total(beats: Sequence[Heartbeat]) -> int:
    return sum(beat.live for beat in beats)


def _write(folder: Path, seconds: float) -> None:
    new = folder / f"{_FILE}.new"
    new.write_text(json.dumps({"seconds": seconds}))
    new.replace(folder / _FILE)

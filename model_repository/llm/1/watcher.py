"""Looks after what no token moves: cancelled requests, drain, the heartbeat, metrics. One thread does all of it.

    heartbeat-INSTANCE.json   written every half second into the run folder: {pid, at, live, stalled, draining}
    drain                     read there: {"seconds": S} has the engine end its requests within S seconds; a later order
                              can only bring the end nearer

The run folder is what TOKENSTREAM_RUN_DIR names; without it there is neither heartbeat nor drain. Triton's calls are
made here because two threads at once in its metrics crash it. It does not know how tokens are made or sent.
"""

from __future__ import annotations

import contextlib
import json
import logging
import math
import os
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from replies import Replies

POLL_SECONDS = 0.05
BEAT_SECONDS = 0.5
EXPORT_SECONDS = 1.0
LEAVE_SECONDS = 2.0
EXIT_CODE = 70  # EX_SOFTWARE
POLLS_PER_LOOK = 128  # more streams than these are looked at in turn: a question takes Triton tens of microseconds
log = logging.getLogger("tokenstream")


class Watcher:
    """Watches one engine and its replies. `exporter` has `export()`; None where metrics are off."""

    def __init__(self, engine: Any, replies: Replies, instance: str, run_folder: Path | None, exporter: Any) -> None:
        self._engine = engine
        self._replies = replies
        self._exporter = exporter
        self._run_folder = run_folder
        self._heartbeat = run_folder / f"heartbeat-{instance}.json" if run_folder else None
        self.draining = False
        self._drain_order = ""  # what was read last
        self._asked = 0  # streams looked at, of those in turn
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="watcher", daemon=True)

    def start(self) -> None:
        """Begin to watch; the first heartbeat is written before this returns."""
        self._beat()
        self._thread.start()

    def stop(self, timeout: float = 10.0) -> None:
        """End the thread behind a last export, and remove the heartbeat."""
        self._stopping.set()
        self._thread.join(timeout)
        if self._heartbeat is not None:
            with contextlib.suppress(OSError):
                self._heartbeat.unlink()

    def _run(self) -> None:
        next_beat = next_export = 0.0
        while True:
            stopping = self._stopping.wait(POLL_SECONDS)
            now = time.monotonic()
            if self._engine.device_lost:
                self._leave()
            _attempt(self._cancel_abandoned)
            if now >= next_beat:
                next_beat = now + BEAT_SECONDS
                _attempt(self._look_for_drain)
                _attempt(self._beat)
            if self._exporter is not None and (stopping or now >= next_export):
                next_export = now + EXPORT_SECONDS
                _attempt(self._exporter.export)
            if stopping:
                return

    def _leave(self) -> None:
        """End this process: its device is lost, and whoever supervises it starts another one."""
        log.critical("the device is lost; this process ends, so that another one can take its place")
        deadline = time.monotonic() + LEAVE_SECONDS
        while self._replies.streams and time.monotonic() < deadline:  # their errors are on the way
            time.sleep(POLL_SECONDS)
        os._exit(EXIT_CODE)

    def _cancel_abandoned(self) -> None:
        streams = list(self._replies.streams.items())
        if len(streams) > POLLS_PER_LOOK:
            self._asked %= len(streams)
            streams = (streams + streams)[self._asked : self._asked + POLLS_PER_LOOK]
            self._asked += POLLS_PER_LOOK
        for key, stream in streams:
            if stream.left():
                self._engine.cancel(key)

    def _look_for_drain(self) -> None:
        if self._run_folder is None:
            return
        try:
            order = (self._run_folder / "drain").read_text()
            if order == self._drain_order:
                return
            seconds = float(json.loads(order)["seconds"])
            if math.isnan(seconds):  # it would be before no moment, and behind none
                return
        except (OSError, ValueError, KeyError, TypeError):
            return
        self._drain_order = order
        self.draining = True
        log.info("draining within %g s", seconds)
        self._engine.drain(seconds)

    def _beat(self) -> None:
        if self._heartbeat is None:
            return
        beat = {
            "pid": os.getpid(),
            "at": time.time(),
            "live": len(self._replies.streams),
            "stalled": self._engine.stalled,
            "draining": self.draining,
        }
        try:
            new = self._heartbeat.with_suffix(".new")
            new.write_text(json.dumps(beat))
            new.replace(self._heartbeat)
        except OSError as error:
            log.warning("the heartbeat could not be written: %s", error)


def _attempt(work: Callable[[], None]) -> None:
    """Do one of the watcher's works. The others do not depend on it: without them no cancel and no drain is heard."""
    try:
        work()
    except Exception:
        log.exception("the watcher failed")

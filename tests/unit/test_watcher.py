"""The watcher over an engine that is made up: orders to drain, heartbeats, cancels, the end behind a lost device."""

from __future__ import annotations

import importlib
import json
import os
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from queue import SimpleQueue
from types import SimpleNamespace
from typing import Any

import pytest

from waiting import WAIT


class Engine:
    """Notes what it is told; it is asked once per heartbeat whether it stalls."""

    def __init__(self) -> None:
        self.device_lost = False
        self.stalls = False
        self.drains: SimpleQueue[float] = SimpleQueue()
        self.cancels: SimpleQueue[str] = SimpleQueue()
        self.beats: SimpleQueue[None] = SimpleQueue()

    @property
    def stalled(self) -> bool:
        self.beats.put(None)
        return self.stalls

    def drain(self, seconds: float) -> None:
        self.drains.put(seconds)

    def cancel(self, key: str) -> None:
        self.cancels.put(key)

    def beat(self, times: int = 3) -> None:
        """Wait for so many heartbeats."""
        for _ in range(times):
            self.beats.get(timeout=WAIT)


@pytest.fixture
def engine() -> Engine:
    return Engine()


Watch = Callable[..., Any]


@pytest.fixture
def watch(replies: Any, engine: Engine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Watch]:
    """Start a watcher that hurries; it is stopped after the test."""
    module = importlib.import_module("watcher")
    monkeypatch.setattr(module, "POLL_SECONDS", 0.001)
    monkeypatch.setattr(module, "BEAT_SECONDS", 0.0)
    started: list[Any] = []

    def start(streams: dict[str, Any] | None = None, exporter: Any = None) -> Any:
        sending = SimpleNamespace(streams={} if streams is None else streams)
        started.append(module.Watcher(engine, sending, "llm_0_0", tmp_path, exporter))
        started[-1].start()
        return started[-1]

    yield start
    for one in started:
        one.stop()


def order(folder: Path, text: str) -> None:
    """Write an order to drain whole, as whoever gives one does."""
    new = folder / "drain.new"
    new.write_text(text)
    new.replace(folder / "drain")


def heartbeat(folder: Path) -> dict[str, Any]:
    told: dict[str, Any] = json.loads((folder / "heartbeat-llm_0_0.json").read_text())
    return told


def test_each_order_to_drain_is_given_once_and_a_later_one_as_well(
    watch: Watch, engine: Engine, tmp_path: Path
) -> None:
    watched = watch()
    engine.beat()
    assert not watched.draining
    order(tmp_path, '{"seconds": 30}')
    assert engine.drains.get(timeout=WAIT) == 30
    engine.beat()
    order(tmp_path, '{"seconds": 5}')
    assert engine.drains.get(timeout=WAIT) == 5
    engine.beat()
    assert engine.drains.empty()
    assert watched.draining


@pytest.mark.parametrize("text", ["", "{", "[]", "5", "{}", '{"seconds": "soon"}', '{"seconds": NaN}'])
def test_what_is_no_order_changes_nothing_until_there_is_one(
    watch: Watch, engine: Engine, tmp_path: Path, text: str
) -> None:
    order(tmp_path, text)
    watched = watch()
    engine.beat()
    assert not watched.draining
    order(tmp_path, '{"seconds": 0}')
    assert engine.drains.get(timeout=WAIT) == 0


def test_a_heartbeat_tells_who_lives_and_how_it_is_and_ends_with_the_watcher(
    watch: Watch, engine: Engine, tmp_path: Path
) -> None:
    before = time.time()
    streams = {key: SimpleNamespace(left=lambda: False) for key in "ab"}
    watched = watch(streams)
    told = heartbeat(tmp_path)  # it is there as soon as the watcher is
    assert before <= told.pop("at") <= time.time()
    assert told == {"pid": os.getpid(), "live": 2, "stalled": False, "draining": False}
    engine.stalls = True
    order(tmp_path, '{"seconds": 1}')
    engine.drains.get(timeout=WAIT)
    engine.beat()
    told = heartbeat(tmp_path)
    assert (told["stalled"], told["draining"]) == (True, True)
    watched.stop()
    assert list(tmp_path.iterdir()) == [tmp_path / "drain"]


def test_all_of_many_streams_are_asked_in_turn_and_those_that_were_left_are_cancelled(
    watch: Watch, engine: Engine
) -> None:
    gone = {"0", "150", "299"}
    untold = set(gone)

    def left(key: str) -> bool:
        """True once, as a stream says it."""
        was_told = key not in untold
        untold.discard(key)
        return not was_told

    watch({str(i): SimpleNamespace(left=partial(left, str(i))) for i in range(300)})
    assert {engine.cancels.get(timeout=WAIT) for _ in gone} == gone


def test_a_failing_export_does_not_keep_it_from_hearing_a_cancel(watch: Watch, engine: Engine) -> None:
    failed = threading.Event()

    def export() -> None:
        failed.set()
        raise OSError("the server did not answer")

    watch({"a": SimpleNamespace(left=failed.is_set)}, SimpleNamespace(export=export))
    assert engine.cancels.get(timeout=WAIT) == "a"


def test_a_lost_device_ends_the_process_behind_the_errors(
    watch: Watch, engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Ending(dict[str, Any]):
        """Streams that end while somebody waits for it."""

        def __bool__(self) -> bool:
            waited = len(self) > 0
            self.clear()
            return waited

    ended: SimpleQueue[tuple[int, int]] = SimpleQueue()
    streams = Ending(a=SimpleNamespace(left=lambda: False))
    monkeypatch.setattr(importlib.import_module("watcher").os, "_exit", lambda code: ended.put((code, len(streams))))
    engine.device_lost = True
    watch(streams)
    assert ended.get(timeout=WAIT) == (70, 0)


@pytest.mark.parametrize("failing", ["poll", "exporter", "drain"])
def test_a_work_of_the_watcher_that_fails_stops_none_of_the_others(
    watch: Watch, engine: Engine, replies: Any, failing: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: object) -> Any:
        raise RuntimeError(failing)

    exports: SimpleQueue[None] = SimpleQueue()
    senders = [SimpleNamespace(is_cancelled=broken if failing == "poll" else lambda: False), SimpleNamespace()]
    senders[1].is_cancelled = lambda: True
    if failing == "drain":
        monkeypatch.setattr(importlib.import_module("watcher").Watcher, "_look_for_drain", broken)
    monkeypatch.setattr(importlib.import_module("watcher"), "EXPORT_SECONDS", 0.0)
    watch(
        {str(index): replies.Stream(sender, replies.Call(str(index))) for index, sender in enumerate(senders)},
        SimpleNamespace(export=broken if failing == "exporter" else lambda: exports.put(None)),
    )
    assert engine.cancels.get(timeout=WAIT) == "1"
    engine.beat()
    if failing != "exporter":
        exports.get(timeout=WAIT)
    if failing != "drain":
        order(tmp_path, '{"seconds": 3}')
        assert engine.drains.get(timeout=WAIT) == 3

"""A drain waits for what beats, as long as it must and no longer, and counts who ended without being ended."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from tokenstream.drain import Drain, withdraw
from unit.test_server_heartbeat import write_beat


class Clock:
    """Seconds that pass when the test says so."""

    def __init__(self) -> None:
        self.now = 50.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


def test_the_wish_is_written_for_every_server_and_can_be_withdrawn(tmp_path: Path, clock: Clock) -> None:
    folders = [tmp_path / "a", tmp_path / "b"]
    for folder in folders:
        folder.mkdir()
    Drain(folders, 7.5, clock)
    assert [json.loads((folder / "drain").read_text()) for folder in folders] == [{"seconds": 7.5}] * 2
    withdraw(folders[0])
    assert not (folders[0] / "drain").exists()


def test_nobody_who_beats_is_nothing_to_wait_for(tmp_path: Path, clock: Clock) -> None:
    drain = Drain([tmp_path], 20.0, clock)
    assert drain.instances == 0
    assert drain.over()


def test_it_is_over_when_every_instance_says_so(tmp_path: Path, clock: Clock) -> None:
    write_beat(tmp_path, "llm_0_0", live=0)
    write_beat(tmp_path, "llm_0_1", live=2)
    drain = Drain([tmp_path], 20.0, clock)
    assert not drain.over()  # nobody has read the wish
    write_beat(tmp_path, "llm_0_0", live=0, draining=True)
    write_beat(tmp_path, "llm_0_1", live=1, draining=True)
    assert not drain.over()
    write_beat(tmp_path, "llm_0_1", live=0, draining=True)
    assert drain.over()
    assert drain.complete
    assert drain.live == 2


def test_instances_that_die_meanwhile_have_not_drained(tmp_path: Path, clock: Clock) -> None:
    write_beat(tmp_path, live=4)
    drain = Drain([tmp_path], 20.0, clock)
    write_beat(tmp_path, live=4, pid=2**22 + 1)
    assert drain.over()
    assert not drain.complete


def test_requests_that_came_before_the_wish_was_read_count(tmp_path: Path, clock: Clock) -> None:
    write_beat(tmp_path, live=1)
    drain = Drain([tmp_path], 20.0, clock)
    write_beat(tmp_path, live=3, draining=True)
    assert not drain.over()
    write_beat(tmp_path, live=0, draining=True)
    assert drain.over()
    assert drain.live == 3


def test_one_that_does_not_drain_is_waited_for_five_seconds_more(tmp_path: Path, clock: Clock) -> None:
    write_beat(tmp_path, live=1)
    drain = Drain([tmp_path], 20.0, clock)
    clock.now += 24.9
    assert not drain.over()
    clock.now += 0.2
    assert drain.over()
    assert not drain.complete


def test_a_dead_instance_is_not_waited_for(tmp_path: Path, clock: Clock) -> None:
    pid = os.spawnlp(os.P_WAIT, "true", "true") or os.spawnlp(os.P_NOWAIT, "true", "true")
    os.waitpid(pid, 0)
    write_beat(tmp_path, live=3, pid=pid)
    assert Drain([tmp_path], 20.0, clock).over()

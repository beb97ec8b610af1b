"""An instance is missed when its process is dead, its beat is old or it stalls, and for nothing else."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest

from tokenstream.heartbeat import NOT_SERVING, Pulse, find_fault, read_heartbeats, remove_heartbeats


def write_beat(folder: Path, instance: str = "llm_0_0", **changes: object) -> None:
    beat = {"pid": os.getpid(), "at": time.time(), "live": 0, "stalled": False, "draining": False, **changes}
    new = folder / f"heartbeat-{instance}.new"
    new.write_text(json.dumps(beat))
    new.replace(folder / f"heartbeat-{instance}.json")


class Watch:
    """A pulse over a clock that the test moves."""

    def __init__(self, folder: Path) -> None:
        self.now = 1000.0
        self._pulse = Pulse(folder, lambda: self.now)

    def fault(self, seconds: float) -> str | None:
        """The fault that is seen within so many seconds of looking every 0.1 s."""
        for _ in range(round(seconds * 10)):
            self.now += 0.1
            if (fault := self._pulse.fault()) is not None:
                return fault
        return None

    def sleep(self, seconds: float) -> str | None:
        """The fault that is seen at once behind so many seconds without a look."""
        self.now += seconds
        return self._pulse.fault()


@pytest.fixture
def dead_pid() -> int:
    with subprocess.Popen([sys.executable, "-c", ""]) as process:
        pass
    return process.pid


@pytest.fixture
def zombie_pid() -> Iterator[int]:
    with subprocess.Popen([sys.executable, "-c", ""]) as process:
        os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
        yield process.pid


def test_a_full_server_that_beats_is_never_missed(tmp_path: Path) -> None:
    watch = Watch(tmp_path)
    for beat in range(20):
        write_beat(tmp_path, live=10_000, at=float(beat))
        assert watch.fault(4.5) is None


def test_an_instance_that_never_beat_is_never_missed(tmp_path: Path) -> None:
    assert Watch(tmp_path).fault(100.0) is None


def test_an_unloaded_instance_is_not_missed(tmp_path: Path) -> None:
    watch = Watch(tmp_path)
    write_beat(tmp_path)
    assert watch.fault(1.0) is None
    remove_heartbeats(tmp_path)
    assert watch.fault(100.0) is None


def test_a_process_that_is_gone_is_told_at_once(tmp_path: Path, dead_pid: int) -> None:
    write_beat(tmp_path, "good_0_0")
    write_beat(tmp_path, pid=dead_pid)
    assert Watch(tmp_path).fault(0.1) == f"the process of llm_0_0 (pid {dead_pid}) died"


def test_a_zombie_is_dead(tmp_path: Path, zombie_pid: int) -> None:
    write_beat(tmp_path, pid=zombie_pid)
    assert Watch(tmp_path).fault(0.1) == f"the process of llm_0_0 (pid {zombie_pid}) died"


def test_a_beat_of_which_nothing_new_comes_is_told_after_five_seconds(tmp_path: Path) -> None:
    write_beat(tmp_path)
    watch = Watch(tmp_path)
    assert watch.fault(5.0) is None
    assert watch.fault(0.5) == f"llm_0_0 (pid {os.getpid()}) gives no sign of life any more"


def test_a_stalled_engine_is_told_at_once(tmp_path: Path) -> None:
    write_beat(tmp_path, stalled=True, live=3)
    assert Watch(tmp_path).fault(0.1) == f"llm_0_0 (pid {os.getpid()}) has work and makes no progress"


def test_a_clock_that_is_set_is_no_death(tmp_path: Path) -> None:
    watch = Watch(tmp_path)
    for at in (5000.0, 9000.0, 100.0, 100.5):
        write_beat(tmp_path, at=at)
        assert watch.fault(1.0) is None


def test_a_machine_that_slept_is_no_death(tmp_path: Path) -> None:
    watch = Watch(tmp_path)
    write_beat(tmp_path)
    assert watch.fault(1.0) is None
    assert watch.sleep(3600.0) is None


def test_a_full_disk_is_no_death(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda _folder: SimpleNamespace(free=0))
    write_beat(tmp_path, at=1.0)
    assert Watch(tmp_path).fault(60.0) is None
    assert find_fault([tmp_path]) is None


def test_what_is_no_heartbeat_is_passed_over(tmp_path: Path) -> None:
    for number, text in enumerate(("", "[]", '{"pid": 1}', "{", '{"pid": "x", "at": 1}')):
        (tmp_path / f"heartbeat-{number}.json").write_text(text)
    write_beat(tmp_path, live=2)
    assert [(beat.instance, beat.live) for beat in read_heartbeats(tmp_path)] == [("llm_0_0", 2)]


def test_a_look_before_the_first_beat_says_so(tmp_path: Path) -> None:
    assert find_fault([]) == NOT_SERVING
    assert find_fault([tmp_path]) == NOT_SERVING


def test_a_look_finds_the_one_that_is_dead_among_the_living(tmp_path: Path, dead_pid: int) -> None:
    for folder in (tmp_path / "a", tmp_path / "b"):
        folder.mkdir()
        write_beat(folder, live=500, draining=True)
    assert find_fault([tmp_path / "a", tmp_path / "b"]) is None
    write_beat(tmp_path / "b", "llm_0_1", pid=dead_pid)
    assert find_fault([tmp_path / "a", tmp_path / "b"]) == f"the process of llm_0_1 (pid {dead_pid}) died"


@pytest.mark.parametrize("age", [3600.0, -3600.0])
def test_a_look_does_not_believe_an_old_beat(tmp_path: Path, age: float) -> None:
    write_beat(tmp_path, at=time.time() - age)
    assert find_fault([tmp_path]) == f"llm_0_0 (pid {os.getpid()}) gives no sign of life any more"


def test_a_look_believes_a_beat_that_is_renewed_under_another_clock(tmp_path: Path) -> None:
    write_beat(tmp_path, at=1.0)
    renew = threading.Timer(0.3, write_beat, [tmp_path], {"at": 1.5})
    renew.start()
    assert find_fault([tmp_path]) is None
    renew.join()

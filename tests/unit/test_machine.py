"""What a machine and its cgroups leave to a process, read from folders that the tests make."""

from __future__ import annotations

import math
import tempfile
from dataclasses import dataclass
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from llm_engine.loading import machine

MIB = 1 << 20
PERIOD = 100_000
CGROUP = Path("sys/fs/cgroup")


@dataclass(frozen=True)
class Level:
    """A cgroup: limits, None for none, and what its processes use; bytes."""

    quota: int | None = None  # microseconds of each PERIOD
    limit: int | None = None
    used: int = 0
    inactive: int = 0
    active: int = 0

    @property
    def left(self) -> float:
        return math.inf if self.limit is None else max(0, self.limit - max(0, self.used - self.inactive - self.active))

    def write(self, folder: Path, version: int) -> None:
        if version == 2:
            files = {
                "cpu.max": f"{'max' if self.quota is None else self.quota} {PERIOD}",
                "memory.max": "max" if self.limit is None else self.limit,
                "memory.high": "max",
                "memory.current": self.used,
                "memory.stat": f"anon 1\nfile 2\ninactive_file {self.inactive}\nactive_file {self.active}",
            }
        else:
            files = {
                "cpu.cfs_quota_us": -1 if self.quota is None else self.quota,
                "cpu.cfs_period_us": PERIOD,
                "memory.limit_in_bytes": 9223372036854771712 if self.limit is None else self.limit,
                "memory.usage_in_bytes": self.used,
                "memory.stat": f"inactive_file 1\ntotal_inactive_file {self.inactive}\ntotal_active_file {self.active}",
            }
        folder.mkdir(parents=True, exist_ok=True)
        for name, value in files.items():
            (folder / name).write_text(f"{value}\n")


def proc(root: Path, cgroup: str, mounts: list[str], available: int = 1000 * MIB, total: int = 2000 * MIB) -> None:
    """The files of /proc. A mount is `PART POINT KIND OPTIONS`."""
    (root / "proc/self").mkdir(parents=True)
    (root / "proc/self/cgroup").write_text(cgroup)
    lines = ["22 1 0:5 / /proc rw - proc proc rw"]
    for mount in mounts:
        part, point, kind, options = mount.split(" ")
        lines.append(f"31 22 0:28 {part} {point} rw,nosuid shared:9 - {kind} cgroup {options}")
    (root / "proc/self/mountinfo").write_text("\n".join(lines) + "\n")
    (root / "proc/meminfo").write_text(
        f"MemTotal: {total >> 10} kB\nMemFree: 1 kB\nMemAvailable: {available >> 10} kB\n"
    )


def nested(root: Path, version: int, levels: list[Level], mounted: int) -> None:
    """Cgroups within each other, the process in the last; visible from level `mounted` on, as in a container."""
    names = [f"g{i}" for i in range(1, len(levels))]  # the first is the hierarchy's own root
    points = {2: {"cgroup2": CGROUP}, 1: {"cpu,cpuacct": CGROUP / "cpu,cpuacct", "memory": CGROUP / "memory"}}[version]
    for point in points.values():
        for depth, level in enumerate(levels[mounted:], start=mounted):
            level.write(root / point / Path(*names[mounted:depth]), version)
    path, part = "/" + "/".join(names), "/" + "/".join(names[:mounted])
    if version == 2:
        proc(root, f"0::{path}\n", [f"{part} /{CGROUP} cgroup2 rw,nsdelegate"])
    else:
        lines = "".join(f"{i}:{name}:{path}\n" for i, name in enumerate(points, start=4))
        proc(root, f"9:name=systemd:/\n{lines}", [f"{part} /{at} cgroup rw,{name}" for name, at in points.items()])


sizes = st.integers(0, 1500).map(lambda n: n * MIB)
cgroups = st.builds(
    Level,
    quota=st.none() | st.integers(1000, 40 * PERIOD),
    limit=st.none() | sizes,
    used=sizes,
    inactive=st.integers(0, 200).map(lambda n: n * MIB),
    active=st.integers(0, 200).map(lambda n: n * MIB),
)


@settings(max_examples=60, deadline=None)
@given(
    version=st.sampled_from([1, 2]),
    levels=st.lists(cgroups, min_size=1, max_size=5),
    affinity=st.integers(1, 32),
    data=st.data(),
)
def test_in_any_hierarchy_the_tightest_level_that_can_be_seen_counts(
    version: int, levels: list[Level], affinity: int, data: st.DataObject
) -> None:
    mounted = data.draw(st.integers(0, len(levels) - 1))
    seen = levels[mounted:]
    with tempfile.TemporaryDirectory() as folder:
        nested(Path(folder), version, levels, mounted)
        cores, memory = machine.processors(affinity, Path(folder)), machine.memory(Path(folder))
    quotas = [max(1, math.ceil(level.quota / PERIOD)) for level in seen if level.quota is not None]
    assert cores.count == min([affinity, *quotas])
    assert ("affinity" in cores.source) == (cores.count == affinity)
    assert memory.left == min([1000 * MIB, *(max(0, min(level.left, 2**62)) for level in seen)])
    assert memory.left == 1000 * MIB or memory.limit in [level.limit for level in seen]


def test_the_source_names_file_and_folder(tmp_path: Path) -> None:
    nested(tmp_path, 2, [Level(), Level(quota=150_000, limit=800 * MIB, used=300 * MIB, inactive=100 * MIB)], 0)
    assert machine.processors(8, tmp_path) == machine.Processors(2, "1.5 cores by cpu.max of /sys/fs/cgroup/g1")
    left = machine.memory(tmp_path)
    assert left == machine.Memory(600 * MIB, 800 * MIB, "memory.max of /sys/fs/cgroup/g1")
    assert str(left) == "600 MiB of the 800 MiB that memory.max of /sys/fs/cgroup/g1 allows"


@pytest.mark.parametrize("path", ["/", "/../sibling", "/kubepods/pod1/abc"])
def test_where_the_path_is_not_visible_the_mount_point_is_the_process_s_own_cgroup(tmp_path: Path, path: str) -> None:
    Level(quota=2 * PERIOD, limit=500 * MIB).write(tmp_path / CGROUP, 2)
    proc(tmp_path, f"0::{path}\n", [f"/ /{CGROUP} cgroup2 rw"])
    assert machine.processors(16, tmp_path).count == 2
    assert machine.memory(tmp_path).left == 500 * MIB


def test_a_mount_of_another_part_of_the_hierarchy_is_not_taken_for_ours(tmp_path: Path) -> None:
    Level(quota=PERIOD).write(tmp_path / "other", 2)
    Level(quota=3 * PERIOD).write(tmp_path / CGROUP / "mine", 2)
    proc(tmp_path, "0::/mine\n", ["/somebody /other cgroup2 rw", f"/ /{CGROUP} cgroup2 rw"])
    assert machine.processors(16, tmp_path).count == 3


def test_with_both_versions_at_once_each_controller_is_read_where_it_is(tmp_path: Path) -> None:
    Level(quota=2 * PERIOD).write(tmp_path / CGROUP / "cpu/a", 1)
    (tmp_path / CGROUP / "unified/a").mkdir(parents=True)
    mounts = [f"/ /{CGROUP}/cpu cgroup rw,cpu", f"/ /{CGROUP}/unified cgroup2 rw"]
    proc(tmp_path, "3:cpu:/a\n0::/a\n", mounts)
    assert machine.processors(16, tmp_path).source == "2 cores by cpu.cfs_quota_us of /sys/fs/cgroup/cpu/a"


def test_what_throttles_is_a_limit_too(tmp_path: Path) -> None:
    nested(tmp_path, 2, [Level(limit=900 * MIB)], 0)
    (tmp_path / CGROUP / "memory.high").write_text(f"{300 * MIB}\n")
    assert machine.memory(tmp_path).source == "memory.high of /sys/fs/cgroup"


def test_a_machine_without_cgroups_has_its_affinity_and_what_is_available(tmp_path: Path) -> None:
    proc(tmp_path, "", [])
    assert machine.processors(3, tmp_path) == machine.Processors(3, "3 cores by affinity")
    assert machine.memory(tmp_path) == machine.Memory(1000 * MIB, 2000 * MIB, "this machine")
    (tmp_path / "proc/meminfo").unlink()
    assert machine.memory(tmp_path).left > 2**60  # unknown, not none


def test_this_machine_has_processors_and_memory() -> None:
    assert machine.processors(1).count == 1
    assert 0 < machine.memory().left <= machine.memory().limit
    assert machine.vendor()

"""What this machine and the cgroups around this process leave to it: processors, and memory.

    root/proc/self/cgroup        where the process is:   0::/a/b             4:memory:/a/b
    root/proc/self/mountinfo     where that is mounted:  /sys/fs/cgroup      /sys/fs/cgroup/memory
    root/sys/fs/cgroup/a/b       its limits, and those of every folder above, of which the tightest counts

Version 2 of cgroups, version 1, and both at once are read. In a container the path may not be visible; then the mount
point is the process's own cgroup. It does not know what anything is used for.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

MIB = 1 << 20
_ROOT = Path("/")
_UNKNOWN = 1 << 62  # bytes, where Linux does not tell


@dataclass(frozen=True, slots=True)
class Processors:
    """How many threads can run at once, and what says so."""

    count: int
    source: str


@dataclass(frozen=True, slots=True)
class Memory:
    """Bytes that can still be taken, of the `limit` that `source` sets."""

    left: int
    limit: int
    source: str

    def __str__(self) -> str:
        """As a person reads it."""
        return f"{self.left / MIB:,.0f} MiB of the {self.limit / MIB:,.0f} MiB that {self.source} allows"


def processors(affinity: int, root: Path = _ROOT) -> Processors:
    """The fewest of the `affinity` (processors that this process may run on) and any cgroup's quota, rounded up."""
    best = Processors(affinity, f"{affinity} core{'s' * (affinity > 1)} by affinity")
    for level in _levels(root, "cpu"):
        if level.version == 2:
            name = "cpu.max"
            quota, _, period = level.read(name).partition(" ")
        else:
            name = "cpu.cfs_quota_us"
            quota, period = level.read(name), level.read("cpu.cfs_period_us")
        if not (quota.isdigit() and period.isdigit() and int(period)):
            continue  # "max", -1, or no such file: no limit here
        cores = int(quota) / int(period)
        if (count := max(1, math.ceil(cores))) < best.count:
            best = Processors(count, f"{cores:g} cores by {name} of {level.name}")
    return best


def memory(root: Path = _ROOT) -> Memory:
    """The least of what the machine has available and what any cgroup's limit leaves.

    Pages of files count as left, for the kernel drops them before it fails an allocation. So does MemAvailable.
    """
    machine = _fields(_read(root / "proc/meminfo").replace(":", ""), 1024)
    total = machine.get("MemTotal", _UNKNOWN)
    least = Memory(machine.get("MemAvailable", total), total, "this machine")
    for level in _levels(root, "memory"):
        second = level.version == 2
        used = level.read("memory.current" if second else "memory.usage_in_bytes")
        pages, prefix = _fields(level.read("memory.stat")), "" if second else "total_"
        files = pages.get(f"{prefix}inactive_file", 0) + pages.get(f"{prefix}active_file", 0)
        for name in ("memory.max", "memory.high") if second else ("memory.limit_in_bytes",):
            if (limit := level.read(name)).isdigit() and used.isdigit():
                left = max(0, int(limit) - max(0, int(used) - files))
                if left < least.left:
                    least = Memory(left, int(limit), f"{name} of {level.name}")
    return least


def vendor(root: Path = _ROOT) -> str:
    """Who made the processor, as Linux names it; "unknown" where it does not."""
    for line in _read(root / "proc/cpuinfo").splitlines():
        name, _, value = line.partition(":")
        if name.strip() in ("vendor_id", "CPU implementer"):
            return value.strip()
    return "unknown"


@dataclass(frozen=True, slots=True)
class _Level:
    """One folder of a cgroup hierarchy. `name`: its path without the root."""

    folder: Path
    name: str
    version: int

    def read(self, file: str) -> str:
        """The file's content, "" if there is none."""
        return _read(self.folder / file).strip()


def _levels(root: Path, controller: str) -> Iterator[_Level]:
    """This process's cgroups with `controller`, version 1 and 2, each from its own folder up to the mount point."""
    for version, path in _memberships(root, controller):
        mounts = [(part, point) for v, part, point in _mounts(root, controller) if v == version]
        visible = [point / path.relative_to(part) for part, point in mounts if _holds(part, path)]
        folders = visible or [point for _, point in mounts]
        points = {point for _, point in mounts}
        if folders:
            folder = folders[0]
            for above in (folder, *folder.parents):
                yield _Level(root / above.relative_to("/"), str(above), version)
                if above in points:
                    break


def _memberships(root: Path, controller: str) -> Iterator[tuple[int, PurePosixPath]]:
    """(version, path in the hierarchy) of this process."""
    for line in _read(root / "proc/self/cgroup").splitlines():
        number, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        if number == "0" and not controllers:
            yield 2, PurePosixPath(path or "/")
        elif controller in controllers.split(","):
            yield 1, PurePosixPath(path or "/")


def _mounts(root: Path, controller: str) -> Iterator[tuple[int, PurePosixPath, PurePosixPath]]:
    """(version, the part of the hierarchy that is mounted, the mount point) of each mount. See man 5 proc."""
    for line in _read(root / "proc/self/mountinfo").splitlines():
        before, _, after = line.partition(" - ")
        fields, kind = before.split(" "), after.split(" ")
        if len(fields) < 5 or len(kind) < 3:
            continue
        part, point = (PurePosixPath(_unescaped(field)) for field in fields[3:5])
        if kind[0] == "cgroup2":
            yield 2, part, point
        elif kind[0] == "cgroup" and controller in kind[2].split(","):
            yield 1, part, point


def _holds(part: PurePosixPath, path: PurePosixPath) -> bool:
    """Whether `path` is in the mounted part; a path with `..` leads out of the process's namespace."""
    return path.is_relative_to(part) and ".." not in path.parts


def _unescaped(field: str) -> str:
    for code, character in (("\\040", " "), ("\\011", "\t"), ("\\012", "\n"), ("\\134", "\\")):
        field = field.replace(code, character)
    return field


def _fields(text: str, unit: int = 1) -> dict[str, int]:
    """Lines of a name and a number as a dictionary; `unit` multiplies the numbers."""
    found = {}
    for line in text.splitlines():
        match line.split():
            case [name, value, *_] if value.isdigit():
                found[name] = int(value) * unit
    return found


def _read(file: Path) -> str:
    with contextlib.suppress(OSError, UnicodeDecodeError):
        return file.read_text()
    return ""

"""The folder of one running server: a lock that says it lives, its log, and the shared memory that bears its name.

`sweep` removes what dead runs left (processes, shared memory, folders) and never touches a live one: a run is dead when
nobody holds its lock, and a process belongs to it when its environment carries the run's random id, which no other
process has. Of swept or failed runs the last log is kept as `last-failed.log`.
It does not know what runs in the folder, and starts nothing.
"""

from __future__ import annotations

import errno
import fcntl
import os
import re
import secrets
import shutil
import signal
import stat
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path

from .diagnosis import SetupError, writing_to
from .drain import withdraw
from .heartbeat import remove_heartbeats

RUN_ID = "TOKENSTREAM_RUN_ID"  # in the environment of every process of a run
KEPT_LOG = "last-failed.log"
_PLACE = "files"  # names the folder of the run's files; written once the run's lock is held
_LOG_BYTES = 65536
_LOOK_SECONDS = 0.05
LEAVE_SECONDS = 4.0  # a predecessor whose supervisor was killed is gone in two
SHARED_MEMORY = Path("/dev/shm")  # noqa: S108 (Triton's Python backend has its regions there)

_ID = re.compile("[0-9a-f]{16}")


def run_root(cache: Path, run_dir: Path | None = None, env: Mapping[str, str] = os.environ) -> Path:
    """Where a run's folder goes: `cache`/run; if that is another user's or read-only, `run_dir`, else a private folder.

    A private folder is this user's alone (0700), in $XDG_RUNTIME_DIR or the folder of temporary files.
    """
    own = cache / "run"
    if _is_open_to_us(own):
        return own
    return run_dir or next(filter(_made_private, _private_roots(env)), own)


def run_roots(cache: Path, env: Mapping[str, str] = os.environ) -> list[Path]:
    """Every place where `run_root` may have put this user's runs, but for folders that were named."""
    return [cache / "run", *(root for root in _private_roots(env) if _is_private(root))]


def _private_roots(env: Mapping[str, str]) -> list[Path]:
    runtime = env.get("XDG_RUNTIME_DIR")
    temporary = Path(tempfile.gettempdir()) / f"tokenstream-{os.geteuid()}"
    return [*([Path(runtime) / "tokenstream"] if runtime else []), temporary]


def _is_open_to_us(root: Path) -> bool:
    """Whether this user may make runs in `root`, which is made if it is absent; other faults are told by those runs."""
    try:
        root.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        return error.errno not in (errno.EACCES, errno.EPERM, errno.EROFS)
    lock = root / ".lock"
    may_make = os.access(root, os.W_OK | os.X_OK, effective_ids=True)
    return may_make and (not lock.exists() or os.access(lock, os.R_OK | os.W_OK, effective_ids=True))


def _made_private(root: Path) -> bool:
    with suppress(OSError):
        root.mkdir(mode=0o700)
    return _is_private(root)


def _is_private(root: Path) -> bool:
    """Whether `root` is a folder of this user's that nobody else can enter; anybody could make one of its name."""
    try:
        found = root.lstat()
    except OSError:
        return False
    return stat.S_ISDIR(found.st_mode) and found.st_uid == os.geteuid() and not found.st_mode & 0o077


class RunFolder:
    """`root`/<id>, locked from its making to `remove`; the lock also falls when this process dies.

    `files` (default: the folder itself) is where the log and the model's run-time files go; it is kept if it was given.
    Raises SetupError when a folder cannot be written, or another live run has its files in `files`.
    """

    def __init__(self, root: Path, *, files: Path | None = None, shared_memory: Path = SHARED_MEMORY) -> None:
        self.id = secrets.token_hex(8)
        self.path = root / self.id
        self.files = files or self.path
        self.log_path = self.files / "server.log"
        self._shared_memory = shared_memory
        self._locks: list[int] = []
        try:
            with writing_to(root):
                root.mkdir(parents=True, exist_ok=True)
                if files is not None:
                    self._locks.append(_own(files))
                with _alone(root):
                    _sweep(root, shared_memory, LEAVE_SECONDS)
                    self.path.mkdir(mode=0o700)
                    self._locks += filter(None, [_lock(self.path, create=True)])
                (self.path / _PLACE).write_text(str(self.files))
            with writing_to(self.files):
                self._remove_traces()
                self.log_path.write_bytes(b"")
        except BaseException:
            shutil.rmtree(self.path, ignore_errors=True)
            self._unlock()
            raise

    @property
    def prefix(self) -> str:
        """What the names of this run's shared memory regions start with."""
        return prefix(self.id)

    @property
    def kept_log_path(self) -> Path:
        """Where the log will lie behind `remove(failed=True)`."""
        return self.log_path if self.files != self.path else self.path.parent / KEPT_LOG

    def log_size(self) -> int:
        """Bytes of the log; one that somebody has removed is begun again."""
        with writing_to(self.files):
            self.log_path.touch()
            return self.log_path.stat().st_size

    def read_log(self, start: int = 0) -> str:
        """The log from byte `start` on, its last 64 KiB at most; "" if it is gone."""
        try:
            with self.log_path.open("rb") as log:
                size = log.seek(0, os.SEEK_END)
                log.seek(max(start, size - _LOG_BYTES))
                return log.read().decode(errors="replace")
        except FileNotFoundError:
            return ""

    def clear(self) -> None:
        """Remove all that a server of this run left, but for its log: the next one may use the folder."""
        end_processes(self.id, LEAVE_SECONDS)
        _remove_shared_memory(self.id, self._shared_memory)
        self._remove_traces()

    def remove(self, *, failed: bool = False) -> None:
        """Remove shared memory and folder, and give up the lock; with `failed` the log stays at `kept_log_path`."""
        self.clear()
        kept = self.kept_log_path
        with _alone(self.path.parent):  # else a sweep could take a folder without its lock file for a dead run
            if failed and kept != self.log_path:
                _keep_log(self.path)
                self.log_path = kept
            shutil.rmtree(self.path, ignore_errors=True)
        self._unlock()

    def _remove_traces(self) -> None:
        with suppress(OSError):  # what cannot be removed will look dead, and that is told by name
            remove_heartbeats(self.files)
            withdraw(self.files)

    def _unlock(self) -> None:
        while self._locks:
            os.close(self._locks.pop())


def live_files(root: Path) -> list[Path]:
    """Where the heartbeats of every live run under `root` are."""
    found = []
    for place in sorted(root.glob(f"*/{_PLACE}")):
        with suppress(OSError):  # gone meanwhile
            if _is_locked(place.parent):
                found.append(Path(place.read_text()))
    return found


def prefix(run_id: str) -> str:
    """What the names of the run's shared memory regions start with."""
    return f"tokenstream_{run_id}_"


def sweep(root: Path, *, shared_memory: Path = SHARED_MEMORY, patience: float = LEAVE_SECONDS) -> list[str]:
    """Clear away every dead run under `root`; return their ids.

    Waits up to `patience` seconds for the processes of each to leave by themselves, and then kills them.
    Raises SetupError when `root` cannot be written.
    """
    with writing_to(root):
        root.mkdir(parents=True, exist_ok=True)
        with _alone(root):
            return _sweep(root, shared_memory, patience)


def processes(run_id: str) -> list[int]:
    """Living processes of the run: those whose environment says so.

    Other users' processes cannot be seen, nor one in the middle of an exec: for a moment it has no environment.
    """
    mark = f"{RUN_ID}={run_id}".encode()
    found = []
    for environ in Path("/proc").glob("[0-9]*/environ"):
        with suppress(OSError):  # gone, or another user's; a zombie's environment is empty
            if mark in environ.read_bytes().split(b"\0"):
                found.append(int(environ.parent.name))
    return found


def end_processes(run_id: str, patience: float) -> None:
    """Wait up to `patience` seconds until the run's processes are gone, then kill what is left of them."""
    deadline = time.monotonic() + patience
    while left := processes(run_id):
        if time.monotonic() > deadline + patience:
            return
        if time.monotonic() > deadline:
            for pid in left:
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
        time.sleep(_LOOK_SECONDS)


def _sweep(root: Path, shared_memory: Path, patience: float) -> list[str]:
    swept = []
    for folder in sorted(path for path in root.iterdir() if path.is_dir() and _ID.fullmatch(path.name)):
        lock = _lock(folder, create=False)
        if lock is None and (folder / "lock").exists():
            continue  # a live one; a folder without a lock file is one whose making was cut short
        end_processes(folder.name, patience)
        _remove_shared_memory(folder.name, shared_memory)
        _keep_log(folder)
        shutil.rmtree(folder, ignore_errors=True)
        if lock is not None:
            os.close(lock)
        swept.append(folder.name)
    return swept


@contextmanager
def _alone(root: Path) -> Iterator[None]:
    """Hold the root's lock, so that nobody takes a folder that is being made for a dead one."""
    lock = os.open(root / ".lock", os.O_RDWR | os.O_CREAT, 0o600)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield
    finally:
        os.close(lock)


def _lock(folder: Path, *, create: bool) -> int | None:
    """The descriptor that holds the folder's lock; None if another process holds it, or there is no lock file."""
    try:
        lock = os.open(folder / "lock", os.O_RDWR | (os.O_CREAT if create else 0), 0o600)
    except FileNotFoundError:
        return None
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(lock)
        return None
    return lock


def _own(files: Path) -> int:
    """Make `files` and lock it: two servers in one folder would take each other's files for their own."""
    with writing_to(files):
        files.mkdir(parents=True, exist_ok=True)
        lock = _lock(files, create=True)
    if lock is None:
        raise SetupError(f"the run folder {files} belongs to another server that runs: give each its own")
    return lock


def _is_locked(folder: Path) -> bool:
    """Whether another process, or another descriptor of this one, holds the folder's lock."""
    lock = os.open(folder / "lock", os.O_RDONLY)
    try:
        fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(lock)
    return False


def _remove_shared_memory(run_id: str, folder: Path) -> None:
    for region in folder.glob(f"{prefix(run_id)}*"):
        region.unlink(missing_ok=True)


def _keep_log(folder: Path) -> None:
    with suppress(FileNotFoundError):
        (folder / "server.log").replace(folder.parent / KEPT_LOG)

"""Why a server could not be started, in one line with its cure: the two errors, and the reading of server logs.

`explain` turns what tritonserver wrote into that line, `taken_port` says which port another program holds.
It does not know how a server is started, and reads text that it is given.
"""

from __future__ import annotations

import errno
import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from .errors import TokenstreamError

_LOG_BYTES = 1 << 20  # of free space under which a log may have been cut


class SetupError(TokenstreamError):
    """A server cannot be started here. The message is one line: what is wrong, with which value, and the cure."""


class ServerFailed(SetupError):  # noqa: N818 (the name says it)
    """The server ended, or was not ready in time.

    `tail` holds the last lines of its log; `log_path` is where all of it lies once the server was stopped.
    """

    def __init__(self, message: str, tail: tuple[str, ...], log_path: Path) -> None:
        super().__init__(message)
        self.tail = tail
        self.log_path = log_path


@contextmanager
def writing_to(folder: Path) -> Iterator[None]:
    """Turn an OSError met while writing under `folder` into a SetupError that names it and says what to do."""
    try:
        yield
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            cure = "free some, or set TOKENSTREAM_CACHE to a folder on another disk"
            raise SetupError(f"no space is left for {folder}: {cure}") from error
        cure = "set TOKENSTREAM_CACHE to a folder that you can write to"
        raise SetupError(f"cannot write to {folder} ({error.strerror}): {cure}") from error


_TAKEN = re.compile(r"failed to start (\w+) service: .*Socket '[^']*:(\d+)' already in use")
_LOAD_FAILED = re.compile(r"failed to load '([^']+)' version \d+: (.*)")
_REFUSED_CONFIG = re.compile(r"Poll failed for model directory '([^']+)': (.*)")
_FATAL = re.compile(r"error: creating server: (.*)")
_TRITONS = re.compile(r"[IWEF]\d{4} |[+|]|error: creating server")
_COMPLAINT = re.compile(
    r"(?i)error|exception|fatal|abort|fault|terminate|illegal|undefined symbol|cannot|can't|what\(\)|\bno such\b"
)
_QUOTE = 300  # characters of somebody's last words
_NOISE = re.compile(r"^(?:(?:Internal|Invalid argument|Unavailable|TritonModelException|RuntimeError): )+")


def taken_port(log: str) -> int | None:
    """The port that made the server give up because another program listens on it; None if that was not it."""
    found = _TAKEN.search(log)
    return int(found[2]) if found else None


def full_disk(folder: Path) -> str | None:
    """One line if `folder` has no room left even for a log, so that the log could not say it."""
    free = shutil.disk_usage(folder).free
    if free >= _LOG_BYTES:
        return None
    return f"no space left in {folder} ({free >> 10} KiB free): free some, or set TOKENSTREAM_CACHE to another folder"


def explain(log: str, *, out_of_memory: bool = False) -> str | None:
    """One line that says why the server of this log gave up, with the cure where one is known; None if unknown.

    `out_of_memory` says that the kernel killed a process for lack of memory meanwhile.
    """
    if found := _TAKEN.search(log):
        return f"{found[1]} port {found[2]} is taken by another program: choose another one, or 0 for a free one"
    if "compiled using NumPy 1.x cannot be run in" in log or "_ARRAY_API not found" in log:
        return "the server's Python imports numpy 2, which Triton's Python stub cannot use: pip install 'numpy<2'"
    if found := _LOAD_FAILED.search(log):
        return f"model {found[1]!r} failed to load: {_model_error(found[2], log, out_of_memory)}"
    if found := _REFUSED_CONFIG.search(log):
        return f"model {found[1]!r} was refused: {_first_line(found[2])}"
    if found := _FATAL.search(log):
        return f"the server could not start: {_first_line(found[1])}"
    return None


def _model_error(text: str, log: str, out_of_memory: bool) -> str:
    if "shared memory" in text and "No space left on device" in text:
        return "/dev/shm is full: free some, or give the container more with --shm-size=1g"  # noqa: S108
    if "is not healthy" in text:
        return f"its process died while it loaded; {_why_it_died(log, out_of_memory)}"
    return _NOISE.sub("", _first_line(text))


def _why_it_died(log: str, out_of_memory: bool) -> str:
    """Why a process died that its server knows to be dead alone: memory only if the kernel says so or nobody else."""
    if out_of_memory:
        return "meanwhile the kernel killed a process for lack of memory: free some, or load a smaller model"
    said = [line.strip() for line in log.splitlines() if not _TRITONS.match(line) and _COMPLAINT.search(line)]
    if said:
        return f"it said: {said[-1][:_QUOTE]}"
    return "it did not say why, as one that is killed for lack of memory would not (dmesg tells)"


def _first_line(text: str) -> str:
    """Cut what Triton quotes: a traceback behind an escaped empty line, and the closing quotation mark."""
    return text.split("\\n")[0].split("\n")[0].rstrip('"; ')

"""A child process that cannot outlive this one, whatever kills this one; it runs under `_keeper.py`.

`terminate` and `kill` never hit a foreign process, and `kill` takes the child's own children along.
It knows nothing of Triton, and prints nothing: what the child says goes to a log file or to `lines`.
"""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

_KEEPER = Path(__file__).with_name("_keeper.py")
_KILL_SECONDS = 10.0  # more than the keeper itself takes to clear away what does not want to go
_ANSWER_SECONDS = 30.0  # a keeper answers in tens of milliseconds; a machine that swaps may take longer


class Process:
    """`command`, running in a session of its own, with standard error (and output, unless `pipe`) appended to `log`.

    Raises OSError when the process cannot be made. A command that cannot be executed ends with code 127.
    """

    def __init__(self, command: Sequence[str], env: Mapping[str, str], log: Path, *, pipe: bool = False) -> None:
        read_end, self._lifeline = os.pipe()
        status_read, status_write = os.pipe()
        try:
            with log.open("ab") as log_file:
                self._popen = subprocess.Popen(
                    [sys.executable, "-I", "-S", str(_KEEPER), str(status_write), *command],
                    stdin=read_end,
                    stdout=subprocess.PIPE if pipe else log_file,
                    stderr=log_file,
                    env=env,
                    pass_fds=[status_write],
                    start_new_session=True,  # a terminal's Ctrl-C reaches this process alone, which passes it on
                )
            os.close(status_write)
            status_write = -1
            self.pid = _read_pid(status_read)
        except BaseException:
            os.close(self._lifeline)
            raise
        finally:
            for fd in (read_end, status_read, status_write):
                if fd >= 0:
                    os.close(fd)

    @property
    def returncode(self) -> int | None:
        """Exit code, negative for a signal; None while it runs."""
        return self._popen.poll()

    def wait(self, timeout: float) -> int | None:
        """The exit code as soon as there is one, or None after `timeout` seconds."""
        try:
            return self._popen.wait(timeout)
        except subprocess.TimeoutExpired:
            return None

    def terminate(self) -> None:
        """Ask the command to end (SIGTERM)."""
        self._popen.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        """Kill the command and all its children; its end is seen through `wait`."""
        if self._lifeline >= 0:
            os.close(self._lifeline)
            self._lifeline = -1

    def lines(self, poll: float) -> Iterator[str | None]:
        """Lines of standard output until it closes, and None whenever `poll` seconds pass without one."""
        stdout = self._popen.stdout
        if stdout is None:
            raise ValueError("lines() needs a process made with pipe=True")
        pending = b""
        while True:
            if not select.select([stdout], [], [], poll)[0]:
                yield None
                continue
            data = os.read(stdout.fileno(), 65536)
            if not data:
                break
            *whole, pending = (pending + data).split(b"\n")
            yield from (line.decode(errors="replace") for line in whole)
        if pending:
            yield pending.decode(errors="replace")

    def close(self, grace: float) -> int:
        """End the process: SIGTERM, then after `grace` seconds a kill; return its exit code."""
        if self.returncode is None:
            self.terminate()
        if self.wait(grace) is None:
            self.kill()
            if self.wait(_KILL_SECONDS) is None:
                self._popen.kill()
        code = self._popen.wait()
        self.kill()  # nothing runs any more: this closes the pipe
        if self._popen.stdout is not None:
            self._popen.stdout.close()
        return code


def memory_kills() -> int:
    """How many processes the kernel has killed on this machine for lack of memory; 0 if it does not count them."""
    try:
        lines = Path("/proc/vmstat").read_text().splitlines()
    except OSError:
        return 0
    return next((int(line.split()[1]) for line in lines if line.startswith("oom_kill ")), 0)


def _read_pid(fd: int) -> int:
    """The command's process id from the keeper; OSError when the keeper ended, or said nothing in time."""
    answer, deadline = b"", time.monotonic() + _ANSWER_SECONDS
    while not answer.endswith(b"\n"):
        ready = select.select([fd], [], [], max(0.0, deadline - time.monotonic()))[0]
        data = os.read(fd, 64) if ready else b""
        if not data:
            raise OSError("a child process could not be started")
        answer += data
    return int(answer)

"""Runs one command so that nothing of it outlives the process that asked for it: `_keeper.py STATUS_FD COMMAND...`.

Standard input is a pipe whose other end the asking process holds open; when it closes, by intent or by a kill -9, the
command is killed. Whatever the command leaves behind (a Python stub, a compiler) is reaped here, for a container's
first process often reaps nobody and a stub takes a zombie for a living parent. SIGTERM and SIGINT are passed on; the
command's process id is written to STATUS_FD, and its end (exit code or signal) becomes the keeper's own.

It knows nothing of Triton, and is run by path with `python -I -S`, so it imports the standard library alone.
"""

from __future__ import annotations

import ctypes
import os
import resource
import select
import signal
import sys
import time
from contextlib import suppress
from pathlib import Path

PR_SET_PDEATHSIG = 1
PR_SET_CHILD_SUBREAPER = 36
POLL_SECONDS = 0.2
LEAVE_SECONDS = 1.5  # a stub looks for its server every 0.3 s
STACK_BYTES = 256 << 20  # of address space for each thread, touched only as far as it is used
KILL_SECONDS = 5.0
LIFELINE = 0
WATCHED = {signal.SIGTERM, signal.SIGINT, signal.SIGCHLD}


def main(arguments: list[str]) -> None:
    """Run the command, wait for its end, clear away what it left, and end the same way."""
    status_fd, command = int(arguments[0]), arguments[1:]
    signal.pthread_sigmask(signal.SIG_BLOCK, WATCHED)
    for number in WATCHED:
        signal.signal(number, signal.SIG_DFL)  # an inherited "ignore" would reach the command, and hide its end
    prctl = ctypes.CDLL(None).prctl
    prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    keeper = os.getpid()
    child = os.fork()  # safe: this process has one thread
    if child == 0:
        prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        _execute(command, status_fd, keeper)
    with suppress(BrokenPipeError):  # the asking process is gone already; the lifeline tells the same
        os.write(status_fd, f"{child}\n".encode())
    os.close(status_fd)
    status = _watch(child)
    _clear()
    _end_with(status)


def _execute(command: list[str], status_fd: int, keeper: int) -> None:
    """Become the command; never returns."""
    try:
        if os.getppid() == keeper:  # else the keeper died before PDEATHSIG was set
            os.close(status_fd)
            null = os.open(os.devnull, os.O_RDONLY)
            os.dup2(null, LIFELINE)
            signal.pthread_sigmask(signal.SIG_UNBLOCK, WATCHED)
            signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # Python's own "ignore" would reach the command
            _raise_stack_limit()
            os.execvp(command[0], command)  # noqa: S606 (no shell is wanted)
    except OSError as error:
        os.write(2, f"cannot run {command[0]}: {error.strerror}\n".encode())
    finally:
        os._exit(127)


def _raise_stack_limit() -> None:
    """Give the server's threads room: its parser of HTTP forms recurses, and 8 MB would overflow 8 MiB of stack."""
    soft, hard = resource.getrlimit(resource.RLIMIT_STACK)
    wanted = STACK_BYTES if hard == resource.RLIM_INFINITY else min(STACK_BYTES, hard)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_STACK, (wanted, hard))


def _watch(child: int) -> int:
    """Wait for the child's end and return its wait status; pass on signals, and kill it when the lifeline closes."""
    while True:
        caught = signal.sigtimedwait(WATCHED, POLL_SECONDS)
        if caught is not None and caught.si_signo != signal.SIGCHLD:
            os.kill(child, signal.SIGTERM)
        if select.select([LIFELINE], [], [], 0)[0]:  # nothing is ever written to it, so this is its end
            os.kill(child, signal.SIGKILL)
        while True:
            pid, status = os.waitpid(-1, os.WNOHANG)
            if pid == child:
                return status
            if pid == 0:
                break


def _clear() -> None:
    """Let the command's orphans leave by themselves for a moment, then kill them; return when none is left."""
    started = time.monotonic()
    while (waited := time.monotonic() - started) < KILL_SECONDS:
        try:
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        except ChildProcessError:
            return
        if waited > LEAVE_SECONDS:
            for pid in _children():
                os.kill(pid, signal.SIGKILL)  # ours and not reaped yet, so the number cannot be another's
        signal.sigtimedwait({signal.SIGCHLD}, 0.05)


def _children() -> list[int]:
    """Process ids whose parent is this process."""
    found = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):  # gone meanwhile
            parent = int(stat.read_text().rpartition(")")[2].split()[1])
            if parent == os.getpid():
                found.append(int(stat.parent.name))
    return found


def _end_with(status: int) -> None:
    """End like the command did: with its exit code, or by its signal (without a second core dump)."""
    code = os.waitstatus_to_exitcode(status)
    if code < 0:
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        if -code not in (signal.SIGKILL, signal.SIGSTOP):
            signal.signal(-code, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {-code})
        os.kill(os.getpid(), -code)
    os._exit(code)


if __name__ == "__main__":
    main(sys.argv[1:])

"""A real tritonserver on this machine: started from the nvidia-pytriton wheel, watched, drained and taken down whole.

`TritonServer` lays out and starts one, `serve_until_signal` keeps one up for a command line. Nothing of a server
outlives this process, however this process ends, and the next start removes what a killed one left on disk and in
shared memory; servers of one user do not touch each other. It prints nothing and does not know what the models do.
"""

from __future__ import annotations

import os
import resource
import time
from collections.abc import Mapping, Sequence
from dataclasses import astuple, dataclass
from pathlib import Path
from types import TracebackType
from typing import Protocol, Self

from .diagnosis import ServerFailed, SetupError, explain, full_disk, taken_port
from .drain import POLL_SECONDS, Drain
from .heartbeat import Pulse, lives
from .layout import Layout, cache_root, check_path, locate
from .ports import Ports, choose_ports
from .prepare import prepare
from .process import Process, memory_kills
from .repository import find_repository, read_repository
from .runfolder import RUN_ID, RunFolder, run_root, sweep
from .supervise import Interrupted, OnDrain, serve_until_signal
from .tritonserver import check_open_files, command_line, ready_models

__all__ = [
    "Interrupted",
    "Progress",
    "ServerFailed",
    "SetupError",
    "TritonServer",
    "cache_root",
    "find_repository",
    "serve_until_signal",
    "sweep",
]

_POLL_SECONDS = 0.1
_PORT_ATTEMPTS = 4
_TAIL_LINES = 20
_LOADING_EXIT_SECONDS = 5.0  # a server that is still loading has no streams worth waiting for


class Progress(Protocol):
    """Hears what a start is doing: a stage's name, how much of it is done, of how much (None: unknown), and seconds."""

    def __call__(self, stage: str, done: int, total: int | None, elapsed: float) -> None:
        """Called from the thread that called `start` or `wait_ready`, at least once a stage."""


@dataclass(frozen=True, slots=True)
class _Run:
    """What one start has laid out: it holds from `start` to `stop`, and a second attempt uses it again."""

    models: tuple[str, ...]
    layout: Layout
    folder: RunFolder
    backends: Path
    env: Mapping[str, str]


class TritonServer:
    """One tritonserver. As a context manager it is ready inside the `with`, and gone behind it.

    Ports of 0 are replaced by free ones; they are final once `wait_ready` has returned. `model_names` limits what is
    loaded (default: all). `run_dir` is where the log goes and what the model finds as TOKENSTREAM_RUN_DIR; if given it
    is kept, else it is a folder in the cache that `stop` removes (a failed server's log stays as `last-failed.log`).
    `env` is added to this process's environment, `extra_args` to the command line. A stop first drains the models that
    can: it lets live requests go on for `drain_seconds` (default: it ends them at once) and ends the rest;
    `exit_timeout` is how many seconds Triton then waits for what other models do. A server is started once, and may be
    restarted. Its methods belong to one thread, except `interrupt`.
    """

    def __init__(
        self,
        repository: Path,
        *,
        host: str = "127.0.0.1",
        http_port: int = 0,
        grpc_port: int = 0,
        metrics_port: int = 0,
        model_names: Sequence[str] | None = None,
        run_dir: Path | None = None,
        env: Mapping[str, str] | None = None,
        extra_args: Sequence[str] = (),
        progress: Progress | None = None,
        exit_timeout: int = 30,
        drain_seconds: float = 0.0,
    ) -> None:
        self.repository = repository.absolute()
        self.host = host
        self.model_names = model_names
        self.ports = self._asked_ports = Ports(http_port, grpc_port, metrics_port)
        self._run_dir = run_dir.absolute() if run_dir else None
        self._env: dict[str, str] = {**os.environ, **(env or {})}
        self._extra_args = tuple(extra_args)
        self._progress = progress
        self._exit_timeout = exit_timeout
        self._drain_seconds = drain_seconds
        self._run: _Run | None = None
        self._process: Process | None = None
        self._pulse: Pulse | None = None
        self._attempts = 0
        self._log_start = 0
        self._memory_kills = 0
        self._began = 0.0
        self._ready = False
        self._failed = False
        self._stopped = False
        self._interrupts = 0

    def __enter__(self) -> Self:
        """Start, and wait until it is ready; what fails is taken down again."""
        try:
            self.start()
            self.wait_ready()
        except BaseException:
            self.stop()
            raise
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        """Stop."""
        self.stop()

    @property
    def address(self) -> str:
        """Where a client on this machine reaches the server."""
        return "127.0.0.1" if self.host == "0.0.0.0" else self.host  # noqa: S104 (compared, not bound)

    @property
    def http_url(self) -> str:
        """Base URL of the HTTP service."""
        return f"http://{self.address}:{self.ports.http}"

    @property
    def grpc_url(self) -> str:
        """HOST:PORT of the gRPC service."""
        return f"{self.address}:{self.ports.grpc}"

    @property
    def metrics_url(self) -> str:
        """URL of the Prometheus metrics."""
        return f"http://{self.address}:{self.ports.metrics}/metrics"

    @property
    def pid(self) -> int:
        """Process id of tritonserver itself."""
        return self._running().pid

    @property
    def returncode(self) -> int | None:
        """Its exit code, negative for a signal; None while it runs, or was never started."""
        return self._process.returncode if self._process else None

    @property
    def log_path(self) -> Path:
        """What the server and its models write; behind a good end without `run_dir` the file is gone."""
        return self._laid_out().folder.log_path

    def tail(self, lines: int = _TAIL_LINES) -> list[str]:
        """The last lines of the log (of its last 64 KiB)."""
        return self._laid_out().folder.read_log().splitlines()[-lines:]

    def interrupt(self) -> None:
        """End whatever `start`, `wait_ready` or `wait` is doing with Interrupted; called again: make `stop` kill.

        Safe in a signal handler and from any thread: it takes no lock, and the waiting thread acts within 0.1 s.
        """
        self._interrupts += 1

    def start(self) -> None:
        """Lay out, prepare the weights, and start the process; does nothing if that was done.

        Raises SetupError in one line with its cure, Interrupted after `interrupt`.
        """
        if self._stopped:
            raise RuntimeError("a server is started once: make another one")
        if self._run is not None:
            return
        check_open_files(resource.getrlimit(resource.RLIMIT_NOFILE)[0])
        self._began = time.monotonic()
        self._report("layout", 0, None)
        models = read_repository(self.repository, self.model_names, self._env)
        layout = locate()
        cache = cache_root(self._env)
        check_path(self.repository, "the model repository", "move it, or link to it from elsewhere")
        check_path(cache, "the cache folder", "name another with TOKENSTREAM_CACHE")
        root = run_root(cache, self._run_dir, self._env)
        check_path(root, "the run folder", "name another with --run-dir")
        folder = RunFolder(root, files=self._run_dir)
        marks = {"TOKENSTREAM_CACHE": str(cache), "TOKENSTREAM_RUN_DIR": str(folder.files), RUN_ID: folder.id}
        names = tuple(model.name for model in models)
        self._run = _Run(names, layout, folder, folder.path / "backends", {**self._env, **marks})
        try:
            choose_ports(self.host, self._asked_ports)  # behind the sweep, which frees them, and before long work
            layout.link(self._run.backends)
            for model in models:
                self._check_interrupt()
                prepare(model, self._run.env, folder.log_path, self._report, self._check_interrupt)
            self._check_interrupt()
            self._report("start", 0, None)
            self._spawn()
        except BaseException as error:
            self._failed = isinstance(error, SetupError)
            self.stop()
            raise

    def wait_ready(self, timeout: float = 600.0) -> None:
        """Return when every model answers that it is ready; each look reports the stage "load" with models and seconds.

        Raises ServerFailed with the last lines of the log when the server ends or `timeout` seconds pass, Interrupted
        after `interrupt`. If somebody took a port that was free when it was chosen, the server starts anew on others.
        """
        began = time.monotonic()
        while True:
            self._check_interrupt()
            process = self._running()
            if process.returncode is not None:
                self._start_anew(process.returncode)
                continue
            run = self._laid_out()
            ready = ready_models(self.address, self.ports.http, run.folder.id, run.models)
            self._report("load", ready, len(run.models))
            if ready == len(run.models) and process.returncode is None:
                self._ready = True
                return
            if time.monotonic() - began > timeout:
                raise self._failure(f"the server was not ready after {timeout:.0f} s: see its log, or wait longer")
            process.wait(_POLL_SECONDS)

    def wait(self) -> int:
        """The exit code, once the server ends by itself; Interrupted after `interrupt`."""
        process = self._running()
        while (code := process.wait(_POLL_SECONDS)) is None:
            self._check_interrupt()
        return code

    @property
    def was_ready(self) -> bool:
        """Whether all models have been ready, since the last start."""
        return self._ready

    def fault(self) -> str | None:
        """Why the server cannot serve any more, None if it can: it ended, or an instance is dead, silent or stalled."""
        process = self._running()
        if process.returncode is not None:
            return f"the server {_how(process.returncode)} while it was serving{self._memory_note()}"
        if self._pulse is None or not lives(process.pid):  # its keeper clears away what it left, and then tells
            return None
        found = self._pulse.fault()
        return None if found is None else f"{found}{self._memory_note()}"

    def death(self, message: str) -> ServerFailed:
        """The failure that says `message` of a server that is to be restarted; its log goes on where it is."""
        self._failed = True
        return ServerFailed(message, tuple(self.tail()), self.log_path)

    def pause(self, seconds: float) -> None:
        """Wait; Interrupted after `interrupt`."""
        deadline = time.monotonic() + seconds
        while True:
            self._check_interrupt()
            if (left := deadline - time.monotonic()) <= 0:
                return
            time.sleep(min(left, _POLL_SECONDS))

    def kill(self) -> None:
        """Take the server down at once with all that it started, and remove what it left but its log and folder."""
        self._running().close(0)
        self._ready = False
        self._laid_out().folder.clear()

    def restart(self) -> None:
        """Start the server again behind `kill`, on the same ports; SetupError if they are taken. Then `wait_ready`."""
        self._asked_ports = self.ports
        self._report("start", 0, None)
        self._spawn()

    def stop(self, timeout: float | None = None, *, on_drain: OnDrain | None = None) -> int:
        """Drain the server, take it down, remove what it left, and return its exit code (0 if it was never started).

        `on_drain` hears of live requests and seconds as a drain begins. Behind it comes SIGTERM; after `timeout`
        seconds (default: a little over `exit_timeout`, or 5 while it still loads), or a second `interrupt`, or at once
        if an instance is dead or hangs, it is killed with all that it started. A second stop only returns the code.
        """
        if self._run is None or self._stopped:
            return self.returncode or 0
        self._stopped = True
        if self._process is not None:
            self._failed |= (self._process.returncode or 0) != 0
            grace = self._grace() if timeout is None else timeout
            if self._ready and self._process.returncode is None and not self._drain(self._process, on_drain):
                grace = 0.0
            self._end(self._process, grace)
        self._run.folder.remove(failed=self._failed)
        return self.returncode or 0

    def _drain(self, process: Process, on_drain: OnDrain | None) -> bool:
        """Drain the models that can; whether the server is still fit to end in order."""
        try:
            drain = Drain([self._laid_out().folder.files], self._drain_seconds)
        except OSError:  # a full disk must not keep a server from ending
            return True
        if drain.instances and on_drain is not None:
            on_drain(drain.live, self._drain_seconds)
        while not drain.over() and self._interrupts < 2 and process.wait(POLL_SECONDS) is None:
            if self.fault() is not None:  # nobody is there who could end its streams
                break
        return self.fault() is None

    def _end(self, process: Process, grace: float) -> None:
        if process.returncode is None:
            process.terminate()
        deadline = time.monotonic() + grace
        while process.wait(_POLL_SECONDS) is None:
            if time.monotonic() > deadline or self._interrupts > 1:
                self._failed = True
                break
        process.close(0)

    def _grace(self) -> float:
        return self._exit_timeout + 5.0 if self._ready else _LOADING_EXIT_SECONDS

    def _spawn(self) -> None:
        run = self._laid_out()
        self._attempts += 1
        self.ports = choose_ports(self.host, self._asked_ports)
        self._log_start = run.folder.log_size()
        self._memory_kills = memory_kills()
        command = command_line(
            run.layout,
            repository=self.repository,
            backends=run.backends,
            server_id=run.folder.id,
            shared_memory_prefix=run.folder.prefix,
            host=self.host,
            ports=self.ports,
            model_names=self.model_names,
            exit_timeout=self._exit_timeout,
        )
        try:
            self._process = Process([*command, *self._extra_args], run.layout.environment(run.env), self.log_path)
        except OSError as error:
            raise SetupError(f"tritonserver cannot be started ({error}): see {self.log_path}") from error
        self._pulse = Pulse(run.folder.files)

    def _start_anew(self, code: int) -> None:
        """Start again if a port of our own choice was lost to another program; else raise ServerFailed."""
        log = self._laid_out().folder.read_log(self._log_start)
        port = taken_port(log)
        ours = port is not None and port not in astuple(self._asked_ports)
        if not ours or self._attempts >= _PORT_ATTEMPTS:
            reason = explain(log, out_of_memory=self._memory_ran_out()) or full_disk(self.log_path.parent)
            raise self._failure(reason or f"the server {_how(code)} before it was ready: see its log")
        self._running().close(0)
        self._spawn()

    def _failure(self, message: str) -> ServerFailed:
        self._failed = True
        return ServerFailed(message, tuple(self.tail()), self._laid_out().folder.kept_log_path)

    def _memory_ran_out(self) -> bool:
        return memory_kills() > self._memory_kills

    def _memory_note(self) -> str:
        return ", and since its start the kernel killed a process for lack of memory" if self._memory_ran_out() else ""

    def _report(self, stage: str, done: int, total: int | None) -> None:
        if self._progress is not None:
            self._progress(stage, done, total, time.monotonic() - self._began)

    def _check_interrupt(self) -> None:
        if self._interrupts:
            raise Interrupted

    def _laid_out(self) -> _Run:
        if self._run is None:
            raise RuntimeError("the server was not started")
        return self._run

    def _running(self) -> Process:
        if self._process is None:
            raise RuntimeError("the server was not started")
        return self._process


def _how(code: int) -> str:
    return f"was killed by signal {-code}" if code < 0 else f"ended with exit code {code}"

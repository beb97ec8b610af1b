"""`tokenstream serve` in a process of its own, read line by line, with its run folder in the test's hands.

Whatever a test does to the server, it is gone behind the `with`. It does not know what the models do.
"""

from __future__ import annotations

import contextlib
import json
import os
import queue
import re
import signal
import subprocess
import sys
import textwrap
import threading
from pathlib import Path
from types import TracebackType
from typing import IO, Any, Self

import tokenstream
from tokenstream.heartbeat import Heartbeat, read_heartbeats
from waiting import WAIT, eventually

COMMAND = [sys.executable, "-c", "from tokenstream.cli import main; main()"]
ENVIRONMENT = {**os.environ, "PYTHONPATH": str(Path(tokenstream.__file__).parent.parent)}

# For a model of `supervised`: beats, drains at once, stalls when told to.
BEATING = textwrap.indent(
    """
import json, threading
run, instance = os.environ["TOKENSTREAM_RUN_DIR"], args["model_instance_name"]
path = f"{run}/heartbeat-{instance}"
def beat():
    while True:
        with open(path + ".new", "w") as new:
            stalled = os.path.exists(f"{run}/stall-{os.getpid()}")
            draining = os.path.exists(f"{run}/drain")
            json.dump(dict(pid=os.getpid(), at=time.time(), live=0, stalled=stalled, draining=draining), new)
        os.replace(path + ".new", path + ".json")
        time.sleep(0.1)
threading.Thread(target=beat, daemon=True).start()
""",
    " " * 8,
).strip()


class Serving:
    """The command on free ports; `run_dir` holds its log and heartbeats. Inside the `with` it is ready."""

    def __init__(self, run_dir: Path, *options: str) -> None:
        self.run_dir = run_dir
        ports = ("--http-port", "0", "--grpc-port", "0", "--metrics-port", "0")
        arguments = [*COMMAND, "serve", *ports, "--run-dir", str(run_dir), *options]
        self.process = subprocess.Popen(
            arguments, env=ENVIRONMENT, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE
        )
        self._out, self._err = _lines(self.process.stdout), _lines(self.process.stderr)
        self.grpc_url = self.http_url = ""

    def __enter__(self) -> Self:
        try:
            self.grpc_url = self.says(r"gRPC +(\S+)")[1]
            self.http_url = self.says(r"HTTP +(\S+)")[1]
        except BaseException:
            self._end()
            raise
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self._end()

    def says(self, pattern: str) -> re.Match[str]:
        """The next line of standard output with the pattern."""
        return _find(self._out, pattern)

    def complains(self, pattern: str) -> re.Match[str]:
        """The next line of standard error with the pattern."""
        return _find(self._err, pattern)

    def complaints(self) -> list[str]:
        """All further lines of standard error, once the command has ended."""
        return list(iter(lambda: self._err.get(timeout=WAIT), None))

    def beat(self) -> Heartbeat:
        """The heartbeat of its one instance; the first one comes a moment after the server is ready."""
        eventually(lambda: bool(read_heartbeats(self.run_dir)))
        (beat,) = read_heartbeats(self.run_dir)
        return beat

    def server_pid(self) -> int:
        """Process id of tritonserver, the parent of the stub."""
        return int(Path(f"/proc/{self.beat().pid}/stat").read_text().rpartition(")")[2].split()[1])

    def run_id(self) -> str:
        """What the names of its shared memory bear."""
        environ = Path(f"/proc/{self.beat().pid}/environ").read_bytes().split(b"\0")
        (mark,) = (entry for entry in environ if entry.startswith(b"TOKENSTREAM_RUN_ID="))
        return mark.decode().partition("=")[2]

    def end(self, signum: signal.Signals = signal.SIGTERM) -> int:
        """Send the signal; the command's exit code."""
        self.process.send_signal(signum)
        return self.process.wait(WAIT)

    def _end(self) -> None:
        if self.process.poll() is None:
            for _ in range(2):  # the second one kills
                self.process.send_signal(signal.SIGTERM)
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.process.wait(WAIT)
        self.process.kill()
        self.process.wait()


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    """Another command, to its end."""
    return subprocess.run(
        [*COMMAND, *arguments], env=ENVIRONMENT, capture_output=True, text=True, timeout=WAIT, check=False
    )


def ready(http_url: str, model: str) -> bool:
    """Whether the model answers that it is ready."""
    import http.client

    connection = http.client.HTTPConnection(http_url.removeprefix("http://"), timeout=5)
    try:
        connection.request("GET", f"/v2/models/{model}/ready")
        return connection.getresponse().status == 200
    except OSError:
        return False
    finally:
        connection.close()


def _lines(stream: IO[bytes] | None) -> queue.SimpleQueue[str | None]:
    assert stream is not None
    lines: queue.SimpleQueue[str | None] = queue.SimpleQueue()

    def read() -> None:
        with stream:
            for line in stream:
                lines.put(line.decode().rstrip("\n"))
        lines.put(None)

    threading.Thread(target=read, daemon=True).start()
    return lines


def _find(lines: queue.SimpleQueue[str | None], pattern: str) -> re.Match[str]:
    seen: list[Any] = []
    while (line := lines.get(timeout=WAIT)) is not None:
        if found := re.search(pattern, line):
            return found
        seen.append(line)
    raise AssertionError(json.dumps([f"no line with {pattern}", *seen]))

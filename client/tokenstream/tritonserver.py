"""What one tritonserver binary wants and says: room, its command line, and whether its models are ready.

Everything here is a function of its arguments; nothing is started or kept.
It does not know who starts the binary, nor what the models do.
"""

from __future__ import annotations

import http
import http.client
import json
import resource
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from .diagnosis import SetupError
from .layout import Layout
from .ports import Ports

MIN_OPEN_FILES = 256
_HTTP_SECONDS = 2.0
# Clients ping between requests too, every 10 s at most, to notice a dead connection; Triton's default is to hang up.
_KEEPALIVE = ("--grpc-keepalive-permit-without-calls=1", "--grpc-http2-min-recv-ping-interval-without-data=10000")


def check_open_files(limit: int) -> None:
    """Refuse a limit of open files under which the server would hang on its way up instead of failing."""
    if limit != resource.RLIM_INFINITY and limit < MIN_OPEN_FILES:
        cure = "raise it with `ulimit -n 1024`, or a container's with --ulimit nofile=1024"
        raise SetupError(f"only {limit} files may be open (ulimit -n), the server needs {MIN_OPEN_FILES}: {cure}")


def command_line(
    layout: Layout,
    *,
    repository: Path,
    backends: Path,
    server_id: str,
    shared_memory_prefix: str,
    host: str,
    ports: Ports,
    model_names: Sequence[str] | None,
    exit_timeout: int,
) -> list[str]:
    """The program and its arguments. With `model_names` only those are loaded, else all of `repository`."""
    command = [
        str(layout.binary),
        f"--model-repository={repository}",
        f"--backend-directory={backends}",
        f"--backend-config=python,shm-region-prefix-name={shared_memory_prefix}",
        f"--id={server_id}",
        f"--exit-timeout-secs={exit_timeout}",
        "--log-verbose=0",
        "--disable-auto-complete-config",
    ]
    for service, port in asdict(ports).items():
        command += [f"--{service}-address={host}", f"--{service}-port={port}"]
    if model_names is None:
        command.append("--model-control-mode=none")
    else:
        command += ["--model-control-mode=explicit", *(f"--load-model={name}" for name in model_names)]
    if not any(Path("/dev").glob("nvidia[0-9]*")):
        command.append("--allow-gpu-metrics=false")
    return command + [flag for flag in _KEEPALIVE if layout.supports(flag.partition("=")[0])]


def ready_models(host: str, http_port: int, server_id: str, names: Sequence[str]) -> int:
    """How many of the models are ready; 0 while nobody answers, or when it is another server that answers there."""
    metadata = _get(host, http_port, "/v2")
    if metadata is None or _name(metadata) != server_id:
        return 0
    return sum(_get(host, http_port, f"/v2/models/{name}/ready") is not None for name in names)


def _get(host: str, port: int, path: str) -> bytes | None:
    """The body of a 200 answer, else None."""
    connection = http.client.HTTPConnection(host, port, timeout=_HTTP_SECONDS)
    try:
        connection.request("GET", path)
        response = connection.getresponse()
        body = response.read()
    except (OSError, http.client.HTTPException):
        return None
    finally:
        connection.close()
    return body if response.status == http.HTTPStatus.OK else None


def _name(metadata: bytes) -> str | None:
    try:
        return str(json.loads(metadata)["name"])
    except (ValueError, KeyError, TypeError):
        return None

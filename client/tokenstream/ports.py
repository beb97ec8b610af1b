"""Chooses the loopback ports of a server: given ones are checked, free ones are found.

A port that was free a moment ago can be taken before the server listens on it: the caller tries again.
It does not know which service listens where, beyond the three names.
"""

from __future__ import annotations

import errno
import socket
from contextlib import ExitStack
from dataclasses import astuple, dataclass, fields

from .diagnosis import SetupError


@dataclass(frozen=True, slots=True)
class Ports:
    """TCP ports of Triton's three services; 0 asks for a free one."""

    http: int = 0
    grpc: int = 0
    metrics: int = 0


def choose_ports(host: str, asked: Ports) -> Ports:
    """`asked` with every 0 replaced by a free port of `host`; all three are held at once, so they differ.

    Raises SetupError when a given port is taken, given twice, out of range or forbidden, or `host` is no address here.
    """
    given = [port for port in astuple(asked) if port]
    if len(set(given)) < len(given):
        raise SetupError(f"the ports {', '.join(map(str, given))} must differ: choose others, or 0 for a free one")
    with ExitStack() as held:
        chosen = [_bind(held, host, field.name, getattr(asked, field.name)) for field in fields(asked)]
    return Ports(*chosen)


def _bind(held: ExitStack, host: str, service: str, port: int) -> int:
    sock = held.enter_context(socket.socket(socket.AF_INET, socket.SOCK_STREAM))
    if port:  # a server that ended a moment ago leaves connections that would keep its port otherwise
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    cure = f"choose another with --{service}-port, or 0 for a free one"
    try:
        sock.bind((host, port))
    except OverflowError:
        raise SetupError(f"{service} port {port} is not from 0 to 65535: {cure}") from None
    except socket.gaierror as error:
        raise SetupError(f"host {host!r} is not known ({error.strerror}): try 127.0.0.1") from error
    except OSError as error:
        if error.errno == errno.EADDRNOTAVAIL:
            raise SetupError(f"{host} is not an address of this machine: try 127.0.0.1 or 0.0.0.0") from error
        if error.errno == errno.EADDRINUSE:
            raise SetupError(f"{service} port {port} on {host} is taken by another program: {cure}") from error
        raise SetupError(f"cannot listen on {service} port {port} of {host} ({error.strerror}): {cure}") from error
    return int(sock.getsockname()[1])

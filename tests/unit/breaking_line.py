"""A line between a client and a server that breaks: torn down when told or at a place in its traffic, or silent.

It carries bytes and counts HTTP/2's DATA frames, of which each gRPC message is one; it does not know what they say.
"""

from __future__ import annotations

import contextlib
import socket
import threading
from dataclasses import dataclass, field
from enum import Enum

_PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"  # what a client sends before its first frame (RFC 9113, 3.4)
_HEADER = 9  # bytes of a frame's header: length, type, flags, stream (RFC 9113, 4.1)
_DATA = 0


class Way(Enum):
    """From where to where."""

    UP = "to the server"
    DOWN = "to the client"


@dataclass(frozen=True, slots=True)
class Cut:
    """Where the first connection is torn: behind so many bytes that went this way, or behind so many messages."""

    way: Way
    bytes: int | None = None
    messages: int | None = None

    def place(self, carried: bytes) -> int | None:
        """How many bytes go through; None while that is not known."""
        if self.bytes is not None:
            return self.bytes
        ends = [0, *messages(carried)]
        return ends[self.messages] if self.messages is not None and self.messages < len(ends) else None


@dataclass(slots=True)
class Traffic:
    """What went over the first connection."""

    up: bytearray = field(default_factory=bytearray)
    down: bytearray = field(default_factory=bytearray)

    def of(self, way: Way) -> bytearray:
        """One way's."""
        return self.up if way is Way.UP else self.down


def messages(carried: bytes) -> list[int]:
    """Where in the bytes of one way each message ends, the first byte counted as 1."""
    at = len(_PREFACE) if carried.startswith(_PREFACE) else 0
    found = []
    while at + _HEADER <= len(carried):
        kind = carried[at + 3]
        at += _HEADER + int.from_bytes(carried[at : at + 3], "big")
        if kind == _DATA and at <= len(carried):
            found.append(at)
    return found


class Line:
    """Carries bytes to a server and back until it is `cut` or `frozen`; later connections are carried again.

    With a place to cut at, the first connection is torn there: `torn` is set then.
    """

    def __init__(self, target: str, cut: Cut | None = None) -> None:
        self._target = ("127.0.0.1", int(target.rpartition(":")[2]))
        self._cut = cut
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.url = f"127.0.0.1:{self._listener.getsockname()[1]}"
        self.torn = threading.Event()
        self.traffic = Traffic()
        self._frozen: set[socket.socket] = set()
        self._open: list[socket.socket] = []
        threading.Thread(target=self._accept, daemon=True).start()

    def cut(self) -> None:
        """Tear down what is connected."""
        for end in self._open:
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)

    def freeze(self) -> None:
        """Swallow whatever is sent over what is connected."""
        self._frozen.update(self._open)

    def close(self) -> None:
        """Hang up and listen no more."""
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)  # wakes the thread that accepts
        self._listener.close()
        self.cut()
        for end in self._open:
            end.close()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                near, _ = self._listener.accept()
                far = socket.create_connection(self._target)
                first = not self._open
                self._open += [near, far]
                for way, source, sink in ((Way.UP, near, far), (Way.DOWN, far, near)):
                    carry = self._carry_first if first else self._carry
                    threading.Thread(target=carry, args=(source, sink, way), daemon=True).start()

    def _carry(self, source: socket.socket, sink: socket.socket, _: Way) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(65536):
                if source not in self._frozen:
                    sink.sendall(data)
            sink.shutdown(socket.SHUT_RDWR)

    def _carry_first(self, source: socket.socket, sink: socket.socket, way: Way) -> None:
        carried = self.traffic.of(way)
        sent = 0
        with contextlib.suppress(OSError):
            while True:
                place = self._cut.place(bytes(carried)) if self._cut is not None and self._cut.way is way else None
                if source not in self._frozen:
                    sink.sendall(carried[sent:place])
                sent = len(carried)
                if place is not None and place <= sent:
                    self.torn.set()
                    break
                if not (data := source.recv(65536)):
                    break
                carried += data
            for end in (sink, source):
                end.shutdown(socket.SHUT_RDWR)

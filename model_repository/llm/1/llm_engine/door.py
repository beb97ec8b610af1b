"""The door of the engine: who is inside, who may still come in, and whether another would find a seat at once.

Requests enter on any thread and are seated and leave on the engine's. What it refuses is a RequestError with the code
UNAVAILABLE. It does not know in which order those who wait are seated, nor what they do inside.
"""

from __future__ import annotations

import threading
from collections import Counter

from .request import Code, Request, RequestError


class Door:
    """At most `seats` requests are computed at once; of each priority at most `max_queue_size` more may wait."""

    def __init__(self, seats: int, max_queue_size: int) -> None:
        self.live: dict[str, Request] = {}  # by id; only the engine's thread may go through it
        self._seats = seats
        self._max_queue_size = max_queue_size
        self._waiting: Counter[int] = Counter()  # by priority: those inside who never had a seat
        self._backlog = False
        self._closed = ""
        self._changed = threading.Condition()

    def enter(self, request: Request) -> None:
        """Let a request in. RequestError if the door is closed, the id is in use, or its queue is full."""
        with self._changed:
            if self._closed:
                raise RequestError(self._closed, Code.UNAVAILABLE)
            if request.id in self.live:
                raise RequestError(f"request id {request.id!r} is already in use")
            mine, everybody = self._waiting[request.priority], self._waiting.total()
            free = self._seats - (len(self.live) - everybody)
            if mine >= self._max_queue_size + max(0, free - (everybody - mine)):
                raise RequestError(
                    f"Exceeds maximum queue size: {mine} requests of priority {request.priority} wait already",
                    Code.UNAVAILABLE,
                )
            self.live[request.id] = request
            self._waiting[request.priority] += 1

    def seated(self, request: Request) -> None:
        """Note that a request has been given its first seat."""
        with self._changed:
            self._waiting[request.priority] -= 1

    def leave(self, request: Request) -> None:
        """Let a request out."""
        with self._changed:
            del self.live[request.id]
            self._waiting[request.priority] -= request.queued
            self._changed.notify_all()

    def close(self, reason: str) -> None:
        """Refuse whoever comes from now on, for this reason; those inside stay."""
        with self._changed:
            self._closed = reason
            self._changed.notify_all()

    def note_backlog(self, backlog: bool) -> None:
        """Note after a plan whether it left somebody waiting."""
        with self._changed:
            self._backlog = backlog
            self._changed.notify_all()

    def occupancy(self) -> dict[str, int]:
        """How many are inside: those who wait for their first seat, and the others."""
        with self._changed:
            waiting = self._waiting.total()
            return {"running": len(self.live) - waiting, "waiting": waiting}

    def wait_for_room(self, timeout: float) -> bool:
        """Block until one more would find a seat at once, or `timeout` seconds; return whether it would."""
        with self._changed:
            return self._changed.wait_for(self._has_room, timeout)

    def _has_room(self) -> bool:
        return bool(self._closed) or (len(self.live) < self._seats and not self._backlog)

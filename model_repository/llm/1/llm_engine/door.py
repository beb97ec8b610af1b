"""The door of the engine: who is inside, who may still come in, and whether another would find a seat at once.

Requests enter on any thread and are seated and leave on the engine's. What it refuses is a RequestError with the code
UNAVAILABLE. It does not know in which order those who wait are seated, nor what they do inside.
"""

from __future__ import annotations

import threading
import time
from collections import Counter, deque

from .request import Code, Request, RequestError

RETRY_LEAST, RETRY_MOST = 0.1, 30.0  # seconds
_LATELY = 33  # moments, which are 32 seats


class Door:
    """At most `seats` requests are computed at once; of each priority at most `max_queue_size` more may wait."""

    def __init__(self, seats: int, max_queue_size: int) -> None:
        self.live: dict[str, Request] = {}  # by id; only the engine's thread may go through it
        self._seats = seats
        self._max_queue_size = max_queue_size
        self._waiting: Counter[int] = Counter()  # by priority: those inside who never had a seat
        self._unseated: set[str] = set()  # their ids
        self._backlog = False
        self._closed = ""
        self._per_seat = 1.0  # seconds in which a seat was freed when somebody waited before; a guess at first
        self._moments = deque([time.monotonic()], _LATELY)  # when somebody began to wait, or a seat was freed
        self._changed = threading.Condition()

    def enter(self, request: Request) -> None:
        """Let a request in. RequestError if the door is closed, the id is in use, or its queue is full.

        Of a full queue it says when to come again.
        """
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
                    self._retry_after(request.priority),
                )
            if not everybody:
                self._per_seat = self._pace(self._moments[-1])
                self._moments = deque([time.monotonic()], _LATELY)
            self.live[request.id] = request
            self._waiting[request.priority] += 1
            self._unseated.add(request.id)

    def seated(self, request: Request) -> None:
        """Note that a request has been given its first seat."""
        with self._changed:
            self._waiting[request.priority] -= 1
            self._unseated.discard(request.id)

    def leave(self, request: Request) -> None:
        """Let a request out. Again: no effect."""
        with self._changed:
            if self.live.pop(request.id, None) is None:
                return
            if request.id in self._unseated:
                self._unseated.discard(request.id)
                self._waiting[request.priority] -= 1
            else:
                self._moments.append(time.monotonic())
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

    def _retry_after(self, priority: int) -> float:
        """Seconds until half of those before it have a seat: then there is room, and still work for the seats."""
        ahead = sum(count for level, count in self._waiting.items() if level <= priority)
        return min(max(RETRY_LEAST, self._pace(time.monotonic()) * max(1.0, ahead / 2)), RETRY_MOST)

    def _pace(self, now: float) -> float:
        """Seconds in which a seat is freed while somebody waits; until one was, at least what it was before."""
        seats, lasted = len(self._moments) - 1, now - self._moments[0]
        return lasted / seats if seats else max(lasted, self._per_seat)

    def _has_room(self) -> bool:
        return bool(self._closed) or (len(self.live) < self._seats and not self._backlog)

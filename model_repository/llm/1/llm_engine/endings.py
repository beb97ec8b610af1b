"""How requests end: what they hold is freed, they are counted, and their readers are told, once and last of all.

A fault in the work for one request ends that request; one of a step ends those in it. All of it happens on the engine
thread, but for `hand_out`. It does not know when a request has to end.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable
from dataclasses import replace

from .deltas import delta
from .door import Door
from .metrics import Metrics, Outcome
from .request import Code, Delta, Emit, Request, RequestError, Status
from .runner import is_device_lost
from .scheduler import Scheduler

log = logging.getLogger(__name__)


class Endings:
    """Ends the requests of one engine. `device_lost`: a fault showed that only a new process can help."""

    def __init__(self, scheduler: Scheduler, door: Door, metrics: Metrics, exact: str) -> None:
        self.metrics = metrics
        self.device_lost = False
        self._scheduler = scheduler
        self._door = door
        self._exact = exact

    def end(self, request: Request, outcome: Outcome, error: RequestError) -> None:
        """End a live request with an error delta, and count it as `outcome`."""
        self.metrics.count_ended(outcome)
        try:
            self.forget(request)
        except Exception:
            log.exception("what request %s held could not be freed", request.id)
        self.hand_out(request.emit, [delta(request, "", self._exact, error=error, first=False)])

    def forget(self, request: Request) -> None:
        """Free what a request holds; it is no longer live."""
        try:
            if request.turn:
                self._scheduler.finish(request)
        finally:
            request.status = Status.FINISHED
            self._door.leave(request)

    def blame(self, request: Request, what: str, error: Exception) -> None:
        """End a request whose own part of the work raised `error`; its neighbours have nothing to do with it."""
        lost = is_device_lost(error)
        self.device_lost |= lost
        self.end(request, "failed", internal(what, error, own_fault=not lost))

    def fail(self, error: Exception, what: str, requests: Iterable[Request]) -> None:
        """End those among `requests` that live: what failed, a step say, was the work of all of them."""
        self.device_lost |= is_device_lost(error)
        for request in list(requests):
            if request.status is not Status.FINISHED:
                self.end(request, "failed", internal(what, error))

    def hand_out(self, emit: Emit, deltas: list[Delta]) -> None:
        """Give a reader its deltas. Refused ones are given one by one; a request of which one is refused again ends."""
        try:
            emit(deltas)
        except Exception as error:  # a reader's fault must not reach the other readers
            log.exception("a reader refused its deltas")
            if len(deltas) > 1:
                for each in deltas:
                    self.hand_out(emit, [each])
            elif deltas[0].error is None:
                self._end_unread(emit, deltas[0], internal("the answer could not be read", error, own_fault=True))

    def _end_unread(self, emit: Emit, unread: Delta, error: RequestError) -> None:
        """End a request at a delta that its reader did not take: an answer has no gap."""
        if request := self._door.live.get(unread.request_id):
            request.emitted = unread.index
            self.end(request, "failed", error)
        else:  # it was the last one
            self.hand_out(emit, [replace(unread, token_ids=(), text="", logprobs=(), finish_reason=None, error=error)])


def internal(what: str, error: Exception, *, own_fault: bool = False) -> RequestError:
    """An INTERNAL error that names the kind of `error`; the log has all of it."""
    return RequestError(f"{what}: {type(error).__name__}", Code.INTERNAL, own_fault=own_fault)

"""One load test after the other within one Locust process, whatever its part: alone, a worker, or the master of some.

It begins tests, counts their requests, hands what workers count to the master, and waits at the end until nothing is
under way: every request that a server has answered is counted. What the whole came to is told by `outcome`. It
knows Locust's events, but no users.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import gevent
from gevent.event import Event
from gevent.lock import RLock
from locust.env import Environment
from locust.exception import InterruptTaskSet, RescheduleTask, RescheduleTaskImmediately, StopTest, StopUser
from locust.runners import MasterRunner, WorkerRunner

from ..dice import Dice
from ..host import Meter, host_and_port, is_here
from ..records import PLANNED, Record
from ..requests import Request
from ..results import Sample
from .link import Asked, DriverFailed, Link
from .numbers import Standing
from .open_loop import OpenLoop
from .options import Choices, check_report
from .totals import Counter, Last, Part, Totals, dump_part, read_part
from .wire import Counted

FINISH, FINISHED = "tokenstream-finish", "tokenstream-finished"  # messages of Locust's master and workers
_REPORTED = "tokenstream"  # the key in a worker's report
_POINT_SECONDS = 3.0  # as often as Locust's workers report
_ANSWER_SECONDS = 30.0  # for a worker to tell that it has finished, beyond the time that its requests get
_PROTOCOLS = {"tokenstream": "gRPC", "openai": "SSE"}
_log = logging.getLogger("tokenstream")


class RequestFailed(Exception):  # noqa: N818  (what Locust shows beside a request)
    """How a request ended, and the server's own line."""


class Session:
    """Of one Locust environment. `totals`: of the test that runs or ran last; None in a worker."""

    def __init__(self, environment: Environment) -> None:
        self.environment = environment
        self._request_event: Any = environment.events.request
        self.totals: Totals | None = None
        self.choices: Choices | None = None
        self.server: dict[str, str] = {}
        self.meter: Meter | None = None
        self.standing = Standing()
        self.running = False
        self._link = Link(self._heard, self._looked)
        self._counter: Counter | None = None
        self._requests: Iterator[Request] = iter(())
        self._open_loop: OpenLoop | None = None
        self._began = self._began_cpu = 0.0
        self._test = 0
        self._finishing = RLock()
        self._told = Event()  # a worker has told something that the master may wait for

    @property
    def options(self) -> Any:
        """Locust's, with ours."""
        return self.environment.parsed_options

    @property
    def is_master(self) -> bool:
        """Whether others do the asking."""
        return isinstance(self.environment.runner, MasterRunner)

    @property
    def is_worker(self) -> bool:
        """Whether another one does the sums."""
        return isinstance(self.environment.runner, WorkerRunner)

    @property
    def _name(self) -> str:
        """Of this process in Locust; its master has none, and asks nothing."""
        return str(getattr(self.environment.runner, "client_id", "master"))

    # The begin.

    def prepare(self) -> None:
        """Start the driver, behind all forks. DriverFailed if that cannot be."""
        self._link.start()

    def begin(self) -> None:
        """A test starts. DriverFailed or ValueError if it cannot; nothing is left then of the one before."""
        options, self.totals, self.standing = self.options, None, Standing()
        if self.is_worker:
            self._begin_share(options)
            return
        options.tokenstream_test = 0  # Locust hands its options on to the workers, even if this fails
        self.choices = Choices.read(options, self.environment.host)
        check_report(self.choices.report)
        workers, self._test = self._workers(), self._test + 1
        self.totals = totals = Totals(self._test, self.choices.objectives, frozenset(workers))
        try:
            self._begin_asking(self.choices, workers)
        except DriverFailed:
            self.totals = None
            raise
        options.tokenstream_workers, options.tokenstream_test = workers, self._test
        host, port = host_and_port(self.choices.url)
        self.meter = Meter(port if is_here(host) else None)
        self.running, self.standing, self._began = True, Standing("running"), time.perf_counter()
        gevent.spawn(self._mark, totals)

    def _begin_share(self, options: Any) -> None:
        """In a worker."""
        self._test = int(options.tokenstream_test)
        if not self._test:  # the master could not begin, and has told why
            return
        self.choices = Choices.read(options, self.environment.host)
        self._begin_asking(self.choices, list(options.tokenstream_workers))
        self.running = True

    def _workers(self) -> list[str]:
        runner = self.environment.runner
        if isinstance(runner, MasterRunner):
            return sorted(client.id for client in (*runner.clients.ready, *runner.clients.running))
        return [self._name]

    def _begin_asking(self, choices: Choices, workers: Sequence[str]) -> None:
        name = self._name
        index = workers.index(name) if name in workers else len(workers)
        # Only one process looks at the server's metrics: that which does the sums.
        order = choices.order if self.totals is not None else replace(choices.order, metrics_url=None)
        opened = self._link.open(order)
        self.server = opened.server
        self._began_cpu = time.process_time()
        self._counter = Counter(self._test, opened.began, choices.objectives)
        dice = Dice(f"locust {choices.seed} {index}")
        self._requests = choices.workload.draw(dice.below(1 << 31))
        self._open_loop = None
        if choices.stage is not None and name in workers:
            self._open_loop = OpenLoop(choices.stage, len(workers), dice.below(1 << 31), opened.began)
            gevent.spawn(self._open_loop.run, self._send_at, lambda: self._link.live)

    # Requests.

    def ask(self, context: dict[str, object]) -> Record:
        """Send the next request and wait for its end; StopUser once the test is over."""
        if not self.running:
            raise StopUser
        record: Record = self._link.ask(next(self._requests), time.perf_counter(), context).done.get()
        return record

    def _send_at(self, scheduled_at: float) -> bool:
        """Of an open loop: send one; whether the test goes on."""
        if self.running:
            self._link.ask(next(self._requests), scheduled_at, {})
        return self.running

    def _heard(self, record: Record, asked: Asked) -> Exception | None:
        if self._counter is None:
            return None
        self._counter.add(record)
        failure = None if record.outcome in PLANNED else RequestFailed(f"{record.outcome}: {record.error}")
        runner = self.environment.runner
        kind = _PROTOCOLS[self.choices.target] if self.choices else ""
        if runner is not None:  # rows beside the requests: they must not count as such in Locust's own sums
            for row, seconds in (("TTFT", record.ttft), ("TPOT", record.tpot)):
                if seconds is not None:
                    runner.stats.get(record.kind, row).log(seconds * 1000, 0)  # type: ignore[arg-type]
        try:
            self._request_event.fire(
                request_type=kind,
                name=record.kind,
                response_time=record.latency * 1000,
                response_length=record.output_tokens,
                exception=failure,
                context={**asked.context, "record": record},
                start_time=time.time() - (time.perf_counter() - record.sent_at),
                url=self.choices.url if self.choices else "",
            )
        except (StopUser, StopTest, RescheduleTask, RescheduleTaskImmediately, InterruptTaskSet) as error:
            return error
        return None

    def _looked(self, sample: Sample) -> None:
        if self.totals is not None:
            self.totals.samples.append(sample)

    # Between workers and master.

    def put_report(self, data: dict[str, Any]) -> None:
        """In a worker: what was counted since the last report goes with Locust's own."""
        if self.running and self._counter is not None:
            data[_REPORTED] = dump_part(self._counter.part(self._link.live))

    def take_report(self, client_id: str, data: dict[str, Any]) -> None:
        """In the master."""
        if self.totals is not None and _REPORTED in data:
            self.totals.add(client_id, read_part(data[_REPORTED]))
            self._told.set()

    def update(self) -> None:
        """In a process of its own: count what was heard since the last call."""
        if self.totals is not None and self._counter is not None and self.running and not self.is_master:
            self.totals.add(self._name, self._counter.part(self._link.live))

    def see_users(self, user_count: int) -> None:
        """Locust has so many now."""
        if self.totals is not None:
            self.totals.see_users(user_count)

    def _mark(self, totals: Totals) -> None:
        while True:
            gevent.sleep(_POINT_SECONDS)
            if not self.running or self.totals is not totals:
                return
            self.update()
            self._mark_now(totals)

    def _mark_now(self, totals: Totals) -> None:
        runner = self.environment.runner
        totals.mark(time.perf_counter() - self._began, runner.user_count if runner is not None else 0)

    # The end.

    def finish(self) -> bool:
        """Send nothing more, wait until all is answered; whether a test ended by that which had not before."""
        with self._finishing:
            if not self.running:
                return False
            self.running = False
            if self.is_master:
                self._finish_workers()
            else:
                part = self._finish_asking()
                runner = self.environment.runner
                if isinstance(runner, WorkerRunner):
                    runner.send_message(FINISHED, {_REPORTED: dump_part(part)})
                elif self.totals is not None:
                    self.totals.add(self._name, part)
            if self.totals is not None:
                self._mark_now(self.totals)
            return True

    def _finish_asking(self) -> Part:
        choices, counter = self.choices, self._counter
        if choices is None or counter is None:
            raise RuntimeError("no test has begun")
        gap = self.totals.tally.all.histograms["itl"].percentile(50) if self.totals is not None else None
        cut, finished = self._link.finish(choices.drain, gap)
        flaws = []
        if cut:
            flaws.append(f"{cut} requests were not done {choices.drain:g} s behind the end, and were cut")
        if self._link.deaths:
            flaws.append(f"the driver process ended {self._link.deaths} times in the test")
        if self._open_loop is not None and self._open_loop.capped:
            flaws.append(self._open_loop.capped)
        seconds = max(time.perf_counter() - counter.began, 1e-9)
        cores = max((time.process_time() - self._began_cpu) / seconds, finished.cores if finished else 0.0)
        stalls = finished.stalls if finished else ()
        return counter.part(0, Last(cores, self.server, stalls, tuple(flaws)))

    def _finish_workers(self) -> None:
        runner, totals, choices = self.environment.runner, self.totals, self.choices
        if not isinstance(runner, MasterRunner) or totals is None or choices is None:
            return
        runner.send_message(FINISH, {"test": self._test})
        deadline = time.perf_counter() + choices.drain + _ANSWER_SECONDS
        while time.perf_counter() < deadline:
            there = {client.id for client in runner.clients.all if client not in runner.clients.missing}
            if not there & totals.silent:
                return
            self._told.clear()
            self._told.wait(0.5)

    def count(self) -> Counted:
        """What the server's own metrics say of the test that has ended."""
        return self._link.count(self.totals.tally.all) if self.totals is not None else Counted(None)

    def close(self) -> None:
        """This process ends."""
        self.running = False
        self._link.close()

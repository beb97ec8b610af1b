"""Users for a locustfile, and the wiring of Locust's events; importing it is enough:

    from tokenstream_loadtest.under_locust.users import OpenAIUser, OpenLoopUser, TokenstreamUser

Locust itself spawns, stops and distributes them, and shows them on its page. What is asked comes from `--workload`, and
what is measured is told by `session`: a user does nothing but ask and wait.
"""

from __future__ import annotations

import logging
import signal
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import gevent
from locust import User, constant, events, task
from locust.env import Environment
from locust.exception import StopUser
from locust.runners import MasterRunner, WorkerRunner

from ..files import free_folder, write_files
from ..results import Run
from .charts import add_charts
from .link import DriverFailed
from .numbers import Standing
from .options import Choices, add_options, check_report
from .outcome import conclude, passes, text
from .session import FINISH, FINISHED, Session
from .shape_class import TokenShape

_SESSION = "tokenstream_session"  # the attribute of Locust's environment that holds ours
_BREATH = 0.1  # seconds that a user waits who was turned away: a dead server must not make a busy loop
_MISSED, _WRONG_USAGE = 1, 2  # exit codes
_log = logging.getLogger("tokenstream")


class StreamUser(User):
    """Asks, waits for the end of the answer, and asks again: a closed loop, whose load falls when the server slows."""

    abstract = True
    wait_time = constant(0)

    @task
    def ask(self) -> None:
        """One request."""
        record = session_of(self.environment).ask(self.context())
        if record.outcome in ("connection", "internal", "unauthorized", "overloaded"):
            gevent.sleep(_BREATH)


class TokenstreamUser(StreamUser):
    """Over gRPC, to `--host HOST:PORT`."""


class OpenAIUser(StreamUser):
    """Over OpenAI's HTTP interface, to `--host http://HOST:PORT`."""


class OpenLoopUser(User):
    """Sends nothing itself: with `--rate` every process sends its share of the schedule, whatever number of users."""

    wait_time = constant(1)

    @task
    def wait_for_the_end(self) -> None:
        """Be there, as Locust wants it."""
        if not session_of(self.environment).running:
            raise StopUser


def session_of(environment: Environment) -> Session:
    """Ours, of this environment."""
    session: Session = getattr(environment, _SESSION)
    return session


def _wire(environment: Environment, **_: object) -> None:
    session = Session(environment)
    setattr(environment, _SESSION, session)
    leader = _Leader(session)
    leader.interrupts = gevent.signal_handler(signal.SIGINT, _interrupt)
    hooks: Any = environment.events
    hooks.spawning_complete.add_listener(session.see_users)
    hooks.test_start.add_listener(leader.begin)
    hooks.test_stopping.add_listener(leader.finish)
    hooks.quitting.add_listener(leader.quit)
    runner = environment.runner
    if not isinstance(runner, WorkerRunner):
        _choose(environment, session)
    session.prepare()
    # Locust sets its --run-time timer next, from a time that the loop has not looked at since all this was imported.
    gevent.get_hub().loop.update_now()
    if isinstance(runner, WorkerRunner):
        hooks.report_to_master.add_listener(lambda client_id, data: session.put_report(data))  # noqa: ARG005
        runner.register_message(FINISH, lambda **_: session.finish(), concurrent=True)
        return
    if isinstance(runner, MasterRunner):
        hooks.worker_report.add_listener(session.take_report)
        runner.register_message(FINISHED, lambda msg, **_: session.take_report(msg.node_id, msg.data))
    if environment.web_ui is not None:
        add_charts(environment.web_ui, session)


def _interrupt() -> None:
    """Ctrl-C is for the main greenlet alone: Python's own would end whichever runs, that which reads answers too."""
    gevent.get_hub().handle_system_error(KeyboardInterrupt, KeyboardInterrupt())


def _choose(environment: Environment, session: Session) -> None:
    """The user class and the shape that the options ask for; a wrong option ends Locust with one line."""
    options = session.options
    try:
        choices = Choices.read(options, environment.host)
        check_report(choices.report)
    except ValueError as error:
        sys.stderr.write(f"locust: error: {error}\n")
        sys.exit(_WRONG_USAGE)
    own = OpenLoopUser if choices.stage else OpenAIUser if choices.target == "openai" else TokenstreamUser
    if not options.user_classes:  # what somebody has added to the locustfile stays
        others = {TokenstreamUser, OpenAIUser, OpenLoopUser} - {own}
        environment.user_classes[:] = [each for each in environment.user_classes if each not in others]
    if options.shape:
        environment.shape_class = TokenShape(session)
        environment.shape_class.runner = environment.runner


class _Leader:
    """Begins and ends the tests of a session, and tells what they came to."""

    def __init__(self, session: Session) -> None:
        self._session = session
        self._unconcluded = False  # a test was begun, or tried
        self.interrupts: object = None  # what listens for Ctrl-C, as long as this is there

    def begin(self, environment: Environment, **_: object) -> None:
        environment.process_exit_code = None
        self._unconcluded = True
        try:
            self._session.begin()
            if isinstance(environment.shape_class, TokenShape):
                environment.shape_class.reset_time()  # its time begins when requests can be sent
        except (DriverFailed, ValueError) as error:
            _log.error("the test cannot begin: %s", error)
            environment.process_exit_code = _MISSED
            self._unconcluded = False
            self._session.standing = Standing("refused", str(error))
            runner = environment.runner
            if runner is not None:  # on Locust's page the next test may be a better one
                gevent.spawn(runner.stop if environment.web_ui is not None else runner.quit)

    def finish(self, environment: Environment, **_: object) -> None:
        session = self._session
        if not session.finish() or session.totals is None or session.choices is None or session.meter is None:
            return
        self._unconcluded = False
        cores, counted = session.meter.read(), session.count()
        shape = environment.shape_class
        told = shape.notes() if isinstance(shape, TokenShape) else ()
        run = conclude(
            session.totals,
            session.choices,
            cores,
            counted,
            server=session.server,
            shape=str(session.options.shape),
            told=told,
            restarted=session.meter.restarted,
        )
        files, why = _write(run, session.choices.report)
        sys.stdout.write(f"{text(run, files)}\n")
        sys.stdout.flush()
        if why:
            _log.error(why)
        flaws = tuple(flaw for each in run.measurements for flaw in each.flaws)
        session.standing = Standing("over", why, flaws, str(files.get("html", "")))
        if why or not passes(run, ignore_flaws=session.choices.ignore_flaws):
            environment.process_exit_code = _MISSED
        elif session.choices.objectives:
            environment.process_exit_code = 0  # they say how many errors are too many

    def quit(self, environment: Environment, **_: object) -> None:
        self.finish(environment)
        if self._unconcluded and self._session.totals is not None:
            _log.error("the test ended before it had begun: nothing was measured")
            environment.process_exit_code = _MISSED
        self._session.close()


def _write(run: Run, folder: str) -> tuple[Mapping[str, Path], str]:
    """The files of the run by kind, none without a folder; and why they could not be written, or ""."""
    if not folder:
        return {}, ""
    try:
        return write_files(run, free_folder(Path(folder))), ""
    except OSError as error:
        return {}, f"the report cannot be written: {error.filename or folder}: {(error.strerror or str(error)).lower()}"


_EVENTS: Any = events
_EVENTS.init_command_line_parser.add_listener(add_options)
_EVENTS.init.add_listener(_wire)

"""The child that `tokenstream load` starts: `python -m tokenstream_loadtest run | list | compare A B | report A OUT`.

It says what happens in lines of JSON on standard output: messages with an "event", or at last {"error", "code"}, where
code is the exit code. SIGTERM ends a run; what was measured is written all the same. It does not know who listens.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .bench import Plan
    from .results import Run
    from .targets import Failed

FAILED, WRONG_USAGE, NO_CONNECTION, REFUSED, TOO_LATE, INTERRUPTED = 1, 2, 3, 4, 5, 130
_EXTRA = ("hdrh", "pydantic", "httpx2")  # what only the extra brings
_CODES = {
    "connection": NO_CONNECTION,
    "timeout": TOO_LATE,
    "overloaded": REFUSED,
    "unauthorized": REFUSED,
    "invalid": REFUSED,
}


class _Ends(Exception):  # noqa: N818  (it need not be an error)
    def __init__(self, line: str, code: int) -> None:
        super().__init__(line)
        self.code = code


def _say(message: dict[str, Any]) -> None:
    sys.stdout.write(json.dumps(message) + "\n")
    sys.stdout.flush()


def _run() -> None:
    from .files import check_writable, write_files
    from .messages import summarise
    from .order import planned, take_order
    from .targets import Failed

    wanted = planned(take_order(os.environ))
    for note in wanted.notes:
        _say({"event": "note", "note": note})
    check_writable(wanted.folder)
    try:
        run = asyncio.run(_measure(wanted.plan))
    except Failed as error:
        raise _Ends(_explained(error, wanted.plan), _CODES.get(error.outcome, FAILED)) from None
    if run is None or not run.measurements:
        raise _Ends("interrupted before anything was measured: nothing was written", INTERRUPTED)
    try:
        files = write_files(run, wanted.folder)
    except OSError:
        _say(summarise(run, {}))  # what was measured is not lost with its files
        raise
    _say(summarise(run, files))


async def _measure(plan: Plan) -> Run | None:
    """None if it was interrupted before it began."""
    from .measure import measure
    from .messages import progress, trial

    measuring = measure(plan, lambda told: _say(progress(told)), lambda each, held: _say(trial(each, held)))
    task = asyncio.ensure_future(measuring)
    for signum in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(signum, task.cancel)
    await asyncio.wait([task])
    return None if task.cancelled() else task.result()


def _explained(error: Failed, plan: Plan) -> str:
    ours = plan.target == "tokenstream" and error.outcome == "connection"
    return f"{error.line}{'. Is it running? Start one with: tokenstream serve' if ours else ''}"


def _list() -> None:
    from .scenarios import list_scenarios
    from .workloads import list_workloads

    for event, found in (("scenario", list_scenarios()), ("workload", list_workloads())):
        for one in found:
            _say({"event": event, "name": one.name, "title": one.title, "about": one.about})


def _compare(before: str, after: str) -> None:
    from .compare import compare, dump_comparison, lines
    from .results import read_run

    compared = compare([read_run(Path(before))], [read_run(Path(after))])
    _say({"event": "comparison", **json.loads(dump_comparison(compared)), "lines": lines(compared)})


def _report(run: str, out: str) -> None:
    from .report.page import write_report
    from .results import read_run

    write_report(read_run(Path(run)), Path(out))
    _say({"event": "report", "html": out})


_COMMANDS: dict[str, Callable[..., None]] = {"run": _run, "list": _list, "compare": _compare, "report": _report}


def main() -> int:
    """Do what the arguments say; the exit code."""
    os.environ.setdefault("GRPC_VERBOSITY", "NONE")  # its own log lines would stand beside our one line
    name, *arguments = sys.argv[1:]
    try:
        _COMMANDS[name](*arguments)
    except _Ends as error:
        line, code = str(error), error.code
    except ValueError as error:
        line, code = str(error), WRONG_USAGE
    except ModuleNotFoundError as error:
        if error.name not in _EXTRA:
            raise
        line, code = f"load tests need {error.name}: pip install 'tokenstream[loadtest]'", FAILED
    except OSError as error:
        line, code = f"{error.filename or 'the run'}: {(error.strerror or str(error)).lower()}", FAILED
    else:
        return 0
    _say({"error": line, "code": code})
    return code


if __name__ == "__main__":
    sys.exit(main())

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
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .course import Done
    from .order import Planned
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
    from .order import planned, take_order
    from .report import write_report
    from .results import dump_run
    from .summary import summarise
    from .tables import write_csv
    from .targets import Failed

    wanted = planned(take_order(os.environ))
    with _folder(wanted.folder) as folder:
        try:
            done = asyncio.run(_measure(wanted))
        except Failed as error:
            raise _Ends(_explained(error, wanted), _CODES.get(error.outcome, FAILED)) from None
        if done is None or not done.run.measurements:
            raise _Ends("interrupted before anything was measured: nothing was written", INTERRUPTED)
        files = {"json": folder / "run.json", "csv": folder / "run.csv", "html": folder / "report.html"}
        files["json"].write_bytes(dump_run(done.run))
        write_csv(done.run, files["csv"])
        write_report(done.run, files["html"])
    _say(summarise(done.run, done.found, files, interrupted=done.interrupted))


@contextmanager
def _folder(path: Path) -> Iterator[Path]:
    """The folder, made before anything is measured: it may not be ours to write. It goes if nothing was written."""
    made = not path.is_dir()
    path.mkdir(parents=True, exist_ok=True)
    try:
        yield path
    finally:
        if made:
            with suppress(OSError):  # it holds something
                path.rmdir()


async def _measure(wanted: Planned) -> Done | None:
    """None if it was interrupted before it began."""
    from .course import carry_out

    task = asyncio.ensure_future(carry_out(wanted.plan, wanted.search, _say))
    for signum in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(signum, task.cancel)
    await asyncio.wait([task])
    return None if task.cancelled() else task.result()


def _explained(error: Failed, wanted: Planned) -> str:
    ours = wanted.plan.target == "tokenstream" and error.outcome == "connection"
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
    from .report import write_report
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

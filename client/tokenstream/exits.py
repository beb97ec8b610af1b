"""How a command ends: one line on standard error that says what went wrong and the cure, and an exit code.

Codes: 0 done, 1 failed, 2 wrong usage, 3 no connection, 4 the server refused, 5 too late, 130 Ctrl-C, 143 SIGTERM.
With `--json` the line is an object, `{"error": "...", "code": 3}`, whose code is the exit code. It does not know what
the command was doing.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import typer
from typer.core import TyperGroup

from .diagnosis import ServerFailed
from .display import printable
from .errors import (
    ConnectionFailed,
    ConnectTimeout,
    Draining,
    IdleTimeout,
    IncompleteStream,
    InvalidRequest,
    ModelNotFound,
    NotReady,
    Overloaded,
    StreamTimeout,
    TokenstreamError,
    Unauthorized,
)

OK, FAILED, WRONG_USAGE, NO_CONNECTION, REFUSED, TOO_LATE, INTERRUPTED, TERMINATED = 0, 1, 2, 3, 4, 5, 130, 143
JSON_FLAG = "--json"
# typer gives no name to the class of all wrong usage: its own copy of click has it, and older ones used click itself.
_WrongUsage: type[Any] = typer.BadParameter.__bases__[0]


class OneLineGroup(TyperGroup):
    """The command with all its subcommands; wrong usage is one line that names the help to read."""

    def main(
        self,
        args: Sequence[str] | None = None,
        prog_name: str | None = None,
        complete_var: str | None = None,
        standalone_mode: bool = True,
        windows_expand_args: bool = True,
        **extra: Any,
    ) -> Any:
        """Run it. SystemExit with the exit code, unless `standalone_mode` is off."""
        given = sys.argv[1:] if args is None else args
        if sys.stdout is None:  # what Python makes of one that is closed
            complain("cannot write the answer: standard output is closed", FAILED, json_lines=JSON_FLAG in given)
            sys.exit(FAILED)
        try:
            code = super().main(args, prog_name, complete_var, False, windows_expand_args, **extra)
            sys.stdout.flush()
        except _WrongUsage as error:
            if not standalone_mode:
                raise
            where = error.ctx.command_path if error.ctx else "tokenstream"
            message = f"{error.format_message().rstrip('.')}. See: {where} --help"
            complain(message, WRONG_USAGE, json_lines=JSON_FLAG in given)
            code = WRONG_USAGE
        except typer.Abort:
            code = FAILED
        except OSError as error:  # from --help, say; a command sees to its own
            code = _unwritten(error, json_lines=JSON_FLAG in given)
        if standalone_mode:
            sys.exit(code if isinstance(code, int) else OK)
        return code


@contextmanager
def one_line_errors(*, json_lines: bool = False) -> Iterator[None]:
    """Turn what can go wrong into one line and an exit code."""
    try:
        yield
    except TokenstreamError as error:
        raise failure(explained(error), exit_code(error), json_lines=json_lines) from error
    except KeyboardInterrupt:
        raise typer.Exit(INTERRUPTED) from None
    except UnicodeEncodeError as error:
        raise failure(f"{error.object[:80]!r} is not Unicode text", WRONG_USAGE, json_lines=json_lines) from None
    except OSError as error:
        raise typer.Exit(_unwritten(error, json_lines=json_lines)) from None


@contextmanager
def unwound_by_sigterm() -> Iterator[None]:
    """Let SIGTERM unwind what is open, as Ctrl-C does; its exit code is TERMINATED. Only in the main thread."""
    before = signal.signal(signal.SIGTERM, lambda *_: sys.exit(TERMINATED))
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def failure(message: str, code: int, *, json_lines: bool = False) -> typer.Exit:
    """Say what went wrong; the exception to raise then."""
    complain(message, code, json_lines=json_lines)
    return typer.Exit(code)


def complain(message: str, code: int, *, json_lines: bool = False) -> None:
    """Say in one line on standard error what went wrong; nothing ends by that."""
    line = printable(" ".join(message.split()))
    shown = json.dumps({"error": line, "code": code}, ensure_ascii=False) if json_lines else f"tokenstream: {line}"
    typer.echo(shown, err=True)


def _unwritten(error: OSError, *, json_lines: bool) -> int:
    """Say that the answer cannot be written, unless its reader (`| head`) has what it wanted; the exit code."""
    if sys.stdout is not None:  # Python's own flush at exit must not complain either
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    if isinstance(error, BrokenPipeError):
        return OK
    complain(f"cannot write the answer: {error.strerror or error}", FAILED, json_lines=json_lines)
    return FAILED


def explained(error: TokenstreamError) -> str:
    """What a user reads of it: the message, and the cure or the place of the log."""
    if isinstance(error, ServerFailed):
        return f"{error.message} (log: {error.log_path})"
    if isinstance(error, ConnectionFailed) and error.message.endswith("socket closed"):
        return f"{error.message}. Is that the port of gRPC? It is 8001 by default, and no other can be asked"
    if isinstance(error, ConnectionFailed) and "speak TLS" in error.message:
        return error.message
    if isinstance(error, Overloaded) and error.retry_after:
        return f"{error.message}. Try again in {error.retry_after:.1f} s"
    return error.message + next((text for kind, text in _CURES if isinstance(error, kind)), "")


def exit_code(error: TokenstreamError) -> int:
    """The exit code that goes with it."""
    return next((code for kind, code in _EXIT_CODES if isinstance(error, kind)), FAILED)


_NOBODY = ". Is it running? Start one with: tokenstream serve"
_CURES: tuple[tuple[type[TokenstreamError], str], ...] = (
    (ConnectionFailed, _NOBODY),
    (ConnectTimeout, _NOBODY),
    (IdleTimeout, ". Does the model still answer? Ask with: tokenstream probe"),
    (StreamTimeout, ". Ask for less, or allow more with --timeout"),
    (IncompleteStream, ". Does the server still live? Ask with: tokenstream probe"),
    (ModelNotFound, ". See what it serves with: tokenstream models, and name one with --model"),
    (Unauthorized, ". Ask whoever runs the server for access"),
    (Overloaded, ". Try again in a moment"),
    (NotReady, ". If it stays so, start the server again"),
    (Draining, ". Ask another server, or try again when it is back"),
)
_EXIT_CODES: tuple[tuple[type[TokenstreamError], int], ...] = (
    (ConnectionFailed, NO_CONNECTION),
    (ConnectTimeout, NO_CONNECTION),
    (StreamTimeout, TOO_LATE),
    *((kind, REFUSED) for kind in (InvalidRequest, ModelNotFound, Unauthorized, Overloaded, NotReady, Draining)),
)

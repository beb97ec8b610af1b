"""How a command ends: one line on standard error that says what went wrong and the cure, and an exit code.

Codes: 0 done, 1 failed, 2 wrong usage (typer's own), 3 no connection, 4 the server refused, 5 too late, 130 Ctrl-C,
143 SIGTERM. It does not know what the command was doing.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import typer

from .diagnosis import ServerFailed
from .errors import (
    ConnectionFailed,
    ConnectTimeout,
    Draining,
    IdleTimeout,
    InvalidRequest,
    ModelNotFound,
    NotReady,
    Overloaded,
    StreamTimeout,
    TokenstreamError,
)

OK, FAILED, NO_CONNECTION, REFUSED, TOO_LATE, INTERRUPTED, TERMINATED = 0, 1, 3, 4, 5, 130, 143


@contextmanager
def one_line_errors() -> Iterator[None]:
    """Turn what can go wrong into one line and an exit code."""
    try:
        yield
    except TokenstreamError as error:
        typer.echo(one_line(error), err=True)
        raise typer.Exit(_exit_code(error)) from error
    except KeyboardInterrupt:
        raise typer.Exit(INTERRUPTED) from None
    except BrokenPipeError:
        # The reader (`| head`) has what it wanted; Python's own flush at exit must not complain either.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        raise typer.Exit(OK) from None
    except OSError as error:
        typer.echo(f"tokenstream: cannot write the answer: {error.strerror or error}", err=True)
        raise typer.Exit(FAILED) from None


def one_line(error: TokenstreamError) -> str:
    """What a user reads of it: the message, and the cure or the place of the log."""
    if isinstance(error, ServerFailed):
        cure = f" (log: {error.log_path})"
    else:
        cure = next((text for kind, text in _CURES if isinstance(error, kind)), "")
    return f"tokenstream: {' '.join(error.message.split())}{cure}"


def _exit_code(error: TokenstreamError) -> int:
    return next((code for kind, code in _EXIT_CODES if isinstance(error, kind)), FAILED)


_NOBODY = ". Is it running? Start one with: tokenstream serve"
_CURES: tuple[tuple[type[TokenstreamError], str], ...] = (
    (ConnectionFailed, _NOBODY),
    (ConnectTimeout, _NOBODY),
    (IdleTimeout, ". Does the model still answer? Ask with: tokenstream probe"),
    (StreamTimeout, ". Ask for less, or allow more with --timeout"),
    (ModelNotFound, ". Name one that it serves with --model"),
    (Overloaded, ". Try again in a moment"),
    (NotReady, ". If it stays so, start the server again"),
)
_EXIT_CODES: tuple[tuple[type[TokenstreamError], int], ...] = (
    (ConnectionFailed, NO_CONNECTION),
    (ConnectTimeout, NO_CONNECTION),
    (StreamTimeout, TOO_LATE),
    *((kind, REFUSED) for kind in (InvalidRequest, ModelNotFound, Overloaded, NotReady, Draining)),
)

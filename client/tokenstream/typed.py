"""Messages typed at a terminal: line editing, a history that is kept, and messages of several lines.

A line that ends in a backslash goes on in the next one; a block between triple quotes is one message as it stands. The
history is a file of one JSON string per line that only its owner can read, so that a message of several lines is one
entry whatever edits the lines. It does not know what the messages mean.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import platformdirs

QUOTES = '"""'
_PROMPT, _MORE = "> ", "... "
_KEPT = 1000  # messages


@dataclass(frozen=True, slots=True)
class Typed:
    """A message without blanks around it. `command`: one line that begins with a slash."""

    text: str
    command: bool


class History:
    """What was typed before, in the file `path`, oldest first. Where it cannot be written nothing is kept."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def entries(self) -> list[str]:
        """The last messages; a line that is none is passed over. What is older leaves the file."""
        with suppress(OSError, ValueError):
            lines = self._path.read_text(encoding="utf-8").splitlines()
            if len(lines) > 2 * _KEPT:
                self._replace(lines[-_KEPT:])
            return [entry for line in lines[-_KEPT:] if (entry := _entry(line))]
        return []

    def add(self, message: str) -> None:
        """Keep one more."""
        with suppress(OSError):
            self._path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            _write(self._path, os.O_APPEND, json.dumps(message) + "\n")

    def _replace(self, lines: list[str]) -> None:
        new = self._path.with_suffix(f".{os.getpid()}")
        _write(new, os.O_TRUNC, "\n".join(lines) + "\n")
        new.replace(self._path)


def history_path() -> Path:
    """The user's own: in the platform's folder for state ($XDG_STATE_HOME, else ~/.local/state)."""
    return platformdirs.user_state_path("tokenstream") / "chat_history"


def typed_messages(history: History) -> Iterator[Typed]:
    """Messages until Ctrl-D or Ctrl-C at the prompt. In the middle of a message, Ctrl-C drops it and Ctrl-D ends it."""
    import readline

    readline.set_auto_history(False)
    readline.clear_history()
    for entry in history.entries():
        with suppress(ValueError):  # an entry that is no text a terminal could hold
            readline.add_history(entry)
    while True:
        try:
            line = _read(_PROMPT)
        except (EOFError, KeyboardInterrupt):
            sys.stderr.write("\n")
            return
        try:
            text, alone = _whole(line)
        except KeyboardInterrupt:
            sys.stderr.write("\n")
            continue
        if text.strip():
            kept = _retype(text)
            readline.add_history(kept)
            history.add(kept)
            yield Typed(text.strip(), alone and line.startswith("/"))


def _whole(line: str) -> tuple[str, bool]:
    """The message that begins with `line`, and whether that line is all of it."""
    opening = line.strip()
    if opening.startswith(QUOTES):
        return _block(opening.removeprefix(QUOTES)), False
    alone = not line.endswith("\\") and "\n" not in line  # a paste may bring several lines at once
    text = ""
    while line.endswith("\\"):
        text += line.removesuffix("\\") + "\n"
        line = _more()
    return text + line, alone


def _block(line: str) -> str:
    lines = []
    while not line.rstrip().endswith(QUOTES):
        lines.append(line)
        try:
            line = _read(_MORE)
        except EOFError:
            return "\n".join(lines)
    lines.append(line.rstrip().removesuffix(QUOTES))
    return "\n".join(lines)


def _more() -> str:
    try:
        return _read(_MORE)
    except EOFError:
        return ""


def _read(prompt: str) -> str:
    if sys.stdout.isatty():
        return input(prompt)
    sys.stderr.write(prompt)  # standard output is a file that shall hold the answers alone
    sys.stderr.flush()
    return input()


def _retype(text: str) -> str:
    """A message as it can be typed again from the history."""
    text = text.strip("\n")
    return f"{QUOTES}{text}{QUOTES}" if "\n" in text else text


def _entry(line: str) -> str:
    with suppress(ValueError):
        entry = json.loads(line)
        if isinstance(entry, str):
            return entry
    return ""


def _write(path: Path, flag: int, text: str) -> None:
    file = os.open(path, os.O_WRONLY | os.O_CREAT | flag, 0o600)
    try:
        os.write(file, text.encode())
    finally:
        os.close(file)

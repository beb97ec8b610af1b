"""Tells on standard error what a long comparison is doing: a line for each step, and on a terminal how it gets on.

It does not know what the steps are.
"""

from __future__ import annotations

import time
from types import TracebackType
from typing import Self

from rich.console import Console
from rich.status import Status
from rich.text import Text

_EVERY = 0.1  # seconds between two drawings of a moving line


class Screen:
    """`begin` starts a step, `say` tells how it gets on; leaving the `with` clears what moves."""

    def __init__(self) -> None:
        self._console = Console(stderr=True, highlight=False)
        self._status = Status("", console=self._console)
        self._step = ""
        self._drawn = 0.0

    def __enter__(self) -> Self:
        """Begin to draw."""
        if self._console.is_terminal:
            self._status.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """Clear what moves."""
        self._status.stop()

    def begin(self, step: str) -> None:
        """A new step, on a line that stays."""
        self._step = step
        self._console.print(Text(f"{time.strftime('%H:%M:%S')} {step}"), soft_wrap=True)
        self._drawn = 0.0
        self.say("")

    def say(self, line: str) -> None:
        """How the step gets on; on a terminal alone, cut to its width."""
        now = time.monotonic()
        if not self._console.is_terminal or now - self._drawn < _EVERY:
            return
        self._drawn = now
        printable = "".join(letter for letter in line if letter.isprintable())
        self._status.update(Text(printable[: max(10, self._console.width - 4)]))

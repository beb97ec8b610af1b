"""What a terminal can do beside showing text: dim a line, and show a rate in its title while an answer runs.

Where there is no terminal, or one that knows no title, nothing is written. It does not know what it shows.
"""

from __future__ import annotations

import os
import sys
import time
from types import TracebackType
from typing import Self, TextIO

_UPDATE_SECONDS = 0.25
_WITHOUT_TITLE = ("", "dumb", "linux")
_SAVE, _RESTORE = "\x1b[22;2t", "\x1b[23;2t"  # xterm's stack of titles


def dimmed(text: str, stream: TextIO) -> str:
    """`text` as something beside the matter, if `stream` is a terminal that can show it so."""
    plain = not stream.isatty() or os.environ.get("TERM", "") in ("", "dumb") or os.environ.get("NO_COLOR")
    return text if plain else f"\x1b[2m{text}\x1b[0m"


class RateTitle:
    """Shows the tokens per second so far in the title of the terminal behind standard output, four times a second.

    The title is no part of the text, so that nothing on the screen moves; leaving the `with` block brings the old one
    back.
    """

    def __init__(self) -> None:
        self._shown = sys.stdout.isatty() and os.environ.get("TERM", "") not in _WITHOUT_TITLE
        self._tokens = 0
        self._first: float | None = None
        self._due = 0.0

    def __enter__(self) -> Self:
        """Keep the title of before."""
        self._write(_SAVE)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """Bring the title of before back."""
        self._write(_RESTORE)

    def count(self, tokens: int) -> None:
        """So many tokens have come now."""
        now = time.monotonic()
        if self._first is None:
            self._first, self._due = now, now + _UPDATE_SECONDS
            return
        self._tokens += tokens
        if now >= self._due:
            self._due = now + _UPDATE_SECONDS
            self._write(f"\x1b]2;{self._tokens / (now - self._first):.0f} tokens/s\x07")

    def _write(self, sequence: str) -> None:
        if self._shown:
            sys.stdout.write(sequence)
            sys.stdout.flush()

"""Shows an answer while it comes: as text with a line of timing behind it, or as JSON lines.

It reads a stream to its end and prints; it does not know who asked, nor what becomes of the answer.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

from .display import chunk_json, end_json, timing_line, write
from .terminal import dimmed

if TYPE_CHECKING:
    from .results import Chunk
    from .stream import TokenStream


def show_text(
    stream: TokenStream, *, interruptible: bool = False, heard: Callable[[Chunk], None] | None = None
) -> float:
    """Print the text on standard output and the timing on standard error.

    Returns when the first response was here (seconds of the epoch; 0 if none came). `interruptible`: Ctrl-C cancels the
    answer on the server and is no error. `heard` is told of each response once it is printed.
    """
    first = 0.0
    with stream:
        try:
            for chunk in stream:
                first = first or time.time()
                write(chunk.text)
                if heard is not None:
                    heard(chunk)
        except KeyboardInterrupt:
            if not interruptible:
                raise
        finally:
            if stream.text:
                write("\n")
    line = timing_line(stream.stats, stream.usage, stream.finish_reason or "cancelled")
    sys.stderr.write(dimmed(line, sys.stderr) + "\n")
    return first


def show_json(stream: TokenStream) -> float:
    """Print one JSON object per response, and one with the rest at the end. Returns as `show_text` does."""
    first = 0.0
    with stream:
        for chunk in stream:
            first = first or time.time()
            write(chunk_json(chunk) + "\n")
        write(end_json(stream.final()) + "\n")
    return first

"""A conversation on a terminal or a pipe: lines in, answers streamed out, history kept.

Ctrl-C during an answer cancels it on the server and keeps what was said; anything else that goes wrong drops the turn,
so that the history never holds a question without an answer. It does not know how errors are worded.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING

from .display import timing_line, write
from .params import Sampling

if TYPE_CHECKING:
    from .client import Client

_GREETING = "Ctrl-C stops an answer, /reset begins anew, /exit or Ctrl-D leaves."


class Conversation:
    """The messages so far, and the client that answers them."""

    def __init__(self, client: Client, sampling: Sampling, system: str | None = None) -> None:
        self._client = client
        self._sampling = sampling
        self._opening = [{"role": "system", "content": system}] if system else []
        self.messages = list(self._opening)

    def say(self, line: str) -> None:
        """Answer `line` on standard output; `/reset` forgets all but the system message, an empty line is ignored."""
        if line == "/reset":
            self.messages = list(self._opening)
        elif line:
            answer = self._answer([*self.messages, {"role": "user", "content": line}])
            if answer:
                self.messages += [{"role": "user", "content": line}, {"role": "assistant", "content": answer}]

    def _answer(self, messages: list[dict[str, str]]) -> str:
        with self._client.chat(messages, **self._sampling) as stream:
            try:
                for chunk in stream:
                    write(chunk.text)
            except KeyboardInterrupt:
                if not sys.stdin.isatty():
                    raise  # from a pipe nobody could go on
            finally:
                if stream.text:
                    write("\n")
            reason = stream.finish_reason or "cancelled"
            sys.stderr.write(timing_line(stream.stats, stream.usage, reason) + "\n")
            return stream.text


def typed_lines(interactive: bool) -> Iterator[str]:
    """Lines of standard input, stripped, until its end, `/exit`, or Ctrl-C at the prompt of a terminal."""
    if interactive:
        import readline  # noqa: F401  (importing it gives input() a history and editing)

        sys.stderr.write(_GREETING + "\n")
    while True:
        try:
            line = input("> ") if interactive else sys.stdin.readline()
        except (EOFError, KeyboardInterrupt):
            if interactive:
                sys.stderr.write("\n")
                return
            raise
        if line.strip() == "/exit" or (not interactive and not line):
            return
        yield line.strip()

"""Values of a client's as an error quotes them: they may be megabytes, and hold line breaks."""

from __future__ import annotations

import reprlib

from llm_engine.request import shown


class _Shortened(reprlib.Repr):
    """Writes a value's beginning and end, without writing the whole before."""

    def __init__(self) -> None:
        super().__init__()
        self.maxstring = self.maxother = 120
        self.maxdict = self.maxlist = self.maxtuple = 8

    def repr_int(self, x: int, level: int) -> str:  # noqa: ARG002  (reprlib's signature)
        return shown(x)


def quoted(value: object) -> str:
    """`value` as Python writes it, on one line; what is long is cut before it is written."""
    return _Shortened().repr(value)

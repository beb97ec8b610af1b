r"""Reads Prometheus's text format: names, labels and values, as a metrics page holds them.

    llm_requests_total{model="llm",outcome="stop"} 12

Comments, timestamps and exemplars are passed over, and a line that is no sample is an error. Source: "Exposition
formats", text-based format 0.0.4, Prometheus documentation. It does not know what the numbers mean.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

_SAMPLE = re.compile(r"([a-zA-Z_:][\w:]*)\s*(?:\{(.*)\}\s*|\s)([^\s{}]+)(?:\s+-?\d+)?")
_LABEL = re.compile(r'\s*([a-zA-Z_]\w*)\s*=\s*"((?:[^"\\]|\\.)*)"\s*(?:,|$)')
_ESCAPE = re.compile(r"\\(.)")


@dataclass(frozen=True, slots=True)
class Sample:
    """One series of a page and its value."""

    name: str
    labels: Mapping[str, str]
    value: float


def parse_page(text: str) -> list[Sample]:
    """All samples of a page, in its order. ValueError naming a line that is none."""
    lines = (line.strip() for line in text.split("\n"))
    return [_sample(line) for line in lines if line and not line.startswith("#")]


def _sample(line: str) -> Sample:
    found = _SAMPLE.fullmatch(line)
    if found is None:
        raise ValueError(f"no metrics: {line[:80]!r}")
    try:
        value = float(found[3])
    except ValueError:
        raise ValueError(f"no number: {line[:80]!r}") from None
    return Sample(found[1], _labels(found[2] or "", line), value)


def _labels(text: str, line: str) -> dict[str, str]:
    labels, at = {}, 0
    while text[at:].strip():
        found = _LABEL.match(text, at)
        if found is None:
            raise ValueError(f"no labels: {line[:80]!r}")
        labels[found[1]] = _ESCAPE.sub(_unescaped, found[2])
        at = found.end()
    return labels


def _unescaped(escape: re.Match[str]) -> str:
    return "\n" if escape[1] == "n" else escape[1]

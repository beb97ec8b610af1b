"""What was said of the repeats of a load, each thing once: lines that differ in their numbers alone become one line.

"others used 0.31 cores" and "others used 0.62 cores" are told as "others used 0.31 to 0.62 cores". It does not know
what a line means.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence

from .figures import Level
from .results import Measurement

_NUMBER = re.compile(r"\d+(?:\.\d+)?(?:e[+-]\d+)?")


def told(level: Level, of: Callable[[Measurement], Iterable[str]]) -> list[str]:
    """The flaws, for instance, of a load, each with the repeats in which it was said."""
    return [f"{_place(level, repeats)}: {line}" for line, repeats in joined([of(each) for each in level.measurements])]


def joined(said: Sequence[Iterable[str]]) -> list[tuple[str, list[int]]]:
    """Of the lines of each repeat those that there are, numbers as ranges, each with the places of its repeats."""
    found: dict[str, list[tuple[int, list[str]]]] = {}
    for place, lines in enumerate(said):
        for line in lines:
            found.setdefault(_NUMBER.sub("\0", line), []).append((place, _NUMBER.findall(line)))
    return [
        (_filled(words, [numbers for _, numbers in each]), sorted({place for place, _ in each}))
        for words, each in found.items()
    ]


def _filled(words: str, numbers: Sequence[Sequence[str]]) -> str:
    first, *others = words.split("\0")
    ranges = [_range(column) for column in zip(*numbers, strict=True)]
    return first + "".join(between + after for between, after in zip(ranges, others, strict=True))


def _range(column: Sequence[str]) -> str:
    low, high = min(column, key=float), max(column, key=float)
    return low if low == high else f"{low} to {high}"


def _place(level: Level, repeats: Sequence[int]) -> str:
    count = len(level.measurements)
    if len(repeats) == 1:
        return level.named(level.measurements[repeats[0]])
    return f"{level.name}, {'all' if len(repeats) == count else f'{len(repeats)} of'} {count} repeats"

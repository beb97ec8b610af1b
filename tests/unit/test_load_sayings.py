"""What several repeats say alike is told once, with the range of its numbers."""

from __future__ import annotations

import pytest

from tokenstream_loadtest.figures import levels
from tokenstream_loadtest.sayings import joined, told
from unit.invented_runs import measurement_of, record, run_of


@pytest.mark.parametrize(
    ("said", "expected"),
    [
        ([], []),
        ([["late"], []], [("late", [0])]),
        ([["others used 0.62 cores"], ["others used 0.31 cores"]], [("others used 0.31 to 0.62 cores", [0, 1])]),
        ([["by 9 ms, where 50 ms"], ["by 10 ms, where 50 ms"]], [("by 9 to 10 ms, where 50 ms", [0, 1])]),
        ([["by 1.2e+03 ms"], ["by 900 ms"]], [("by 900 to 1.2e+03 ms", [0, 1])]),
        ([["a 1", "b 2"], ["b 3"]], [("a 1", [0]), ("b 2 to 3", [0, 1])]),
        ([["7"], ["7"]], [("7", [0, 1])]),
    ],
)
def test_lines_that_differ_in_numbers_alone_become_one(said, expected):
    assert joined(said) == expected


def test_a_line_names_the_repeats_in_which_it_was_said():
    flaws = [("noise 1", "late"), ("noise 2",), ("slow", "noise 3"), ("slow",)]
    made = [measurement_of([record([0.1])], 1.0, repeat=repeat, flaws=each) for repeat, each in enumerate(flaws)]
    (level,) = levels(run_of(made))
    assert told(level, lambda each: each.flaws) == [
        "1 at once, 3 of 4 repeats: noise 1 to 3",
        "1 at once, repeat 1: late",
        "1 at once, 2 of 4 repeats: slow",
    ]
    (single,) = levels(run_of(made[:1]))
    assert told(single, lambda each: each.flaws) == ["1 at once: noise 1", "1 at once: late"]

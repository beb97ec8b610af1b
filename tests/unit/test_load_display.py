"""What the terminal shows of a summary beside its table."""

from __future__ import annotations

from typing import Any

from tokenstream.load_display import summary_text

BARE: dict[str, Any] = {
    "levels": [], "objectives": [], "search": None, "errors": [], "stalls": [], "reading": None, "flaws": [],
    "notes": [], "valid": True, "files": {},
}  # fmt: skip


def test_errors_stalls_and_how_repeats_are_read_are_told_in_a_line_each() -> None:
    errors = [{"kind": "overloaded", "count": 3, "example": "the queue\x1b[2J is full"}]
    stalls = [
        {"load": "4/s poisson", "count": 1, "longest": 1.93},
        {"load": "8/s poisson", "count": 2, "longest": 2.0},
    ]
    told = {**BARE, "errors": errors, "stalls": stalls, "reading": "counts are summed"}
    assert summary_text(told).splitlines()[-5:] == [
        "counts are summed",
        "3 overloaded: the queue[2J is full",
        "1 stall, the longest 1.9 s, at 4/s poisson",
        "2 stalls, the longest 2.0 s, at 8/s poisson",
        "valid",
    ]

"""What the terminal shows of a summary beside its table."""

from __future__ import annotations

from typing import Any

from tokenstream.load_display import summary_text

BARE: dict[str, Any] = {
    "levels": [], "objectives": [], "search": None, "errors": [], "stalls": [], "clocks": None, "reading": None,
    "flaws": [], "notes": [], "valid": True, "files": {},
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


def test_the_generator_has_no_share_of_the_servers_cpu_where_no_token_came() -> None:
    figures = dict.fromkeys(f"{name}_{point}" for name in ("ttft", "itl") for point in ("p50", "p95", "p99"))
    idle = {
        "load": "4 at once", "repeats": 1, "valid": False, "ok": 0, "errors": 9, "tokens_per_second": 0.0,
        "goodput": 0.0, **figures, "lag_p99": None, "generator_cores": 0.5, "server_cores": 0.1,
        "overhead_per_token": None,
    }  # fmt: skip
    lines = summary_text({**BARE, "levels": [idle]}).splitlines()
    assert lines[-2:] == ["generator: 0.50 cores at 4 at once", "valid"]


def test_clocks_are_set_beside_each_other_in_milliseconds_and_percent() -> None:
    clocks = {"load": "1 at once, repeat 2", "ttft_seconds": 0.0024, "ttft_share": 0.08, "itl_share": None}
    line = summary_text({**BARE, "clocks": clocks}).splitlines()[-2]
    assert line == "beside the server's own clocks: mean TTFT +2.4 ms (+8.0%) at 1 at once, repeat 2"

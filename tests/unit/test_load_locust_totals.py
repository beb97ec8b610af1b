"""What Locust's processes count, put together: nothing is lost, nothing counts twice, and gaps show."""

from __future__ import annotations

import pytest

from tokenstream_loadtest.records import Record
from tokenstream_loadtest.slo import Objective
from tokenstream_loadtest.tally import Tally
from tokenstream_loadtest.under_locust.totals import Counter, Last, Part, Totals, dump_part, read_part

OBJECTIVES = (Objective.parse("ttft_p95=500ms"), Objective.parse("errors=10%"))
LAST = Last(0.5, {})


def record(at: float, outcome: str = "ok", ttft: float = 0.1) -> Record:
    ok = outcome == "ok"
    return Record(
        id=f"r{at}",
        kind="chat",
        scheduled_at=at,
        sent_at=at + 0.01,
        ended_at=at + 1.0,
        outcome=outcome,  # type: ignore[arg-type]
        times=[at + ttft, at + 0.5, at + 0.6] if ok else [],
        tokens=[1, 1, 1] if ok else [],
        output_tokens=3 if ok else 0,
        error="" if ok else "no",
    )


def counter(test: int = 1) -> Counter:
    return Counter(test, 10.0, OBJECTIVES)


def totals(test: int = 1) -> Totals:
    return Totals(test, OBJECTIVES)


def dumped(of: Tally) -> object:
    """Everything that it holds, in a form that compares; the sums of floats depend on their order."""
    return {
        name: (
            group.outcomes,
            group.good,
            group.output_tokens,
            group.responses,
            {key: (list(h.buckets()), pytest.approx(h.total)) for key, h in group.histograms.items()},
        )
        for name, group in of.groups.items()
    }, of.seconds


def test_two_workers_that_report_now_and_then_come_to_what_one_counts():
    records = [record(10.0 + i * 0.3, "ok" if i % 7 else "overloaded", 0.05 * (i % 12)) for i in range(60)]
    one, first, second = counter(), counter(), counter()
    together, alone = totals(), totals()
    for i, each in enumerate(records):
        one.add(each)
        (first if i % 3 else second).add(each)
        if i % 10 == 9:
            together.add("a", read_part(dump_part(first.part(live=1))))
            together.add("b", read_part(dump_part(second.part(live=2))))
    together.add("a", first.part(0, LAST))
    together.add("b", second.part(0, LAST))
    alone.add("local", one.part(0, LAST))
    assert dumped(together.tally) == dumped(alone.tally)
    assert together.seconds == alone.seconds
    assert together.flaws() == ()
    assert together.tally.all.requests == 60


def test_a_part_of_another_test_is_not_taken():
    whole, other = totals(test=2), counter(test=1)
    other.add(record(10.0))
    whole.add("a", other.part(0))
    assert whole.tally.all.requests == 0
    assert whole.silent == set()


def test_a_part_that_got_lost_is_a_flaw():
    whole, one = totals(), counter()
    whole.add("a", one.part(0))
    one.part(0)
    whole.add("a", one.part(0, LAST))
    assert whole.flaws() == ("1 reports of workers were lost on the way: their requests are missing",)


def test_a_worker_that_never_told_its_last_is_a_flaw():
    whole = totals()
    whole.add("a", counter().part(0))
    (flaw,) = whole.flaws()
    assert "worker a did not tell how it ended" in flaw


def test_a_worker_that_never_told_anything_is_a_flaw():
    whole = Totals(1, OBJECTIVES, frozenset({"a", "b"}))
    whole.add("a", counter().part(0, LAST))
    assert whole.silent == {"b"}
    (flaw,) = whole.flaws()
    assert "worker b did not tell how it ended" in flaw


def test_flaws_of_workers_are_told_once():
    whole = totals()
    for name in ("a", "b"):
        whole.add(name, counter().part(0, Last(0.1, {}, (), ("late",))))
    assert whole.flaws() == ("late",)


def test_requests_under_way_are_those_of_all_processes():
    whole = totals()
    whole.add("a", counter().part(live=3))
    whole.add("b", counter().part(live=4))
    assert whole.live == 7


def test_a_point_tells_of_what_ended_since_the_one_before():
    whole, one = totals(), counter()
    one.add(record(10.0, ttft=0.1))
    whole.add("local", one.part(0))
    whole.mark(3.0, users=2)
    one.add(record(12.0, ttft=0.4))
    one.add(record(12.0, "timeout"))
    whole.add("local", one.part(0))
    whole.mark(6.0, users=5)
    whole.mark(9.0, users=1)
    first, second, third = whole.points
    assert first.ttft == pytest.approx((0.1, 0.1, 0.1), rel=2e-3)
    assert second.ttft == pytest.approx((0.4, 0.4, 0.4), rel=2e-3)
    assert (second.requests, second.errors) == (2, 1)
    assert (third.requests, third.ttft, third.itl) == (0, None, None)
    assert whole.peak_users == 5


def test_a_step_is_judged_by_its_own_requests():
    whole, one = totals(), counter()
    one.add(record(10.0, ttft=0.4))
    whole.add("local", one.part(0))
    assert whole.missed(whole.step) == []
    whole.begin_step()
    one.add(record(12.0, ttft=0.6))
    whole.add("local", one.part(0))
    assert whole.missed(whole.step) == [OBJECTIVES[0]]


def test_a_part_survives_json():
    one = counter()
    one.add(record(10.5))
    part = one.part(4, LAST)
    again = read_part(dump_part(part))
    assert dumped(again.tally) == dumped(part.tally)
    assert (again.test, again.number, again.live, again.last) == (1, 1, 4, LAST)


@pytest.mark.parametrize("text", ["", "{}", "[1]", '{"test": 1}'])
def test_what_is_no_part_is_refused_in_one_line(text):
    with pytest.raises(ValueError, match="no part of a test") as caught:
        read_part(text)
    assert "\n" not in str(caught.value)


def test_parts_hold_only_what_is_new():
    one = counter()
    one.add(record(10.0))
    assert one.part(0).tally.all.requests == 1
    second: Part = one.part(0)
    assert (second.tally.all.requests, second.number) == (0, 2)

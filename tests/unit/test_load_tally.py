"""A tally counts each request once in each of its groups, and parts of it add up to the whole without loss."""

from __future__ import annotations

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import TypeAdapter

from tokenstream_loadtest.records import OUTCOMES, Record
from tokenstream_loadtest.tally import Tally
from unit.invented_runs import BEGAN, record, tally_of

TALLY = TypeAdapter(Tally)
TIMES = st.lists(st.floats(0.001, 20.0), max_size=5).map(sorted)
RECORDS = st.builds(
    lambda times, sent, outcome, kind, priority, queue: record(
        times,
        sent=sent,
        scheduled=sent / 2,
        ended=max([sent, *times]),
        outcome=outcome,
        kind=kind,
        priority=priority,
        queue=queue,
        error=f"it was {outcome}",
    ),
    TIMES,
    st.floats(0.0, 20.0),
    st.sampled_from(OUTCOMES),
    st.sampled_from(["chat", "code"]),
    st.sampled_from([None, 1, 2]),
    st.none() | st.floats(0.0, 5.0),
)


@settings(deadline=None, max_examples=40)
@given(st.lists(RECORDS, max_size=12), st.data())
def test_any_split_of_any_records_merges_to_the_tally_of_all(records: list[Record], data: st.DataObject):
    places = data.draw(st.lists(st.integers(0, 2), min_size=len(records), max_size=len(records)))
    parts = [tally_of([one for one, place in zip(records, places, strict=True) if place == part]) for part in range(3)]
    merged = Tally()
    merged.merge(parts)
    assert TALLY.dump_python(merged) == TALLY.dump_python(tally_of(records))


@settings(deadline=None, max_examples=40)
@given(st.lists(RECORDS, max_size=12), st.integers(0, 12))
def test_what_was_merged_is_written_as_the_whole_and_read_back(records: list[Record], cut: int):
    merged = Tally()
    merged.merge([tally_of(records[:cut]), tally_of(records[cut:])])
    assert json.loads(TALLY.dump_json(merged)) == json.loads(TALLY.dump_json(tally_of(records)))
    assert TALLY.dump_json(TALLY.validate_json(TALLY.dump_json(merged))) == TALLY.dump_json(merged)


def test_every_request_is_in_the_groups_it_belongs_to():
    tally = tally_of([record([1.0], priority=1), record([1.0], kind="code"), record([2.0], priority=1)])
    assert {name: group.requests for name, group in tally.groups.items()} == {
        "all": 3,
        "kind=chat": 2,
        "kind=code": 1,
        "priority=1": 2,
    }


def test_histograms_hold_what_each_outcome_tells():
    tally = tally_of(
        [
            record([1.0, 1.5], ended=2.0),
            record([3.0, 3.5], ended=4.0, outcome="abandoned", queue=0.25),
            record(sent=0.1, outcome="overloaded", error="full"),
        ]
    )
    counts = {name: len(histogram) for name, histogram in tally.all.histograms.items()}
    assert counts == {"ttft": 2, "ttft_sent": 2, "itl": 2, "tpot": 1, "e2e": 1, "queue": 1, "lag": 3}
    assert tally.all.histograms["e2e"].mean == pytest.approx(2.0)
    assert tally.all.histograms["ttft"].mean == pytest.approx(2.0)


def test_what_was_planned_is_no_error():
    tally = tally_of([record([1.0]), record([1.0], outcome="abandoned"), record(outcome="timeout", error="late")])
    assert (tally.all.requests, tally.all.errors) == (3, 1)
    assert tally.all.examples == {"timeout": ["late"]}


def test_examples_are_a_few_different_lines_also_after_a_merge():
    parts = [
        tally_of([record(outcome="internal", error=f"line {n % 8}") for n in range(start, 40)]) for start in (0, 3)
    ]
    merged = Tally()
    merged.merge(parts)
    lines = merged.all.examples["internal"]
    assert len(lines) == len(set(lines)) == 5


def test_seconds_hold_what_was_sent_what_ended_and_the_tokens_that_came():
    tally = tally_of(
        [record([0.9, 1.1, 2.0], sent=0.2, tokens=[1, 2, 3]), record(sent=1.5, ended=2.5, outcome="internal")]
    )
    told = {at: (one.sent, one.ended, one.errors, one.tokens) for at, one in tally.seconds.items()}
    assert told == {0: (1, 0, 0, 1), 1: (1, 0, 0, 2), 2: (0, 2, 1, 3)}


def test_good_requests_are_those_that_it_was_told():
    tally = Tally()
    tally.add(record([1.0]), began=BEGAN, good=True)
    tally.add(record([1.0]), began=BEGAN, good=False)
    assert tally.all.good == 1
    assert tally.groups["kind=chat"].good == 1

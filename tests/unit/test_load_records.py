"""The times of one request follow from its clock readings, by the definitions that are promised."""

from __future__ import annotations

import pytest

from unit.invented_runs import record


def test_ttft_counts_from_the_schedule_and_ttft_sent_from_the_sending():
    late = record([2.0, 2.1], scheduled=0.5, sent=1.25)
    assert late.ttft == pytest.approx(1.5)
    assert late.ttft_sent == pytest.approx(0.75)
    assert late.lag == pytest.approx(0.75)


def test_latency_counts_from_the_schedule_to_the_end_and_not_to_the_last_token():
    assert record([2.0, 2.1], scheduled=0.5, sent=0.6, ended=3.0).latency == pytest.approx(2.5)


def test_gaps_are_those_between_responses():
    assert record([1.0, 1.25, 1.25, 2.0]).gaps == pytest.approx([0.25, 0.0, 0.75])
    assert record([1.0]).gaps == []
    assert record().gaps == []


def test_tpot_shares_the_time_behind_the_first_response_among_the_tokens_behind_it():
    assert record([1.0, 1.2, 1.8]).tpot == pytest.approx(0.4)
    assert record([1.0, 1.2, 1.8], tokens=[5, 1, 3]).tpot == pytest.approx(0.2)


def test_an_answer_of_one_response_has_no_tpot_and_no_answer_has_no_ttft():
    assert record([1.0], tokens=[7]).tpot is None
    nothing = record(outcome="connection")
    assert (nothing.ttft, nothing.ttft_sent, nothing.tpot) == (None, None, None)

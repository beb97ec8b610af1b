"""Each stage between logits and draw against a plain reference: bias, penalties, bad words, top-k, top-p, min-p."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.overrides import TorchFunctionMode
from transformers import (
    MinPLogitsWarper,
    NoBadWordsLogitsProcessor,
    RepetitionPenaltyLogitsProcessor,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from llm_engine.request import SamplingParams
from llm_engine.sampling import Sampler, _nucleus, _nucleus_of_sorted
from unit.sampler_seats import CPU, GREEDY, admit, draws, sample, warped

pytestmark = pytest.mark.usefixtures("one_thread")

examples = settings(max_examples=60, deadline=None)


def kept(params: SamplingParams, logits: Tensor) -> set[int]:
    """Which tokens survive the stages of `params`: all that many seeds draw."""
    return set(draws(params, logits, 1000).tolist())


def in_vllms_order(logits: Tensor, k: int, p: float, min_p: float) -> set[int]:
    """vLLM's candidates: min-p of the whole, then top-k, then top-p over what these two leave, made to sum to 1."""
    weights = np.exp(logits.double().numpy() - float(logits.max()))
    weights[weights < min_p] = 0.0
    order = np.lexsort((np.arange(len(weights)), -weights))
    left = weights[order][:k]
    before = (np.cumsum(left) - left) / left.sum()
    return {int(token) for token, weight, mass in zip(order, left, before, strict=False) if weight > 0 and mass < p}


@settings(max_examples=25, deadline=None)
@given(st.permutations(list(np.linspace(-1, 1, 9))), st.integers(1, 10), st.floats(0.05, 1.0), st.floats(0, 0.9))
def test_the_candidates_are_those_of_vllm(values: list[float], k: int, p: float, min_p: float) -> None:
    logits = torch.tensor(values, dtype=torch.float32)
    found = kept(SamplingParams(top_k=k, top_p=p, min_p=min_p), logits)
    warpers = MinPLogitsWarper(min_p), TopKLogitsWarper(k), TopPLogitsWarper(p)  # Hugging Face's, in vLLM's order
    assert found == set(warped(logits, *warpers).nonzero().flatten().tolist())
    assert found == in_vllms_order(logits, k, p, min_p)


@pytest.mark.parametrize("top_k", [0, 3])
def test_top_p_takes_its_share_of_what_min_p_leaves(top_k: int) -> None:
    """Of 0.4, 0.3, 0.2 and 0.1, top-p 0.55 alone needs the first two; of 0.4 and 0.3, the first has the share."""
    logits = torch.tensor([0.1, 0.4, 0.2, 0.3]).log()
    assert kept(SamplingParams(top_p=0.55, top_k=top_k), logits) == {1, 3}
    assert kept(SamplingParams(min_p=0.6, top_k=top_k), logits) == {1, 3}
    assert kept(SamplingParams(min_p=0.6, top_p=0.55, top_k=top_k), logits) == {1}


def check_nucleus(logits: Tensor, p: float) -> None:
    """Compare with a plain sort in float64, but for tokens whose place is within the rounding of the sums."""
    weights = (logits - logits.max()).exp()
    share = torch.tensor([[p]])
    exact = weights.double().numpy()
    order = np.lexsort((np.arange(len(exact)), -exact))
    before = (np.cumsum(exact[order]) - exact[order]) / exact.sum()
    clear = np.abs(before - share.double().item()) > 1e-9
    expected = before < share.double().item()
    by_id, by_rank = _nucleus(weights[None], share), _nucleus_of_sorted(weights[order.copy()][None], share)
    got: npt.NDArray[np.bool_] = by_id[0].numpy()[order]
    assert (got == expected)[clear].all()
    assert got[0]
    assert (by_rank[0].numpy() == got).all()


@examples
@given(st.lists(st.floats(-8, 8, width=16), min_size=2, max_size=24), st.floats(1e-9, 1.0))
def test_top_p_keeps_the_smallest_set_with_its_share_and_equals_by_id(values: list[float], p: float) -> None:
    check_nucleus(torch.tensor(values), p)


@pytest.mark.parametrize("p", [1e-9, 0.1, 0.5, 0.9, 0.999, 0.9999999])
@pytest.mark.parametrize("spread", [0.0, 0.05, 4.0])
def test_top_p_is_exact_over_a_real_vocabulary_with_many_equals(spread: float, p: float) -> None:
    logits = torch.randn(49152, generator=torch.Generator().manual_seed(10)) * spread
    check_nucleus(logits.bfloat16().float(), p)


def test_top_p_stops_at_exactly_its_share() -> None:
    weights, share = torch.tensor([[0.5, 1.0, 0.25, 0.25]]), torch.tensor([[0.75]])
    assert _nucleus(weights, share).tolist() == [[True, True, False, False]]
    assert _nucleus(weights, torch.tensor([[0.5]])).tolist() == [[False, True, False, False]]


def test_top_k_keeps_exactly_k_and_equals_by_id() -> None:
    logits = torch.tensor([1.0, 2.0, 2.0, 0.0, 2.0, 2.0], dtype=torch.bfloat16)
    assert kept(SamplingParams(top_k=2), logits) == {1, 2}
    assert kept(SamplingParams(top_k=5), logits) == {0, 1, 2, 4, 5}
    assert kept(SamplingParams(top_k=600), logits) == set(range(6))


def test_a_tiny_top_p_is_greedy() -> None:
    logits = torch.tensor([0.5, 3.0, 3.0, 1.0])
    assert set(draws(SamplingParams(top_p=1e-9), logits, 300).tolist()) == {1}
    assert set(draws(SamplingParams(top_p=1e-9, top_k=3), logits, 300).tolist()) == {1}


@pytest.mark.parametrize("temperature", [1e-300, 1e-5, 1e-4])
def test_a_tiny_temperature_is_greedy(temperature: float) -> None:
    logits = torch.tensor([0.5, 3.0, 3.5, 1.0]) * 1000
    for params in (SamplingParams(temperature=temperature), SamplingParams(temperature=temperature, top_p=0.5)):
        assert set(draws(params, logits, 300).tolist()) == {2}


def test_min_p_one_keeps_the_best_alone() -> None:
    assert kept(SamplingParams(min_p=1.0), torch.tensor([0.0, 2.0, 1.99, 1.0])) == {1}


@examples
@given(st.lists(st.integers(0, 11), min_size=1, max_size=12), st.floats(0.3, 3.0), st.integers(0, 99))
def test_the_repetition_penalty_is_hugging_faces(tokens: list[int], penalty: float, seed: int) -> None:
    logits = torch.randn(1, 12, generator=torch.Generator().manual_seed(seed)) - seed % 3
    sampler = Sampler(1, 12, CPU)
    admit(sampler, 0, SamplingParams(temperature=0.0, repetition_penalty=penalty), tokens=tokens)
    expected = RepetitionPenaltyLogitsProcessor(penalty)(torch.tensor([tokens]), logits)
    assert sample(sampler, logits, [0]).tokens == expected.argmax()


def test_presence_and_frequency_penalties_count_the_answer_alone() -> None:
    sampler = Sampler(1, 6, CPU)
    params = SamplingParams(temperature=0.0, presence_penalty=0.5, frequency_penalty=0.25)
    admit(sampler, 0, params, tokens=[5, 5, 5, 1], prompt_len=3)
    logits = torch.tensor([[0.0, 2.0, 1.9, -1.0, 0.1, 1.45]])
    counts = np.array([0, 1, 0, 0, 0, 0])
    for step in range(12):
        expected = int(np.argmax(logits[0].numpy() - 0.25 * counts - 0.5 * (counts > 0)))
        assert sample(sampler, logits, [0], step + 1).tokens == expected
        counts[expected] += 1
    assert counts[5] > 0


@examples
@given(st.lists(st.integers(0, 3), min_size=1, max_size=8), st.integers(0, 99))
def test_bad_words_are_hugging_faces(tokens: list[int], seed: int) -> None:
    words = ((0,), (1, 2), (3, 3, 1), (2, 1, 0, 3), (1, 1))
    generator = torch.Generator().manual_seed(seed)
    sampler = Sampler(2, 4, CPU)
    admit(sampler, 1, GREEDY, tokens=tokens, prompt_len=1, bad_words=((1,),))  # the tables grow under it
    admit(sampler, 0, GREEDY, tokens=tokens, prompt_len=1, bad_words=words)
    oracle = NoBadWordsLogitsProcessor([list(word) for word in words], eos_token_id=None)
    ids = list(tokens)
    for step in range(12):
        logits = torch.randn(1, 4, generator=generator)
        expected = oracle(torch.tensor([ids]), logits)
        out = sample(sampler, logits.repeat(2, 1), [0, 1], len(ids) - 1 + step)
        assert bool(out.bad[0]) == bool(expected.isinf().all())
        if not out.bad[0]:
            assert out.tokens[0] == expected.argmax()
        assert out.tokens[1] == logits.index_fill(1, torch.tensor([1]), -torch.inf).argmax()
        ids.append(int(out.tokens[0]))


def test_an_answer_does_not_end_before_min_tokens() -> None:
    logits = torch.tensor([[0.0, 9.0, 8.0, 7.0, 1.0]])
    sampler = Sampler(1, 5, CPU)
    for ignore_eos, early in ((False, 3), (True, 1)):
        params = SamplingParams(temperature=0.0, min_tokens=3, stop_token_ids=(2,), ignore_eos=ignore_eos)
        admit(sampler, 0, params, eos=(1,))
        assert [int(sample(sampler, logits, [0], p).tokens) for p in range(5)] == [early, early, early, 1, 1]


def test_logit_bias_is_added_before_all_else() -> None:
    logits = torch.tensor([[0.0, 1.0, 2.0, 3.0]])
    sampler = Sampler(1, 4, CPU)
    bias = ((0, 2.5), (0, 1.0), (3, -100.0))
    admit(sampler, 0, SamplingParams(temperature=0.0, logit_bias=bias))
    assert sample(sampler, logits, [0]).tokens == 0
    admit(sampler, 0, SamplingParams(temperature=0.0, logit_bias=bias, repetition_penalty=2.0), tokens=[0])
    assert sample(sampler, logits, [0]).tokens == 2


def test_prompt_tokens_without_a_logit_change_nothing_but_what_stands_behind_them() -> None:
    """An embedding may have more rows than the head."""
    logits = torch.tensor([[0.0, 0.5, 1.0, 3.0]])
    sampler = Sampler(1, 4, CPU)
    params = SamplingParams(temperature=0.0, repetition_penalty=2.0)
    admit(sampler, 0, params, tokens=[9, 4, 3], prompt_len=2, bad_words=((4, 3, 3),))
    assert [int(sample(sampler, logits, [0], p).tokens) for p in (1, 2)] == [2, 3]  # 3 would complete a word at first


class Elements(TorchFunctionMode):
    """Counts the elements that all operations return."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **kwargs or {})
        values = out if isinstance(out, tuple) else (out,)
        self.count += sum(value.numel() for value in values if isinstance(value, Tensor))
        return out


def elements(sampler: Sampler, logits: Tensor) -> int:
    """What a step with a row for each seat costs, behind one that is not counted."""
    seats = range(len(logits))
    sample(sampler, logits, seats)
    with Elements() as counted:
        sample(sampler, logits, seats)
    return counted.count


HEAVY = SamplingParams(
    temperature=0.0, logit_bias=tuple((token, -1.0) for token in range(1000)), repetition_penalty=2.0
)
LONG_WORD = tuple(range(1, 200))


def test_a_step_costs_what_its_rows_ask_for_and_not_what_their_seats_were_once_asked() -> None:
    logits = torch.zeros(8, 2000)
    fresh, used = (Sampler(8, 2000, CPU) for _ in range(2))
    for seat in range(8):
        admit(used, seat, HEAVY, bad_words=(LONG_WORD,))
    sample(used, logits, range(8))
    for sampler in (fresh, used):
        for seat in range(8):
            admit(sampler, seat, SamplingParams(temperature=0.0, logit_bias=((5, 1.0),) if seat == 3 else ()))
    assert elements(used, logits) == elements(fresh, logits)


@pytest.mark.parametrize("greedy", [True, False])
def test_the_rules_and_penalties_of_one_row_cost_the_others_nothing(greedy: bool) -> None:
    plain = SamplingParams(temperature=0.0 if greedy else 1.0)
    costs = {}
    for rows in (4, 8):
        for heavy in (False, True):
            sampler = Sampler(8, 2000, CPU)
            for seat in range(rows):
                admit(
                    sampler,
                    seat,
                    HEAVY if heavy and seat == 3 else plain,
                    bad_words=(LONG_WORD,) * (heavy and seat == 3),
                )
            costs[rows, heavy] = elements(sampler, torch.zeros(rows, 2000))
    more = {rows: costs[rows, True] - costs[rows, False] for rows in (4, 8)}
    assert abs(more[8] - more[4]) < 2000 * (1 if greedy else 8)  # the drawn rows are copied out of the logits, once

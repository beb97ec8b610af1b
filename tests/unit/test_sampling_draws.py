"""The draw follows its distribution and depends on nothing but its row, its seat and (seed, position)."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import MinPLogitsWarper, TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

from engine import cpu_objects
from llm_engine import sampling
from llm_engine.numerics import _mix64
from llm_engine.request import SamplingParams
from llm_engine.sampling import Sampler
from llm_kernels.draws import NativeNumerics
from unit.sampler_seats import CPU, GREEDY, admit, draws, sample, warped

pytestmark = pytest.mark.usefixtures("one_thread", "numerics")


@pytest.fixture(params=["torch", "kernels"])
def numerics(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """What computes the draws of every Sampler here: torch, and then the kernels."""
    if request.param == "kernels":
        native = NativeNumerics(cpu_objects.best(), threads=1)
        monkeypatch.setattr(sampling, "Numerics", lambda: native)


def chi_square(tokens: Tensor, probabilities: Tensor) -> float:
    """Pearson's statistic over the tokens with probability, in standard deviations from its mean."""
    counts = torch.bincount(tokens, minlength=len(probabilities)).double()
    assert counts[probabilities == 0].sum() == 0
    expected = probabilities[probabilities > 0].double() * len(tokens)
    statistic = ((counts[probabilities > 0] - expected) ** 2 / expected).sum()
    freedom = len(expected) - 1
    return float((statistic - freedom) / (2 * freedom) ** 0.5)


# ---- the draw


@pytest.mark.parametrize(
    ("params", "warpers"),
    [
        (SamplingParams(), []),
        (SamplingParams(temperature=0.6), [TemperatureLogitsWarper(0.6)]),
        (SamplingParams(temperature=100.0), [TemperatureLogitsWarper(100.0)]),
        (SamplingParams(top_k=4), [TopKLogitsWarper(4)]),
        (SamplingParams(top_p=0.7), [TopPLogitsWarper(0.7)]),
        (SamplingParams(min_p=0.2), [MinPLogitsWarper(0.2)]),
        (
            SamplingParams(temperature=1.5, top_k=8, top_p=0.8, min_p=0.05),
            [TemperatureLogitsWarper(1.5), TopKLogitsWarper(8), TopPLogitsWarper(0.8), MinPLogitsWarper(0.05)],
        ),
    ],
)
def test_draws_follow_the_distribution(params: SamplingParams, warpers: list[Callable[..., Tensor]]) -> None:
    logits = torch.randn(12, generator=torch.Generator().manual_seed(1))
    assert chi_square(draws(params, logits, 20_000), warped(logits, *warpers)) < 4


def test_positions_of_one_seed_are_independent_draws() -> None:
    logits = torch.zeros(8)
    sampler = Sampler(1, 8, CPU)
    admit(sampler, 0, SamplingParams(), seed=2**64 - 1)
    index = torch.zeros(1, dtype=torch.int64)
    tokens = torch.cat([sampler.sample(logits[None], [0], index, torch.tensor([p])).tokens for p in range(4000)])
    pairs = tokens[:-1] * 8 + tokens[1:]
    assert chi_square(tokens, torch.full((8,), 1 / 8)) < 4
    assert chi_square(pairs, torch.full((64,), 1 / 64)) < 4


@pytest.mark.parametrize("seeds", [0, 2**63 - 10_000, 2**64 - 20_000])
def test_neighbouring_seeds_are_independent(seeds: int) -> None:
    logits = torch.zeros(8)
    tokens = draws(SamplingParams(), logits, 20_000, seeds=seeds)
    assert chi_square(tokens[:-1] * 8 + tokens[1:], torch.full((64,), 1 / 64)) < 4


def test_a_seed_at_one_position_says_nothing_of_the_next() -> None:
    first, second = (draws(SamplingParams(), torch.zeros(8), 20_000, position=p) for p in (0, 1))
    assert chi_square(first * 8 + second, torch.full((64,), 1 / 64)) < 4


def test_all_64_bits_of_a_seed_count() -> None:
    logits = torch.zeros(2000)
    sampler = Sampler(1, 2000, CPU)
    tokens = set()
    for seed in [0, *(2**bit for bit in range(64))]:
        admit(sampler, 0, SamplingParams(), seed=seed)
        tokens.add(int(sample(sampler, logits[None], [0]).tokens))
    assert len(tokens) > 55


def test_the_row_key_is_splitmix64() -> None:
    gamma = 0x9E3779B97F4A7C15 - 2**64
    outputs = [0xE220A8397B1DCDAF, 0x6E789E6AA1B965F4, 0x06C45D188009454F]  # of the generator seeded with 0
    assert [int(x) % 2**64 for x in _mix64(torch.arange(1, 4) * gamma)] == outputs


def test_a_seed_means_the_same_tokens_in_every_version() -> None:
    """A stream may be resumed on another server, so these numbers never change."""
    assert draws(SamplingParams(), torch.zeros(1000), 6, position=3).tolist() == [675, 702, 684, 584, 429, 4]


def test_noise_never_picks_a_token_without_weight() -> None:
    logits = torch.full((1000,), -torch.inf)
    logits[777] = -3.0
    assert set(draws(SamplingParams(), logits, 500).tolist()) == {777}


def test_rare_tokens_are_drawn_as_often_as_they_should() -> None:
    logits = torch.zeros(4001)
    logits[0] = 20.0  # the others have 4000 / e^20 together: eight in a million
    count = sum(int((draws(SamplingParams(temperature=2.0), logits, 500, seeds=s) > 0).sum()) for s in (0, 500))
    assert 120 < count < 190  # temperature 2: 4000 / (4000 + e^10) = 15.4 %


# ---- one row is not another's business

MIXED = [
    GREEDY,
    SamplingParams(),
    SamplingParams(top_k=5, temperature=0.9),
    SamplingParams(top_p=0.9, min_p=0.02, logprobs=3),
    SamplingParams(temperature=0.0, repetition_penalty=1.7, frequency_penalty=0.4, presence_penalty=-0.3),
    SamplingParams(top_k=40, top_p=0.5, logit_bias=((3, 4.0), (8, -100.0)), min_tokens=30, stop_token_ids=(5,)),
    SamplingParams(temperature=1.3, presence_penalty=1.1, repetition_penalty=0.8, top_p=0.95, logprobs=0),
]
WORDS = ((7,), (2, 9), (4, 4, 4))


def answers(
    seats: Sequence[int], logits: Tensor, steps: int, start: int = 0, given_tokens: Sequence[Sequence[int]] = ()
) -> tuple[list[list[int]], list[Tensor]]:
    """Let `seats` (indices into MIXED) generate together; the tokens and the chosen logprobs bit by bit."""
    sampler = Sampler(len(MIXED), logits.shape[-1], CPU)
    tokens = [[1, 2, 3, *(given_tokens[n] if given_tokens else ())] for n in range(len(seats))]
    for n, seat in enumerate(seats):
        admit(
            sampler,
            seat,
            MIXED[seat],
            seed=seat * 11,
            tokens=tokens[n],
            prompt_len=3,
            eos=(6,),
            bad_words=WORDS if seat % 2 else (),
        )
    logprobs = []
    for step in range(start, steps):
        out = sample(sampler, logits[step, list(seats)], seats, step)
        assert not out.bad.any()
        for n, token in enumerate(out.tokens.tolist()):
            tokens[n].append(token)
        if out.logprobs is not None:
            logprobs.append(out.logprobs.chosen)
    return [row[3:] for row in tokens], logprobs


@pytest.mark.parametrize(("vocabulary", "dtype"), [(37, torch.float32), (301, torch.bfloat16), (64, torch.float16)])
def test_a_rows_tokens_do_not_depend_on_its_neighbours(vocabulary: int, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(5)
    logits = (torch.randn(25, len(MIXED), vocabulary, generator=generator) * 3).to(dtype)
    together, logprobs = answers(range(len(MIXED)), logits, 25)
    for seat, params in enumerate(MIXED):
        alone, own = answers([seat], logits, 25)
        assert alone == [together[seat]]
        if params.logprobs is not None:
            assert [float(step[0]) for step in own] == [float(step[seat]) for step in logprobs]
    backwards, _ = answers(range(len(MIXED) - 1, -1, -1), logits, 25)
    assert backwards == together[::-1]


def test_a_resumed_row_goes_on_as_if_it_had_never_stopped() -> None:
    logits = torch.randn(24, len(MIXED), 50, generator=torch.Generator().manual_seed(6)) * 2
    seats = range(len(MIXED))
    whole, _ = answers(seats, logits, 24)
    resumed, _ = answers(seats, logits, 24, start=11, given_tokens=[row[:11] for row in whole])
    assert resumed == whole


def test_a_seat_forgets_its_last_request() -> None:
    logits = torch.randn(1, 40, generator=torch.Generator().manual_seed(7))
    sampler = Sampler(2, 40, CPU)
    admit(sampler, 0, SamplingParams(temperature=0.0, frequency_penalty=2.0), tokens=[0, *[1] * 9])
    admit(sampler, 1, SamplingParams(temperature=0.0, logit_bias=((4, 100.0),), min_tokens=9), bad_words=((1, 2),))
    for seat in (0, 1):
        admit(sampler, seat, GREEDY)
        admit(sampler, 1 - seat, SamplingParams(temperature=0.0, presence_penalty=1.0, logit_bias=((0, -1.0),)))
        both = sample(sampler, logits.repeat(2, 1), [seat, 1 - seat])
        assert both.tokens[0] == logits.argmax()
    for tokens, expected in (([0, *[int(logits.argmax())] * 9], False), ([0], True)):
        admit(sampler, 0, SamplingParams(temperature=0.0, frequency_penalty=2.0), tokens=tokens)
        assert bool(sample(sampler, logits, [0], 9).tokens == logits.argmax()) is expected


# ---- greedy, bad rows, logprobs


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("vocabulary", [2, 17, 1003, 49152])
def test_greedy_is_argmax_and_the_lowest_id_of_equals(dtype: torch.dtype, vocabulary: int) -> None:
    generator = torch.Generator().manual_seed(vocabulary)
    logits = torch.randint(0, 3, (4, vocabulary), generator=generator).to(dtype)
    sampler = Sampler(4, vocabulary, CPU)
    expected = np.argmax(logits.float().numpy(), axis=1).tolist()
    assert sample(sampler, logits, range(4)).tokens.tolist() == expected
    admit(sampler, 3, SamplingParams(frequency_penalty=1.0))
    assert sample(sampler, logits, range(4)).tokens.tolist()[:3] == expected[:3]


@pytest.mark.parametrize("params", [*MIXED, SamplingParams(top_p=0.5)])
def test_a_bad_row_is_reported_and_its_neighbours_are_not(params: SamplingParams) -> None:
    logits = torch.randn(5, 30, generator=torch.Generator().manual_seed(8))
    logits[0, 11] = torch.nan
    logits[1] = torch.nan
    logits[2] = -torch.inf
    logits[3, 4] = torch.inf
    before = logits.clone()
    sampler = Sampler(5, 30, CPU)
    for seat in range(5):
        admit(sampler, seat, params)
    out = sample(sampler, logits, range(5))
    assert out.bad.tolist() == [True, True, True, True, False]
    assert ((out.tokens >= 0) & (out.tokens < 30)).all()
    assert torch.equal(logits.view(torch.int32), before.view(torch.int32))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_logprobs_are_those_of_the_raw_logits(dtype: torch.dtype) -> None:
    logits = (torch.randn(3, 40, generator=torch.Generator().manual_seed(9)) * 2).to(dtype)
    sampler = Sampler(3, 40, CPU)
    admit(sampler, 0, SamplingParams(temperature=0.3, top_k=3, logprobs=2))
    admit(sampler, 1, SamplingParams(temperature=0.0, logit_bias=((6, 100.0),), logprobs=5))
    out = sample(sampler, logits, range(3))
    assert out.logprobs is not None
    expected = logits.float().log_softmax(-1)
    for row, token in enumerate(out.tokens.tolist()):
        assert torch.isclose(out.logprobs.chosen[row], expected[row, token])
        assert out.logprobs.rank[row] == 1 + (logits[row] > logits[row, token]).sum()
        ids = sorted(range(40), key=lambda i: (-float(logits[row, i]), i))[:5]
        assert out.logprobs.top_ids[row].tolist() == ids
        assert torch.allclose(out.logprobs.top[row], expected[row, ids])
    assert out.tokens[1] == 6


def test_logprobs_are_made_only_when_asked_for() -> None:
    sampler = Sampler(1, 9, CPU)
    assert sample(sampler, torch.randn(1, 9), [0]).logprobs is None
    admit(sampler, 0, SamplingParams(logprobs=0))
    out = sample(sampler, torch.randn(1, 9), [0]).logprobs
    assert out is not None
    assert out.top_ids.shape == (1, 0)

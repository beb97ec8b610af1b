"""The kernels' floating point of a draw: the same bits on every level, and those of the definition within its error.

The reference is written here in NumPy, in float64, from the words of `cpu/draw.h` and not from its code.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor

from engine import cpu_objects
from llm_engine.numerics import Numerics, exponential
from llm_engine.request import SamplingParams
from llm_engine.sampling import Sampler
from llm_kernels.draws import NativeNumerics, noise
from unit.sampler_seats import CPU, admit, sample

ERROR = 2e-7  # relative, of weights and noise
SIZES = [*range(1, 35), 511, 512, 513, 1024, 1030, 49152]
BAD = [torch.nan, torch.inf, -torch.inf]


def each(threads: int = 1) -> list[NativeNumerics]:
    """The implementations of all levels."""
    return [NativeNumerics(library, threads) for library in cpu_objects.libraries().values()]


def same(tensors: list[Tensor]) -> Tensor:
    """The one result that all have bit by bit."""
    integers = [t if t.dtype == torch.int64 else t.view(torch.int32) for t in tensors]
    assert all(torch.equal(t, integers[0]) for t in integers)
    return tensors[0]


def randn(*shape: int, seed: int = 1) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


# ---- noise


def mixed(x: int) -> int:
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
        x = (x ^ x >> shift) * factor % 2**64
    return x ^ x >> 31


def key_of(seed: int, position: int) -> tuple[int, int]:
    key = mixed((mixed(seed % 2**64) + (position + 1) * 0x9E3779B97F4A7C15) % 2**64)
    return key % 2**32, key >> 32


def hashed(seed: int, position: int, ids: NDArray[np.int32]) -> NDArray[np.uint32]:
    low, high = key_of(seed, position)
    h = ids.astype(np.uint32) * np.uint32(0x9E3779B1) ^ np.uint32(low)
    h = (h ^ h >> np.uint32(16)) * np.uint32(0x7FEB352D)
    h = ((h ^ h >> np.uint32(15)) + np.uint32(high)) * np.uint32(0x846CA68B)
    return h ^ h >> np.uint32(16)


def ids_with_hash(seed: int, position: int, hashes: NDArray[np.uint32]) -> NDArray[np.int32]:
    """The ids that `hashed` maps to `hashes`: each of its steps backwards."""
    low, high = key_of(seed, position)

    def divided(x: NDArray[np.uint32], factor: int) -> NDArray[np.uint32]:
        return x * np.uint32(pow(factor, -1, 2**32))

    h = divided(hashes ^ hashes >> np.uint32(16), 0x846CA68B) - np.uint32(high)
    h = divided(h ^ h >> np.uint32(15) ^ h >> np.uint32(30), 0x7FEB352D)
    return divided((h ^ h >> np.uint32(16)) ^ np.uint32(low), 0x9E3779B1).view(np.int32)


def reference_noise(hashes: NDArray[np.uint32]) -> NDArray[np.float64]:
    uniform = ((hashes & np.uint32(2**31 - 1)).astype(np.float32) + np.float32(0.5)) * np.float32(2**-31)
    return -np.log1p(-np.minimum(uniform, np.float32(1 - 2**-24)).astype(np.float64))


@pytest.mark.parametrize(("seed", "position"), [(0, 0), (5, 3), (-1, 2**40), (-(2**63), 7)])
def test_noise_is_the_exponential_of_the_hash_on_every_level(seed: int, position: int) -> None:
    ids = torch.arange(-50_000, 50_001, dtype=torch.int32)
    at = torch.tensor([seed]), torch.tensor([position])
    found = same([noise(library, *at, ids) for library in cpu_objects.libraries().values()])[0]
    expected = reference_noise(hashed(seed, position, ids.numpy()))
    assert (np.abs(found.double().numpy() / expected - 1) < ERROR).all()
    assert torch.allclose(found, exponential(*at, ids)[0], rtol=1e-6, atol=0)


def test_noise_keeps_its_error_over_the_whole_range_of_uniforms() -> None:
    edges = [0, 1, 2, 2**24, 2**31 - 1, 2**31 - 128, 2**31 - 64, 2**31 - 65, 2**31, 2**32 - 1]
    halves = [round((1 - 2**-k * r) * 2**31) + d for k in range(25) for r in (1, 0.5**0.5) for d in range(-500, 500)]
    small = [2**k + d for k in range(31) for d in range(-3, 4)]
    hashes = np.array([*edges, *halves, *small, *range(0, 2**31, 20011)]).astype(np.uint32)
    ids = ids_with_hash(9, 4, hashes)
    assert (hashed(9, 4, ids) == hashes).all()
    at = torch.tensor([9]), torch.tensor([4])
    found = same([noise(library, *at, torch.from_numpy(ids)) for library in cpu_objects.libraries().values()])[0]
    assert (np.abs(found.double().numpy() / reference_noise(hashes) - 1) < ERROR).all()
    assert (found > 0).all()


# ---- weights


def test_weights_are_exponentials_of_the_quotient_on_every_level() -> None:
    scores = torch.cat([randn(4, 5000) * 9, torch.linspace(-120, 40, 20_000).expand(4, -1)], dim=1)
    temperature = torch.tensor([0.3, 0.7, 1.0, 100.0])
    peak = scores.max(dim=1).values
    found = same([numerics.weights(scores, peak, temperature) for numerics in each()])
    exact = ((scores - peak[:, None]) / temperature[:, None]).double().exp()
    normal = exact >= 2.0**-126 * (1 + 1e-5)
    assert (found.double() / exact - 1)[normal].abs().max() < ERROR
    assert (found[exact < 2.0**-126 * (1 - 1e-5)] == 0).all()
    assert (found.max(dim=1).values == 1).all()


@pytest.mark.parametrize("size", SIZES)
def test_weights_of_a_row_of_any_length(size: int) -> None:
    scores = randn(3, size + 5)[:, :size]  # rows with gaps between them
    peak = scores.max(dim=1).values
    found = same([numerics.weights(scores, peak, torch.ones(3)) for numerics in each()])
    assert torch.allclose(found, (scores - peak[:, None]).exp())


def test_weights_of_bad_rows_are_numbers_from_zero_to_one() -> None:
    scores = randn(4, 40)
    scores[0, 7], scores[1, 7], scores[2, 7], scores[3] = torch.nan, torch.inf, -torch.inf, -torch.inf
    for numerics in each():
        weights = numerics.weights(scores, numerics.row_max(scores)[0], torch.full((4,), 0.5))
        assert ((weights >= 0) & (weights <= 1)).all()
        assert weights[2, 7] == 0
        assert weights[2].max() == 1


# ---- the largest


@pytest.mark.parametrize("size", SIZES)
def test_the_row_maximum_is_the_first_of_equals_and_nan_wins(size: int) -> None:
    generator = torch.Generator().manual_seed(size)
    scores = torch.randint(-2, 3, (12, size + 3), generator=generator).float()[:, :size]
    scores[1] = -torch.inf
    scores[2] = torch.inf
    scores[3] = torch.where(torch.arange(size) % 2 > 0, 0.0, -0.0)
    scores[4, size // 2 :] = torch.nan
    scores[5, -1] = -torch.nan
    scores[6, -1] = 9.0
    scores[7, [0, -1]] = torch.tensor([torch.inf, torch.nan])
    scores[8] = -3e38
    peaks, places = zip(*(numerics.row_max(scores) for numerics in each()), strict=True)
    place = same(list(places))
    assert place.tolist() == np.argmax(scores.numpy(), axis=1).tolist()
    assert torch.equal(same(list(peaks)).view(torch.int32), scores.gather(1, place[:, None])[:, 0].view(torch.int32))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_the_row_maximum_of_half_precision_is_that_of_torch(dtype: torch.dtype) -> None:
    scores = randn(5, 1000).to(dtype)
    for numerics in each():
        peak, place = numerics.row_max(scores)
        assert torch.equal(peak, scores.float().max(dim=1).values)
        assert place.tolist() == np.argmax(scores.float().numpy(), axis=1).tolist()


# ---- the race


@pytest.mark.parametrize("own_ids", [False, True])
@pytest.mark.parametrize("size", SIZES)
def test_the_race_is_won_by_the_largest_quotient(size: int, own_ids: bool) -> None:
    weights = (randn(6, size) * 4).exp().clamp(max=1)
    weights[weights < 0.1] = 0
    weights[4] = 0
    seed, positions = torch.arange(6) - 3, torch.arange(6) * 7
    ids = torch.arange(6 * size, dtype=torch.int32).view(6, size) if own_ids else torch.arange(size, dtype=torch.int32)
    place = same([numerics.race(weights.clone(), seed, positions, ids) for numerics in each()])
    library = cpu_objects.best()
    rows = ids if own_ids else ids.expand(6, -1)
    noises = [noise(library, seed[r : r + 1], positions[r : r + 1], rows[r].contiguous()) for r in range(6)]
    assert place.tolist() == np.argmax((weights / torch.cat(noises)).numpy(), axis=1).tolist()
    assert place[4] == 0


# ---- logprobs


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("spread", [0.0, 1.0, 8.0])
def test_logprobs_are_those_of_float64_on_every_level(size: int, spread: float) -> None:
    logits = (randn(4, size + 3) * spread)[:, :size]
    logits[3, 0] = -torch.inf if size > 1 else 0.0
    ids = torch.randint(0, size, (4, 9), generator=torch.Generator().manual_seed(2))
    ids[:, 0] = 0
    found = same([numerics.logprobs(logits, ids) for numerics in each()])
    expected = logits.double().log_softmax(dim=1).gather(1, ids)
    assert torch.allclose(found.double(), expected, rtol=ERROR, atol=1e-6)


@pytest.mark.parametrize("bad", BAD)
def test_logprobs_of_a_bad_row_are_nan_and_its_neighbours_are_not(bad: float) -> None:
    logits = randn(3, 50)
    good = logits[2:].log_softmax(dim=1)
    logits[0] = bad
    logits[1, 5] = torch.nan
    ids = torch.tensor([[5, 6]] * 3)
    for numerics in each():
        found = numerics.logprobs(logits, ids)
        assert found[:2].isnan().all()
        assert torch.allclose(found[2:], good[:, 5:7])


# ---- together


def test_seeded_answers_and_logprobs_are_the_same_on_every_level_and_for_any_threads() -> None:
    seats, vocabulary = 16, 20_011
    logits = randn(6, seats, vocabulary, seed=3) * 2
    params = [
        SamplingParams(temperature=0.4 + 0.1 * (seat % 5), logprobs=4, **extra)
        for seat in range(seats)
        for extra in [[{}, {"top_k": 50}, {"top_p": 0.9}, {"min_p": 0.02, "frequency_penalty": 0.3}][seat % 4]]
    ]
    drawn, logprobs = [], []
    for numerics in [*each(), *each(threads=3)]:
        sampler = Sampler(seats, vocabulary, CPU, numerics)
        for seat in range(seats):
            admit(sampler, seat, params[seat], seed=seat)
        steps = [sample(sampler, logits[step], range(seats), step) for step in range(len(logits))]
        drawn.append(torch.stack([step.tokens for step in steps]))
        found = [step.logprobs for step in steps]
        logprobs.append(torch.cat([torch.cat([f.chosen[:, None], f.top], dim=1) for f in found if f is not None]))
    assert len(same(drawn).unique()) > 50
    assert same(logprobs).shape == (6 * seats, 5)


class Watched(Numerics):
    """Keeps the scores that it was last asked for the largest of."""

    def row_max(self, scores: Tensor) -> tuple[Tensor, Tensor]:
        self.scores = scores.clone()
        return super().row_max(scores)


def test_penalties_round_after_each_operation() -> None:
    """As float32 in NumPy, which fuses none: a fused product and difference would have other bits."""
    logits, watched = randn(1, 3000) * 5, Watched()
    tokens = torch.randint(0, 3000, (4000,), generator=torch.Generator().manual_seed(4)).tolist()
    repetition, presence, frequency = (np.float32(x) for x in (1.3, 0.7, 0.31))
    sampler = Sampler(1, 3000, CPU, watched)
    params = SamplingParams(temperature=0.0, repetition_penalty=1.3, presence_penalty=0.7, frequency_penalty=0.31)
    admit(sampler, 0, params, tokens=tokens, prompt_len=500)
    sample(sampler, logits, [0])
    counts = np.bincount(tokens[500:], minlength=3000).astype(np.float32)
    scores = logits[0].numpy()
    seen = np.bincount(tokens, minlength=3000) > 0
    scores = np.where(seen, np.where(scores > 0, scores / repetition, scores * repetition), scores)
    scores = scores - frequency * counts - presence * (counts > 0)
    assert scores.dtype == np.float32
    assert (watched.scores[0].numpy().view(np.int32) == scores.view(np.int32)).all()

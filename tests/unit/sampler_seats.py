"""A sampler's seats filled and drawn from in one call each, and Hugging Face's probabilities to hold the draws against.

It knows the sampler's interface; it does not know which tokens are right.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from llm_engine.request import Request, SamplingParams
from llm_engine.sampling import Sampled, Sampler

CPU = torch.device("cpu")
GREEDY = SamplingParams(temperature=0.0)


def admit(
    sampler: Sampler,
    seat: int,
    params: SamplingParams,
    *,
    seed: int = 0,
    tokens: Sequence[int] = (0,),
    prompt_len: int = 1,
    eos: tuple[int, ...] = (),
    bad_words: tuple[tuple[int, ...], ...] = (),
) -> None:
    request = Request("r", tokens[:prompt_len], params, tokens=list(tokens), prompt_len=prompt_len, seed=seed)
    sampler.admit(seat, request, eos_token_ids=eos, bad_words_ids=bad_words)


def sample(sampler: Sampler, logits: Tensor, seats: Sequence[int], position: int = 0) -> Sampled:
    index = torch.tensor(seats, dtype=torch.int64)
    return sampler.sample(logits, list(seats), index, torch.full_like(index, position))


def draws(params: SamplingParams, logits: Tensor, count: int, *, position: int = 0, seeds: int = 0) -> Tensor:
    """`count` draws from one row of logits, with the seeds `seeds`, `seeds` + 1, ..."""
    sampler = Sampler(250, len(logits), CPU)
    tokens = []
    for start in range(0, count, 250):
        seats = range(min(250, count - start))
        for seat in seats:
            admit(sampler, seat, params, seed=seeds + start + seat)
        tokens.append(sample(sampler, logits.expand(len(seats), -1), seats, position).tokens)
    return torch.cat(tokens)


def warped(logits: Tensor, *warpers: Callable[..., Tensor]) -> Tensor:
    """Hugging Face's probabilities after `warpers`."""
    scores, ids = logits[None].float(), torch.zeros(1, 1, dtype=torch.int64)
    for warper in warpers:
        scores = warper(ids, scores)
    return scores.softmax(-1)[0]

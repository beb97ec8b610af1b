"""Choose one token per row of logits: rules, penalties, temperature, min-p, top-k, top-p, draw, and logprobs.

A token depends on its own row, its seat's parameters and (seed, position) alone: no generator, no state but the seat's,
and no floating-point sum over the vocabulary, so neither neighbours nor the order of additions can change it. `sample`
never waits for the device. The module does not know what a token means, nor when an answer ends.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from .numerics import Numerics, signed
from .rules import RuleList, Rules, put, to_device

if TYPE_CHECKING:
    from .request import Request

_GREEDY_BELOW = 1e-5  # temperatures under this are greedy: logits / temperature would leave float32

_UNITS = float(2**40)  # weights are summed as integers in 2^-40 of the largest: exact in any order, 2^18 fit 63 bits
_WEIGHT_BITS = 30  # weights are floats in [0, 1], whose bit patterns are below 2^30
_DIGIT_BITS = 10
_BINS = 2**_DIGIT_BITS


@dataclass(frozen=True, slots=True)
class Logprobs:
    """Natural log-probabilities of the raw logits: `chosen` float32 [R], `rank` int64 [R] from 1, and the k best.

    `top_ids` int64 [R, k] and `top` float32 [R, k] are best first, equal ones by id; k is the most any row asked for.
    """

    chosen: Tensor
    rank: Tensor
    top_ids: Tensor
    top: Tensor


@dataclass(frozen=True, slots=True)
class Sampled:
    """`tokens` int64 [R]; `bad` bool [R] where a row held NaN, +inf or no candidate (its token is then arbitrary)."""

    tokens: Tensor
    bad: Tensor
    logprobs: Logprobs | None


@dataclass(frozen=True, slots=True)
class _Wants:
    """What the host knows of a seat: which stages its row needs."""

    draws: bool = False
    top_k: int = 0
    top_p: bool = False
    min_p: bool = False
    rules: bool = False
    recent: bool = False
    penalties: bool = False
    logprobs: int | None = None


# A seat's real numbers, without effect: temperature, top_p, min_p; repetition, presence and frequency penalty.
_IDENTITY = (1.0, 1.0, 0.0, 1.0, 0.0, 0.0)


class Sampler:
    """Sampling state of `seats` seats over a vocabulary of `vocab_size` tokens, on `device`.

    `admit` fills a seat from a request, resumed or preempted ones included; `sample` draws for any of the seats. Of
    all token ids only those of prompts may reach beyond the vocabulary, where an embedding has more rows than the head.
    Tables for penalties and rules are made when the first request wants them. `numerics` has the floating point.
    """

    def __init__(self, seats: int, vocab_size: int, device: torch.device, numerics: Numerics | None = None) -> None:
        self._vocab_size = vocab_size
        self._numerics = numerics or Numerics()
        self._device = device
        self._wants = [_Wants()] * seats
        self._real = torch.tensor([_IDENTITY] * seats, dtype=torch.float32, device=device)
        self._seed = torch.zeros(seats, dtype=torch.int64, device=device)
        self._top_k = torch.zeros(seats, dtype=torch.int64, device=device)
        self._ids = torch.arange(vocab_size, dtype=torch.int32, device=device)
        self._rules = Rules(seats, device)
        self._seen_in_prompt: Tensor | None = None  # bool [seats, V]: the token is in the prompt
        self._counts: Tensor | None = None  # int32 [seats, V]: how often it is in the answer

    def admit(
        self, seat: int, request: Request, *, eos_token_ids: tuple[int, ...], bad_words_ids: tuple[tuple[int, ...], ...]
    ) -> None:
        """Prepare `seat` for `request`, whose `tokens` must hold every token drawn so far.

        `bad_words_ids` holds each forbidden word as non-empty token ids: its last token is banned behind the others.
        Until `min_tokens` the stop token ids are banned, and `eos_token_ids` unless EOS is ignored anyway.
        """
        params = request.params
        rules = RuleList.of(params, eos_token_ids, bad_words_ids)
        draws = params.temperature >= _GREEDY_BELOW
        temperature = params.temperature if draws else 1.0
        penalties = (params.repetition_penalty, params.presence_penalty, params.frequency_penalty)
        wants = _Wants(
            draws=draws,
            top_k=params.top_k if 0 < params.top_k < self._vocab_size else 0,
            top_p=params.top_p < 1.0,
            min_p=params.min_p > 0.0,
            rules=bool(rules),
            recent=bool(rules.words),
            penalties=penalties != _IDENTITY[3:],
            logprobs=params.logprobs,
        )
        self._wants[seat] = wants
        put(self._real[seat], torch.tensor([temperature, params.top_p, params.min_p, *penalties], dtype=torch.float32))
        self._seed[seat] = signed(request.seed)
        self._top_k[seat] = wants.top_k
        self._rules.admit(seat, rules, request.tokens)
        if wants.penalties:
            self._count(seat, request.tokens, request.prompt_len)

    def sample(self, logits: Tensor, seats: list[int], seat_index: Tensor, positions: Tensor) -> Sampled:
        """Choose a token for each of R rows.

        `logits` [R, V] in bfloat16, float16 or float32, left unchanged; `seats` names the rows' seats, all different,
        on the host, `seat_index` int64 [R] the same on the device; `positions` int64 [R] is each token's index in its
        answer. Greedy ties go to the lowest id.
        """
        wants = [self._wants[seat] for seat in seats]
        peak, tokens = self._numerics.row_max(logits)
        shaped = [row for row, w in enumerate(wants) if w.rules or w.penalties]
        if shaped:  # only these rows pay for it
            at = self._rows(shaped)
            scores = self._shape(logits[at].float(), [seats[r] for r in shaped], seat_index[at], positions[at])
            best, places = self._numerics.row_max(scores)
            peak, tokens = peak.float().index_copy(0, at, best), tokens.index_copy(0, at, places)
        place = {row: i for i, row in enumerate(shaped)}
        for narrow, own in itertools.product((False, True), repeat=2):
            rows = [r for r, w in enumerate(wants) if w.draws and bool(w.top_k) == narrow and (r in place) == own]
            if len(rows) == len(seats):
                tokens = self._draw(scores if own else logits, peak, seat_index, positions, wants)
            elif rows:
                at = self._rows(rows)
                source = scores[self._rows([place[r] for r in rows])] if own else logits[at]
                drawn = self._draw(source, peak[at], seat_index[at], positions[at], [wants[r] for r in rows])
                tokens = tokens.index_copy(0, at, drawn)
        asked = [w.logprobs for w in wants if w.logprobs is not None]
        sampled = Sampled(tokens, ~peak.isfinite(), self._logprobs(logits, tokens, max(asked)) if asked else None)
        self._note(wants, seat_index, tokens)  # last, so that rows may be drawn again if anything fails before
        return sampled

    def _shape(self, scores: Tensor, seats: list[int], seat_index: Tensor, positions: Tensor) -> Tensor:
        """Apply rules and penalties to `scores` [n, V], rows that have some: float32 [n, V]."""
        wants = [self._wants[seat] for seat in seats]
        ruled = [row for row, w in enumerate(wants) if w.rules]
        if ruled:
            self._rules.apply(scores, ruled, [seats[row] for row in ruled], seat_index, positions)
        penalised = [row for row, w in enumerate(wants) if w.penalties]
        if len(penalised) == len(seats):
            return self._penalise(scores, seat_index)
        if penalised:
            at = self._rows(penalised)
            scores.index_copy_(0, at, self._penalise(scores[at], seat_index[at]))
        return scores

    def _note(self, wants: Sequence[_Wants], seat_index: Tensor, tokens: Tensor) -> None:
        """Note the drawn tokens for the rows that look back at them."""
        if penalised := [row for row, w in enumerate(wants) if w.penalties]:
            at = self._rows(penalised)
            self._add_drawn(seat_index[at], tokens[at])
        if recent := [row for row, w in enumerate(wants) if w.recent]:
            at = self._rows(recent)
            self._rules.append(seat_index[at], tokens[at])

    def _rows(self, rows: list[int]) -> Tensor:
        return to_device(torch.tensor(rows, dtype=torch.int64), self._device)

    def _draw(
        self, scores: Tensor, peak: Tensor, seat_index: Tensor, positions: Tensor, wants: Sequence[_Wants]
    ) -> Tensor:
        """Draw one token per row, of rows that all draw and that all want top-k or all do not: int64 [n]."""
        temperature, top_p, min_p = self._real[seat_index, :3, None].unbind(dim=1)
        weights = self._numerics.weights(scores, peak, temperature.squeeze(1))
        ids = None
        if k := max(w.top_k for w in wants):
            weights, ids = _largest(weights, k)
            rank = torch.arange(k, device=self._device)
            weights = weights.masked_fill(rank >= self._top_k[seat_index, None], 0.0)
        if any(w.min_p for w in wants):
            weights = weights.masked_fill(weights < min_p, 0.0)
        if any(w.top_p for w in wants):  # as in vLLM, of what min-p and top-k leave
            kept = _nucleus(weights, top_p) if ids is None else _nucleus_of_sorted(weights, top_p)
            weights = weights.masked_fill(~kept & (top_p < 1.0), 0.0)
        place = self._numerics.race(weights, self._seed[seat_index], positions, self._ids if ids is None else ids.int())
        return place if ids is None else ids.gather(1, place[:, None]).squeeze(1)

    def _penalise(self, scores: Tensor, seat_index: Tensor) -> Tensor:
        """Apply the repetition penalty (arXiv 1909.05858) over prompt and answer, then OpenAI's two over the answer."""
        seen_in_prompt, counts = self._occurrences()
        counts = counts[seat_index]
        drawn = counts > 0
        repetition, presence, frequency = self._real[seat_index, 3:, None].unbind(dim=1)
        seen = drawn | seen_in_prompt[seat_index]
        scores = torch.where(seen, torch.where(scores > 0, scores / repetition, scores * repetition), scores)
        return scores - frequency * counts - presence * drawn

    def _occurrences(self) -> tuple[Tensor, Tensor]:
        if self._seen_in_prompt is None or self._counts is None:
            shape = (len(self._wants), self._vocab_size)
            self._seen_in_prompt = torch.zeros(shape, dtype=torch.bool, device=self._device)
            self._counts = torch.zeros(shape, dtype=torch.int32, device=self._device)
        return self._seen_in_prompt, self._counts

    def _count(self, seat: int, tokens: Sequence[int], prompt_len: int) -> None:
        seen_in_prompt, counts = self._occurrences()
        ids = torch.tensor(tokens, dtype=torch.int64)
        prompt, answer = ids[:prompt_len], to_device(ids[prompt_len:], self._device)
        seen_in_prompt[seat].zero_().index_fill_(0, to_device(prompt[prompt < self._vocab_size], self._device), 1)
        counts[seat].zero_().scatter_add_(0, answer, torch.ones_like(answer, dtype=torch.int32))

    def _add_drawn(self, seat_index: Tensor, tokens: Tensor) -> None:
        flat = self._occurrences()[1].view(-1)
        flat.scatter_add_(0, seat_index * self._vocab_size + tokens, torch.ones_like(tokens, dtype=torch.int32))

    def _logprobs(self, logits: Tensor, tokens: Tensor, k: int) -> Logprobs:
        raw = logits.float()
        ids = torch.cat([tokens[:, None], _largest(raw, min(k, raw.shape[1]))[1]], dim=1)
        rank = (raw > raw.gather(1, ids[:, :1])).sum(dim=1) + 1
        logprobs = self._numerics.logprobs(raw, ids)
        return Logprobs(logprobs[:, 0], rank, ids[:, 1:], logprobs[:, 1:])


def _largest(values: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """Return the k largest of float32 [n, V], largest first, equal ones by id: float32 [n, k], int64 [n, k].

    topk leaves the order of equals open, and in bfloat16 equals are common, so value and id are packed into one key.
    """
    bits = (values + 0.0).view(torch.int32)  # + 0.0 makes -0.0 equal to 0.0
    ordered = bits ^ ((bits >> 31) & 0x7FFFFFFF)  # as integers in the order of the floats
    last = values.shape[1] - 1
    key = ordered.long().mul_(2**32).add_(torch.arange(last, -1, -1, device=values.device))
    ids = last - (key.topk(k, dim=1).values & 0xFFFFFFFF)
    return values.gather(1, ids), ids


def _nucleus_of_sorted(weights: Tensor, top_p: Tensor) -> Tensor:
    """`_nucleus` for weights that are in descending order already."""
    units = (weights * _UNITS).long()
    return units.cumsum(dim=1) - units < _share(units, top_p)


def _nucleus(weights: Tensor, top_p: Tensor) -> Tensor:
    """Return which weights, float32 [n, V] in [0, 1], form the smallest set with the share `top_p` [n, 1]: bool [n, V].

    Equal weights enter by id. A radix selection instead of a sort: bit patterns of weights are in the order of the
    weights, so histograms of weight over one digit after the other spell the bit pattern of the smallest member.
    """
    bits = weights.view(torch.int32)
    units = (weights * _UNITS).long()
    missing = _share(units, top_p)
    smallest = torch.zeros_like(missing)
    for shift in range(_WEIGHT_BITS - _DIGIT_BITS, -1, -_DIGIT_BITS):
        digit, missing = _cut((bits >> shift) & (_BINS - 1), units, missing)
        smallest = (smallest << _DIGIT_BITS) | digit
        if shift:
            units.masked_fill_((bits >> shift) != smallest.int(), 0)
    smallest = smallest.int()
    equal = bits == smallest
    unit = (smallest.view(torch.float32) * _UNITS).long().clamp_(min=1)
    places = ((missing + unit - 1) // unit).int()
    return (bits > smallest) | (equal & (equal.cumsum(dim=1, dtype=torch.int32) <= places))


def _share(units: Tensor, top_p: Tensor) -> Tensor:
    return (top_p.double() * units.sum(dim=1, keepdim=True).double()).ceil().long().clamp_(min=1)


def _cut(digits: Tensor, units: Tensor, missing: Tensor) -> tuple[Tensor, Tensor]:
    """Return the largest digit d such that the units with digits >= d reach `missing`, and what those above d leave."""
    bins = units.new_zeros(len(units), _BINS).scatter_add_(1, digits.long(), units)
    up_to = bins.cumsum(dim=1)
    total = up_to[:, -1:]
    digit = torch.searchsorted(up_to, total - missing, right=True)
    return digit, missing - (total - up_to.gather(1, digit))

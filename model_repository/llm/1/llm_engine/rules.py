"""Rules over logits: biases, tokens banned until a length, and words banned behind their beginnings.

What a step costs goes with the rules of the rows in it, and not with what any other seat has or had. It does not know
how a token is drawn, nor why it is forbidden.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from .request import SamplingParams

_ALWAYS = 2**62
_NOTHING = -0.0  # x + -0.0 is x bit by bit, also for x = -0.0
_ANY, _NONE = -1, -2  # in a word's prefix: any token; in the recent tokens: no token yet


@dataclass(frozen=True, slots=True)
class RuleList:
    """What holds for one request, on the host.

    `tokens[i]` gets `values[i]` while the answer is shorter than `until[i]`. `words` are longer than one token: the
    last is banned behind the others.
    """

    tokens: list[int] = field(default_factory=list)
    values: list[float] = field(default_factory=list)
    until: list[int] = field(default_factory=list)
    words: list[tuple[int, ...]] = field(default_factory=list)

    @classmethod
    def of(
        cls, params: SamplingParams, eos_token_ids: Sequence[int], bad_words_ids: Sequence[tuple[int, ...]]
    ) -> RuleList:
        """The rules of `params`: until `min_tokens` its stop token ids are banned, and EOS unless that is ignored."""
        biases: dict[int, float] = {}
        for token, bias in params.logit_bias:
            biases[token] = biases.get(token, 0.0) + bias
        single = [word[0] for word in bad_words_ids if len(word) == 1]
        ends: list[int] = []
        if params.min_tokens:
            ends = sorted({*params.stop_token_ids, *(() if params.ignore_eos else eos_token_ids)})
        return cls(
            [*biases, *single, *ends],
            [*biases.values(), *[-torch.inf] * (len(single) + len(ends))],
            [_ALWAYS] * (len(biases) + len(single)) + [params.min_tokens] * len(ends),
            [word for word in bad_words_ids if len(word) > 1],
        )

    def __bool__(self) -> bool:
        """Whether there is any rule."""
        return bool(self.tokens or self.words)


@dataclass(frozen=True, slots=True)
class _Placed:
    """Rules on the device, of one seat or of all rows of a step.

    N rules: row, token and until int64 [N], value float32 [N]. M words: word_row and last int64 [M], prefix int64
    [M, L], aligned at the end.
    """

    row: Tensor
    token: Tensor
    value: Tensor
    until: Tensor
    word_row: Tensor
    last: Tensor
    prefix: Tensor

    def at(self, row: int, length: int) -> tuple[Tensor, ...]:
        """All columns for a row of a step, prefixes widened to `length`."""
        more = length - self.prefix.shape[1]
        prefix = torch.nn.functional.pad(self.prefix, (more, 0), value=_ANY)
        return self.row + row, self.token, self.value, self.until, self.word_row + row, self.last, prefix


class Rules:
    """The rules of every seat, and the newest tokens of those with words: recent int64 [seats, longest prefix]."""

    def __init__(self, seats: int, device: torch.device) -> None:
        self._device = device
        self._of_seat: list[_Placed | None] = [None] * seats
        self._recent = torch.full((seats, 0), _NONE, dtype=torch.int64, device=device)
        self._joined_for: tuple[tuple[int, ...], tuple[int, ...]] | None = None
        self._joined: _Placed | None = None  # the rules of a step's rows; steps with the same rows share them

    def admit(self, seat: int, rules: RuleList, tokens: Sequence[int]) -> None:
        """Replace the rules of `seat`, whose request has `tokens` so far."""
        self._joined_for = None
        self._of_seat[seat] = self._place(rules) if rules else None
        if not rules.words:
            return
        length = max(map(len, rules.words)) - 1
        seats, known = self._recent.shape
        if length > known:
            wider = torch.full((seats, length), _NONE, dtype=torch.int64, device=self._device)
            wider[:, length - known :] = self._recent
            self._recent = wider
        length = self._recent.shape[1]
        put(self._recent[seat], torch.tensor(([_NONE] * length + list(tokens[-length:]))[-length:], dtype=torch.int64))

    def apply(
        self, scores: Tensor, rows: Sequence[int], seats: Sequence[int], seat_index: Tensor, positions: Tensor
    ) -> None:
        """Add what holds to `scores` [R, V], in place, for its `rows`, which have rules and belong to `seats`.

        `seat_index` int64 [R] and `positions` int64 [R] are those of all rows.
        """
        joined, flat, width = self._join(rows, seats), scores.view(-1), scores.shape[1]
        if len(joined.token):
            held = torch.where(positions[joined.row] < joined.until, joined.value, _NOTHING)
            flat.scatter_add_(0, joined.row * width + joined.token, held)
        if len(joined.last):
            recent = self._recent[:, self._recent.shape[1] - joined.prefix.shape[1] :][seat_index[joined.word_row]]
            begun = ((joined.prefix == recent) | (joined.prefix == _ANY)).all(dim=1)
            held = torch.where(begun, -torch.inf, _NOTHING)
            flat.scatter_add_(0, joined.word_row * width + joined.last, held)

    def append(self, seat_index: Tensor, tokens: Tensor) -> None:
        """Note the tokens that were drawn for seats with words."""
        self._recent[seat_index] = torch.cat([self._recent[seat_index, 1:], tokens[:, None]], dim=1)

    def _place(self, rules: RuleList) -> _Placed:
        length = max(map(len, rules.words), default=1) - 1
        prefixes = [[_ANY] * (length + 1 - len(word)) + list(word[:-1]) for word in rules.words]
        return _Placed(
            torch.zeros(len(rules.tokens), dtype=torch.int64, device=self._device),
            self._int64(rules.tokens),
            to_device(torch.tensor(rules.values, dtype=torch.float32), self._device),
            self._int64(rules.until),
            torch.zeros(len(rules.words), dtype=torch.int64, device=self._device),
            self._int64([word[-1] for word in rules.words]),
            to_device(torch.tensor(prefixes, dtype=torch.int64).view(len(prefixes), length), self._device),
        )

    def _join(self, rows: Sequence[int], seats: Sequence[int]) -> _Placed:
        wanted = (tuple(rows), tuple(seats))
        if self._joined is None or self._joined_for != wanted:
            placed = [(row, rules) for row, seat in zip(rows, seats, strict=True) if (rules := self._of_seat[seat])]
            length = max(rules.prefix.shape[1] for _, rules in placed)
            columns = zip(*(rules.at(row, length) for row, rules in placed), strict=True)
            self._joined, self._joined_for = _Placed(*(torch.cat(column) for column in columns)), wanted
        return self._joined

    def _int64(self, values: list[int]) -> Tensor:
        return to_device(torch.tensor(values, dtype=torch.int64), self._device)


def to_device(values: Tensor, device: torch.device) -> Tensor:
    """Copy host values to `device`; from pinned memory the copy does not wait for it."""
    return values.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else values


def put(target: Tensor, values: Tensor) -> None:
    """Write host values into a tensor on a device, without waiting for it."""
    target.copy_(to_device(values, target.device))

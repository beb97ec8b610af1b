"""From a plan to flat tensors: what the model's forward, attention and the sampler read in one step.

Rows of all chunks lie one behind the other, in the plan's order. Where matrix libraries take another path (other
rounding) for a single row, a scratch row keeps it company, in the layers and in the head.
This module does not know weights or logits, nor how attention wants its contexts laid out.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate, chain

import torch
from torch import Tensor

from .scheduler import Chunk, Plan


@dataclass(frozen=True, slots=True)
class Span:
    """One sequence's rows: `first` to `first + count` of the batch are its positions `start` to `start + count`.

    `blocks` hold its context, positions 0 to `end`.
    """

    first: int
    start: int
    count: int
    blocks: tuple[int, ...]

    @property
    def end(self) -> int:
        """Tokens of context after this step."""
        return self.start + self.count


@dataclass(frozen=True, slots=True)
class Batch:
    """One step's inputs. All tensors are int64 on the device.

    token_ids, positions, slot_mapping: [rows], the scratch row included, which belongs to no span.
    head_rows: [heads], rows whose logits are wanted, in the plan's order; the scratch row follows where one would
    be alone. `sampled` counts the wanted ones. seats: per sampled row, its seat; answer_positions: the index in the
    answer of the token that it draws.
    """

    token_ids: Tensor
    positions: Tensor
    slot_mapping: Tensor
    spans: tuple[Span, ...]
    head_rows: Tensor
    sampled: int
    seats: tuple[int, ...]
    seat_index: Tensor
    answer_positions: Tensor


class BatchBuilder:
    """Builds batches for one KV layout. `last_token`: int64 [seats], the newest drawn token of each seat, on device.

    `scratch_slot`: where the scratch row writes its KV; None if single rows need no company.
    """

    def __init__(self, block_size: int, scratch_slot: int | None, last_token: Tensor) -> None:
        self._block_size = block_size
        self._scratch_slot = scratch_slot
        self._last_token = last_token
        self._device = last_token.device

    def build(self, plan: Plan) -> Batch:
        """Return the tensors of `plan`, whose chunks are not empty."""
        chunks = plan.chunks
        ends = list(accumulate(chunk.count for chunk in chunks))
        spans = tuple(_span(chunk, end) for chunk, end in zip(chunks, ends, strict=True))
        sampling = [(c.request, end - 1, c.start + c.count) for c, end in zip(chunks, ends, strict=True) if c.samples]
        positions = list(chain.from_iterable(range(span.start, span.end) for span in spans))
        mapping = [slot for span in spans for slot in self._slots(span)]
        tokens, unseen = _tokens(chunks)
        head_rows = [row for _, row, _ in sampling]
        if self._scratch_slot is not None and 1 in (len(tokens), len(head_rows)):
            if len(head_rows) == 1:
                head_rows.append(len(tokens))
            tokens.append(0)
            positions.append(0)
            mapping.append(self._scratch_slot)
        token_ids = self._int64(tokens)
        if unseen:  # drawn on the device in the step that is still in flight
            rows, seats = zip(*unseen, strict=True)
            token_ids[self._int64(list(rows))] = self._last_token[self._int64(list(seats))]
        seats = tuple(request.seat for request, _, _ in sampling)
        return Batch(
            token_ids=token_ids,
            positions=self._int64(positions),
            slot_mapping=self._int64(mapping),
            spans=spans,
            head_rows=self._int64(head_rows),
            sampled=len(sampling),
            seats=seats,
            seat_index=self._int64(list(seats)),
            answer_positions=self._int64([end - request.prompt_len for request, _, end in sampling]),
        )

    def _slots(self, span: Span) -> list[int]:
        size = self._block_size
        return [span.blocks[p // size] * size + p % size for p in range(span.start, span.end)]

    def _int64(self, values: list[int]) -> Tensor:
        return torch.tensor(values, dtype=torch.int64, device=self._device)


def _span(chunk: Chunk, end: int) -> Span:
    return Span(end - chunk.count, chunk.start, chunk.count, tuple(chunk.request.blocks))


def _tokens(chunks: tuple[Chunk, ...]) -> tuple[list[int], list[tuple[int, int]]]:
    """Token ids of all rows; and (row, seat) of those that the host has not seen, which read 0 here."""
    ids: list[int] = []
    unseen: list[tuple[int, int]] = []
    for chunk in chunks:
        known = chunk.request.tokens[chunk.start : chunk.start + chunk.count]
        ids.extend(known)
        if len(known) < chunk.count:
            unseen.append((len(ids), chunk.request.seat))
            ids.append(0)
    return ids, unseen

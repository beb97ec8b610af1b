"""From a plan to flat tensors: what the model's forward, attention and the sampler read in one step.

Rows of all chunks lie one behind the other, in the plan's order. A step never runs a single row, in the layers or in
the head, because matrix libraries take another path (other rounding) for one: a scratch row keeps it company.
This module does not know weights or logits.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import chain

import torch
from torch import Tensor

from .attention import KEY_TILE, QUERY_TILE, TileGroup, tile_positions
from .scheduler import Chunk, Plan

_Member = tuple[Chunk, list[int], int]  # a chunk, the slots of its positions, its first row


@dataclass(frozen=True, slots=True)
class Batch:
    """One step's inputs. All integer tensors are int64 on the device.

    token_ids, positions, slot_mapping: [rows], the scratch row included.
    head_rows: [heads], rows whose logits are wanted, in the plan's order; the scratch row follows where one would
    be alone. `sampled` counts the wanted ones. seats: per sampled row, its seat; answer_positions: the index in the
    answer of the token that it draws.
    """

    token_ids: Tensor
    positions: Tensor
    slot_mapping: Tensor
    tile_groups: tuple[TileGroup, ...]
    head_rows: Tensor
    sampled: int
    seats: tuple[int, ...]
    seat_index: Tensor
    answer_positions: Tensor

    @property
    def rows(self) -> int:
        """Rows that the layers compute."""
        return self.token_ids.shape[0]


class BatchBuilder:
    """Builds batches for one KV layout. `last_token`: int64 [seats], the newest drawn token of each seat, on device."""

    def __init__(self, block_size: int, zero_slot: int, scratch_slot: int, last_token: Tensor) -> None:
        self._block_size = block_size
        self._zero_slot = zero_slot
        self._scratch_slot = scratch_slot
        self._last_token = last_token
        self._device = last_token.device

    def build(self, plan: Plan) -> Batch:
        """Return the tensors of `plan`, whose chunks are not empty."""
        chunks = plan.chunks
        slots = [_slots(c.request.blocks, self._block_size) for c in chunks]
        positions = list(chain.from_iterable(range(c.start, c.start + c.count) for c in chunks))
        mapping = [s[p] for c, s in zip(chunks, slots, strict=True) for p in range(c.start, c.start + c.count)]
        tokens, unseen = _tokens(chunks)
        last_rows = _last_rows(chunks)
        head_rows = [row for c, row in zip(chunks, last_rows, strict=True) if c.samples]
        sampling = [c.request for c in chunks if c.samples]
        groups = self._groups(chunks, slots)
        if len(tokens) == 1 or len(head_rows) == 1:
            if len(head_rows) == 1:
                head_rows.append(len(tokens))
            tokens.append(0)
            positions.append(0)
            mapping.append(self._scratch_slot)
        token_ids = self._int64(tokens)
        if unseen:  # drawn on the device in the step that is still in flight
            rows, seats = zip(*unseen, strict=True)
            token_ids[self._int64(list(rows))] = self._last_token[self._int64(list(seats))]
        seats = tuple(r.seat for r in sampling)
        return Batch(
            token_ids=token_ids,
            positions=self._int64(positions),
            slot_mapping=self._int64(mapping),
            tile_groups=groups,
            head_rows=self._int64(head_rows),
            sampled=len(sampling),
            seats=seats,
            seat_index=self._int64(list(seats)),
            answer_positions=self._int64([c.start + c.count - c.request.prompt_len for c in chunks if c.samples]),
        )

    def _groups(self, chunks: tuple[Chunk, ...], slots: list[list[int]]) -> tuple[TileGroup, ...]:
        """Sequences with one query tile share a group; one with several tiles has a group of its own."""
        single: list[_Member] = []
        several: list[_Member] = []
        row = 0
        for chunk, s in zip(chunks, slots, strict=True):
            last = chunk.start + chunk.count - 1
            (single if chunk.start // QUERY_TILE == last // QUERY_TILE else several).append((chunk, s, row))
            row += chunk.count
        return tuple(self._group(members) for members in ([single] if single else []) + [[m] for m in several])

    def _group(self, members: list[_Member]) -> TileGroup:
        rows: list[int] = []
        places: list[int] = []
        starts: list[int] = []
        ends = [c.start + c.count for c, _, _ in members]
        keys = -(-max(ends) // KEY_TILE) * KEY_TILE
        for chunk, _, row in members:
            first = chunk.start // QUERY_TILE
            base = len(starts) - first
            rows.extend(range(row, row + chunk.count))
            places.extend(base * QUERY_TILE + p for p in range(chunk.start, chunk.start + chunk.count))
            starts.extend(t * QUERY_TILE for t in range(first, (chunk.start + chunk.count - 1) // QUERY_TILE + 1))
        context = [s[:end] + [self._zero_slot] * (keys - end) for (_, s, _), end in zip(members, ends, strict=True)]
        return TileGroup(
            rows=self._int64(rows),
            places=self._int64(places),
            context=self._int64(context),
            positions=tile_positions(starts, self._device),
        )

    def _int64(self, values: list[int] | list[list[int]]) -> Tensor:
        return torch.tensor(values, dtype=torch.int64, device=self._device)


def _slots(blocks: list[int], size: int) -> list[int]:
    """The slot of every position that `blocks` hold."""
    return [slot for block in blocks for slot in range(block * size, (block + 1) * size)]


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


def _last_rows(chunks: tuple[Chunk, ...]) -> list[int]:
    rows, end = [], 0
    for chunk in chunks:
        end += chunk.count
        rows.append(end - 1)
    return rows

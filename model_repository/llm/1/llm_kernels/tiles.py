"""Paged attention for ragged batches in plain PyTorch: the oracle, and the fallback where nothing faster is built.

The result for a row depends on its own context alone, bit by bit: neighbours, chunking and placement cannot change the
order of its additions.

    rows of one sequence, by position      keys of the sequence, by position
      0 1 2 3 | 4 5 6 7 | 8 .. 11            0 .. 63 | 64 .. 127 | 128 ..
      query tile  tile     tile              key tile  key tile    key tile

A row's place in its query tile is its position modulo QUERY_TILE, every matrix product has the fixed shape
[QUERY_TILE * group, KEY_TILE], and the products of the key tiles are added from the first to the last. Keys behind a
row, and the padding of a shorter sequence beside a longer one, add exact zeros at the end.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from llm_engine.attention import KVCache, Mask
from llm_engine.batch import Batch, Span

QUERY_TILE = 4
KEY_TILE = 64


@dataclass(frozen=True, slots=True)
class TileGroup:
    """Query tiles that are computed together: one tile each of several sequences, or several tiles of one.

    rows: int64 [r], flat batch rows of the group's queries. places: int64 [r], tile * QUERY_TILE + place in the tile.
    context: int64 [sequences, keys], slots of every key, padded to whole key tiles with the zero slot.
    positions: int64 [tiles, QUERY_TILE], the position of each place in its sequence.
    """

    rows: Tensor
    places: Tensor
    context: Tensor
    positions: Tensor

    @property
    def tiles(self) -> int:
        """Query tiles in the group."""
        return self.positions.shape[0]


def tile_layout(batch: Batch, block_size: int, zero_slot: int) -> TileLayout:
    """Lay out a batch: sequences with one query tile share a group; one with several tiles has a group of its own."""
    device = batch.slot_mapping.device
    single = [span for span in batch.spans if span.start // QUERY_TILE == (span.end - 1) // QUERY_TILE]
    several = [[span] for span in batch.spans if span.start // QUERY_TILE != (span.end - 1) // QUERY_TILE]
    groups = [_group(group, block_size, zero_slot, device) for group in ([single] if single else []) + several]
    return TileLayout(batch.slot_mapping, groups)


def _group(spans: list[Span], block_size: int, zero_slot: int, device: torch.device) -> TileGroup:
    rows: list[int] = []
    places: list[int] = []
    starts: list[int] = []
    context: list[list[int]] = []
    keys = -(-max(span.end for span in spans) // KEY_TILE) * KEY_TILE
    for span in spans:
        first = span.start // QUERY_TILE
        base = len(starts) - first
        rows.extend(range(span.first, span.first + span.count))
        places.extend(base * QUERY_TILE + p for p in range(span.start, span.end))
        starts.extend(t * QUERY_TILE for t in range(first, (span.end - 1) // QUERY_TILE + 1))
        slots = [slot for block in span.blocks for slot in range(block * block_size, (block + 1) * block_size)]
        context.append(slots[: span.end] + [zero_slot] * (keys - span.end))

    def int64(values: list[int] | list[list[int]]) -> Tensor:
        return torch.tensor(values, dtype=torch.int64, device=device)

    positions = int64(starts)[:, None] + torch.arange(QUERY_TILE, device=device)
    return TileGroup(int64(rows), int64(places), int64(context), positions)


@dataclass(frozen=True, slots=True)
class TileLayout:
    """The oracle's layout. slot_mapping: int64 [rows]."""

    slot_mapping: Tensor
    groups: list[TileGroup]

    def attend(self, query: Tensor, key: Tensor, value: Tensor, cache: KVCache, mask: Mask) -> Tensor:
        """See Layout; computed in float32."""
        cache.key[self.slot_mapping] = key
        cache.value[self.slot_mapping] = value
        q = query.float() * mask.scale
        out = q.new_zeros(*q.shape[:2], cache.value.shape[2])
        for group in self.groups:
            out[group.rows] = _attend(q[group.rows], cache, group, mask)
        return out.to(query.dtype)


def _attend(q: Tensor, cache: KVCache, group: TileGroup, mask: Mask) -> Tensor:
    """Attention of one group. q: float32 [r, heads, key_dim], scaled. Returns [r, heads, value_dim]."""
    _, heads, dim = q.shape
    kv_heads = cache.key.shape[1]
    share = heads // kv_heads  # query heads per key head
    padded = q.new_zeros(group.tiles * QUERY_TILE, heads, dim)
    padded[group.places] = q
    tiles = padded.view(group.tiles, QUERY_TILE, kv_heads, share, dim).permute(2, 0, 1, 3, 4)
    tiles = tiles.reshape(kv_heads, group.tiles, QUERY_TILE * share, dim)
    keys = cache.key[group.context].permute(2, 0, 1, 3).float()  # [kv_heads, sequences, keys, dim]
    values = cache.value[group.context].permute(2, 0, 1, 3).float()

    scores = torch.cat([_product(tiles, k.transpose(-1, -2)) for k in _key_tiles(keys, 2)], dim=-1)
    if mask.softcap is not None:
        scores = mask.softcap * torch.tanh(scores / mask.softcap)
    by_row = scores.view(kv_heads, group.tiles, QUERY_TILE, share, -1)
    by_row.masked_fill_(~_visible(group, mask.window)[None, :, :, None, :], float("-inf"))
    out = _weighted_sum(scores, values, _sink_scores(mask.sinks, kv_heads, share, group.tiles))
    out = out.view(kv_heads, group.tiles, QUERY_TILE, share, -1).permute(1, 2, 0, 3, 4)
    return out.reshape(group.tiles * QUERY_TILE, heads, -1)[group.places]


def _weighted_sum(scores: Tensor, values: Tensor, sinks: Tensor | None) -> Tensor:
    """Softmax of scores [kv_heads, tiles, m, keys] over keys, times values [kv_heads, sequences, keys, dim].

    A sink [kv_heads, 1, m, 1] takes weight and gives no value.
    """
    peak = scores.amax(dim=-1, keepdim=True)
    if sinks is not None:
        peak = torch.maximum(peak, sinks)
    weights = torch.exp(scores - peak)
    total = torch.zeros_like(peak) if sinks is None else torch.exp(sinks - peak)
    out = scores.new_zeros(*scores.shape[:3], values.shape[-1])
    for w, v in zip(_key_tiles(weights, 3), _key_tiles(values, 2), strict=True):
        total = total + w.sum(dim=-1, keepdim=True)
        out += _product(w, v)
    return out / total


def _product(a: Tensor, b: Tensor) -> Tensor:
    """a [kv_heads, tiles, m, k] times b [kv_heads, tiles or 1, k, n], each product in the same fixed shape."""
    if b.shape[1] == a.shape[1]:
        flat = torch.bmm(a.reshape(-1, *a.shape[2:]), b.reshape(-1, *b.shape[2:]))
        return flat.view(*a.shape[:3], b.shape[-1])
    # All tiles share one sequence: a stride of 0 over the tiles, where a broadcast would copy b for each.
    return torch.stack([torch.bmm(x, y.expand(a.shape[1], -1, -1)) for x, y in zip(a, b, strict=True)])


def _key_tiles(x: Tensor, dim: int) -> tuple[Tensor, ...]:
    """Views of `x`, KEY_TILE long in `dim`."""
    return x.view(*x.shape[:dim], -1, KEY_TILE, *x.shape[dim + 1 :]).unbind(dim)


def _visible(group: TileGroup, window: int | None) -> Tensor:
    """Which keys each place may see: bool [tiles, QUERY_TILE, keys]."""
    at = group.positions[:, :, None]
    keys = torch.arange(group.context.shape[1], device=group.context.device)
    visible = keys <= at
    if window is not None:
        visible &= keys > at - window
    return visible


def _sink_scores(sinks: Tensor | None, kv_heads: int, share: int, tiles: int) -> Tensor | None:
    if sinks is None:
        return None
    per_row = sinks.float().view(kv_heads, 1, 1, share).expand(-1, tiles, QUERY_TILE, -1)
    return per_row.reshape(kv_heads, tiles, QUERY_TILE * share, 1)

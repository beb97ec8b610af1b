"""The floating point of a draw by torch: row maxima, weights, exponential noise, logprobs. The bits are its own.

Subclasses compute the same in other ways. It does not know what the stages between keep, nor seats.
"""

from __future__ import annotations

import torch
from torch import Tensor


class Numerics:
    """Rows of scores or weights [n, V], on any device. Weights are from 0 to 1, and a sound row's largest is just 1."""

    def row_max(self, scores: Tensor) -> tuple[Tensor, Tensor]:
        """The largest of each row [n] and its place int64 [n]. NaN wins, and of equals the first."""
        return scores.max(dim=-1)  # not argmax: on CPU max is six times faster in bfloat16

    def weights(self, scores: Tensor, peak: Tensor, temperature: Tensor) -> Tensor:
        """e^((score - peak) / temperature): float32 [n, V], of each row's largest `peak` [n] and `temperature` [n].

        NaN becomes 0: a bad row's bits must not become an index.
        """
        return (scores.float() - peak[:, None]).div_(temperature[:, None]).exp_().nan_to_num_(nan=0.0)

    def race(self, weights: Tensor, seed: Tensor, positions: Tensor, ids: Tensor) -> Tensor:
        """The place of each row's largest weight / noise of (seed, position, token id), which is a draw: int64 [n].

        `seed` and `positions` int64 [n], `ids` int32 [V] or [n, V]. The largest of log weight + Gumbel noise is the
        same, with one logarithm more. `weights` is overwritten.
        """
        return self.row_max(weights.div_(exponential(seed, positions, ids)))[1]

    def logprobs(self, logits: Tensor, ids: Tensor) -> Tensor:
        """Natural log-probabilities of the tokens `ids` int64 [n, k] in float32 logits [n, V]: float32 [n, k]."""
        return logits.log_softmax(dim=-1).gather(1, ids)


def exponential(seed: Tensor, positions: Tensor, ids: Tensor) -> Tensor:
    """Return exponential noise of (seed, position, token id): float32 [n, m], ids int32 [m] or [n, m].

    A key of 64 bits per row, by the finaliser of SplitMix64 (Steele, Lea, Flood 2014), enters `lowbias32` (Wellons,
    hash-prospector) over the ids, its halves before and inside. The uniform is (31 bits + 1/2) / 2^31, precise towards
    0, where noise is small and wins: a token more than 26 nats below the likeliest is never drawn.
    """
    key = _mix64(_mix64(seed) + (positions + 1) * signed(0x9E3779B97F4A7C15))
    low, high = key.view(torch.int32).view(-1, 2, 1).unbind(dim=1)
    h = (ids * signed(0x9E3779B1, 32)) ^ low
    h ^= (h >> 16).bitwise_and_(0xFFFF)
    h *= 0x7FEB352D
    h ^= (h >> 15).bitwise_and_(0x1FFFF)
    h += high
    h *= signed(0x846CA68B, 32)
    h ^= (h >> 16).bitwise_and_(0xFFFF)
    uniform = h.bitwise_and_(0x7FFFFFFF).float().add_(0.5).mul_(2.0**-31).clamp_(max=1.0 - 2.0**-24)
    return uniform.neg_().log1p_().neg_()


def _mix64(x: Tensor) -> Tensor:
    # >> is arithmetic on int64, so each shift masks the copies of the sign.
    x = (x ^ ((x >> 30) & (2**34 - 1))) * signed(0xBF58476D1CE4E5B9)
    x = (x ^ ((x >> 27) & (2**37 - 1))) * signed(0x94D049BB133111EB)
    return x ^ ((x >> 31) & (2**33 - 1))


def signed(value: int, bits: int = 64) -> int:
    """The integer of `bits` in two's complement that has the bits of `value`."""
    return value - 2**bits if value >= 2 ** (bits - 1) else value

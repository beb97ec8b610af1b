"""The floating point of a draw by the kernels' own code: the same bits on every CPU, and with every version of torch.

The C functions are those of `cpu/draw.h`. It does not know seats, nor what top-k, top-p and penalties keep.
"""

from __future__ import annotations

import ctypes
import weakref
from typing import Any

import torch
from torch import Tensor

from llm_engine.numerics import Numerics

_void = ctypes.c_void_p


class NativeNumerics(Numerics):
    """As Numerics, on the CPU, in float32 whatever comes in. `library` is an object of the kernels; see objects.py.

    Many rows are shared among `threads` threads of its own, which end with it.
    """

    def __init__(self, library: Any, threads: int) -> None:
        self._library = library
        library.ts_open_pool.restype = _void
        self._pool = _void(library.ts_open_pool(threads))
        weakref.finalize(self, library.ts_close_pool, self._pool)

    def row_max(self, scores: Tensor) -> tuple[Tensor, Tensor]:
        """The largest of each row, float32 [n], and its place int64 [n]. NaN wins, and of equals the first."""
        scores = _rows(scores)
        peak, place = torch.empty(len(scores)), torch.empty(len(scores), dtype=torch.int64)
        self._library.ts_row_max(self._pool, *scores.shape, *_strided(scores), _at(peak), _at(place))
        return peak, place

    def weights(self, scores: Tensor, peak: Tensor, temperature: Tensor) -> Tensor:
        """See Numerics. The relative error behind the division is below 2e-7; weights below 2^-126 are 0."""
        scores, peak, temperature = _rows(scores), peak.float().contiguous(), temperature.contiguous()
        weights = torch.empty(scores.shape)
        self._library.ts_weights(
            self._pool, *scores.shape, *_strided(scores), _at(peak), _at(temperature), _at(weights)
        )  # fmt: skip
        return weights

    def race(self, weights: Tensor, seed: Tensor, positions: Tensor, ids: Tensor) -> Tensor:
        """See Numerics. The relative error of the noise is below 2e-7."""
        weights, seed, positions, ids = (t.contiguous() for t in (weights, seed, positions, ids))
        place = torch.empty(len(weights), dtype=torch.int64)
        self._library.ts_race(
            self._pool, *weights.shape, _at(weights), _at(seed), _at(positions), _at(ids),
            ids.shape[1] if ids.dim() > 1 else 0, _at(place),
        )  # fmt: skip
        return place

    def logprobs(self, logits: Tensor, ids: Tensor) -> Tensor:
        """See Numerics. The error is below 1e-6 + 2e-7 times the logprob; NaN where a row's largest is not finite."""
        logits, ids = _rows(logits), ids.contiguous()
        logprobs = torch.empty(ids.shape)
        self._library.ts_logprobs(
            self._pool, *logits.shape, *_strided(logits), ids.shape[1], _at(ids), _at(logprobs)
        )  # fmt: skip
        return logprobs


def noise(library: Any, seed: Tensor, positions: Tensor, ids: Tensor) -> Tensor:
    """The noise of `race` alone, for tests: float32 [n, m] of seed and positions int64 [n] and ids int32 [m]."""
    out = torch.empty(len(seed), len(ids))
    library.ts_noise(*out.shape, _at(seed), _at(positions), _at(ids), _at(out))
    return out


def _rows(values: Tensor) -> Tensor:
    values = values.float()
    return values if values.stride(1) == 1 else values.contiguous()


def _strided(rows: Tensor) -> tuple[ctypes.c_void_p, int]:
    return _at(rows), rows.stride(0)


def _at(values: Tensor) -> ctypes.c_void_p:
    return _void(values.data_ptr())

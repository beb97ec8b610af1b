"""Whether a server may call itself `bitwise`. It knows a forward function, and nothing of models."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

Forward = Callable[[int, int], Tensor]

PROBE_ROWS = (2, 3, 7, 16, 100)


def probe_exactness(rows: int, forward: Forward) -> str:
    """Say "bitwise" if logits do not depend on how a sequence is cut into steps, else "sampled".

    `forward(start, count)` computes rows [start, start + count) of one sequence and returns their logits. One step of
    all `rows` (512 where there is room) is compared, bit by bit, with steps of 2, 3, 7, 16, 100 and the rest: every
    layer and the head see each number of rows.
    """
    whole = forward(0, rows)
    start = 0
    for count in (*PROBE_ROWS, rows):
        count = min(count, rows - start)
        if count < 2:
            break
        if not torch.equal(forward(start, count), whole[start : start + count]):
            return "sampled"
        start += count
    return "bitwise"

"""The golden check: a model is served only if our batched pass gives the logits of transformers' own eager attention.

`reference` runs first, on the model as it was loaded, one sequence at a time. Then kernels are chosen, weights packed
and the KV cache laid out, and `check` feeds the same sequences through `LoadedModel.forward` as requests would be: in
chunks, several in one step, one row at a time in the end, through blocks that are not in order.

    step 0   1        2        3      4      5      6
    short    short    row      row    row
             medium   medium   row    row    row
                      long     long   row    row    row

What this does not show: sliding windows of more than LARGEST_WINDOW tokens are not crossed, nor are contexts reached
that are longer than the long sequence. Rope types whose frequencies change there are refused by their names.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from .. import attention
from ..batch import BatchBuilder
from ..config import ConfigError
from ..request import Request, SamplingParams
from ..scheduler import Chunk, Plan
from .loaded import LoadedModel
from .shape import Heads, told_as_config_error

LENGTHS = (9, 23, 70)  # the last crosses a tile of 64 keys
LARGEST_WINDOW = 256
BEHIND_WINDOW = 16  # tokens of the long sequence behind a window
DECODED = 3  # rows at the end of each sequence that are computed one by one
TOLERANCE = {"float32": 1e-3, "float16": 0.05, "bfloat16": 0.2}
"""How far logits may be off, in units of their spread, both passes computing in this dtype.

Right: tiny random models of all families that are served come to 1e-5, 0.01 and 0.07 at most, SmolLM2-135M to 4e-6,
0.006 and 0.05, Gemma 3 270M to 6e-6 and, in bfloat16, 0.07. Wrong, in every dtype: 0.22 without a softcap, 0.27 without
sinks, 0.6 with another scale, 1.4 if nothing is right. A fault smaller than rounding is seen in float32 alone.
"""

Q8DOT_TOLERANCE = 0.3  # where activations are rounded to eight bits; weights are the same in both passes


@dataclass(frozen=True, slots=True)
class Reference:
    """Sequences of token ids, and for each its logits [tokens, vocabulary] under eager attention, on the device."""

    model_type: str
    sequences: tuple[tuple[int, ...], ...]
    logits: tuple[Tensor, ...]
    dtype: str


@torch.inference_mode()
def reference(model: Any, heads: Collection[Heads], special: Collection[int]) -> Reference:
    """Run `model` under eager attention, one whole sequence at a time, and restore its attention.

    `heads` are its attention modules', `special` token ids that no sequence should hold. ConfigError if it cannot run,
    and for logits that are not finite: the fault is in the weights then, not in what is compared with them.
    """
    config = model.config.get_text_config()
    limit = getattr(config, "max_position_embeddings", None) or LARGEST_WINDOW + BEHIND_WINDOW
    vocab = min(e.weight.shape[0] for e in (model.get_input_embeddings(), model.get_output_embeddings()))
    sequences = tuple(_ids(n, seed, vocab, special) for seed, n in enumerate(_lengths(heads, limit)))
    device = next(model.parameters()).device
    with told_as_config_error(model, "under eager attention"):
        model.set_attn_implementation("eager")
        try:
            logits = [model(torch.tensor([ids], device=device), use_cache=False).logits[0] for ids in sequences]
        finally:
            model.set_attn_implementation(attention.NAME)
    dtype = str(next(model.parameters()).dtype).removeprefix("torch.")
    if not all(bool(rows.isfinite().all()) for rows in logits):
        raise ConfigError(
            f"the weights give NaN or infinity under transformers' own attention, in {dtype}; fetch them again"
            + ("" if dtype == "float32" else ", or set the parameter 'dtype' to float32")
        )
    return Reference(config.model_type, sequences, tuple(logits), dtype)


def check(loaded: LoadedModel, reference: Reference) -> float:
    """Return how far `loaded` is from the reference; ConfigError above TOLERANCE.

    The KV cache must be free of requests. Of sequences that do not fit in it, only a beginning is compared.
    """
    ours = _batched_logits(loaded, reference.sequences)
    found = _distance([_off(a, b) for a, b in zip(ours, reference.logits, strict=False)])
    tolerance = max(_tolerance(loaded), TOLERANCE[reference.dtype])
    if not found <= tolerance:  # NaN is not
        raise ConfigError(
            f"model type {reference.model_type!r} gives other logits in a batch than under transformers' eager "
            f"attention: off by {found:.2g} of their spread, at most {tolerance:g} is rounding; it cannot be served"
        )
    return found


def _tolerance(loaded: LoadedModel) -> float:
    rounded = TOLERANCE[loaded.config.dtype]
    return max(rounded, Q8DOT_TOLERANCE) if loaded.steps and "q8dot" in loaded.steps.arithmetic else rounded


def _lengths(heads: Collection[Heads], limit: int) -> list[int]:
    windows = [h.window for h in heads if h.window and h.window <= LARGEST_WINDOW]
    longest = max([LENGTHS[-1], *(window + BEHIND_WINDOW for window in windows)])
    return [min(n, limit) for n in (*LENGTHS[:-1], longest)]


def _ids(length: int, seed: int, vocab: int, special: Collection[int]) -> tuple[int, ...]:
    """Draw token ids, the same ones always, and none of `special` unless there are no others."""
    avoided = set(special)
    plain = [i for i in range(min(vocab, 4096)) if i not in avoided] or [0]
    drawn = torch.randint(len(plain), (length,), generator=torch.Generator().manual_seed(seed))
    return tuple(plain[i] for i in drawn.tolist())


@torch.inference_mode()
def _batched_logits(loaded: LoadedModel, sequences: Sequence[Sequence[int]]) -> list[Tensor]:
    """The logits of every row [tokens, vocabulary] of each sequence, or of a beginning of it."""
    requests = _seated(loaded, sequences)
    out: list[list[Tensor]] = [[] for _ in requests]
    seats = torch.zeros(len(requests), dtype=torch.int64, device=loaded.device)
    builder = BatchBuilder(loaded.config.block_size, loaded.scratch_slot, seats)
    pieces = [_pieces(request.prompt_len) for request in requests]
    for step in range(max(i + len(p) for i, p in enumerate(pieces))):
        running = [i for i, p in enumerate(pieces) if 0 <= step - i < len(p)]
        chunks = tuple(Chunk(requests[i], *pieces[i][step - i], samples=False) for i in running)
        batch = builder.build(Plan(chunks))
        rows = sum(chunk.count for chunk in chunks)
        head = torch.arange(max(rows, 2 if loaded.scratch_slot is not None else 1), device=loaded.device)
        logits = loaded.forward(batch, head)[:rows]
        for i, part in zip(running, torch.split(logits, [chunk.count for chunk in chunks]), strict=True):
            out[i].append(part)
    return [torch.cat(parts) for parts in out]


def _seated(loaded: LoadedModel, sequences: Sequence[Sequence[int]]) -> list[Request]:
    """A request for each sequence with blocks from both ends of the cache; the last ones may find less, or nothing."""
    size = loaded.config.block_size
    count = loaded.config.kv_tokens // size
    free = [i // 2 if i % 2 else count - 1 - i // 2 for i in range(count)]
    seated: list[Request] = []
    for ids in sequences:
        tokens = list(ids[: min(loaded.config.max_context, len(free) * size)])
        if not tokens:
            break
        request = Request("golden", tokens, SamplingParams(), tokens=tokens, prompt_len=len(tokens))
        needed = -(-len(tokens) // size)
        request.blocks, free = free[:needed], free[needed:]
        seated.append(request)
    return seated


def _pieces(length: int) -> list[tuple[int, int]]:
    """Cut a sequence into (start, count): two chunks and single rows."""
    rows = min(DECODED, length - 1)
    prompt = length - rows
    counts = [n for n in (prompt * 2 // 5, prompt - prompt * 2 // 5, *[1] * rows) if n]
    return list(zip((0, *accumulate(counts)), counts, strict=False))


def _off(ours: Tensor, expected: Tensor) -> Tensor:
    """How far each row is off [tokens]: root mean square of its differences, by the spread of the expected logits."""
    wanted = expected[: len(ours), : ours.shape[1]].float()  # tokens that cannot be embedded have no logit here
    return (ours.float() - wanted).square().mean(dim=-1).sqrt() / wanted.std(dim=-1).mean()


def _distance(rows: list[Tensor]) -> float:
    """The worst of what is typical: of each sequence, of the rows computed one by one, of those behind a window.

    Medians, because rounding may send single rows to another expert.
    """
    single, behind = torch.cat([off[-DECODED:] for off in rows]), rows[-1][-BEHIND_WINDOW:]
    return float(torch.stack([group.median() for group in (*rows, single, behind)]).max())

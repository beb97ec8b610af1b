"""How far logits are from float32: this engine's, in each dtype and with each kernels, beside transformers' own.

One fixed text, computed in one step. What does not run on this machine is named with the reason. It does not know
requests, and judges no number.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, cast

import torch
from torch import Tensor

from llm_engine import loading
from llm_engine.batch import BatchBuilder
from llm_engine.config import ConfigError, EngineConfig
from llm_engine.loading import LoadedModel
from llm_engine.loading.tokenizer import load_tokenizer
from llm_engine.request import Request, SamplingParams
from llm_engine.scheduler import Chunk, Plan

from .prepared import Prepared, load_reference
from .weights import Progress

TOKENS = 256
COMBINATIONS = (
    ("bfloat16", "native"),
    ("bfloat16", "torch"),
    ("float16", "torch"),
    ("float32", "native"),
    ("float32", "torch"),
)
TEXT = """\
The harbour lay quiet under a thin fog, and the first boats of the morning moved like shadows along the wall. On the
pier an old man mended a net. He had done so for forty years, and his hands no longer asked his eyes for help. "You are
late," he said without turning round. The girl put down her basket and counted what was in it: three loaves, a piece of
cheese, two apples, and a letter with a blue stamp. "The road was closed at the bridge," she answered. "They are
measuring the river again, because it rose by 17 centimetres in a single night." He nodded. In his youth the water had
once come as far as the church door, and since then a brass line on the wall showed how high it had been. Nobody looked
at that line any more, except for the children, who compared their heights with it every spring. What does the letter
say? It says that the new lighthouse will be built after all, that work begins in May, and that it will need neither a
keeper nor oil, only a cable and somebody who cleans the glass twice a year. He laughed, tied the last knot, and held
the net against the light to see whether anything could slip through.
"""


@dataclass(frozen=True, slots=True)
class Check:
    """Logits of one dtype and kernels against float32, over `tokens` positions.

    Errors, agreement of the likeliest token and KL divergence (nats, from float32's) are of positions without NaN or
    inf, None if there is none; `nan` and `inf` count logits. `skipped` says why a combination does not run here.
    """

    dtype: str
    kernels: str
    tokens: int = 0
    max_error: float | None = None
    mean_error: float | None = None
    argmax_agreement: float | None = None
    mean_kl: float | None = None
    nan: int = 0
    inf: int = 0
    skipped: str | None = None
    kind: str = "check"


def check(config: EngineConfig, prepared: Prepared, progress: Progress) -> list[Check]:
    """Compare every combination for the model that `config` names, `prepared`; its dtype and kernels are not read."""
    progress("check, float32 of transformers", 0, len(COMBINATIONS) + 1)
    ids, reference = reference_logits(prepared)
    found = []
    for done, (dtype, kernels) in enumerate(COMBINATIONS, start=1):
        progress(f"check, {dtype} {kernels}", done, len(COMBINATIONS) + 1)
        chosen = replace(config, dtype=dtype, kernels=kernels, max_context=0, kv_tokens=2 * TOKENS)
        try:
            logits = engine_logits(loading.load(chosen), ids)
        except (ConfigError, RuntimeError) as error:  # PyTorch's word for an operation that the dtype lacks
            found.append(Check(dtype, kernels, skipped=str(error).strip().split("\n")[0]))
        else:
            found.append(compare(reference, logits, dtype, kernels))
    return found


@torch.inference_mode()
def reference_logits(prepared: Prepared) -> tuple[list[int], Tensor]:
    """TEXT's first tokens and their logits, float32 [tokens, vocabulary], by transformers alone."""
    model = load_reference(prepared)
    limit = getattr(model.config.get_text_config(), "max_position_embeddings", None) or TOKENS
    tokenizer = load_tokenizer(prepared.folder, model.get_output_embeddings().weight.shape[0])
    ids = cast(list[int], tokenizer(TEXT, verbose=False)["input_ids"])[: min(TOKENS, limit)]
    return ids, model(input_ids=torch.tensor([ids]), use_cache=False).logits[0]


@torch.inference_mode()
def engine_logits(loaded: LoadedModel, ids: list[int]) -> Tensor:
    """Logits of all `ids` [tokens, vocabulary] in the model's dtype, computed in one step as the engine would."""
    request: Any = Request("check", ids, SamplingParams(), tokens=ids, prompt_len=len(ids))
    request.blocks = list(range(-(-len(ids) // loaded.config.block_size)))
    last_token = torch.zeros(1, dtype=torch.int64, device=loaded.device)
    builder = BatchBuilder(loaded.config.block_size, loaded.scratch_slot, last_token)
    batch = builder.build(Plan((Chunk(request, 0, len(ids), samples=False),)))
    return loaded.forward(batch, torch.arange(len(ids), device=loaded.device))


def compare(reference: Tensor, logits: Tensor, dtype: str, kernels: str) -> Check:
    """Compare logits [tokens, vocabulary] with float32 ones, row by row: a large vocabulary is large in float64."""
    nan, inf = int(logits.isnan().sum()), int(logits.isinf().sum())
    sound = logits.isfinite().all(dim=-1)
    rows = [
        _row(expected.double(), got.double()) for expected, got in zip(reference[sound], logits[sound], strict=True)
    ]
    if not rows:
        return Check(dtype, kernels, len(logits), nan=nan, inf=inf)
    peaks, means, agreed, divergences = zip(*rows, strict=True)
    return Check(
        dtype,
        kernels,
        tokens=len(logits),
        max_error=max(peaks),
        mean_error=sum(means) / len(rows),
        argmax_agreement=sum(agreed) / len(rows),
        mean_kl=sum(divergences) / len(rows),
        nan=nan,
        inf=inf,
    )


def _row(expected: Tensor, got: Tensor) -> tuple[float, float, bool, float]:
    """Largest and mean absolute error, whether the likeliest token is the same, and KL divergence."""
    error = (got - expected).abs()
    log_p, log_q = expected.log_softmax(-1), got.log_softmax(-1)
    divergence = (log_p.exp() * (log_p - log_q)).sum()
    return error.max().item(), error.mean().item(), bool(got.argmax() == expected.argmax()), divergence.item()

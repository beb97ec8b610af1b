"""A model on its device with everything that the engine needs to know of it. It does not know how it was loaded."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any, cast

import torch
from torch import Tensor, nn

from llm_kernels import tiles
from llm_kernels.native import NativeAttention

from ..attention import KVCache, Layout
from ..batch import Batch
from ..config import EngineConfig
from ..request import SamplingParams
from .resources import Resources
from .steps import NativeSteps


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """A model on its device with everything the engine needs to know of it.

    `config` has no unset value left. Token ids below `vocab_size` can be drawn and embedded; a prompt may hold those
    below `embedding_size`, which is no smaller. `exact` is "bitwise" or "sampled". `digest` names all that answers
    depend on, and `arithmetic` the part of it that computes; see identity. `steps`, if set, computes whole steps in
    place of `model`, whose parameters then have shapes alone, no weights, and keeps the KV instead of `caches`.
    `attention`, if set, computes the attention of `model`; PyTorch does otherwise.
    """

    config: EngineConfig
    model: nn.Module
    tokenizer: Any
    device: torch.device
    vocab_size: int
    embedding_size: int
    eos_token_ids: tuple[int, ...]
    defaults: SamplingParams
    caches: tuple[KVCache, ...]
    exact: str
    digest: str
    steps: NativeSteps | None = None
    attention: NativeAttention | None = None
    arithmetic: str = ""
    resources: Resources = field(default_factory=Resources)

    def forward(self, batch: Batch, head_rows: Tensor) -> Tensor:
        """Logits [head rows, vocabulary] of `batch`; the KV of its rows is written. head_rows: int64 [heads]."""
        if self.steps is not None:
            return self.steps.forward(batch, head_rows)[:, : self.vocab_size]
        if self.attention is None:
            layout: Layout = tiles.tile_layout(batch, self.config.block_size, self.caches[0].zero_slot)
        else:
            layout = self.attention.layout(batch, self.config.kv_tokens)
        out = self.model(
            input_ids=batch.token_ids[None],
            position_ids=batch.positions[None],
            use_cache=False,
            logits_to_keep=head_rows,
            layout=layout,
        )
        return cast(Tensor, out.logits[0])[:, : self.vocab_size]

    @property
    def scratch_slot(self) -> int | None:
        """Where a row that keeps a single row company writes its KV; None where single rows need no company."""
        return self.caches[0].scratch_slot if self.steps is None else None

    def info(self) -> dict[str, Any]:
        """What a client may want to know before it sends anything, ready for JSON."""
        import transformers

        return {
            **asdict(self.config),
            "exact": self.exact,
            "digest": self.digest,
            "weight_format": self.config.dtype if self.steps is None else self.steps.weight_format,
            "arithmetic": self.arithmetic,
            **asdict(self.resources),
            "vocab_size": self.vocab_size,
            "chat": bool(self.tokenizer.chat_template),
            "eos_token_ids": self.eos_token_ids,
            "versions": {"torch": torch.__version__, "transformers": transformers.__version__},
        }

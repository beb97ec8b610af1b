"""A model without a network: its logits are written by the test, so that thousands of requests take seconds.

By default the next token follows from the newest token and its position alone. A test may replace the script, or
block, break and poison single steps. It knows the engine's side of a model, and nothing of requests.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from engine import driver, tiny_models
from llm_engine.attention import KVCache
from llm_engine.batch import Batch
from llm_engine.loading import LoadedModel
from llm_engine.request import SamplingParams

Script = Callable[[Tensor, Tensor], Tensor]  # token ids and positions, int64 [n] each -> next token, int64 [n]


def wander(tokens: Tensor, positions: Tensor) -> Tensor:
    """Any token but a special one, and seldom the same twice."""
    return (tokens * 31 + positions * 17).remainder(tiny_models.vocab_size() - 3).add(3)


@dataclass(slots=True)
class Stage:
    """What the test controls. `before` gets each step's token ids and head rows on the engine thread; it may block."""

    script: Script = wander
    before: Callable[[Tensor, Tensor], None] = lambda _tokens, _head_rows: None
    poisoned: frozenset[int] = frozenset()  # behind these tokens the logits are NaN


@dataclass(frozen=True, slots=True)
class ScriptedModel(LoadedModel):
    """Puts all the weight on the token that the script names."""

    stage: Stage = field(default_factory=Stage)

    def forward(self, batch: Batch, head_rows: Tensor) -> Tensor:
        self.stage.before(batch.token_ids, head_rows)
        tokens = batch.token_ids[head_rows]
        logits = torch.zeros(len(head_rows), self.vocab_size)
        logits.scatter_(1, self.stage.script(tokens, batch.positions[head_rows])[:, None], 30.0)
        for token in self.stage.poisoned:
            logits[tokens == token] = torch.nan
        return logits


def load(tokenizer: Any = None, **values: Any) -> ScriptedModel:
    """A scripted model whose context is the whole KV cache."""
    config = driver.config(**values)
    if not config.max_context:
        config = driver.config(**values, max_context=config.kv_tokens)
    device = torch.device("cpu")
    return ScriptedModel(
        config=config,
        model=nn.Identity(),
        tokenizer=tokenizer or tiny_models.tokenizer(),
        device=device,
        vocab_size=tiny_models.vocab_size(),
        embedding_size=tiny_models.vocab_size(),
        eos_token_ids=(tiny_models.EOS,),
        defaults=SamplingParams(),
        caches=(KVCache.empty(config.kv_tokens, 1, 1, torch.float32, device),),
        exact="sampled",
        digest="scripted",
    )


def expected(prompt: list[int], count: int) -> list[int]:
    """The answer of `wander` to a prompt."""
    tokens = list(prompt)
    for _ in range(count):
        tokens.append(int(wander(torch.tensor(tokens[-1]), torch.tensor(len(tokens) - 1))))
    return tokens[len(prompt) :]

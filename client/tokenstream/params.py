"""The sampling parameters a caller may give, by vLLM's names, and their way onto the wire.

Names are checked here and values on the server, which knows the model's limits.
It does not know how a token is drawn.
"""

from __future__ import annotations

import json
import math
import secrets
from collections.abc import Mapping, Sequence
from typing import TypedDict

from .errors import InvalidRequest

DEFAULT_URL = "127.0.0.1:8001"  # where Triton's gRPC endpoint is if nothing else is said


class Sampling(TypedDict, total=False):
    """Keywords of `stream`, `generate` and `chat`; what is left out (or None) is the model's default."""

    max_tokens: int | None
    min_tokens: int | None
    temperature: float | None
    top_k: int | None
    top_p: float | None
    min_p: float | None
    repetition_penalty: float | None
    presence_penalty: float | None
    frequency_penalty: float | None
    seed: int | None
    stop: str | Sequence[str] | None
    stop_token_ids: Sequence[int] | None
    ignore_eos: bool | None
    include_stop_str_in_output: bool | None
    skip_special_tokens: bool | None
    logprobs: int | None
    logit_bias: Mapping[int, float] | None
    bad_words: Sequence[str] | None


SAMPLING_NAMES = frozenset(Sampling.__annotations__)


def draw_seed() -> int:
    """63 random bits, so that the seed fits a signed integer wherever it is stored."""
    return secrets.randbits(63)


def sampling_json(sampling: Sampling, seed: int) -> str:
    """The wire's JSON object, with `seed` in it whatever the caller gave.

    A seed is always sent: an answer whose seed only the server knows could not be resumed on another one.
    Raises TypeError naming an unknown keyword or a value that JSON cannot hold, InvalidRequest for NaN and infinity.
    """
    if unknown := sorted(set(sampling) - SAMPLING_NAMES):
        raise TypeError(f"{unknown[0]!r} is no sampling parameter; known ones are {', '.join(sorted(SAMPLING_NAMES))}")
    given = {name: value for name, value in sampling.items() if value is not None}
    for name, value in given.items():
        if isinstance(value, float) and not math.isfinite(value):
            raise InvalidRequest(f"{name} must be a finite number, got {value}")
    return json.dumps(given | {"seed": seed}, ensure_ascii=False)

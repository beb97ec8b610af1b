"""What a caller gets back: plain frozen values.

It does not know where they come from.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """Log-probabilities (natural) at one position, before temperature and masks. `top`: (id, logprob), best first."""

    token_id: int
    logprob: float
    rank: int = 0
    top: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True, slots=True)
class Chunk:
    """One response of the server: usually one token. `index` is the position of the first of `token_ids`.

    `text` may be empty while bytes or a possible stop string are held back. `finish_reason` is set on the last:
    `stop` or `length`.
    """

    text: str
    token_ids: tuple[int, ...]
    index: int
    logprobs: tuple[TokenLogprob, ...] = ()
    finish_reason: str | None = None


@dataclass(frozen=True, slots=True)
class Usage:
    """Tokens of the prompt and of the answer."""

    input_tokens: int
    output_tokens: int


@dataclass(frozen=True, slots=True)
class Timings:
    """Seconds each stage took on the server, and what the engine did. `exact`: `bitwise` or `sampled`.

    Of an answer that was resumed they tell of the server that ended it, from where that server took it up.
    """

    queue: float = 0.0
    prefill: float = 0.0
    first_token: float = 0.0
    decode: float = 0.0
    cached_tokens: int = 0
    preemptions: int = 0
    exact: str = ""


@dataclass(frozen=True, slots=True)
class Stats:
    """Seconds as this client saw them, taken when it read the responses.

    `ttft`: from sending to the first response with tokens. `gaps` (ITL): between such responses.
    `tokens_per_second`: tokens behind the first response, per second since it; 0 if there are none.
    """

    ttft: float | None
    gaps: tuple[float, ...]
    tokens_per_second: float


@dataclass(frozen=True, slots=True)
class Completion:
    """A whole answer. `resumes`: how often it was cut and taken up again."""

    request_id: str
    text: str
    token_ids: tuple[int, ...]
    finish_reason: str
    usage: Usage
    timings: Timings | None
    seed: int
    fingerprint: str
    logprobs: tuple[TokenLogprob, ...]
    stats: Stats
    resumes: int = 0


@dataclass(frozen=True, slots=True)
class ServerInfo:
    """What the server says of its model. `details` holds everything it sent, by its own names."""

    model: str
    dtype: str
    exact: str
    details: Mapping[str, object]


@dataclass(frozen=True, slots=True)
class ModelStatus:
    """One version of a model in the server's repository. `state` and `reason` are Triton's own words."""

    name: str
    version: str
    state: str
    reason: str

    @property
    def ready(self) -> bool:
        """Whether it can be asked."""
        return self.state == "READY"

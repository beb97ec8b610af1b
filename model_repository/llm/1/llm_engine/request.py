"""What the engine is asked for and what leaves it: sampling parameters, requests, deltas and errors.

Values are checked once, where they enter; everything behind this module trusts them.
It does not know how a token is computed, nor what carries a delta to its reader.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from enum import Enum, StrEnum
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .text import TextStream

MAX_STOP_STRINGS = 16
MAX_STOP_BYTES = 256
MAX_STOP_TOKEN_IDS = 64
MAX_BAD_WORDS = 64
MAX_LOGIT_BIAS = 1024
MAX_LOGPROBS = 20
MAX_COUNT = 2**63 - 1  # of tokens: what a tensor of int64 holds
_STRIDE = 4096  # token ids that are checked at once: faster than one by one, and other threads have their turns


class Code(StrEnum):
    """Why a request ended without `stop` or `length`; the names are Triton's status codes."""

    INVALID_ARG = "INVALID_ARG"
    UNAVAILABLE = "UNAVAILABLE"
    CANCELLED = "CANCELLED"
    INTERNAL = "INTERNAL"


class RequestError(Exception):
    """A request was refused or ended early. `message` is one line for the client, without a traceback.

    `retry_after`: seconds after which it may be let in, None if nobody knows. `own_fault`: of an INTERNAL error, that
    the work for this request alone failed, so that it would fail again, here and elsewhere.
    """

    def __init__(
        self,
        message: str,
        code: Code = Code.INVALID_ARG,
        retry_after: float | None = None,
        *,
        own_fault: bool = False,
    ) -> None:
        super().__init__(message)
        self.message = message
        self.code = code
        self.retry_after = retry_after
        self.own_fault = own_fault


class FinishReason(StrEnum):
    """The two ways an answer ends well: by itself (`stop`) or at a limit (`length`)."""

    STOP = "stop"
    LENGTH = "length"


class Status(Enum):
    """Where a request is. A preempted request is WAITING again, with more tokens than its prompt."""

    WAITING = 0
    RUNNING = 1
    FINISHED = 2


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How the next token is chosen and when the answer ends. Field names are vLLM's.

    `max_tokens` None means the rest of the context. `temperature` 0 is greedy. `top_k` 0 or -1 means all tokens.
    `seed` None is replaced by a drawn one at submit. `logprobs` None means none; N means the N best besides the chosen.

        max_tokens           1 to 2^63 - 1          presence_penalty     -2 to 2
        min_tokens           0 to max_tokens        frequency_penalty    -2 to 2
        temperature          0 to 100               seed                 0 to 2^64 - 1
        top_k                -1 to 2^63 - 1         stop                 16 strings of 1 to 256 bytes
        top_p                above 0, to 1          bad_words            64 strings of 1 to 256 bytes
        min_p                0 to 1                 stop_token_ids       64 ids of the vocabulary
        repetition_penalty   0.01 to 100            logit_bias           1024 ids, each with -100 to 100
        logprobs             0 to 20
    """

    max_tokens: int | None = None
    min_tokens: int = 0
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    seed: int | None = None
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    include_stop_str_in_output: bool = False
    skip_special_tokens: bool = True
    logprobs: int | None = None
    logit_bias: tuple[tuple[int, float], ...] = ()
    bad_words: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        """Refuse what is out of range: RequestError naming the field, the bound and the value."""
        if self.max_tokens is not None:
            _count("max_tokens", self.max_tokens, 1)
        _count("min_tokens", self.min_tokens, 0)
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise RequestError(f"min_tokens must be at most max_tokens ({self.max_tokens}), got {self.min_tokens}")
        _within("temperature", self.temperature, 0.0, 100.0)
        _count("top_k", self.top_k, -1)
        if not 0.0 < self.top_p <= 1.0:
            raise RequestError(f"top_p must be above 0 and at most 1, got {self.top_p}")
        _within("min_p", self.min_p, 0.0, 1.0)
        _within("repetition_penalty", self.repetition_penalty, 0.01, 100.0)  # logits over a smaller one are infinite
        _within("presence_penalty", self.presence_penalty, -2.0, 2.0)
        _within("frequency_penalty", self.frequency_penalty, -2.0, 2.0)
        if self.seed is not None:
            _within("seed", self.seed, 0, 2**64 - 1)
        _strings("stop", self.stop, MAX_STOP_STRINGS)
        _strings("bad_words", self.bad_words, MAX_BAD_WORDS)
        _entries("stop_token_ids", len(self.stop_token_ids), MAX_STOP_TOKEN_IDS)
        _entries("logit_bias", len(self.logit_bias), MAX_LOGIT_BIAS)
        for _, bias in self.logit_bias:
            _within("logit_bias", bias, -100.0, 100.0)
        if self.logprobs is not None:
            _within("logprobs", self.logprobs, 0, MAX_LOGPROBS)

    def check_vocabulary(self, size: int) -> None:
        """Refuse token ids outside [0, size): RequestError naming the field."""
        check_token_ids("stop_token_ids", self.stop_token_ids, size)
        check_token_ids("logit_bias", [token for token, _ in self.logit_bias], size)


def is_unicode(text: str) -> bool:
    """Whether it can be written as UTF-8; JSON can carry halves of surrogate pairs, which tokenizers raise at."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def check_token_ids(field_name: str, ids: Sequence[int], size: int) -> None:
    """Refuse ids outside [0, size): RequestError naming the field and the first such id."""
    for start in range(0, len(ids), _STRIDE):
        part = ids[start : start + _STRIDE]
        if min(part) < 0 or max(part) >= size:
            wrong = next(token for token in part if not 0 <= token < size)
            raise RequestError(f"{field_name} must hold token ids from 0 to {size - 1}, got {shown(wrong)}")


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """Log-probabilities at one position, natural logarithm, of the logits before temperature and masks.

    `top` holds (token id, logprob) of the most likely tokens, best first.
    """

    token_id: int
    logprob: float
    rank: int
    top: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True, slots=True)
class Timings:
    """Seconds spent in each stage of a request, and what the engine did for it."""

    queue: float
    prefill: float
    first_token: float
    decode: float
    cached_tokens: int
    preemptions: int
    exact: str


@dataclass(frozen=True, slots=True)
class Delta:
    """One piece of an answer; the only thing that leaves the engine.

    `index` is the position of the first of `token_ids` in the answer. Exactly one delta per request is terminal:
    `finish_reason` or `error` is set. `fingerprint` and `seed` are set on the first, `timings` on a terminal one.
    """

    request_id: str
    index: int
    token_ids: tuple[int, ...]
    text: str
    num_input_tokens: int
    logprobs: tuple[TokenLogprob, ...] = ()
    finish_reason: FinishReason | None = None
    error: RequestError | None = None
    fingerprint: str | None = None
    seed: int | None = None
    timings: Timings | None = None

    @property
    def terminal(self) -> bool:
        """Whether nothing follows for this request."""
        return self.finish_reason is not None or self.error is not None


Emit = Callable[[list[Delta]], None]  # of a call that raises, no delta counts as read


@dataclass(slots=True, eq=False)
class Request:
    """One answer being made. The caller fills the first block of fields; the rest belongs to the engine.

    `tokens` is prompt then answer. `computed` counts the leading tokens whose KV is (or is being) written;
    `in_flight` counts tokens drawn by launched steps that the host has not seen (at most one per step).
    `priority` 1 is the highest. Requests share prefix blocks only with the same `cache_salt`. A request that has
    waited `queue_seconds` for its first seat is ended.
    """

    id: str
    prompt_ids: Sequence[int]
    params: SamplingParams
    resume_token_ids: Sequence[int] = ()
    resume_fingerprint: str | None = None
    priority: int = 2
    cache_salt: str = ""
    queue_seconds: float = math.inf

    emit: Emit = field(init=False, repr=False)
    tokens: list[int] = field(default_factory=list)
    prompt_len: int = 0
    max_total: int = 0  # tokens (prompt and answer) at which the answer ends with `length`
    seed: int = 0
    fingerprint: str = ""
    text: TextStream = field(init=False, repr=False)
    bad_words_ids: tuple[tuple[int, ...], ...] = ()
    status: Status = Status.WAITING
    seat: int = -1
    blocks: list[int] = field(default_factory=list)
    computed: int = 0
    confirmed: int = 0  # leading tokens whose KV is known to be sound
    in_flight: int = 0
    cached_tokens: int = 0
    preemptions: int = 0
    chain: list[bytes] = field(default_factory=list)  # digests of the full blocks of `tokens`, behind a root
    cancelled: bool = False  # somebody asked for its end, which comes with the next turn
    turn: int = 0  # arrival number, kept for life
    overtaken: int = 0  # newer requests admitted while this one waited
    emitted: int = 0  # answer tokens delivered, resumed ones included
    arrived_at: float = field(default_factory=time.monotonic)
    admitted_at: float = 0.0
    first_token_at: float = 0.0
    last_token_at: float = 0.0

    @property
    def queued(self) -> bool:
        """Whether it has never had a seat."""
        return self.admitted_at == 0.0

    @property
    def answer_len(self) -> int:
        """Answer tokens known to the host."""
        return len(self.tokens) - self.prompt_len

    @property
    def pending(self) -> int:
        """Tokens whose KV is still to be computed, the sampled but unseen one included."""
        return len(self.tokens) + self.in_flight - self.computed


def _within(name: str, value: float, low: float, high: float) -> None:
    if not low <= value <= high:  # NaN is nowhere
        raise RequestError(f"{name} must be from {low} to {high}, got {shown(value)}")


def _count(name: str, value: int, low: int) -> None:
    if not low <= value <= MAX_COUNT:
        bound = f"at least {low}" if value < low else f"at most {MAX_COUNT}"
        raise RequestError(f"{name} must be {bound}, got {shown(value)}")


def shown(value: float) -> str:
    """A number as an error shows it: Python writes no integer of more than 4300 digits, and nobody reads hundreds."""
    if isinstance(value, int) and value.bit_length() > 128:
        return f"an integer of some {int(value.bit_length() * 0.30103) + 1} digits"
    return str(value)


def _entries(name: str, count: int, limit: int) -> None:
    if count > limit:
        raise RequestError(f"{name} may hold at most {limit} entries, got {count}")


def _strings(name: str, values: tuple[str, ...], limit: int) -> None:
    _entries(name, len(values), limit)
    for value in values:
        if not value:
            raise RequestError(f"{name} must not hold an empty string")
        if not is_unicode(value):
            raise RequestError(f"{name} holds half of a surrogate pair, which is no character")
        if (size := len(value.encode())) > MAX_STOP_BYTES:
            raise RequestError(f"{name} may hold strings of at most {MAX_STOP_BYTES} bytes, got {size}")

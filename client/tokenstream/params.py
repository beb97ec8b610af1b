"""What a caller may say of a request: sampling parameters by vLLM's names, their way onto the wire, and options.

Names, and whether values can be sent, are checked here; values on the server, which knows the model's limits.
It does not know how a token is drawn.
"""

from __future__ import annotations

import json
import math
import secrets
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal, TypedDict

from .errors import InvalidRequest
from .timeouts import Timeout

if TYPE_CHECKING:
    from .security import Headers

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


class Prompting(TypedDict, total=False):
    """Keywords of `stream`, `generate` and `chat` that say how the prompt is made; docs/requests.md has more.

    `chat_template_kwargs`: variables of the model's chat template, of which `enable_thinking` and `reasoning_effort`
    may be given alone. `tools` and `documents`: for a template that reads them; `tool_choice` "none" keeps the tools
    from it. `continue_final_message`: go on with the assistant's last message, instead of opening a turn behind it,
    which `add_generation_prompt` says. `parse_special`: whether control tokens that a text spells become tokens, which
    they do in a prompt of text, and not in messages. `add_special_tokens`: whether the tokenizer adds its own.
    """

    chat_template_kwargs: Mapping[str, Any] | None
    enable_thinking: bool | None
    reasoning_effort: str | None
    tools: Sequence[Mapping[str, Any]] | None
    tool_choice: Literal["auto", "none"] | None
    documents: Sequence[Mapping[str, Any]] | None
    add_generation_prompt: bool | None
    continue_final_message: bool | None
    parse_special: bool | None
    add_special_tokens: bool | None


class Options(Sampling, Prompting, total=False):
    """Every keyword of `stream`, `generate` and `chat`: sampling, prompting, and how this one request travels.

    `request_id`: what the server logs it under; drawn if it is not given. `priority`: 1 (highest) to 3.
    `cache_salt`: only requests of the same salt share cached prefixes. `timeout`, `retries`, `resume`, `max_resumes`:
    in place of the client's own. `headers`: sent as gRPC metadata, over the client's; a function is asked at every
    attempt. `traceparent`, `tracestate`: W3C trace context.
    """

    request_id: str | None
    priority: int | None
    cache_salt: str | None
    timeout: float | Timeout | None
    headers: Headers | None
    traceparent: str | None
    tracestate: str | None
    retries: int | None
    resume: Resume | None
    max_resumes: int | None


Resume = bool | Literal["best_effort"]
SAMPLING_NAMES = frozenset(Sampling.__annotations__)
PROMPTING_NAMES = frozenset(Prompting.__annotations__)
_OPTION_NAMES = frozenset(Options.__annotations__)


def draw_seed() -> int:
    """63 random bits, so that the seed fits a signed integer wherever it is stored."""
    return secrets.randbits(63)


def sampling_json(options: Options, seed: int) -> str:
    """The wire's JSON object of the sampling and prompting among `options`, with `seed` in it whatever the caller gave.

    A seed is always sent: an answer whose seed only the server knows could not be resumed on another one.
    Raises TypeError naming an unknown keyword or a value that JSON cannot hold, InvalidRequest for NaN, infinity,
    integers of more than 4300 digits and text that is no Unicode.
    """
    if unknown := sorted(set(options) - _OPTION_NAMES):
        raise TypeError(f"{unknown[0]!r} is no sampling parameter; known ones are {', '.join(sorted(SAMPLING_NAMES))}")
    names = SAMPLING_NAMES | PROMPTING_NAMES
    given = {name: value for name, value in options.items() if name in names and value is not None}
    for name, value in given.items():
        if isinstance(value, float) and not math.isfinite(value):
            raise InvalidRequest(f"{name} must be a finite number, got {value}")
    parts = (f'"{name}": {json_text(name, value)}' for name, value in (given | {"seed": seed}).items())
    return "{" + ", ".join(parts) + "}"


def json_text(name: str, value: object) -> str:
    """A value as JSON. TypeError naming it if it is nothing that JSON holds, InvalidRequest if nobody could read it."""
    try:
        text = json.dumps(value, ensure_ascii=False)
    except TypeError as error:
        raise TypeError(f"{name} cannot be sent as JSON: {error}") from None
    except (ValueError, RecursionError):
        raise InvalidRequest(f"{name} holds too long an integer, or is nested too deeply") from None
    utf8(name, text)
    return text


def utf8(name: str, text: str) -> bytes:
    """Text as bytes. TypeError naming it if it is no str, InvalidRequest if it is no Unicode."""
    if not isinstance(text, str):
        raise TypeError(f"{name} must be a str, got {type(text).__name__}")
    try:
        return text.encode()
    except UnicodeEncodeError as error:
        raise InvalidRequest(f"{name} is not Unicode text: half a character at position {error.start}") from None

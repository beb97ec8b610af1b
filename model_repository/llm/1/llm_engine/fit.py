"""Whether a request fits the model: its token ids, its prompt in the context, what it resumes, what it forbids.

Whatever does not fit is a RequestError naming the field and the numbers. It does not know who else is served.
"""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Sequence
from typing import Any

from .request import Request, RequestError, SamplingParams, check_token_ids


def fit(request: Request, tokenizer: Any, max_context: int, vocab_size: int, embedding_size: int) -> None:
    """Refuse a request that does not fit, else set its `max_total` and `bad_words_ids`. `max_context` is in tokens.

    Token ids of a prompt lie below `embedding_size`, those that an answer may hold below `vocab_size`.
    """
    prompt, resumed = len(request.prompt_ids), len(request.resume_token_ids)
    if not prompt:
        raise RequestError("the prompt is empty; send at least one token")
    check_length(prompt, max_context)
    request.max_total = min(max_context, prompt + (request.params.max_tokens or max_context))
    if prompt + resumed > request.max_total:
        raise RequestError(
            f"resume_token_ids holds {resumed} tokens; at most {request.max_total - prompt} fit behind the prompt"
        )
    check_token_ids("input_ids", request.prompt_ids, embedding_size)
    check_token_ids("resume_token_ids", request.resume_token_ids, vocab_size)
    request.params.check_vocabulary(vocab_size)
    words = _bad_words(request.params.bad_words, tokenizer)
    request.bad_words_ids = tuple(ids for ids in words if ids[-1] < vocab_size)  # the others are never written so


def hidden_stops(tokenizer: Any, params: SamplingParams) -> dict[int, str]:
    """The stop strings that are one special token each, by its id: their text is skipped, so no text can match them."""
    if not params.skip_special_tokens:
        return {}
    found = {}
    for stop in params.stop:
        token = tokenizer.convert_tokens_to_ids(stop)
        if (
            isinstance(token, int)
            and _text(tokenizer, token, skip=False) == stop
            and not _text(tokenizer, token, skip=True)
        ):
            found[token] = stop
    return found


def check_length(prompt: int, max_context: int) -> None:
    """Refuse a prompt of so many tokens if no answer fits behind it."""
    if prompt >= max_context:
        raise RequestError(
            f"the prompt has {prompt} tokens; at most {max_context - 1} fit, "
            f"for the context is {max_context} with the answer"
        )


def fingerprint(digest: str, prompt_ids: Sequence[int]) -> str:
    """What tells whether another server would give the same answer: the model's digest and the prompt, hashed."""
    return hashlib.blake2b(digest.encode() + array("q", prompt_ids).tobytes(), digest_size=16).hexdigest()


def _text(tokenizer: Any, token: int, *, skip: bool) -> str:
    text: str = tokenizer.decode([token], skip_special_tokens=skip, clean_up_tokenization_spaces=False)
    return text


def _bad_words(words: Sequence[str], tokenizer: Any) -> tuple[tuple[int, ...], ...]:
    """Token sequences that would write one of `words`, at the start of a text and behind a space."""
    found: dict[tuple[int, ...], None] = {}
    for word in words:
        for text in (word, " " + word.lstrip()):
            if ids := tuple(tokenizer(text, add_special_tokens=False)["input_ids"]):
                found[ids] = None
    return tuple(found)

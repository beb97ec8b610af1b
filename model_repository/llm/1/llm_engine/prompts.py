"""From a client's text or chat messages to prompt token ids, and back for `detokenize`.

Whatever a client can get wrong is a RequestError naming the field. It does not know blocks, nor who else is served.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any, cast

from .request import Request, RequestError, check_token_ids, is_unicode


class PromptEncoder:
    """Encodes for one tokenizer. `max_context` is in tokens; `vocab_size` bounds token ids."""

    def __init__(self, tokenizer: Any, max_context: int, vocab_size: int) -> None:
        self._tokenizer = tokenizer
        self._max_context = max_context
        self._vocab_size = vocab_size
        longest = max((len(token.encode()) for token in tokenizer.get_vocab()), default=1)
        self._max_bytes = longest * max_context  # a longer text cannot fit, and need not be tokenized to know it

    def text(self, field: str, text: str, *, special: bool = True) -> list[int]:
        """Token ids of `text`, with the tokenizer's own special tokens where `special`."""
        if not text:
            raise RequestError(f"{field} is empty; send at least one character")
        if len(text) > self._max_bytes:
            raise RequestError(f"{field} has {len(text)} characters, more than {self._max_context} tokens can hold")
        if not is_unicode(text):
            raise RequestError(f"{field} holds half of a surrogate pair, which is no character")
        return cast(list[int], self._tokenizer(text, add_special_tokens=special, verbose=False)["input_ids"])

    def messages(self, field: str, messages: Sequence[Mapping[str, Any]], now: datetime | None = None) -> list[int]:
        """Token ids of a chat, a sequence of {role, content}, through the model's chat template; `now` is its clock."""
        if not self._tokenizer.chat_template:
            raise RequestError(f"{field}: this model has no chat template; send text_input instead")
        clock = now or datetime.now().astimezone()
        from jinja2.exceptions import TemplateError

        try:
            text = self._tokenizer.apply_chat_template(
                list(messages), tokenize=False, add_generation_prompt=True, strftime_now=clock.strftime
            )
        except (TemplateError, ValueError, TypeError, KeyError, IndexError) as error:
            reason = (str(error).splitlines() or [type(error).__name__])[0]
            raise RequestError(f"{field}: the model's chat template refuses these messages: {reason}") from None
        return self.text(field, text, special=False)

    def check(self, request: Request) -> None:
        """Refuse a request that does not fit the model, else set its `max_total` and `bad_words_ids`."""
        check_token_ids("input_ids", request.prompt_ids, self._vocab_size)
        check_token_ids("resume_token_ids", request.resume_token_ids, self._vocab_size)
        request.params.check_vocabulary(self._vocab_size)
        prompt, resumed, limit = len(request.prompt_ids), len(request.resume_token_ids), self._max_context
        if not prompt:
            raise RequestError("the prompt is empty; send at least one token")
        if prompt >= limit:
            raise RequestError(
                f"the prompt has {prompt} tokens; at most {limit - 1} fit, for the context is {limit} with the answer"
            )
        request.max_total = min(limit, prompt + (request.params.max_tokens or limit))
        if prompt + resumed > request.max_total:
            raise RequestError(
                f"resume_token_ids holds {resumed} tokens; at most {request.max_total - prompt} fit behind the prompt"
            )
        request.bad_words_ids = self._bad_words(request.params.bad_words)

    def decode(self, field: str, ids: Sequence[int]) -> str:
        """Text of `ids`, special tokens skipped."""
        check_token_ids(field, ids, self._vocab_size)
        return cast(str, self._tokenizer.decode(list(ids), skip_special_tokens=True))

    def _bad_words(self, words: Sequence[str]) -> tuple[tuple[int, ...], ...]:
        """Token sequences that would write one of `words`, at the start of a text and behind a space."""
        found: dict[tuple[int, ...], None] = {}
        for word in words:
            for text in (word, " " + word.lstrip()):
                if ids := tuple(self._tokenizer(text, add_special_tokens=False)["input_ids"]):
                    found[ids] = None
        return tuple(found)

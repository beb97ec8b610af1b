"""From a client's text or chat messages to prompt token ids, and back for `detokenize`.

Whatever a client can get wrong is a RequestError naming the field. It does not know blocks, nor who else is served.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any, cast

from tokenizers import Tokenizer

from llm_engine.request import RequestError, check_token_ids, is_unicode
from llm_engine.text import backend

ESCAPED = 6  # bytes that JSON may take for one: \u0041
OTHER_BYTES = 2**20  # of whatever comes beside a prompt
SAMPLE_TOKENS = 1000


class PromptEncoder:
    """Encodes for one tokenizer. `max_context` is in tokens; `embedding_size` bounds token ids."""

    def __init__(self, tokenizer: Any, max_context: int, embedding_size: int) -> None:
        self._tokenizer = tokenizer
        self._max_context = max_context
        self._embedding_size = embedding_size
        self._backend = self._proven_backend()
        longest = max((len(token.encode()) for token in tokenizer.get_vocab()), default=1)
        self._max_bytes = longest * max_context  # a longer text cannot fit, and need not be tokenized to know it

    def check_size(self, size: int) -> None:
        """Refuse a request of more bytes than any that fits can have, before anybody reads them."""
        if size > (most := ESCAPED * self._max_bytes + OTHER_BYTES):
            raise RequestError(f"the request has {size} bytes; at most {most} can fit a context of {self._max_context}")

    def text(self, field: str, text: str, *, special: bool = True) -> list[int]:
        """Token ids of `text`, with the tokenizer's own special tokens where `special`."""
        if not text:
            raise RequestError(f"{field} is empty; send at least one character")
        if len(text) > self._max_bytes:
            raise RequestError(f"{field} has {len(text)} characters, more than {self._max_context} tokens can hold")
        if not is_unicode(text):
            raise RequestError(f"{field} holds half of a surrogate pair, which is no character")
        if self._backend is not None:
            (encoding,) = self._backend.encode_batch_fast([text], add_special_tokens=special)
            return encoding.ids
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

    def decode(self, field: str, ids: Sequence[int]) -> str:
        """Text of `ids`, special tokens skipped."""
        check_token_ids(field, ids, self._embedding_size)
        if self._backend is not None:  # which does not hold the interpreter's lock
            (text,) = self._backend.decode_batch([list(ids)], skip_special_tokens=True)
            return text
        return cast(str, self._tokenizer.decode(list(ids), skip_special_tokens=True))

    def _proven_backend(self) -> Tokenizer | None:
        """What encodes a text as the tokenizer does, in half its time and without the interpreter's lock; or None.

        Only batches are encoded without the lock, for which all other threads would wait.
        """
        found = backend(self._tokenizer)
        if found is None:
            return None
        sample = found.decode(list(range(min(SAMPLE_TOKENS, self._embedding_size))))
        ids = self._tokenizer(sample, verbose=False)["input_ids"]  # first, for it also ends what the file truncates
        (encoding,) = found.encode_batch_fast([sample])
        return found if encoding.ids == ids else None

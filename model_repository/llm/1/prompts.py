"""From a client's text or chat messages to prompt token ids, and back for `detokenize`.

Whatever a client can get wrong is a RequestError naming the field. Any thread may call it. It does not know blocks, nor
who else is served.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any, cast

from tokenizers import Tokenizer

from chat_options import ChatOptions
from chat_template import ChatTemplate
from control_tokens import ControlTokens, Span
from llm_engine.fit import check_length
from llm_engine.request import RequestError, check_token_ids, is_unicode
from llm_engine.text import backend
from quoted import quoted

ESCAPED = 6  # bytes that JSON may take for one: \u0041
OTHER_BYTES = 2**20  # of whatever comes beside a prompt
SAMPLE_TOKENS = 1000

_PLAIN = ChatOptions()


class PromptEncoder:
    """Encodes for one fast tokenizer. `max_context` is in tokens; `embedding_size` bounds token ids."""

    def __init__(self, tokenizer: Any, max_context: int, embedding_size: int) -> None:
        self._tokenizer = tokenizer
        self._max_context = max_context
        self._embedding_size = embedding_size
        self._backend = self._proven_backend()
        longest = max((len(token.encode()) for token in tokenizer.get_vocab()), default=1)
        self._max_bytes = longest * max_context  # a longer text cannot fit, and need not be tokenized to know it
        plain, with_tools = _sources(tokenizer)
        self._controls = ControlTokens(tokenizer, "".join({plain, with_tools}))
        self._template = ChatTemplate(tokenizer, plain, self._controls) if plain else None
        self._tool_template = self._template
        if with_tools != plain:
            self._tool_template = ChatTemplate(tokenizer, with_tools, self._controls)

    def check_size(self, size: int) -> None:
        """Refuse a request of more bytes than any that fits can have, before anybody reads them."""
        if size > (most := ESCAPED * self._max_bytes + OTHER_BYTES):
            raise RequestError(f"the request has {size} bytes; at most {most} can fit a context of {self._max_context}")

    def text(self, field: str, text: str, options: ChatOptions = _PLAIN, *, fits: bool = False) -> list[int]:
        """Token ids of `text`, with the tokenizer's own special tokens unless `options` say otherwise.

        With `fits` a text that leaves no room for an answer is refused before its ids are listed: a list of a million
        is made with the interpreter's lock held.
        """
        spelt = [(0, len(text))] if options.parse_special is False else []
        return self._encode(field, text, spelt, special=options.add_special_tokens is not False, fits=fits)

    def messages(
        self,
        field: str,
        messages: Sequence[Mapping[str, Any]],
        now: datetime | None = None,
        options: ChatOptions = _PLAIN,
        *,
        fits: bool = False,
    ) -> list[int]:
        """Token ids of a chat, as `read_messages` gives it, through the model's chat template; `now` is its clock.

        Control tokens that a message spells are plain text, unless `options.parse_special`. `fits` is as for `text`.
        """
        template = self._tool_template if options.tools else self._template
        if template is None:
            raise RequestError(f"{field}: this model has no chat template; send text_input instead")
        last = f"{field}[{len(messages) - 1}]"
        if options.continue_final_message and messages[-1]["role"] != "assistant":
            raise RequestError(
                f"continue_final_message: {last} is of role {quoted(messages[-1]['role'])}, not assistant"
            )
        if (
            messages[-1]["role"] == "assistant"
            and options.add_generation_prompt is options.continue_final_message is None
        ):
            raise RequestError(
                f"{last} is the assistant's: send continue_final_message true to go on with it, "
                f"or add_generation_prompt true for another turn behind it"
            )
        prompt = template.render(messages, options, now or datetime.now().astimezone())
        return self._encode(field, prompt.text, prompt.spelt, special=options.add_special_tokens is True, fits=fits)

    def decode(self, field: str, ids: Sequence[int]) -> str:
        """Text of `ids`, special tokens skipped."""
        check_token_ids(field, ids, self._embedding_size)
        if self._backend is not None:  # which does not hold the interpreter's lock
            (text,) = self._backend.decode_batch([list(ids)], skip_special_tokens=True)
            return text
        return cast(str, self._tokenizer.decode(list(ids), skip_special_tokens=True))

    def _encode(self, field: str, text: str, spelt: Sequence[Span], *, special: bool, fits: bool) -> list[int]:
        """Token ids of `text`; control tokens within the spans `spelt` of it are plain text."""
        if not text:
            raise RequestError(f"{field} is empty; send at least one character")
        if len(text) > self._max_bytes:
            raise RequestError(f"{field} has {len(text)} characters, more than {self._max_context} tokens can hold")
        if not is_unicode(text):
            raise RequestError(f"{field} holds half of a surrogate pair, which is no character")
        try:
            return self._tokenized(text, spelt, special=special, fits=fits)
        except RequestError:
            raise
        except Exception as error:  # tokenizers has no narrower: a vocabulary of words may lack one, and any other
            reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
            raise RequestError(f"{field} cannot be encoded by this model's tokenizer: {reason}") from error

    def _tokenized(self, text: str, spelt: Sequence[Span], *, special: bool, fits: bool) -> list[int]:
        if spelt:
            return self._controls.encode(text, spelt, special=special)
        if self._backend is not None:
            (encoding,) = self._backend.encode_batch_fast([text], add_special_tokens=special)
            if fits:
                check_length(len(encoding), self._max_context)
            return encoding.ids
        return cast(list[int], self._tokenizer(text, add_special_tokens=special, verbose=False)["input_ids"])

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


def _sources(tokenizer: Any) -> tuple[str, str]:
    """The texts of the chat templates for a chat without and with tools, often the same; "" where there is none."""
    given = tokenizer.chat_template or ""
    named = given if isinstance(given, Mapping) else {"default": given}
    texts = {name: text for name, text in named.items() if isinstance(text, str)}
    plain = texts.get("default", "")
    return plain, texts.get("tool_use", plain)

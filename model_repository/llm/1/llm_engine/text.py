"""From token ids to text that may be sent: an incremental detokenizer and stop strings, one object per request.

The deltas joined equal decode(prompt + answer) beyond what it shares with decode(prompt), special tokens skipped if
asked, up to the first stop match; a token costs one short decode or a few, whatever the answer's length. It does not
know why an answer ends: the engine names the terminating token, reads `stopped`, and flushes on stop and length alone.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Protocol

from tokenizers import Tokenizer
from tokenizers.decoders import DecodeStream

if TYPE_CHECKING:
    from .request import SamplingParams

_CONTEXT = 8  # prompt tokens decoded before the answer, so that rules about leading spaces see a predecessor
_LONGEST = 4  # bytes of a UTF-8 character, hence the most tokens that can share one
_BROKEN = "\N{REPLACEMENT CHARACTER}"


class Decoder(Protocol):
    """What is used of a tokenizer: Hugging Face's `decode`."""

    def decode(self, token_ids: list[int], *, skip_special_tokens: bool, clean_up_tokenization_spaces: bool) -> str:
        """Return the text of `token_ids` as one sequence."""


def backend(tokenizer: Any) -> Tokenizer | None:
    """The `tokenizers` object behind a Hugging Face tokenizer, if its `decode` is that object's and no more.

    None where there is none, or where the two differ over the vocabulary, as they do for classes that replace spaces.
    """
    found = getattr(tokenizer, "backend_tokenizer", None)
    if not isinstance(found, Tokenizer):
        return None
    ids = list(range(found.get_vocab_size()))
    for skip in (True, False):
        text = tokenizer.decode(ids, skip_special_tokens=skip, clean_up_tokenization_spaces=False)
        if text != found.decode(ids, skip_special_tokens=skip):
            return None
    return found


class Detokenizer:
    """Turns tokens into text one by one; a character appears when it is complete.

    For byte-level BPE `push` and `flush` joined equal decode(answer) for every sequence of ids, behind a prompt that
    ends between characters; a character that the prompt left unfinished belongs to the answer. Tokenizers with byte
    fallback (sentencepiece) decode a run of byte tokens to U+FFFD throughout if one byte is wrong, so there the
    equality holds for answers whose decoding has no U+FFFD.

        window:   [ context: already in text | pending: not yet ]
                                             ^ read

    While nothing is pending, the decoder of `backend` takes the tokens, several times faster. It has no flush, would
    hold back whole characters that a token ends before it begins another, and decodes more and more where bytes are
    wrong for good or tokens have no text; so a token for which it has no answer is taken from it, and so is the window.
    """

    def __init__(
        self,
        tokenizer: Decoder,
        prompt_ids: Sequence[int],
        *,
        skip_special_tokens: bool = True,
        backend: Tokenizer | None = None,
    ) -> None:
        self._tokenizer = tokenizer
        self._backend = backend
        self._skip_special_tokens = skip_special_tokens
        self._window, self._text = self._prompt_end(prompt_ids)
        self._sent = self._text  # the beginning of the window's text that must not be emitted (again)
        self._read = len(self._window)
        self._stream = None if self._text.endswith(_BROKEN) else self._new_stream()

    def push(self, token_id: int) -> str:
        """Return the text that this token completes; "" while a character is unfinished."""
        if self._stream is not None and self._backend is not None:
            try:
                fresh = self._stream.step(self._backend, token_id)
            except Exception:  # no class of its own: this token has changed text that was sent  # noqa: BLE001
                fresh = None
            if fresh is not None:
                self._window = [token_id]
                self._read = 0  # `_text` and `_sent` are made when they are needed
                return fresh
            self._leave_stream()
        fresh = self._push(token_id)
        if self._read == len(self._window) and not self._text.endswith(_BROKEN):
            self._stream = self._new_stream()
        return fresh

    def flush(self) -> str:
        """Return what an unfinished character decodes to, for no token will finish it."""
        if self._stream is not None:
            return ""
        return self._settle() if len(self._window) > self._read else ""

    def _new_stream(self) -> DecodeStream | None:
        return DecodeStream(self._window, self._skip_special_tokens) if self._backend is not None else None

    def _leave_stream(self) -> None:
        """Go on with the window that the stream had: the last token that had text, or the prompt's end."""
        self._stream = None
        if self._read == 0:
            self._text = self._sent = self._decode(self._window)
            self._read = len(self._window)

    def _push(self, token_id: int) -> str:
        self._window.append(token_id)
        text = self._decode(self._window)
        if text == self._text and not self._decode([token_id, token_id]):
            self._window.pop()  # skipped or unused ids never matter; twice, as a lone leading space decodes to ""
            return ""
        self._text = text
        if not text.endswith(_BROKEN):
            return self._settle()
        if len(self._window) - self._read < _LONGEST:
            settled = text.rstrip(_BROKEN)
            if fresh := self._fresh(settled):
                self._sent = settled
            return fresh
        # Too many tokens for one character, so some bytes are wrong for good. Only the last U+FFFD may still change.
        fresh = self._fresh(text[:-1])
        self._window = self._window[-_LONGEST:]
        self._text = self._decode(self._window)
        self._sent = self._text[:-1]
        self._read = 0
        return fresh

    def _settle(self) -> str:
        fresh = self._fresh(self._text)
        self._window = self._window[self._read :]
        self._text = self._sent = self._decode(self._window)
        self._read = len(self._window)
        return fresh

    def _fresh(self, text: str) -> str:
        # U+FFFD at the end of what was sent is an unfinished character of the prompt: if `text` finished it, it is new.
        known = len(self._sent.rstrip(_BROKEN))
        while known < len(self._sent) and text.startswith(_BROKEN, known):
            known += 1
        return text[known:]

    def _prompt_end(self, prompt_ids: Sequence[int]) -> tuple[list[int], str]:
        # Special tokens alone would leave the answer without a predecessor, and a window that opens inside a character
        # makes byte fallback reject the whole run.
        count = _CONTEXT
        while True:
            window = list(prompt_ids[-count:])
            text = self._decode(window)
            if count >= len(prompt_ids) or (text and not text.startswith(_BROKEN)):
                return window, text
            count *= 2

    def _decode(self, ids: list[int]) -> str:
        if self._backend is not None:
            return self._backend.decode(ids, skip_special_tokens=self._skip_special_tokens)
        return self._tokenizer.decode(
            ids, skip_special_tokens=self._skip_special_tokens, clean_up_tokenization_spaces=False
        )


class TextStream:
    """The text of one answer, as it may be sent.

    Stop strings are matched on text, across tokens. The match that ends first wins, among those that end together the
    longest. Only a tail that may still become a stop string is held back, so no prefix of a matched one is ever sent,
    unless `include_stop_str_in_output`, which sends the match itself too. With `min_tokens` a match must end in text
    that appeared with answer token `min_tokens` or a later one; earlier occurrences are ordinary text.
    `hidden_stops`: the stop strings that are special tokens, by id, whose text would be skipped and never match.
    """

    def __init__(
        self,
        tokenizer: Decoder,
        prompt_ids: Sequence[int],
        params: SamplingParams,
        *,
        backend: Tokenizer | None = None,
        hidden_stops: Mapping[int, str] = MappingProxyType({}),
    ) -> None:
        self._detokenizer = Detokenizer(
            tokenizer, prompt_ids, skip_special_tokens=params.skip_special_tokens, backend=backend
        )
        self._stops = params.stop
        self._hidden_stops = hidden_stops
        self._initials = frozenset(stop[0] for stop in params.stop)
        self._longest_stop = max(map(len, params.stop), default=0)
        self._include = params.include_stop_str_in_output
        self._min_tokens = params.min_tokens
        self._tokens = 0
        self._held = ""
        self.stopped = False  # a stop string was matched: the answer ends here

    def push(self, token_id: int, *, is_end: bool = False) -> str:
        """Take the next answer token and return the text that may be sent now.

        `is_end` marks the terminating token (EOS or a stop token id): it has no text unless the stop is to be included.
        """
        if self.stopped:
            return ""
        self._tokens += 1
        if is_end and not self._include:
            return ""
        if token_id in self._hidden_stops and self._tokens >= self._min_tokens:
            return self._sift(self._detokenizer.flush() + self._hidden_stops[token_id], final=False)
        return self._sift(self._detokenizer.push(token_id), final=False)

    def flush(self) -> str:
        """Return all that is held back. Only for an answer that ended with stop or length: a resume still needs it."""
        return "" if self.stopped else self._sift(self._detokenizer.flush(), final=True)

    def _sift(self, piece: str, *, final: bool) -> str:
        """Append `piece` to the held text; cut at a stop string or hold back what may become one."""
        if not self._stops:
            return piece
        text, seen = self._held + piece, len(self._held)
        self._held = ""
        if self._tokens >= self._min_tokens and (match := self._first_match(text, seen)):
            self.stopped = True
            start, end = match
            return text[: end if self._include else start]
        if not final:
            ready = self._hold_from(text)
            text, self._held = text[:ready], text[ready:]
        return text

    def _first_match(self, text: str, seen: int) -> tuple[int, int] | None:
        """Return (start, end) of the match that ends first behind `seen`, the longest if several do."""
        found = []
        for stop in self._stops:
            start = text.find(stop, max(0, seen - len(stop) + 1))
            if start >= 0:
                found.append((start + len(stop), start))
        if not found:
            return None
        end, start = min(found)
        return start, end

    def _hold_from(self, text: str) -> int:
        """Return where the longest suffix begins that is a proper prefix of a stop string, else len(text)."""
        for at in range(max(0, len(text) - self._longest_stop + 1), len(text)):
            if text[at] in self._initials:
                tail = text[at:]
                if any(len(stop) > len(tail) and stop.startswith(tail) for stop in self._stops):
                    return at
        return len(text)

"""Keeps text that merely spells a control token, such as <|im_end|> in a user's message, from becoming that token.

Strings are marked before a template sees them, with characters that nobody else uses; behind the template the marks are
taken out, and where a control token of the prompt lies between marks it is put as the tokens of its text. All other
tokens are those of the whole prompt, as without marks. It does not know messages or templates.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

from llm_engine.request import RequestError

Span = tuple[int, int]
_SPACE = "\u2581"  # as SentencePiece writes it
_PRIVATE = range(0xE000, 0xF8FF)  # code points without a meaning
_ESCAPE = re.compile(r"\\u[ef][0-9a-f]{3}")


@dataclass(frozen=True, slots=True)
class Marks:
    """Two characters that neither the texts of a request nor the template hold."""

    begin: str
    end: str

    @staticmethod
    def unused_in(text: str) -> Marks:
        """The first two private characters that `text` does not hold, nor their escapes; RequestError if it has all."""
        used = {*text, *_ESCAPE.findall(text)}
        free = (chr(code) for code in _PRIVATE if used.isdisjoint((chr(code), _escaped(chr(code)))))
        begin, end = next(free, ""), next(free, "")
        if not end:
            raise RequestError("messages hold every private character of Unicode; leave two of U+E000 to U+F8FE out")
        return Marks(begin, end)

    def around(self, text: str, spans: Iterable[Span]) -> str:
        """`text` with each of the ascending `spans` between marks."""
        parts, at = [], 0
        for start, stop in spans:
            parts += [text[at:start], self.begin, text[start:stop], self.end]
            at = stop
        return "".join((*parts, text[at:]))

    def taken_out(self, text: str, longest: int) -> tuple[str, list[Span]]:
        """`text` without marks, and what lay between them; an odd mark, whose partner the template cut, is empty.

        What is longer than `longest` lay between odd ones.
        """
        pieces, spans = [], list[Span]()
        at, open_at = 0, -1
        for mark in (self.begin, self.end):  # as a filter writes them that leaves ASCII alone
            text = text.replace(_escaped(mark), mark)
        for piece in re.split(f"([{self.begin}{self.end}])", text):
            if piece not in (self.begin, self.end):
                pieces.append(piece)
                at += len(piece)
                continue
            whole = piece == self.end and open_at >= 0 and at - open_at <= longest
            if whole:
                spans.append((open_at, at))
            else:
                spans += [(place, place) for place in (open_at, at if piece == self.end else -1) if place >= 0]
            open_at = at if piece == self.begin else -1
        return "".join(pieces), spans + [(open_at, open_at)] * (open_at >= 0)


class ControlTokens:
    """The tokens of a fast tokenizer that steer a model: its special ones, and added ones that its template writes.

    `template` is the chat template's source, "" where there is none.
    """

    def __init__(self, tokenizer: Any, template: str = "") -> None:
        self._tokenizer = tokenizer
        added: Mapping[int, Any] = tokenizer.added_tokens_decoder
        tokens = [t for t in added.values() if t.special or (t.content in template and _like_a_tag(t.content))]
        contents = {t.content for t in tokens}
        self._any = re.compile(_any_of(contents) or "(?!)")
        self._special = re.compile(_any_of({t.content for t in tokens if t.special}) or "(?!)")
        self._normalizer = tokenizer.backend_tokenizer.normalizer if any(t.normalized for t in tokens) else None
        self._ids = {number for number, t in added.items() if t.content in contents}
        self.longest = sys.maxsize if self._normalizer is not None else max(map(len, contents), default=0)

    def spelt(self, text: str, *, special_only: bool = False) -> list[Span]:
        """Where `text` spells control tokens, in ascending order; all of it, if the normalizer has to have its say."""
        pattern = self._special if special_only else self._any
        found = [match.span() for match in pattern.finditer(text)]
        if not found and self._normalizer is not None and pattern.search(self._normalizer.normalize_str(text)):
            return [(0, len(text))]
        return found

    def encode(self, text: str, spans: Sequence[Span], *, special: bool) -> list[int]:
        """Token ids of `text`, in which no control token touches one of the ascending `spans`: its text does."""
        # A batch of one, for only batches are encoded without the interpreter's lock.
        (encoded,) = self._tokenizer.backend_tokenizer.encode_batch([text], add_special_tokens=special)
        tokens: list[int] = encoded.ids
        left = list(reversed(spans))
        ids, at, spelt = list[int](), 0, dict[str, list[int]]()
        for index in [i for i, token in enumerate(tokens) if token in self._ids]:
            start, stop = encoded.token_to_chars(index) or (0, 0)
            while left and left[-1][1] <= start:
                left.pop()
            if left and left[-1][0] < stop and start < stop:
                word = text[start:stop]
                if word not in spelt:
                    spelt[word] = self._plain(word)
                ids += tokens[at:index] + spelt[word]
                at = index + 1
        return ids + tokens[at:]

    def _plain(self, text: str) -> list[int]:
        """Token ids of `text`, which is not empty, by the tokenizer's pipeline without its added tokens."""
        pipeline = self._tokenizer.backend_tokenizer
        normalized = text if pipeline.normalizer is None else pipeline.normalizer.normalize_str(text)
        words = [normalized]
        if pipeline.pre_tokenizer is not None:
            words = [word for word, _ in pipeline.pre_tokenizer.pre_tokenize_str(normalized)]
        if words and not text[0].isspace():
            words[0] = words[0].removeprefix(_SPACE)  # it is put before a text, and this is the middle of one
        return [token for word in words for token in self._word(pipeline.model, word)]

    def _word(self, model: Any, word: str) -> list[int]:
        ids = [cast(int, token.id) for token in model.tokenize(word)]
        if len(word) > 1 and self._ids.intersection(ids):  # the vocabulary has the control token as a word, too
            return [token for character in word for token in self._word(model, character)]
        return ids


def _escaped(character: str) -> str:
    """As JSON in ASCII writes it."""
    return f"\\u{ord(character):04x}"


def _like_a_tag(content: str) -> bool:
    """Whether it is written as <this> or [THIS] is; ordinary words and white space that were added steer nothing."""
    ends = content[:1] + content[-1:]
    return len(content) > 2 and not any(end.isspace() or end.isalnum() or end == "_" for end in ends)


def _any_of(words: set[str]) -> str:
    """A regular expression of the longest of `words`, whose cost does not grow with their number."""
    rests: dict[str, set[str]] = {}
    for word in words - {""}:
        rests.setdefault(word[0], set()).add(word[1:])
    if not rests:
        return ""
    choices = "|".join(re.escape(head) + _any_of(rests[head]) for head in sorted(rests))
    return f"(?:{choices})?" if "" in words else f"(?:{choices})"

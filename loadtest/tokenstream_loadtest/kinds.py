"""The kinds of requests that a workload's file can describe, and how each makes requests without end.

    prompts         the lines of a file
    passages        pieces of a corpus up to so many words, then a question
    text            a corpus' words, about so many tokens of them
    conversations   scripts of several turns, each request holding all turns before it

Tokens are guessed from words; only the server counts them. It does not know when requests are sent.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from .amounts import Amount
from .corpora import Script, read_paragraphs, read_prompts, read_scripts, read_texts
from .data_files import Table
from .dice import Dice
from .requests import Message, Request

_TEMPLATE_TOKENS = 64  # left free for what a chat template adds
_OPENING_TOKENS = 6  # of "12345. "
_NUMBERS = 100_000
_STRIDE = 61_803  # shares no factor with _NUMBERS, so every number comes once before any comes twice
_SEEDS = 2**31


@dataclass(frozen=True, slots=True)
class Frame:
    """What holds for all kinds of a workload. `folder`: where its file is.

    `max_context`: tokens that prompt and answer may have together. `tokens_per_word`: of the corpus, to guess by.
    """

    folder: str
    max_context: int
    tokens_per_word: float


class Kind(Table, ABC):
    """What all kinds say. `share`: how many of each round of requests are of this kind; see `Request` for the rest.

    `chat`: the prompt goes through the model's chat template; else it is text as it is.
    """

    name: Annotated[str, Field(pattern=r"^[a-z0-9][a-z0-9-]{0,39}$")]
    share: Annotated[int, Field(ge=1, le=1000)] = 1
    max_tokens: Amount
    priority: Annotated[int, Field(ge=1, le=3)] | None = None
    abandon_after: Amount | None = None
    pause: Annotated[float, Field(ge=0, le=60)] = 0.0
    temperature: Annotated[float, Field(ge=0, le=2)] = 0.0
    chat: bool = True
    system: str = ""

    @model_validator(mode="after")
    def _answers_have_tokens(self) -> Self:
        if self.max_tokens.least < 1:
            raise ValueError("max_tokens must be 1 or more")
        if self.system and not self.chat:
            raise ValueError("system needs chat = true")
        return self

    @abstractmethod
    def load(self, frame: Frame) -> Source:
        """The same with its files read. ValueError in one line if they are not as they should be."""

    def request(self, dice: Dice, messages: Sequence[Message], *, name: str = "", max_tokens: int = 0) -> Request:
        """One request of this kind; what is not given is drawn."""
        opening = (Message("system", self.system),) if self.system else ()
        return Request(
            kind=name or self.name,
            max_tokens=max_tokens or self.max_tokens.draw(dice),
            prompt=None if self.chat else messages[0].content,
            messages=(*opening, *messages) if self.chat else (),
            temperature=self.temperature,
            seed=dice.below(_SEEDS),
            priority=self.priority,
            abandon_after=None if self.abandon_after is None else self.abandon_after.draw(dice),
            pause=self.pause,
        )


class Source(ABC):
    """A kind that is ready to make requests."""

    kind: Kind

    @abstractmethod
    def draw(self, dice: Dice) -> Iterator[Request]:
        """Requests without end, the same for the same dice."""


class Prompts(Kind):
    """The prompts of `file`, each once before any comes twice. `numbered`: each opens with a number of its own."""

    source: Literal["prompts"]
    file: str
    numbered: bool = False

    def load(self, frame: Frame) -> Source:
        """Read `file`."""
        return _LoadedPrompts(self, read_prompts(frame.folder, self.file))


class _LoadedPrompts(Source):
    def __init__(self, kind: Prompts, prompts: Sequence[str]) -> None:
        self.kind: Prompts = kind
        self._prompts = prompts

    def draw(self, dice: Dice) -> Iterator[Request]:
        for number, prompt in zip(_numbers(dice), dice.deal(self._prompts), strict=False):
            text = f"{number}. {prompt}" if self.kind.numbered else prompt
            yield self.kind.request(dice, [Message("user", text)])


class Passages(Kind):
    """`pieces` of `corpus` in random order until the next would be more than `words`, then one of `questions`.

    Each opens with its own number, so that no prefix cache knows it.
    """

    source: Literal["passages"]
    corpus: str = "corpus.txt"
    pieces: Literal["texts", "paragraphs"] = "paragraphs"
    words: Amount
    questions: Annotated[tuple[str, ...], Field(min_length=1)]

    def load(self, frame: Frame) -> Source:
        """Read `corpus`."""
        read = read_texts if self.pieces == "texts" else read_paragraphs
        return _LoadedPassages(self, read(frame.folder, self.corpus), frame)


class _LoadedPassages(Source):
    def __init__(self, kind: Passages, pieces: Sequence[str], frame: Frame) -> None:
        self.kind: Passages = kind
        self._pieces = pieces
        self._frame = frame

    def draw(self, dice: Dice) -> Iterator[Request]:
        pieces = dice.deal(self._pieces)
        for number in _numbers(dice):
            max_tokens = _answer(self.kind, dice, self._frame)
            question = dice.choose(self.kind.questions)
            most = _words(_room(self._frame, max_tokens), self._frame) - len(question.split())
            body = _fill(pieces, max(1, min(self.kind.words.draw(dice), most)))
            text = "\n\n".join((f"{number}. {body[0]}", *body[1:], question))
            yield self.kind.request(dice, [Message("user", text)], max_tokens=max_tokens)


class Text(Kind):
    """About `input_tokens` of running words of `corpus` from a random place on, behind a number of their own."""

    source: Literal["text"]
    corpus: str = "corpus.txt"
    input_tokens: Amount

    def load(self, frame: Frame) -> Source:
        """Read `corpus`."""
        return _LoadedText(self, " ".join(read_paragraphs(frame.folder, self.corpus)).split(), frame)


class _LoadedText(Source):
    def __init__(self, kind: Text, words: Sequence[str], frame: Frame) -> None:
        self.kind: Text = kind
        self._words = words
        self._frame = frame

    def draw(self, dice: Dice) -> Iterator[Request]:
        for number in _numbers(dice):
            max_tokens = _answer(self.kind, dice, self._frame)
            tokens = min(self.kind.input_tokens.draw(dice), _room(self._frame, max_tokens))
            start = dice.below(len(self._words))
            words = [self._words[(start + i) % len(self._words)] for i in range(_words(tokens, self._frame))]
            yield self.kind.request(dice, [Message("user", f"{number}. {' '.join(words)}")], max_tokens=max_tokens)


class Conversations(Kind):
    """The scripts of `file`, `at_once` of them under way; the next turn of a random one of these comes next.

    What the assistant says is scripted, whatever the server answered before. Each script opens with a number of its own
    behind `system`, so that a prefix cache knows `system` and the conversation's own turns, and nothing else. By turn,
    the kinds of its requests are NAME-1, NAME-2 and so on.
    """

    source: Literal["conversations"]
    file: str
    at_once: Annotated[int, Field(ge=1, le=1000)] = 8
    chat: Literal[True] = True

    def load(self, frame: Frame) -> Source:
        """Read `file`."""
        return _LoadedConversations(self, read_scripts(frame.folder, self.file))


class _LoadedConversations(Source):
    def __init__(self, kind: Conversations, scripts: Sequence[Script]) -> None:
        self.kind: Conversations = kind
        self._scripts = scripts

    def draw(self, dice: Dice) -> Iterator[Request]:
        waiting = self._conversations(dice)
        live = [next(waiting) for _ in range(self.kind.at_once)]
        while True:
            place = dice.below(len(live))
            request = next(live[place], None)
            if request is None:
                live[place] = next(waiting)
            else:
                yield request

    def _conversations(self, dice: Dice) -> Iterator[Iterator[Request]]:
        for number, script in zip(_numbers(dice), dice.deal(self._scripts), strict=False):
            yield self._turns(dice, number, script)

    def _turns(self, dice: Dice, number: str, script: Script) -> Iterator[Request]:
        messages = [Message("assistant" if place % 2 else "user", text) for place, text in enumerate(script)]
        messages[0] = Message("user", f"{number}. {script[0]}")
        for turn, end in enumerate(range(1, len(messages) + 1, 2), 1):
            yield self.kind.request(dice, messages[:end], name=f"{self.kind.name}-{turn}")


AnyKind = Annotated[Prompts | Passages | Text | Conversations, Field(discriminator="source")]


def _numbers(dice: Dice) -> Iterator[str]:
    number = dice.below(_NUMBERS)
    while True:
        yield f"{number:05d}"
        number = (number + _STRIDE) % _NUMBERS


def _answer(kind: Kind, dice: Dice, frame: Frame) -> int:
    """How many tokens the answer may have: half of the context at most."""
    return min(kind.max_tokens.draw(dice), frame.max_context // 2)


def _room(frame: Frame, max_tokens: int) -> int:
    """How many tokens the prompt may have beside the answer and a template."""
    return max(frame.max_context - max_tokens - _TEMPLATE_TOKENS, 1)


def _words(tokens: int, frame: Frame) -> int:
    """How many words are about so many tokens behind a number."""
    return max(round((tokens - _OPENING_TOKENS) / frame.tokens_per_word), 1)


def _fill(pieces: Iterator[str], words: int) -> list[str]:
    """Pieces of at most so many words together, and at least one, which is cut if it is too long."""
    taken = [" ".join(next(pieces).split(" ")[:words])]
    left = words - len(taken[0].split())
    for piece in pieces:
        left -= len(piece.split())
        if left < 0:
            break
        taken.append(piece)
    return taken

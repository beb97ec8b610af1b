"""A conversation: what was said, asked on and answered, and what can be done with it (retry, reset, save).

A turn is kept when its answer has come, if only in part; anything that goes wrong drops it, so that the history never
holds a question without an answer. It does not know where lines come from, how answers are shown or errors are worded.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from .errors import TokenstreamError
from .params import Sampling, draw_seed

if TYPE_CHECKING:
    from .client import Client
    from .stream import TokenStream


class ChatError(TokenstreamError):
    """The conversation cannot do that: one line, with the cure. Nothing has changed."""


@dataclass(frozen=True, slots=True)
class Turn:
    """A question and its answer."""

    question: str
    answer: str


class Conversation:
    """The turns so far, the client that answers, and `show`, which reads an answer to its end.

    `system` is what the model is told before the first message.
    """

    def __init__(
        self, client: Client, sampling: Sampling, system: str | None, show: Callable[[TokenStream], object]
    ) -> None:
        self._client = client
        self._sampling = sampling
        self._show = show
        self._saved: set[Path] = set()
        self.system = system
        self.turns: list[Turn] = []

    def say(self, question: str) -> None:
        """Have `question` answered."""
        self._ask(self.turns, question, self._sampling)

    def retry(self) -> None:
        """Ask the last question again with a new seed; the new answer takes the place of the old one once it is there.

        ChatError if nothing was asked yet.
        """
        if not self.turns:
            raise ChatError("nothing was answered yet that could be asked again: say something first")
        sampling = self._sampling.copy()
        sampling["seed"] = draw_seed()
        self._ask(self.turns[:-1], self.turns[-1].question, sampling)

    def reset(self) -> None:
        """Forget all turns; the system message stays."""
        self.turns = []

    def save(self, path: Path) -> None:
        """Write the conversation: JSON (messages as the server takes them) for `.json`, Markdown for `.md`.

        A file is written over only if this conversation wrote it. ChatError for another suffix, and if it cannot be
        written.
        """
        if path.suffix not in (".json", ".md"):
            raise ChatError(f"cannot save as {path.name!r}: name a file that ends in .md or .json")
        text = self._markdown() if path.suffix == ".md" else json.dumps(self.messages(), ensure_ascii=False, indent=1)
        target = path.expanduser().absolute()
        try:
            with target.open("w" if target in self._saved else "x", encoding="utf-8", errors="replace") as file:
                file.write(text.rstrip("\n") + "\n")
        except FileExistsError:
            raise ChatError(f"{target} exists already: choose another name") from None
        except OSError as error:
            raise ChatError(f"cannot write {target} ({error.strerror}): choose another place") from error
        self._saved.add(target)

    def messages(self) -> list[dict[str, str]]:
        """What was said so far, as chat messages."""
        return self._messages(self.turns)

    def _messages(self, turns: list[Turn]) -> list[dict[str, str]]:
        said = [{"role": "system", "content": self.system}] if self.system else []
        for turn in turns:
            said += [{"role": "user", "content": turn.question}, {"role": "assistant", "content": turn.answer}]
        return said

    def _ask(self, before: list[Turn], question: str, sampling: Sampling) -> None:
        messages = [*self._messages(before), {"role": "user", "content": question}]
        stream = self._client.chat(messages, **sampling)
        self._show(stream)
        if stream.text:
            self.turns = [*before, Turn(question, stream.text)]

    def _markdown(self) -> str:
        return "\n\n".join(f"**{message['role']}**\n\n{message['content'].strip()}" for message in self.messages())

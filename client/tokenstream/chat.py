"""The command `chat` from within: messages in, commands that begin with a slash obeyed, answers out.

At a terminal what goes wrong is told in one line and the chat goes on; from a pipe it ends the chat. It does not know
how a line is edited, nor what an answer looks like.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from .answers import show_json, show_text
from .conversation import ChatError, Conversation
from .display import printable
from .errors import TokenstreamError
from .exits import complain, exit_code, explained
from .terminal import RateTitle, dimmed

if TYPE_CHECKING:
    from .client import Client
    from .params import Sampling
    from .stream import TokenStream

GREETING = "Ctrl-C stops an answer; /help lists the commands; /exit or Ctrl-D leaves."
COMMANDS = (
    ("/system TEXT", "what the model is told first, from now on; without TEXT: nothing"),
    ("/retry", "ask the last question again with a new seed, in place of its answer"),
    ("/save FILE", "write the conversation to FILE.md or FILE.json"),
    ("/reset", "forget all but the system message"),
    ("/help", "show this"),
    ("/exit", "leave, as Ctrl-D does"),
)
_NAMES = tuple(usage.split()[0] for usage, _ in COMMANDS)
_MORE = (
    'A line that ends in \\ goes on in the next one; """ begins and ends a block of lines.',
    "With a space before it a / begins no command.",
)


def chat_at_terminal(client: Client, sampling: Sampling, system: str | None) -> None:
    """Talk until the user leaves."""
    from .typed import History, history_path, typed_messages

    talk = Conversation(client, sampling, system, _show_live)
    _note(GREETING)
    for typed in typed_messages(History(history_path())):
        try:
            if not typed.command:
                talk.say(typed.text)
            elif not obey(talk, typed.text):
                return
        except KeyboardInterrupt:
            _note("cancelled")  # before the first token
        except TokenstreamError as error:
            complain(explained(error), exit_code(error))


def chat_from_pipe(client: Client, sampling: Sampling, system: str | None) -> None:
    """Answer each line of standard input; a line that begins with none of the commands is a message."""
    talk = Conversation(client, sampling, system, show_text)
    for line in _lines():
        if line.split(maxsplit=1)[0] not in _NAMES:
            talk.say(line)
        elif not obey(talk, line):
            return


def chat_in_json(client: Client, sampling: Sampling, system: str | None) -> None:
    """Answer each JSON object of standard input: a chat message `{"role": "user", "content": "..."}`.

    The role may be left out; `system` sets the system message. `{"command": "/retry"}` is what a user would type.
    ChatError for anything else.
    """
    talk = Conversation(client, sampling, system, show_json)
    for line in _lines():
        match _object(line):
            case {"role": "system", "content": str(text)}:
                talk.system = text or None
            case {"role": "user", "content": str(text)} if text:
                talk.say(text)
            case {"command": str(text)} if text.startswith("/"):
                if not obey(talk, text):
                    return
            case _:
                raise ChatError(f'{line[:80]!r} is no message: send one like {{"content": "Hello"}} per line')


def obey(talk: Conversation, line: str) -> bool:
    """Do what a line that begins with a slash says; False if that is to leave. ChatError if it cannot be done."""
    name, _, rest = line.partition(" ")
    rest = rest.strip()
    match name:
        case "/system":
            talk.system = rest or None
            _note("system message set" if rest else "no system message")
        case "/retry":
            talk.retry()
        case "/save" if rest:
            talk.save(Path(rest))
            _note(f"saved to {rest}")
        case "/save":
            raise ChatError("/save needs the name of a file that ends in .md or .json")
        case "/reset":
            talk.reset()
            _note("the conversation begins anew")
        case "/help":
            _note("\n".join((*(f"{usage:14}{meaning}" for usage, meaning in COMMANDS), *_MORE)))
        case "/exit":
            return False
        case _:
            raise ChatError(f"{name} is no command; there are {', '.join(_NAMES)} (to say it, put a space before it)")
    return True


def _show_live(stream: TokenStream) -> None:
    with RateTitle() as title:
        show_text(stream, interruptible=True, heard=lambda chunk: title.count(len(chunk.token_ids)))


def _lines() -> Iterator[str]:
    for line in iter(sys.stdin.readline, ""):
        if stripped := line.strip():
            yield stripped


def _object(line: str) -> object:
    try:
        said = json.loads(line)
    except ValueError:
        return None
    return {"role": "user", **said} if isinstance(said, dict) and "command" not in said else said


def _note(text: str) -> None:
    """Something that is no part of the conversation; from a pipe, nobody reads it."""
    if sys.stdin.isatty():
        sys.stderr.write(dimmed(printable(text), sys.stderr) + "\n")

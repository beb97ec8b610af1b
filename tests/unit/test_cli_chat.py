"""`tokenstream chat`: what is typed at a terminal or sent through a pipe, and what becomes of the conversation."""

from __future__ import annotations

import json
import stat
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from tokenstream import Client
from tokenstream.answers import show_text
from tokenstream.conversation import ChatError, Conversation
from tokenstream.params import Sampling
from tokenstream.typed import History
from unit.conftest import Serve
from unit.scripted_triton import WAIT, ScriptedTriton, answer, failure, inputs
from unit.test_cli_commands import ENVIRONMENT, Terminal, ended, endless, interrupt, run, start


@pytest.fixture
def triton() -> Iterator[ScriptedTriton]:
    server = ScriptedTriton(answer("Hello", " world"))
    yield server
    server.close()


def told(triton: ScriptedTriton) -> list[list[tuple[str, str]]]:
    """The messages of every request."""
    asked = [inputs(request)["messages"] for request in triton.requests]
    return [[(message["role"], message["content"]) for message in messages] for messages in asked]


def seeds(triton: ScriptedTriton) -> list[int]:
    return [inputs(request)["sampling_parameters"]["seed"] for request in triton.requests]


def test_a_retry_asks_the_same_with_a_new_seed_and_replaces_the_answer(triton: ScriptedTriton) -> None:
    result = run("chat", "--url", triton.url, "--seed", "3", stdin="one\n/retry\n/retry\ntwo\n")
    assert result.exit_code == 0
    assert told(triton) == [
        [("user", "one")],
        [("user", "one")],
        [("user", "one")],
        [("user", "one"), ("assistant", "Hello world"), ("user", "two")],
    ]
    first, *again, last = seeds(triton)
    assert (first, last) == (3, 3)
    assert len({3, *again}) == 3


def test_a_retry_that_fails_leaves_the_old_answer(serve: Serve) -> None:
    server, client = serve(answer("old"))
    talk = Conversation(client, Sampling(), None, show_text)
    talk.say("one")
    server.script = lambda request, call: iter([failure("no [code=INVALID_ARG]")])
    with pytest.raises(Exception, match="no"):
        talk.retry()
    assert talk.messages() == [{"role": "user", "content": "one"}, {"role": "assistant", "content": "old"}]


def test_the_system_message_is_changed_in_the_middle_and_survives_a_reset(triton: ScriptedTriton) -> None:
    run("chat", "--url", triton.url, "--system", "A", stdin="one\n/system  B b\n/reset\ntwo\n/system\n/reset\nthree\n")
    assert told(triton) == [
        [("system", "A"), ("user", "one")],
        [("system", "B b"), ("user", "two")],
        [("user", "three")],
    ]


def test_from_a_pipe_a_line_that_only_looks_like_a_command_is_a_message(triton: ScriptedTriton) -> None:
    assert run("chat", "--url", triton.url, stdin="/etc is what?\n/resetting\n").exit_code == 0
    assert [messages[-1] for messages in told(triton)] == [("user", "/etc is what?"), ("user", "/resetting")]


def test_nothing_to_retry_ends_a_pipe_with_one_line(triton: ScriptedTriton) -> None:
    result = run("chat", "--url", triton.url, stdin="/retry\none\n")
    assert (result.exit_code, result.stdout) == (1, "")
    assert result.stderr.count("\n") == 1
    assert not triton.requests


@pytest.fixture
def talk(serve: Serve) -> Conversation:
    client: Client
    _, client = serve(answer("Well,", " <yes> é"))
    return Conversation(client, Sampling(), "Be brief.", show_text)


def test_a_conversation_is_saved_as_messages_or_as_markdown(talk: Conversation, tmp_path: Path) -> None:
    talk.say("Is it?")
    talk.save(tmp_path / "a.json")
    talk.save(tmp_path / "a.md")
    assert json.loads((tmp_path / "a.json").read_text()) == [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Is it?"},
        {"role": "assistant", "content": "Well, <yes> é"},
    ]
    assert (tmp_path / "a.md").read_text() == (
        "**system**\n\nBe brief.\n\n**user**\n\nIs it?\n\n**assistant**\n\nWell, <yes> é\n"
    )


def test_only_a_file_that_the_conversation_wrote_is_written_over(talk: Conversation, tmp_path: Path) -> None:
    mine, other = tmp_path / "mine.json", tmp_path / "other.md"
    other.write_text("precious")
    talk.save(mine)
    talk.say("Is it?")
    talk.save(mine)
    assert len(json.loads(mine.read_text())) == 3
    with pytest.raises(ChatError, match="exists already"):
        talk.save(other)
    assert other.read_text() == "precious"


@pytest.mark.parametrize(("name", "why"), [("a.txt", "ends in .md or .json"), ("none/a.md", "cannot write")])
def test_a_place_where_nothing_can_be_saved_is_said(talk: Conversation, tmp_path: Path, name: str, why: str) -> None:
    with pytest.raises(ChatError, match=why):
        talk.save(tmp_path / name)


def lines(*objects: object) -> str:
    return "".join(json.dumps(one) + "\n" for one in objects)


def test_json_lines_in_are_messages_and_json_lines_out_are_answers(triton: ScriptedTriton) -> None:
    sent = lines(
        {"role": "system", "content": "A"},
        {"content": "one\nline"},
        {"role": "user", "content": "two"},
        {"command": "/reset"},
        {"content": "/exit"},
    )
    result = run("chat", "--json", "--url", triton.url, stdin=sent)
    assert (result.exit_code, result.stderr) == (0, "")
    objects = [json.loads(line) for line in result.stdout.splitlines()]
    assert [one.get("text", one.get("finish_reason")) for one in objects] == ["Hello", " world", "stop"] * 3
    assert told(triton)[1][0] == ("system", "A")
    assert told(triton)[1][1] == ("user", "one\nline")
    assert told(triton)[2] == [("system", "A"), ("user", "/exit")]


@pytest.mark.parametrize(
    "line", ["plain", "3", "[]", '{"content": 3}', '{"content": ""}', '{"role": "assistant", "content": "x"}', "{}"]
)
def test_a_line_that_is_no_message_is_an_error_in_json(triton: ScriptedTriton, line: str) -> None:
    result = run("chat", "--json", "--url", triton.url, stdin=f"{line}\n")
    assert (result.exit_code, result.stdout) == (1, "")
    error = json.loads(result.stderr)
    assert error["code"] == 1
    assert '{"content": "Hello"}' in error["error"]


class Chat:
    """A chat at a terminal; its history is below `state`."""

    def __init__(self, terminal: Terminal, child: Any, state: Path) -> None:
        self.terminal = terminal
        self.child = child
        self.history = state / "tokenstream" / "chat_history"

    def says(self, line: str, *shown: str) -> None:
        """Type a line, and wait for what is shown then, at last for the prompt."""
        self.terminal.type(line.encode())
        for text in (*shown, "> "):
            assert self.terminal.shows(text.encode()), text

    def leave(self) -> None:
        self.terminal.type(b"/exit")
        assert ended(self.child, WAIT)
        assert self.child.returncode == 0


@contextmanager
def chatting(triton: ScriptedTriton, state: Path, **environment: str) -> Iterator[Chat]:
    terminal = Terminal()
    env = {**ENVIRONMENT, "XDG_STATE_HOME": str(state), "TERM": "dumb", **environment}
    options: dict[str, Any] = {"env": env, "start_new_session": True}
    options |= dict.fromkeys(("stdin", "stdout", "stderr"), terminal.side)
    with start("chat", "--url", triton.url, **options) as child:
        assert terminal.shows(b"> ")
        yield Chat(terminal, child, state)
        terminal.close()


def test_at_a_terminal_mistakes_are_one_line_and_the_chat_goes_on(triton: ScriptedTriton, tmp_path: Path) -> None:
    with chatting(triton, tmp_path) as chat:
        chat.says("/retry", "nothing was answered yet")
        chat.says("/frobnicate", "/frobnicate is no command", "/system, /retry, /save, /reset, /help, /exit")
        chat.says("/save", "needs the name of a file")
        chat.says("/help", "/system TEXT", "goes on in the next one")
        triton.script = lambda request, call: iter([failure("too long [code=INVALID_ARG]")])
        chat.says("one", "too long")
        triton.script = answer("Yes.")
        chat.says(" /usr is what?", "Yes.", "TTFT", "finished: stop")
        chat.says(f"/save {tmp_path}/a.md", "saved")
        chat.leave()
    assert told(triton) == [[("user", "one")], [("user", "/usr is what?")]]
    assert "/usr is what?" in (tmp_path / "a.md").read_text()


def test_a_message_may_have_several_lines(triton: ScriptedTriton, tmp_path: Path) -> None:
    def types(chat: Chat, typed: Sequence[str]) -> None:
        *before, last = typed
        for line in before:
            chat.terminal.type(line.encode())
            assert chat.terminal.shows(b"... ")
        chat.says(last, "Hello world")

    with chatting(triton, tmp_path) as chat:
        types(chat, ["one \\", "two\\", "three"])
        types(chat, ['"""/reset', "  b", "", 'c"""'])
        types(chat, ['"""', "d", '"""'])
        types(chat, ['"""e"""'])
        chat.leave()
    questions = [messages[-1][1] for messages in told(triton)]
    assert questions == ["one \ntwo\nthree", "/reset\n  b\n\nc", "d", "e"]


def test_what_was_typed_is_there_the_next_time_and_for_nobody_else(triton: ScriptedTriton, tmp_path: Path) -> None:
    with chatting(triton, tmp_path) as chat:
        chat.says("first", "Hello world")
        chat.terminal.type(b"second \\")
        chat.says("line", "Hello world")
        chat.leave()
        assert stat.S_IMODE(chat.history.stat().st_mode) == 0o600
        assert stat.S_IMODE(chat.history.parent.stat().st_mode) == 0o700
    up = "\x1b[A"
    with chatting(triton, tmp_path, TERM="xterm") as chat:
        chat.says(up + up, "Hello world")  # the last entry is /exit
        chat.says(up * 4, "Hello world")
        chat.leave()
    assert [messages[-1][1] for messages in told(triton)] == ["first", "second \nline", "second \nline", "first"]


def test_a_history_that_cannot_be_kept_is_no_matter(triton: ScriptedTriton, tmp_path: Path) -> None:
    (tmp_path / "tokenstream").write_text("a file in the way")
    with chatting(triton, tmp_path) as chat:
        chat.says("first", "Hello world")
        chat.leave()


def test_a_history_is_read_past_lines_that_are_none_and_does_not_grow_for_ever(tmp_path: Path) -> None:
    history = History(tmp_path / "state" / "history")
    assert history.entries() == []
    history.add("a\nb")
    with (tmp_path / "state" / "history").open("a") as file:
        file.write("broken\n3\n")
    history.add("é")
    assert history.entries() == ["a\nb", "é"]
    (tmp_path / "state" / "history").write_text("".join(f'"{number}"\n' for number in range(2500)))
    assert history.entries() == [str(number) for number in range(1500, 2500)]
    assert len((tmp_path / "state" / "history").read_text().splitlines()) == 1000
    assert stat.S_IMODE((tmp_path / "state" / "history").stat().st_mode) == 0o600


def test_the_rate_is_shown_in_the_title_and_the_timing_dim_where_a_terminal_can(
    triton: ScriptedTriton, tmp_path: Path
) -> None:
    triton.script = endless
    with chatting(triton, tmp_path, TERM="xterm") as chat:
        chat.terminal.type(b"one")
        for shown in (b"\x1b[22;2t", b"word", b"\x1b]2;", b" tokens/s\x07", b"word"):
            assert chat.terminal.shows(shown)
        interrupt(chat.child, partial(chat.terminal.shows, b"\x1b[2mTTFT"))
        assert chat.terminal.shows(b"cancelled\x1b[0m")
        assert chat.terminal.shows(b"\x1b[23;2t")
        chat.leave()

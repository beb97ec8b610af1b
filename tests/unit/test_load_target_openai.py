"""OpenAI's interface against a scripted server: what is sent, what counts as a token, how answers and callers end,
and which models are refused before anything is measured."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from tokenstream_loadtest import target_openai
from tokenstream_loadtest.requests import Message, Request
from tokenstream_loadtest.targets import Failed, Seen, TargetOptions, open_target
from waiting import WAIT

CHAT = (Message("system", "Be brief."), Message("user", "Grüß Gott"))
Handler = Callable[[dict[str, Any], asyncio.StreamWriter], Awaitable[None]]
LONGER = b"HTTP/1.1 200 OK\r\ncontent-length: 9000\r\n\r\n"
HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\nconnection: close\r\n\r\n"


def request(**parts: Any) -> Request:
    return Request(**({"kind": "k", "max_tokens": 5, "prompt": "Once"} | parts))


def ask_http(handler: Handler, asked: Request, **options: Any) -> tuple[Seen, dict[str, Any]]:
    """One request to a server of HTTP; what it was sent: its path, headers and body."""
    got: dict[str, Any] = {}
    seen = Seen(asked)

    over = asyncio.Event()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            lines = (await reader.readuntil(b"\r\n\r\n")).decode().splitlines()
            headers = dict(line.lower().split(": ", 1) for line in lines[1:] if line)
            got.update(path=lines[0].split()[1], headers=headers)
            got["body"] = json.loads(await reader.readexactly(int(headers["content-length"])))
            await handler(got, writer)
        finally:
            writer.close()
            with contextlib.suppress(ConnectionError):
                await writer.wait_closed()
            over.set()

    async def main() -> None:
        server = await asyncio.start_server(serve, "127.0.0.1", 0)
        url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        async with server, asyncio.timeout(WAIT), open_target("openai", url, "m", TargetOptions(**options)) as target:
            try:
                await target.ask(asked, "request-1", seen)
            finally:
                await over.wait()

    try:
        asyncio.run(main())
    except Failed as error:
        error.seen = seen  # type: ignore[attr-defined]
        raise
    return seen, got


def events(*data: Any, head: bytes = HEAD, done: bool = True) -> Handler:
    """A handler that sends these events, then hangs up."""

    async def handle(got: dict[str, Any], writer: asyncio.StreamWriter) -> None:
        writer.write(head)
        for one in data:
            writer.write(b"data: " + (one if isinstance(one, bytes) else json.dumps(one).encode()) + b"\n\n")
        if done:
            writer.write(b"data: [DONE]\n\n")
        await writer.drain()

    return handle


def answered(status: int, body: str) -> Handler:
    async def handle(got: dict[str, Any], writer: asyncio.StreamWriter) -> None:
        data = body.encode()
        writer.write(b"HTTP/1.1 %d X\r\ncontent-length: %d\r\nconnection: close\r\n\r\n%b" % (status, len(data), data))
        await writer.drain()

    return handle


def text(words: str, reason: str | None = None) -> dict[str, Any]:
    return {"choices": [{"index": 0, "text": words, "finish_reason": reason}]}


def delta(reason: str | None = None, **parts: Any) -> dict[str, Any]:
    return {"choices": [{"index": 0, "delta": parts, "finish_reason": reason}]}


def test_completions_are_asked_for_as_the_request_says():
    asked = request(ignore_eos=True, priority=3, seed=7)
    usage = {"choices": [], "usage": {"prompt_tokens": 9, "completion_tokens": 4}}
    script = events(text("a"), text(""), text("b"), text("", "length"), usage)
    seen, got = ask_http(script, asked, headers={"authorization": "Bearer s"}, extra={"top_k": 5})
    assert got["path"] == "/v1/completions"
    assert got["headers"]["authorization"] == "bearer s"
    assert got["body"] == {
        "model": "m",
        "prompt": "Once",
        "max_tokens": 5,
        "temperature": 0.0,
        "seed": 7,
        "stream": True,
        "stream_options": {"include_usage": True},
        "ignore_eos": True,
        "priority": 3,
        "top_k": 5,
    }
    assert seen.tokens == [1, 1, 1]  # what is held back counts, the closing event does not
    assert (seen.input_tokens, seen.output_tokens, seen.cached_tokens) == (9, 4, None)


@pytest.mark.parametrize("chat", [True, False])
def test_chats_are_asked_for_by_messages(chat):
    usage = {"prompt_tokens": 9, "completion_tokens": 2, "prompt_tokens_details": {"cached_tokens": 4}}
    script = events(
        delta(role="assistant", content=""), delta(content="a"), delta("stop", content="b"), {"usage": usage}
    )
    asked = request() if chat else request(prompt=None, messages=CHAT)
    seen, got = ask_http(script, asked, chat=chat, knows_ignore_eos=False)
    assert got["path"] == "/v1/chat/completions"
    user = {"role": "user", "content": "Once"}
    assert got["body"]["messages"] == ([user] if chat else [{"role": m.role, "content": m.content} for m in CHAT])
    assert "prompt" not in got["body"]
    assert "ignore_eos" not in got["body"]
    assert seen.tokens == [1, 1]
    assert seen.cached_tokens == 4


def test_events_are_read_however_they_are_cut():
    whole = HEAD + "".join(f"data: {json.dumps(text(word))}\r\n\r\n" for word in ("ä", "€", "c")).encode()

    async def trickle(got: dict[str, Any], writer: asyncio.StreamWriter) -> None:
        for at in range(0, len(whole), 7):
            writer.write(whole[at : at + 7])
            await writer.drain()
            await asyncio.sleep(0)
        writer.write(b": a comment\n\ndata:[DONE]\n\n")
        await writer.drain()

    seen, _ = ask_http(trickle, request())
    assert seen.tokens == [1, 1, 1]


@pytest.mark.parametrize(
    ("handler", "outcome", "line"),
    [
        (answered(429, '{"error": {"message": "slow down"}}'), "overloaded", "HTTP 429: slow down"),
        (answered(503, "busy\nnow"), "overloaded", "HTTP 503: busy now"),
        (answered(401, '{"error": "who?"}'), "unauthorized", "HTTP 401: who?"),
        (answered(400, "{}"), "invalid", "HTTP 400: {}"),
        (answered(400, '{"detail": "pinned to another"}'), "invalid", "HTTP 400: pinned to another"),
        (answered(500, "oh"), "internal", "HTTP 500: oh"),
        (events(text("a"), done=False), "incomplete", "the stream ended without [DONE]"),
        (events(text("a"), b"{"), "internal", "is not of this interface: b'{'"),
        (events(text("a"), b"[]"), "internal", "is not of this interface: b'[]'"),
        (events(text("a"), {"choices": [3]}), "internal", "is not of this interface"),
        (events({"error": {"message": "full", "code": 503}}), "overloaded", "full"),
        (events({"error": {"message": "full", "type": "overloaded_error"}}), "overloaded", "full"),
        (events({"error": {"message": "no", "code": "400"}}), "invalid", "no"),
        (events({"error": "broken"}), "internal", "broken"),
        (events(text("a"), head=LONGER, done=False), "incomplete", "cut"),
        (events(head=b"nonsense\r\n\r\n", done=False), "incomplete", "cut"),
    ],
)  # fmt: skip
def test_every_failure_of_openais_interface_is_told_in_one_line(handler, outcome, line):
    with pytest.raises(Failed) as error:
        ask_http(handler, request())
    assert error.value.outcome == outcome
    assert line in error.value.line
    assert "\n" not in error.value.line


@pytest.mark.parametrize("after", [0, 1, 3])
def test_a_caller_of_openais_interface_that_leaves_hangs_up(after):
    async def endless_text(got: dict[str, Any], writer: asyncio.StreamWriter) -> None:
        writer.write(HEAD)
        while not writer.is_closing():
            writer.write(b"data: " + json.dumps(text("x")).encode() + b"\n\n")
            await asyncio.sleep(0.005)

    seen, _ = ask_http(endless_text, request(abandon_after=after))
    assert seen.unwanted
    assert sum(seen.tokens) == after


# --- which models there are

CHAT_PATH, TEXT_PATH = "/v1/chat/completions", "/v1/completions"
NO_SUCH = '{"error": {"message": "The model `m` does not exist."}}'
ONE_TOKEN = events(text("a", "length"))
MISSING = answered(404, "Not Found")


async def stay_silent(got: dict[str, Any], writer: asyncio.StreamWriter) -> None:
    await asyncio.Event().wait()


def listing(*names: str) -> Handler:
    return answered(200, json.dumps({"object": "list", "data": [{"id": name, "owned_by": "us"} for name in names]}))


def describe(**paths: Handler) -> tuple[dict[str, str], list[tuple[str, dict[str, Any]]]]:
    """What a server says of the model "m" with such answers to `models`, `chat` and `text`; what it was asked."""
    handlers = {"/v1/models": paths["models"], CHAT_PATH: paths.get("chat"), TEXT_PATH: paths.get("text")}
    asked: list[tuple[str, dict[str, Any]]] = []
    stops: list[Callable[[], None]] = []

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        lines = (await reader.readuntil(b"\r\n\r\n")).decode().splitlines()
        headers = dict(line.lower().split(": ", 1) for line in lines[1:] if line)
        body = json.loads(await reader.readexactly(int(headers.get("content-length", 0))) or b"{}")
        path = lines[0].split()[1]
        asked.append((path, body))
        try:
            await (handlers[path] or MISSING)({"stop": stops[0]}, writer)
        finally:
            writer.close()
            with contextlib.suppress(ConnectionError):
                await writer.wait_closed()

    async def main() -> dict[str, str]:
        server = await asyncio.start_server(serve, "127.0.0.1", 0)
        stops.append(server.close)
        url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        async with asyncio.timeout(WAIT), open_target("openai", url, "m") as target:
            try:
                return await target.describe()
            finally:
                server.close()

    return asyncio.run(main()), asked


def test_a_model_that_is_listed_is_described_and_asked_for_nothing():
    found, asked = describe(models=listing("other", "m"), chat=MISSING)
    assert found == {"id": "m", "owned_by": "us"}
    assert [path for path, _ in asked] == ["/v1/models"]


@pytest.mark.parametrize("models", [listing("other"), listing(), MISSING, answered(200, "none"), answered(200, "[]")])
@pytest.mark.parametrize(
    ("chat", "asks"), [(ONE_TOKEN, [CHAT_PATH]), (answered(400, "no template"), [CHAT_PATH, TEXT_PATH])]
)
def test_a_model_that_is_not_listed_is_there_if_it_answers_one_token_in_a_chat_or_as_text(models, chat, asks):
    found, asked = describe(models=models, chat=chat, text=ONE_TOKEN)
    assert found == {}
    assert [path for path, _ in asked[1:]] == asks
    assert {(body["model"], body["max_tokens"]) for _, body in asked[1:]} == {("m", 1)}


@pytest.mark.parametrize(
    ("models", "chat", "text", "outcome", "line"),
    [
        (listing("llm"), answered(404, NO_SUCH), answered(404, NO_SUCH), "invalid",
         "HTTP 404: The model `m` does not exist; it lists llm"),
        (MISSING, MISSING, answered(404, NO_SUCH), "invalid", "HTTP 404: The model `m` does not exist"),
        (listing(), answered(400, '{"detail": "pinned"}'), MISSING, "invalid", "HTTP 400: pinned; it lists no model"),
        (listing("llm"), answered(500, "oh"), answered(500, "oh"), "invalid", "HTTP 500: oh; it lists llm"),
        (answered(401, "who?"), answered(401, "who?"), answered(401, "who?"), "unauthorized", "HTTP 401: who?"),
    ],
)  # fmt: skip
def test_a_model_that_a_server_does_not_have_is_refused_in_its_words(models, chat, text, outcome, line):
    with pytest.raises(Failed) as error:
        describe(models=models, chat=chat, text=text)
    assert error.value.outcome == outcome
    assert error.value.line.endswith(line)


@pytest.mark.parametrize(
    "chat", [answered(500, "oh"), answered(503, "full"), answered(429, "full"), events(), stay_silent]
)
def test_a_server_that_fails_is_not_taken_for_one_without_the_model(chat, monkeypatch):
    monkeypatch.setattr(target_openai, "_HELLO_SECONDS", 0.2)
    assert describe(models=MISSING, chat=chat)[0] == {}


def test_a_server_that_leaves_before_it_is_asked_is_no_connection():
    async def leave(got: dict[str, Any], writer: asyncio.StreamWriter) -> None:
        got["stop"]()
        await listing("other")(got, writer)

    with pytest.raises(Failed) as error:
        describe(models=leave)
    assert error.value.outcome == "connection"


def test_a_server_that_is_not_there_is_no_connection():
    async def main() -> None:
        async with open_target("openai", "http://127.0.0.1:1", "m") as target:
            await target.describe()

    with pytest.raises(Failed) as error:
        asyncio.run(main())
    assert error.value.outcome == "connection"

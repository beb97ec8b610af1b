"""Asks a server with OpenAI's interface: completions or chat completions as server-sent events, over HTTP.

Every request has a connection of its own, for some servers close theirs behind a stream. A response counts as one token
if it has text, or says of the answer only that it goes on; where the server counts tokens itself, its count of all is
kept too. A caller that leaves as soon as it has asked leaves at the head of the answer. It does not know when requests
are sent.
"""

from __future__ import annotations

import asyncio
import json
import ssl
from collections.abc import Iterator, Sequence
from types import TracebackType
from typing import Any, Self

import httpx2

from tokenstream import TLS
from tokenstream.security import Passport

from .records import Outcome
from .requests import Message, Request
from .targets import Failed, Seen, TargetOptions

_CONNECT_SECONDS = 10.0
_HELLO_SECONDS = 10.0  # for the answer of one token that tells whether a model is there
_HELLO = "Hi"
_LONGEST_EVENT = 1 << 24
_STATUSES: dict[int, Outcome] = {
    400: "invalid",
    401: "unauthorized",
    403: "unauthorized",
    404: "invalid",
    408: "timeout",
    413: "invalid",
    422: "invalid",
    429: "overloaded",
    503: "overloaded",
    504: "timeout",
}


class OpenAITarget:
    """The model of a server at http://HOST:PORT, with or without /v1 behind it."""

    def __init__(self, url: str, model: str, options: TargetOptions) -> None:
        try:
            address = httpx2.URL(url)
        except httpx2.InvalidURL as error:
            raise ValueError(f"{url!r} is no url: {error}") from None
        if address.scheme not in ("http", "https") or not address.host:
            raise ValueError(f"the url is like http://127.0.0.1:9000, got {url!r}")
        encrypted = address.scheme == "https"
        self._address = address.netloc.decode()
        passport = Passport(
            [self._address],
            encrypted=encrypted,
            token=None,
            headers=options.headers,
            allow_insecure=options.allow_insecure_credentials,
        )
        self._base = url.rstrip("/").removesuffix("/v1") + "/v1"
        self._model = model
        self._options = options
        self._client = httpx2.AsyncClient(
            headers=dict(passport.stamp({})),
            timeout=httpx2.Timeout(None, connect=_CONNECT_SECONDS),
            limits=httpx2.Limits(max_connections=None, max_keepalive_connections=0),
            verify=_trust(options.tls) if encrypted else False,
            trust_env=False,  # what is measured is asked itself, whatever proxy is named for the world outside
        )

    async def __aenter__(self) -> Self:
        """The target itself."""
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """Hang up."""
        await self._client.aclose()

    async def describe(self) -> dict[str, str]:
        """What the list of models says of this one; {} of one that is not in it but answers, as by an alias.

        Failed in the server's words if it has no such model, or no ear for us.
        """
        listed = await self._listed()
        for one in listed or ():
            if one.get("id") == self._model:
                return {
                    str(name): value if isinstance(value, str) else json.dumps(value) for name, value in one.items()
                }
        await self._greet(None if listed is None else [str(one["id"]) for one in listed if "id" in one])
        return {}

    async def ask(self, request: Request, request_id: str, seen: Seen) -> None:
        """See `Target.ask`."""
        path, body = self._body(request)
        headers = {"x-request-id": request_id}
        try:
            async with self._client.stream("POST", f"{self._base}/{path}", json=body, headers=headers) as response:
                if response.status_code != httpx2.codes.OK:
                    raise _refused(response.status_code, await response.aread())
                if not seen.unwanted:
                    await _read(response, seen)
        except httpx2.TransportError as error:
            raise self._failed(error) from error

    async def _listed(self) -> list[dict[str, Any]] | None:
        """The server's models; None if it does not say."""
        try:
            response = await self._client.get(f"{self._base}/models", timeout=_CONNECT_SECONDS)
            found = response.json() if response.status_code == httpx2.codes.OK else {}
        except httpx2.TransportError as error:
            raise self._failed(error) from error
        except ValueError:
            return None
        models = found.get("data") if isinstance(found, dict) else None
        return [one for one in models if isinstance(one, dict)] if isinstance(models, list) else None

    async def _greet(self, listed: Sequence[str] | None) -> None:
        """Ask for one token, in a chat or else as text: not every server, nor every model, takes both.

        Failed if both were refused, and if the server failed at both and has a list, which the model is not in:
        `transformers serve` fails at names that it cannot load. Any other end, or none in time, tells nothing.
        """
        telling = {"invalid", "unauthorized"} | (set() if listed is None else {"internal"})
        chat = Request("hello", 1, messages=(Message("user", _HELLO),))
        refusals = []
        for request in (chat, Request("hello", 1, prompt=_HELLO)):
            try:
                async with asyncio.timeout(_HELLO_SECONDS):
                    await self.ask(request, "load-hello", Seen(request))
            except TimeoutError:
                return
            except Failed as error:
                if error.outcome == "connection":
                    raise
                if error.outcome not in telling:
                    return
                refusals.append(error)
            else:
                return
        told = next((error for error in refusals if self._model in error.line), refusals[0])
        if told.outcome == "unauthorized":
            raise told
        also = "" if listed is None else f"; it lists {', '.join(listed) or 'no model'}"
        line = f"the model {self._model!r} is refused at {self._address}: {told.line.rstrip('.')}{also}"
        raise Failed("invalid", line)

    def _body(self, request: Request) -> tuple[str, dict[str, Any]]:
        body: dict[str, Any] = {
            "model": self._model,
            "max_tokens": request.max_tokens,
            "temperature": request.temperature,
            "seed": request.seed,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        if request.ignore_eos and self._options.knows_ignore_eos:
            body["ignore_eos"] = True
        if request.priority is not None:
            body["priority"] = request.priority
        body |= self._options.extra
        messages = [{"role": message.role, "content": message.content} for message in request.messages]
        if self._options.chat and not messages:
            messages = [{"role": "user", "content": request.prompt or ""}]
        if messages:
            return "chat/completions", body | {"messages": messages}
        return "completions", body | {"prompt": request.prompt}

    def _failed(self, error: httpx2.TransportError) -> Failed:
        reason = str(error) or type(error).__name__
        if isinstance(error, httpx2.ConnectError | httpx2.ConnectTimeout):
            return Failed("connection", f"cannot connect to {self._address}: {reason}")
        if isinstance(error, httpx2.TimeoutException):
            return Failed("timeout", reason)
        return Failed("incomplete", f"the stream was cut: {reason}")


class EventReader:
    """Takes server-sent events apart: feed it blocks of bytes, it gives the data of each event that is whole."""

    def __init__(self) -> None:
        self._rest = b""
        self._data: list[bytes] = []

    def feed(self, block: bytes) -> Iterator[bytes]:
        """The data of every event that ends in this block. Failed for one that is too long to be one."""
        *lines, self._rest = (self._rest + block).split(b"\n")
        if len(self._rest) > _LONGEST_EVENT:
            raise Failed("internal", "the server sent an event without end")
        for full in lines:
            line = full.rstrip(b"\r")
            if line.startswith(b"data:"):
                self._data.append(line[5:].removeprefix(b" "))
            elif not line and self._data:
                yield b"\n".join(self._data)
                self._data.clear()


async def _read(response: httpx2.Response, seen: Seen) -> None:
    """To [DONE]. Some servers do not say it (`transformers serve`): then the last event must tell of the end."""
    events, last = EventReader(), b""
    async for block in response.aiter_raw():
        for data in events.feed(block):
            if data == b"[DONE]" or _take(data, seen):
                return
            last = data
        await seen.pause()
    if not last or not _finishes(json.loads(last)):
        raise Failed("incomplete", "the stream ended without [DONE] and without a reason for its end")


def _finishes(event: dict[str, Any]) -> bool:
    """Whether the answer is over: for a reason that is given, or what follows that, the usage alone."""
    choices = event.get("choices")
    return choices[0].get("finish_reason") is not None if choices else bool(event.get("usage"))


def _take(data: bytes, seen: Seen) -> bool:
    """Note what one event says; whether the caller should leave."""
    try:
        event = json.loads(data)
        if event.get("error"):
            raise _broken(event["error"])
        if usage := event.get("usage"):
            seen.input_tokens, seen.output_tokens = usage.get("prompt_tokens"), usage.get("completion_tokens")
            seen.cached_tokens = (usage.get("prompt_tokens_details") or {}).get("cached_tokens")
        choices = event.get("choices")
        is_token = bool(choices) and _is_token(choices[0])
    except (ValueError, TypeError, AttributeError, LookupError):
        raise Failed("internal", f"the server sent an event that is not of this interface: {data[:80]!r}") from None
    return is_token and seen.note(1)


def _is_token(choice: dict[str, Any]) -> bool:
    """Whether a response stands for a token: not the first of a chat, which tells the role, nor a bare last one."""
    delta = choice.get("delta")
    if delta is None:
        return bool(choice.get("text")) or choice.get("finish_reason") is None
    if any(delta.get(name) for name in ("content", "reasoning_content", "reasoning", "tool_calls")):
        return True
    return choice.get("finish_reason") is None and "role" not in delta


def _trust(tls: TLS | None) -> ssl.SSLContext:
    """Whom to trust: the given authority, else the system's."""
    roots = tls.read()[0] if tls is not None else None
    return ssl.create_default_context(cadata=roots.decode() if roots is not None else None)


def _refused(status: int, body: bytes) -> Failed:
    text = body.decode(errors="replace")
    try:
        told = json.loads(text)
        error = told["detail"] if "detail" in told else told["error"]  # the former: FastAPI's own
        text = str(error["message"] if isinstance(error, dict) else error)
    except (ValueError, KeyError, TypeError):
        pass  # in words of its own
    return Failed(_STATUSES.get(status, "internal"), f"HTTP {status}: {text}")


def _broken(error: object) -> Failed:
    """An error within a stream: its code is a status of HTTP, or words."""
    if not isinstance(error, dict):
        return Failed("internal", str(error))
    code = str(error.get("code"))
    status = int(code) if code.isdecimal() else 0
    words = f"{code} {error.get('type')}".lower()
    outcome: Outcome = (
        "overloaded" if "overload" in words or "rate_limit" in words else _STATUSES.get(status, "internal")
    )
    return Failed(outcome, str(error.get("message") or error))

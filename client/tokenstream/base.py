"""What the blocking and the asynchronous client are made of: their settings, and requests made from keywords.

It draws ids, seeds and template times, so that whatever is asked can be asked again, anywhere, for the same answer.
It does not know how a client waits.
"""

from __future__ import annotations

import os
import re
import uuid
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any, TypeVar

import grpc
from tritonclient.grpc import service_pb2 as pb

from . import protocol
from .answer import Answer
from .connections import Connections
from .course import Endpoints
from .errors import InvalidRequest
from .params import DEFAULT_URL, Options, Resume, draw_seed, sampling_json, utf8
from .pursuit import Pursuit, Travel
from .replies import Reply
from .results import ModelStatus
from .security import TLS, Headers, Passport, joined, trace_headers
from .timeouts import Timeout, check_number, read_timeout
from .transport import Bell, Connection, channel_options


class BaseClient(ABC):
    """Talks to one model of one Triton server, or of several that serve the same one."""

    def __init__(
        self,
        url: str | Sequence[str] | None = None,
        *,
        model: str = "llm",
        timeout: float | Timeout | None = None,
        keepalive: float | None = 45.0,
        retries: int = 2,
        resume: Resume = True,
        max_resumes: int = 5,
        tls: TLS | None = None,
        token: str | None = None,
        headers: Headers | None = None,
        allow_insecure_credentials: bool = False,
    ) -> None:
        """Settings; nothing is sent yet.

        `url` is HOST:PORT of Triton's gRPC endpoint, or several of them, the preferred one first; unset, the
        environment's TOKENSTREAM_URL (several with commas between), else 127.0.0.1:8001. `timeout` (seconds alone are
        its total) holds for requests that bring none of their own, as do `retries` (how often all endpoints are asked
        again while no token has come), `resume` (whether a cut answer is taken up at the next endpoint, or again at the
        same: True only where the server's fingerprint is the same, "best_effort" anyway) and `max_resumes`.
        `keepalive`: seconds between pings while an answer is awaited in silence; they find a dead peer. A server
        started by `tokenstream serve` accepts 10 and more. Triton's own default is to hang up at the third ping in one
        silence, which 45 does not reach before the first token's clock rings. None: no pings.
        `tls` encrypts; `token` is sent as `authorization: Bearer`; `headers` go with every request, a function is
        asked anew each time. Credentials are refused (ValueError) on an unencrypted connection to another machine
        unless `allow_insecure_credentials` is set.
        The connection is made by the first request, so that a client made before a fork works after it.
        TypeError or ValueError for a setting that cannot be meant, OSError for a file that cannot be read.
        """
        urls = read_urls((os.environ.get("TOKENSTREAM_URL") or DEFAULT_URL) if url is None else url)
        self.url = ",".join(urls)
        self.model = _text("model", model)
        self.timeout = Timeout() if timeout is None else read_timeout(timeout)
        self._travel = Travel(self.timeout, {}, retries, resume, max_resumes)
        _check_keepalive(keepalive)
        self._pem = None if tls is None else _checked("tls", tls, TLS).read()
        self._channel_options = channel_options(keepalive, self.timeout.connect, tls.server_name if tls else None)
        passport = Passport(
            urls, encrypted=tls is not None, token=token, headers=headers, allow_insecure=allow_insecure_credentials
        )
        self._connections = Connections(Endpoints(urls), passport, self._connect, self._bell)

    @abstractmethod
    def _new_connection(
        self, url: str, options: list[tuple[str, Any]], credentials: grpc.ChannelCredentials | None
    ) -> Connection:
        """A new connection to `url`; gRPC's `options`, and no encryption without `credentials`."""

    @abstractmethod
    def _bell(self) -> Bell:
        """What a request pauses with."""

    def _connect(self, url: str) -> Connection:
        credentials = None if self._pem is None else grpc.ssl_channel_credentials(*self._pem)
        return self._new_connection(url, self._channel_options, credentials)

    def _pursue(self, prompt: protocol.Prompt, options: Options) -> Pursuit:
        """A request that can be sent. TypeError for an unknown keyword; ValueError for one that cannot be meant."""
        _check_prompt(prompt)
        given = options.get("seed")
        seed = draw_seed() if given is None else given
        sampling = sampling_json(options, seed)
        travel = self._travel_of(options)
        name = options.get("request_id")
        question = protocol.Question(
            self.model,
            prompt,
            sampling,
            uuid.uuid4().hex if name is None or name == "" else name,
            options.get("priority"),
            options.get("cache_salt"),
            "" if prompt.messages is None else datetime.now().astimezone().isoformat(timespec="seconds"),
        )
        asked = protocol.generate_request(question)  # what cannot be sent is refused before anything else happens
        answer = Answer(question.request_id, seed, any_fingerprint=travel.resume == "best_effort")
        return Pursuit(self._connections, asked, answer, travel, self._bell())

    def _travel_of(self, options: Options) -> Travel:
        default = self._travel
        trace = trace_headers(options.get("traceparent"), options.get("tracestate"))
        headers = joined(options.get("headers"), trace)
        if not callable(headers):
            self._connections.passport.check(headers)
        timeout = options.get("timeout")
        retries, resume, most = options.get("retries"), options.get("resume"), options.get("max_resumes")
        return Travel(
            default.clocks if timeout is None else read_timeout(timeout),
            headers,
            default.retries if retries is None else retries,
            default.resume if resume is None else resume,
            default.max_resumes if most is None else most,
        )

    async def _operate(
        self, operation: str, *, text: str | None = None, input_ids: Sequence[int] | None = None
    ) -> Reply:
        if text is not None or operation == "tokenize":
            _checked("text", text, str)
        if input_ids is not None or operation == "detokenize":
            _check_ids("ids", input_ids)
        request = protocol.operation_request(
            self.model, operation, request_id=uuid.uuid4().hex, text=text, input_ids=input_ids
        )
        return await self._connections.operate(request, self.timeout, self._travel.retries)

    async def _models(self) -> tuple[ModelStatus, ...]:
        question = pb.RepositoryIndexRequest()
        index = await self._connections.ask("RepositoryIndex", question, self.timeout, self._travel.retries)
        return protocol.model_states(index)


def read_urls(given: str | Sequence[str]) -> list[str]:
    """The endpoints of `given`, each once. ValueError for what is no HOST:PORT, TypeError for what is no text."""
    if isinstance(given, bytes | Mapping) or not isinstance(given, Sequence):
        raise TypeError(f"url must be a str or a sequence of them, got {type(given).__name__}")
    parts = given.split(",") if isinstance(given, str) else given
    urls = [_text("url", url).strip() for url in parts]
    for url in urls:
        if not (_ENDPOINT.fullmatch(url) and (url.startswith("unix:") or 1 <= int(url.rpartition(":")[2]) <= 65535)):
            raise ValueError(f"the url is HOST:PORT of Triton's gRPC endpoint (8001 by default), got {url[:200]!r}")
    if not urls:
        raise ValueError("no url was given")
    return list(dict.fromkeys(urls))


_ENDPOINT = re.compile(r"unix:.+|(\[[^\[\]\s]+\]|[^\[\]:/\s]+):[0-9]{1,5}")
T = TypeVar("T")


def _checked(name: str, value: object, kind: type[T]) -> T:
    if not isinstance(value, kind):
        raise TypeError(f"{name} must be a {kind.__name__}, got {type(value).__name__}")
    return value


def _text(name: str, value: object) -> str:
    text = _checked(name, value, str)
    try:
        utf8(name, text)
    except InvalidRequest as error:
        raise ValueError(error.message) from None
    return text


def _check_prompt(prompt: protocol.Prompt) -> None:
    if prompt.text is not None:
        _checked("prompt", prompt.text, str)
    messages = prompt.messages
    if messages is not None and (isinstance(messages, str | bytes | Mapping) or not isinstance(messages, Sequence)):
        raise TypeError(f"messages must be a sequence of mappings, got {type(messages).__name__}")
    for message in messages or ():
        if not isinstance(message, Mapping):
            raise TypeError(f"messages must be a sequence of mappings, one is {type(message).__name__}")
    if prompt.input_ids is not None:
        _check_ids("input_ids", prompt.input_ids)


def _check_ids(name: str, ids: object) -> None:
    """An array will do, which is no Sequence; its values are checked where they are packed."""
    if isinstance(ids, str | bytes | Mapping) or not (hasattr(ids, "__len__") and hasattr(ids, "__iter__")):
        raise TypeError(f"{name} must be a sequence of integers, got {type(ids).__name__}")


def _check_keepalive(seconds: float | None) -> None:
    if seconds is not None:
        check_number("keepalive", seconds, "or None")
        if not 1 <= seconds <= 1e6:
            raise ValueError(f"keepalive must be from 1 to 1e6 seconds (None: no pings), got {seconds}")

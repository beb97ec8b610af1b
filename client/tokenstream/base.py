"""What the blocking and the asynchronous client are made of: their settings, and requests made from keywords.

It draws ids, seeds and template times, so that whatever is asked can be asked again, anywhere, for the same answer.
It does not know how a client waits.
"""

from __future__ import annotations

import os
import uuid
from abc import ABC, abstractmethod
from collections.abc import Sequence
from datetime import datetime
from typing import Any

import grpc
from tritonclient.grpc import service_pb2 as pb

from . import protocol
from .answer import Answer
from .connections import Connections
from .course import Endpoints
from .params import DEFAULT_URL, Options, Resume, draw_seed, sampling_json
from .pursuit import Pursuit, Travel
from .results import ModelStatus
from .security import TLS, Headers, Passport, trace_headers
from .timeouts import Timeout
from .transport import Bell, Connection, channel_options


class BaseClient(ABC):
    """Talks to one model of one Triton server, or of several that serve the same one."""

    def __init__(
        self,
        url: str | Sequence[str] | None = None,
        *,
        model: str = "llm",
        timeout: Timeout | None = None,
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
        environment's TOKENSTREAM_URL (several with commas between), else 127.0.0.1:8001. `timeout` holds for requests
        that bring none of their own, as do `retries` (how often all endpoints are asked again while no token has
        come), `resume` (whether a cut answer is taken up at the next endpoint, or again at the same: True only where
        the server's fingerprint is the same, "best_effort" anyway) and `max_resumes`.
        `keepalive`: seconds between pings while an answer is awaited in silence; they find a dead peer. A server
        started by `tokenstream serve` accepts 10 and more. Triton's own default is to hang up at the third ping in one
        silence, which 45 does not reach before the first token's clock rings. None: no pings.
        `tls` encrypts; `token` is sent as `authorization: Bearer`; `headers` go with every request, a function is
        asked anew each time. Credentials are refused (ValueError) on an unencrypted connection to another machine
        unless `allow_insecure_credentials` is set.
        The connection is made by the first request, so that a client made before a fork works after it.
        """
        urls = read_urls(url or os.environ.get("TOKENSTREAM_URL") or DEFAULT_URL)
        self.url = ",".join(urls)
        self.model = model
        self.timeout = timeout or Timeout()
        self._travel = Travel(self.timeout, {}, retries, resume, max_resumes)
        self._pem = None if tls is None else tls.read()
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
        given = options.get("seed")
        seed = draw_seed() if given is None else given
        sampling = sampling_json(options, seed)
        travel = self._travel_of(options)
        question = protocol.Question(
            self.model,
            prompt,
            sampling,
            options.get("request_id") or uuid.uuid4().hex,
            options.get("priority"),
            options.get("cache_salt"),
            datetime.now().astimezone().isoformat(timespec="seconds"),
        )
        protocol.generate_request(question)  # what cannot be sent is refused before anything else happens
        answer = Answer(question.request_id, seed, any_fingerprint=travel.resume == "best_effort")
        return Pursuit(self._connections, question, answer, travel, self._bell())

    def _travel_of(self, options: Options) -> Travel:
        default = self._travel
        headers = dict(options.get("headers") or {})
        headers |= trace_headers(options.get("traceparent"), options.get("tracestate"))
        self._connections.passport.check(headers)
        retries, resume, most = options.get("retries"), options.get("resume"), options.get("max_resumes")
        return Travel(
            options.get("timeout") or default.clocks,
            headers,
            default.retries if retries is None else retries,
            default.resume if resume is None else resume,
            default.max_resumes if most is None else most,
        )

    async def _operate(
        self, operation: str, *, text: str | None = None, input_ids: Sequence[int] | None = None
    ) -> protocol.Reply:
        request = protocol.operation_request(
            self.model, operation, request_id=uuid.uuid4().hex, text=text, input_ids=input_ids
        )
        return await self._connections.operate(request, self.timeout, self._travel.retries)

    async def _models(self) -> tuple[ModelStatus, ...]:
        question = pb.RepositoryIndexRequest()
        index = await self._connections.ask("RepositoryIndex", question, self.timeout, self._travel.retries)
        return protocol.model_states(index)


def read_urls(given: str | Sequence[str]) -> list[str]:
    """The endpoints of `given`, each once. ValueError for what is no HOST:PORT."""
    urls = [url.strip() for url in given.split(",")] if isinstance(given, str) else list(given)
    for url in urls:
        if not url or "://" in url:
            raise ValueError(f"the url is HOST:PORT of Triton's gRPC endpoint (8001 by default), got {url!r}")
    if not urls:
        raise ValueError("no url was given")
    return list(dict.fromkeys(urls))

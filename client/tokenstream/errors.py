"""Every exception of this package, and which one a server's words or a gRPC status become.

    TokenstreamError
    ├── ConnectionFailed (also ConnectionError)      nobody listens, or the name does not resolve
    ├── StreamTimeout (also TimeoutError)            one of the four clocks ran out
    │   ├── ConnectTimeout
    │   ├── FirstTokenTimeout
    │   ├── IdleTimeout
    │   └── TotalTimeout
    ├── IncompleteStream                             cut without a terminal event, and nobody could go on with it
    ├── ServerError                                  the server said no, or ended the answer
    │   ├── InvalidRequest
    │   │   └── ResumeMismatch                       this server's answer would differ from the one begun
    │   ├── ModelNotFound
    │   ├── Unauthorized                             no credentials, wrong ones, or not enough
    │   ├── Overloaded                               refused at once, or too long in the queue: see `retry_after`
    │   ├── NotReady
    │   ├── Draining                                 going away: ask another server
    │   ├── Cancelled
    │   └── InternalError                            its fault, or an answer that breaks the protocol
    └── SetupError (in `diagnosis`)                  a server cannot be started on this machine
        └── ServerFailed                             it was started, and ended or never became ready

Each carries what had arrived (`text`, `token_ids`) and the `request_id`, so nothing received is lost.
It does not know who raises: gRPC's exceptions are handed in as a status name and a text, and never escape this package.
"""

# ruff: noqa: N818  (names say what happened; all of them end in TokenstreamError's tree)

from __future__ import annotations

import math
import re
from collections.abc import Sequence


class TokenstreamError(Exception):
    """Base of all. `message` is one line; `text` and `token_ids` are what had arrived before it."""

    def __init__(self, message: str, *, request_id: str = "") -> None:
        super().__init__(message)
        self.message = message
        self.request_id = request_id
        self.text = ""
        self.token_ids: Sequence[int] = ()

    def extend(self, words: str) -> None:
        """Say more, in the same line."""
        self.message = f"{self.message}; {words}"
        self.args = (self.message,)


class ConnectionFailed(TokenstreamError, ConnectionError):
    """No connection could be made."""


class StreamTimeout(TokenstreamError, TimeoutError):
    """One of the clocks in `Timeout` ran out; the request was cancelled on the server."""


class ConnectTimeout(StreamTimeout):
    """The server did not answer on a new connection in time."""


class FirstTokenTimeout(StreamTimeout):
    """Queue and prefill took too long."""


class IdleTimeout(StreamTimeout):
    """The answer began and then paused for too long."""


class TotalTimeout(StreamTimeout):
    """The whole answer took too long."""


class IncompleteStream(TokenstreamError):
    """The stream was cut without a terminal event."""


class ServerError(TokenstreamError):
    """The server refused the request or ended the answer. `code` is its status name, "" if it gave none.

    `retry_after`: seconds it asks to be left alone, None if it says nothing of that. `own_fault`: it failed over this
    request alone, and would fail again; so the client asked nobody again.
    """

    def __init__(
        self,
        message: str,
        *,
        request_id: str = "",
        code: str = "",
        retry_after: float | None = None,
        own_fault: bool = False,
    ) -> None:
        super().__init__(message, request_id=request_id)
        self.code = code
        self.retry_after = retry_after
        self.own_fault = own_fault


class InvalidRequest(ServerError):
    """Something asked for is unknown, out of range, or does not fit; the message names it."""


class ResumeMismatch(InvalidRequest):
    """The answer was begun by a server with other weights, tokenizer, template or dtype."""


class ModelNotFound(ServerError):
    """The server has no model of this name."""


class Unauthorized(ServerError):
    """The server or a proxy before it does not let this caller in."""


class Overloaded(ServerError):
    """The queue is full, or the request waited in it for too long."""


class NotReady(ServerError):
    """The server or its model is not able to answer (now)."""


class Draining(ServerError):
    """The server is shutting down."""


class Cancelled(ServerError):
    """The request was cancelled, by this client or by the server."""


class InternalError(ServerError):
    """The server failed, or sent what the protocol does not allow."""


# Triton's own messages carry no status on a stream; these words have been stable across its releases.
_TRITON_PHRASES: tuple[tuple[str, type[ServerError]], ...] = (
    ("exceeds maximum queue size", Overloaded),
    ("request timeout expired", Overloaded),
    ("unknown model", ModelNotFound),
    ("is not healthy", NotReady),
    ("is not ready", NotReady),
    ("shutting down", Draining),
    ("request was cancelled", Cancelled),
    ("unexpected inference", InvalidRequest),
    ("unexpected shape for input", InvalidRequest),
    ("data-type is", InvalidRequest),
    ("expected number of inputs", InvalidRequest),
    ("byte size mismatch", InvalidRequest),
    ("batch-size must be", InvalidRequest),
)
_CODES: tuple[tuple[str, type[ServerError]], ...] = (
    ("INVALID_ARG", InvalidRequest),
    ("INVALID_ARGUMENT", InvalidRequest),
    ("NOT_FOUND", ModelNotFound),
    ("UNAVAILABLE", Overloaded),
    ("RESOURCE_EXHAUSTED", Overloaded),
    ("UNAUTHENTICATED", Unauthorized),
    ("PERMISSION_DENIED", Unauthorized),
    ("CANCELLED", Cancelled),
    ("INTERNAL", InternalError),
)
_NO_CONNECTION = ("failed to connect", "resolving", "resolution")
_CLOSED_EARLY = ("fd shutdown", "bad file descriptor", "handshake read failed", "handshaker shutdown")
_TAIL = re.compile(r"(?P<text>.*?)\s*\[(?P<fields>(?:request|tokens|code|retry_after|fault)=[^\[\]]*)\]\s*", re.DOTALL)
_TRITON_ID = re.compile(r"\[request id: (?P<id>[^\]]*)\]\s*")


def from_server(message: str) -> ServerError:
    """The exception for an error message that came on a stream, without its machine-readable parts.

    Our model ends its messages with `[request=ID tokens=N code=CODE retry_after=SECONDS fault=request]`, any part of
    which may be missing; Triton begins its own with `[request id: ID]` and says the kind in words alone.
    """
    text, request_id, code = message.strip(), "", ""
    retry_after, own_fault = None, False
    if begin := _TRITON_ID.match(text):
        text, request_id = text[begin.end() :], begin["id"]
    if tail := _TAIL.fullmatch(text):
        text = tail["text"]
        for part in tail["fields"].split():
            key, _, value = part.partition("=")
            request_id = value if key == "request" else request_id
            code = value if key == "code" else code
            retry_after = read_seconds(value) if key == "retry_after" else retry_after
            own_fault = value == "request" if key == "fault" else own_fault
    kind, text = _kind(text, code), " ".join(text.split()) or "the server gave no reason"
    return kind(text, request_id=request_id, code=code, retry_after=retry_after, own_fault=own_fault)


def read_seconds(text: str) -> float | None:
    """A waiting time as a server or proxy writes it; None if it is no number from 0 up."""
    try:
        value = float(text)
    except ValueError:
        return None
    return value if 0 <= value < math.inf else None


def _kind(text: str, code: str) -> type[ServerError]:
    words = text.lower()
    if code in ("UNAVAILABLE", "CANCELLED") and ("drain" in words or "shutting down" in words):
        return Draining
    if code == "UNAVAILABLE" and "not ready" in words:
        return NotReady
    if code == "INVALID_ARG" and "resume_mismatch" in words:
        return ResumeMismatch
    if code:
        return next((kind for name, kind in _CODES if name == code), ServerError)
    return next((kind for phrase, kind in _TRITON_PHRASES if phrase in words), ServerError)


def from_status(status: str, details: str, url: str, retry_after: float | None = None) -> TokenstreamError:
    """The exception for a gRPC status (its name and its text) that ended a stream to `url`."""
    words = details.lower()
    if "shutting down" in words:
        return Draining(f"the server at {url} is shutting down", code=status, retry_after=retry_after)
    if status == "UNAVAILABLE" and "timed out" in words:
        return ConnectTimeout(f"{url} did not answer: {reason_of(details)}")
    if status == "UNAVAILABLE" and any(sign in words for sign in _NO_CONNECTION):
        return ConnectionFailed(f"cannot connect to {url}: {why_not_connected(details)}")
    if status == "RESOURCE_EXHAUSTED" and "metadata" in words:
        return InvalidRequest(f"the headers are too long for {url}: {reason_of(details)}", code=status)
    if status == "RESOURCE_EXHAUSTED" and "larger than max" in words:
        return InvalidRequest(f"a message is too long on the way to {url} or back: {reason_of(details)}", code=status)
    if status == "DEADLINE_EXCEEDED":
        return TotalTimeout(f"the answer from {url} took longer than its total time")
    if "deserializing" in words:
        return InternalError(f"{url} sent a message that is not Triton's")
    if retry_after is None and status in ("UNAVAILABLE", "UNKNOWN", "INTERNAL", "ABORTED", "CANCELLED"):
        return IncompleteStream(f"the stream from {url} was cut: {reason_of(details)}")
    if status == "UNIMPLEMENTED":
        return ServerError(f"no Triton server at {url}: {reason_of(details)}", code=status)
    kind = next((kind for name, kind in _CODES if name == status), ServerError)
    return kind(f"{url} answered {status}: {reason_of(details)}", code=status, retry_after=retry_after)


def why_not_connected(details: str) -> str:
    """The same for a connection that was not made."""
    words = details.lower()
    if "wrong_version_number" in words:
        return "the peer does not speak TLS"
    if any(sign in words for sign in _CLOSED_EARLY):
        return "the connection was closed while it was being made (does the server speak TLS?)"
    return reason_of(details)


def reason_of(details: str) -> str:
    """The last, most telling part of gRPC's nested text: `...: connect: Connection refused (111)`."""
    reason = details.strip().splitlines()[0] if details.strip() else ""
    reason = reason.removesuffix(": Invalid certificate verification context: OK")  # of every failed TLS handshake
    reason = reason.rsplit(": ", 1)[-1].strip(" .{}[]")
    while reason.endswith(")") and reason.count(")") > reason.count("("):  # its partner was cut off before it
        reason = reason[:-1]
    reason = re.sub(r"\s*\(\d+\)$", "", reason)
    plain = re.match(r"[A-Z][a-z]+\b", reason) is not None or len(reason.split(" ", 1)[0]) == 1
    return (reason[:1].lower() + reason[1:] if plain else reason) or "no reason given"

"""Who we are and whom we trust: TLS, tokens and headers, and the refusal to send secrets in the clear.

It reads files and checks values; it does not know connections, nor what a header means to the server.
"""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

Headers = Mapping[str, str] | Callable[[], Mapping[str, str]]

_NAME = re.compile(r"[0-9a-z_.-]+")
_VALUE = re.compile(r"[\x20-\x7e]*")
_TRACEPARENT = re.compile(r"(?!ff)[0-9a-f]{2}-(?!0{32})[0-9a-f]{32}-(?!0{16})[0-9a-f]{16}-[0-9a-f]{2}(-.*)?")
_CERTIFICATE = re.compile(rb"-----BEGIN (?:X509 |TRUSTED )?CERTIFICATE-----")
_KEY = re.compile(rb"-----BEGIN (?:[A-Z]+ )*PRIVATE KEY-----")
_SECRET_NAMES = frozenset({"authorization", "proxy-authorization", "cookie", "x-api-key"})
_SECRET_PREFIX = "triton-grpc-protocol-"  # noqa: S105  (the name under which Triton wants a shared secret)


class ExposedSecret(ValueError):  # noqa: N818  (the name says what would happen)
    """Header `name` would travel unencrypted to another machine, `url`."""

    def __init__(self, name: str, url: str) -> None:
        super().__init__(
            f"{name} would travel unencrypted to {url}: give tls=TLS(...), or say "
            "allow_insecure_credentials=True if the network between is safe"
        )
        self.name = name
        self.url = url


@dataclass(frozen=True, slots=True)
class TLS:
    """An encrypted connection. Each part is PEM, as bytes or as the path of a file.

    `root_certificates`: whom to trust; None: the roots that gRPC brings. `private_key` and `certificate_chain` prove
    who we are to a server that asks (mutual TLS); both or none, else ValueError. `server_name`: the name in the
    server's certificate, where it is not the host that is connected to.
    """

    root_certificates: bytes | str | Path | None = None
    private_key: bytes | str | Path | None = field(default=None, repr=False)
    certificate_chain: bytes | str | Path | None = None
    server_name: str | None = None

    def __post_init__(self) -> None:
        """Refuse half a proof."""
        if (self.private_key is None) != (self.certificate_chain is None):
            raise ValueError("mutual TLS needs private_key and certificate_chain, both or none")

    def read(self) -> tuple[bytes | None, bytes | None, bytes | None]:
        """Roots, key and chain as bytes. OSError if a file cannot be read, ValueError if it is no PEM of its kind."""
        return (
            _pem("root_certificates", self.root_certificates, _CERTIFICATE),
            _pem("private_key", self.private_key, _KEY),
            _pem("certificate_chain", self.certificate_chain, _CERTIFICATE),
        )


class Passport:
    """The metadata of every request, over connections to `urls`.

    `token` is sent as `authorization: Bearer`. `headers` may be a function, asked anew for each request: for tokens
    that change. Raises ValueError for a header that gRPC could not send, and ExposedSecret for one that would travel
    unencrypted to another machine, unless `allow_insecure` says that something else keeps the line safe.
    """

    def __init__(
        self, urls: Sequence[str], *, encrypted: bool, token: str | None, headers: Headers | None, allow_insecure: bool
    ) -> None:
        self._exposed = [] if encrypted or allow_insecure else [url for url in urls if not is_local(url)]
        if not isinstance(token, str | None):
            raise TypeError(f"token must be a str, got {type(token).__name__}")
        self._token = {} if token is None else {"authorization": f"Bearer {token}"}
        self._headers = joined(headers, {})
        self.check(self._token | ({} if callable(self._headers) else dict(self._headers)))

    def stamp(self, more: Headers) -> tuple[tuple[str, str], ...]:
        """The metadata of one request; `more` is its own and goes over the client's."""
        parts = (self._token, *(given() if callable(given) else given for given in (self._headers, more)))
        headers = {name.lower(): value for part in parts for name, value in part.items()}
        self.check(headers)
        return tuple(headers.items())

    def check(self, headers: Mapping[str, str]) -> None:
        """Raise ValueError for a header that cannot or must not be sent."""
        for name, value in headers.items():
            if not isinstance(name, str) or not isinstance(value, str):
                raise TypeError(f"header {name!r} and its value must be str")
            self._check(name.lower(), value)

    def _check(self, name: str, value: str) -> None:
        if not _NAME.fullmatch(name) or name.startswith("grpc-") or name.endswith("-bin"):
            raise ValueError(f"{name!r} cannot be sent as a header")
        if not _VALUE.fullmatch(value):
            raise ValueError(f"the value of header {name!r} holds more than printable ASCII")
        if self._exposed and (name in _SECRET_NAMES or name.startswith(_SECRET_PREFIX)):
            raise ExposedSecret(name, self._exposed[0])


def trace_headers(traceparent: str | None, tracestate: str | None) -> dict[str, str]:
    """W3C trace context as headers, where Triton looks for it. ValueError if it is malformed, TypeError if no str."""
    if traceparent is None:
        if tracestate is not None:
            raise ValueError("tracestate means nothing without traceparent")
        return {}
    if not isinstance(traceparent, str):
        raise TypeError(f"traceparent must be a str, got {type(traceparent).__name__}")
    if not _TRACEPARENT.fullmatch(traceparent):
        raise ValueError(f"traceparent must be VERSION-TRACE-PARENT-FLAGS in hexadecimal digits, got {traceparent!r}")
    return {"traceparent": traceparent} | ({} if tracestate is None else {"tracestate": tracestate})


def is_local(url: str) -> bool:
    """Whether HOST:PORT (or unix:PATH) is this machine, by its name alone."""
    if url.startswith("unix:"):
        return True
    host = url.rpartition(":")[0].strip("[]") or url
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def joined(headers: Headers | None, more: Mapping[str, str]) -> Headers:
    """`headers` and `more` over them; asked anew each time where `headers` is a function."""
    if headers is None:
        return more
    if callable(headers):
        ask = headers
        return lambda: {**_mapping(ask()), **more}
    return {**_mapping(headers), **more}


def _mapping(headers: object) -> dict[str, str]:
    if not isinstance(headers, Mapping):
        raise TypeError(f"headers must be a mapping, or a function that returns one, got {type(headers).__name__}")
    return dict(headers)


def _pem(name: str, value: bytes | str | Path | None, kind: re.Pattern[bytes]) -> bytes | None:
    if value is None:
        return None
    if not isinstance(value, bytes | str | Path):
        raise TypeError(f"{name} must be PEM as bytes or the path of a file, got {type(value).__name__}")
    where = name if isinstance(value, bytes) else f"{name}: {value}"
    data = value if isinstance(value, bytes) else Path(value).read_bytes()
    if kind.search(data) is None:
        raise ValueError(f"{where} holds no PEM {'certificate' if kind is _CERTIFICATE else 'private key'}")
    return data

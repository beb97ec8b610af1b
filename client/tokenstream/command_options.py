"""The options that several commands have, each declared once, and the groups in which they come.

A command takes a group as one parameter, and `with_groups` shows typer the options that it stands for; a group can make
what its options mean. It knows names and help texts; it does not know what a command does.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass, fields, is_dataclass
from functools import wraps
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeVar, get_type_hints

import typer

from .params import DEFAULT_URL, Sampling
from .timeouts import Timeout

if TYPE_CHECKING:
    from .aio import AsyncClient
    from .base import BaseClient
    from .client import Client
    from .security import TLS

    C = TypeVar("C", bound=BaseClient)

_SAMPLING, _SERVER = "Sampling", "Server"  # the panels of --help
_FILE: dict[str, Any] = {"exists": True, "dir_okay": False, "readable": True, "rich_help_panel": _SERVER}

Url = Annotated[
    str,
    typer.Option(envvar="TOKENSTREAM_URL", help="HOST:PORT of the server's gRPC endpoint.", rich_help_panel=_SERVER),
]
ModelName = Annotated[str, typer.Option(help="Name of the model on the server.", rich_help_panel=_SERVER)]
Seconds = Annotated[float | None, typer.Option("--timeout", help="Seconds for the whole answer.")]
MaxTokens = Annotated[int | None, typer.Option(help="Most tokens to generate.", rich_help_panel=_SAMPLING)]
Temperature = Annotated[
    float | None, typer.Option(help="0 is greedy; unset: the model's own.", rich_help_panel=_SAMPLING)
]
TopP = Annotated[
    float | None, typer.Option(help="Draw from the smallest set with this probability.", rich_help_panel=_SAMPLING)
]
TopK = Annotated[int | None, typer.Option(help="Draw from so many most likely tokens.", rich_help_panel=_SAMPLING)]
Seed = Annotated[int | None, typer.Option(help="Same seed, same answer.", rich_help_panel=_SAMPLING)]
Stop = Annotated[
    list[str] | None, typer.Option(help="End before this text; may be repeated.", rich_help_panel=_SAMPLING)
]
RunDir = Annotated[
    Path | None, typer.Option(envvar="TOKENSTREAM_RUN_DIR", help="Run folder of the server; unset: all of this user's.")
]
Repository = Annotated[Path | None, typer.Option(help="Model repository; unset: the one that came along.")]
JsonLines = Annotated[bool, typer.Option("--json", help="One JSON object per line; an error is one too, on stderr.")]
Encrypted = Annotated[
    bool, typer.Option("--tls", help="Encrypt; trust the roots that gRPC brings.", rich_help_panel=_SERVER)
]
Roots = Annotated[Path | None, typer.Option(help="Encrypt; trust the PEM certificates in this file.", **_FILE)]
Certificate = Annotated[
    Path | None, typer.Option(help="Encrypt; who we are, to a server that asks: PEM, with --tls-key.", **_FILE)
]
Key = Annotated[Path | None, typer.Option(help="The key of --tls-cert: PEM, without a password.", **_FILE)]
Token = Annotated[
    str | None,
    typer.Option(
        envvar="TOKENSTREAM_TOKEN",
        help="Sent as `authorization: Bearer`; the variable does not show in a list of processes.",
        rich_help_panel=_SERVER,
    ),
]
Header = Annotated[
    list[str] | None,
    typer.Option(metavar="NAME=VALUE", help="Sent with every request; may be repeated.", rich_help_panel=_SERVER),
]
Exposed = Annotated[
    bool,
    typer.Option(
        "--allow-insecure-credentials",
        help="Send token and secret headers to another machine without TLS.",
        rich_help_panel=_SERVER,
    ),
]


@dataclass(frozen=True, slots=True)
class SamplingOptions:
    """How the tokens of an answer are chosen."""

    max_tokens: MaxTokens = None
    temperature: Temperature = None
    top_p: TopP = None
    top_k: TopK = None
    seed: Seed = None
    stop: Stop = None

    @property
    def keywords(self) -> Sampling:
        """As a client's methods take them."""
        return Sampling(
            max_tokens=self.max_tokens,
            temperature=self.temperature,
            top_p=self.top_p,
            top_k=self.top_k,
            seed=self.seed,
            stop=self.stop or None,
        )


@dataclass(frozen=True, slots=True)
class ServerOptions:
    """Which server is asked, how we know it, and how it knows us."""

    url: Url = DEFAULT_URL
    tls: Encrypted = False
    tls_ca: Roots = None
    tls_cert: Certificate = None
    tls_key: Key = None
    token: Token = None
    header: Header = None
    allow_insecure_credentials: Exposed = False

    def client(self, model: str, total: float | None = None) -> Client:
        """A client for `model`; `total` in seconds. BadParameter, in the words of these options, for what is wrong."""
        from .client import Client

        return self._made(Client, model, total)

    def async_client(self, model: str, total: float | None = None) -> AsyncClient:
        """The same, asynchronous."""
        from .aio import AsyncClient

        return self._made(AsyncClient, model, total)

    def _made(self, kind: type[C], model: str, total: float | None) -> C:
        from .security import ExposedSecret

        if self.token == "":
            raise typer.BadParameter("the token is empty: leave it out, or give one")
        try:
            return kind(
                self.url,
                model=model,
                timeout=Timeout(total=total),
                tls=self._tls(),
                token=self.token,
                headers=self._headers(),
                allow_insecure_credentials=self.allow_insecure_credentials,
            )
        except ExposedSecret as error:
            cure = "encrypt with --tls or --tls-ca, or say --allow-insecure-credentials if the network between is safe"
            raise typer.BadParameter(f"{error.name} would travel unencrypted to {error.url}: {cure}") from error
        except ValueError as error:
            raise typer.BadParameter(str(error)) from error

    def _tls(self) -> TLS | None:
        import ssl

        from .security import TLS

        if (self.tls_cert is None) != (self.tls_key is None):
            raise typer.BadParameter("--tls-cert and --tls-key go together: give both or none")
        if not (self.tls or self.tls_ca or self.tls_cert):
            return None
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)  # only to read the files: gRPC does not say what is wrong
        try:
            what = f"--tls-ca: {self.tls_ca} holds no PEM certificate"
            if self.tls_ca is not None:
                context.load_verify_locations(self.tls_ca)
            what = f"--tls-cert, --tls-key: {self.tls_cert} and {self.tls_key} are no PEM pair without a password"
            if self.tls_cert is not None and self.tls_key is not None:
                context.load_cert_chain(self.tls_cert, self.tls_key, password="")
        except OSError as error:  # an SSLError is one
            raise typer.BadParameter(what) from error
        return TLS(self.tls_ca, self.tls_key, self.tls_cert)

    def _headers(self) -> dict[str, str]:
        pairs = [header.partition("=") for header in self.header or ()]
        if not all(name and equals for name, equals, _ in pairs):  # it is not shown: it may be a secret
            raise typer.BadParameter("--header wants NAME=VALUE")
        return {name.strip().lower(): value for name, _, value in pairs}


def with_groups(command: Callable[..., None]) -> Callable[..., None]:
    """`command` as typer is to see it: a parameter whose type is a group of options stands for all of them."""
    hints = get_type_hints(command, include_extras=True)
    groups: dict[str, Any] = {name: hint for name, hint in hints.items() if is_dataclass(hint)}
    parameters: list[inspect.Parameter] = []
    for parameter in inspect.signature(command).parameters.values():
        known = groups.get(parameter.name)
        own = [parameter.replace(annotation=hints[parameter.name], kind=inspect.Parameter.KEYWORD_ONLY)]
        parameters += own if known is None else _options(known)

    @wraps(command)
    def call(**given: Any) -> None:
        for name, group in groups.items():
            given[name] = group(**{option.name: given.pop(option.name) for option in fields(group)})
        command(**given)

    call.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    call.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    return call


def _options(group: Any) -> list[inspect.Parameter]:
    hints = get_type_hints(group, include_extras=True)
    kind = inspect.Parameter.KEYWORD_ONLY
    return [inspect.Parameter(o.name, kind, default=o.default, annotation=hints[o.name]) for o in fields(group)]

"""TLS with an authority of the test's own, tokens and headers on their way, and secrets that must not travel openly."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path

import grpc
import pytest

from tokenstream import TLS, AsyncClient, Client, ConnectionFailed
from tokenstream.security import is_local
from unit.certificates import Authority, Pair
from unit.scripted_triton import ScriptedTriton, answer, failure

TRACE = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"


@pytest.fixture(scope="module")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    return Authority(tmp_path_factory.mktemp("authority"))


@pytest.fixture(scope="module")
def host(authority: Authority) -> Pair:
    return authority.sign("server", "IP:127.0.0.1", "DNS:triton.example")


@pytest.fixture(params=[False, True], ids=["one-sided", "mutual"])
def mutual(request: pytest.FixtureRequest) -> bool:
    return bool(request.param)


@pytest.fixture
def encrypted(authority: Authority, host: Pair, mutual: bool) -> Iterator[ScriptedTriton]:
    pairs = [(host.key.read_bytes(), host.certificate.read_bytes())]
    roots = authority.root.read_bytes() if mutual else None
    server = ScriptedTriton(answer("a"), credentials=grpc.ssl_server_credentials(pairs, roots, mutual))
    yield server
    server.close()


def sent(server: ScriptedTriton) -> dict[str, str]:
    return server.calls[-1].metadata


def test_an_encrypted_answer_is_an_answer_for_whom_both_sides_know(
    encrypted: ScriptedTriton, authority: Authority, mutual: bool
) -> None:
    who = authority.sign("caller")
    proof = {"private_key": who.key, "certificate_chain": who.certificate} if mutual else {}
    with Client(encrypted.url, tls=TLS(authority.root, **proof), token="secret") as client:
        assert client.generate("x").text == "a"
        assert client.ready()
    assert sent(encrypted)["authorization"] == "Bearer secret"

    async def ask() -> str:
        read = {name: path.read_bytes() for name, path in proof.items()}
        async with AsyncClient(encrypted.url, tls=TLS(authority.root.read_bytes(), **read)) as client:
            return (await client.generate("x")).text

    assert asyncio.run(ask()) == "a"


def test_whom_we_do_not_trust_or_who_does_not_trust_us_gets_no_request(
    encrypted: ScriptedTriton, authority: Authority, mutual: bool, tmp_path: Path
) -> None:
    strange = Authority(tmp_path, "strange")
    tried = [TLS(strange.root), TLS(authority.root, server_name="other.example"), None]
    if mutual:
        forged = strange.sign("caller")
        tried += [TLS(authority.root), TLS(authority.root, forged.key, forged.certificate)]
    for tls in tried:
        with Client(encrypted.url, tls=tls, retries=0) as client, pytest.raises(ConnectionFailed):
            client.generate("x")
    assert encrypted.requests == []


def test_a_certificate_may_bear_another_name_than_the_address(authority: Authority, host: Pair) -> None:
    named = authority.sign("named", "DNS:triton.example")
    pairs = [(named.key.read_bytes(), named.certificate.read_bytes())]
    server = ScriptedTriton(answer("a"), credentials=grpc.ssl_server_credentials(pairs))
    with Client(server.url, tls=TLS(authority.root, server_name="triton.example")) as client:
        assert client.generate("x").text == "a"
    server.close()


def test_headers_of_client_and_request_travel_together_and_the_request_wins(serve) -> None:
    server, client = serve(answer("a"), headers={"X-Tenant": "blue", "x-team": "one"}, token="t0")
    client.generate("x", headers={"X-TEAM": "two"}, traceparent=TRACE, tracestate="vendor=1")
    metadata = sent(server)
    assert {name: metadata[name] for name in ("x-tenant", "x-team", "authorization", "traceparent", "tracestate")} == {
        "x-tenant": "blue",
        "x-team": "two",
        "authorization": "Bearer t0",
        "traceparent": TRACE,
        "tracestate": "vendor=1",
    }
    client.generate("y")
    assert not {"traceparent", "tracestate"} & sent(server).keys()


def test_a_function_is_asked_for_headers_at_every_attempt() -> None:
    tokens = iter(range(100))

    def refuse_first(request, call) -> Iterator:
        if len(server.requests) == 1:
            yield failure("Exceeds maximum queue size")
        else:
            yield from answer("a")(request, call)

    server = ScriptedTriton(refuse_first)
    with Client(server.url, headers=lambda: {"authorization": f"Bearer {next(tokens)}"}) as client:
        client.generate("x")
    first, second = (call.metadata["authorization"] for call in server.calls)
    assert first != second
    server.close()


@pytest.mark.parametrize(
    "secret",
    [
        {"token": "t"},
        {"headers": {"Authorization": "Basic eA=="}},
        {"headers": {"Cookie": "a=b"}},
        {"headers": {"triton-grpc-protocol-key": "shared"}},
    ],
)
def test_a_secret_does_not_leave_this_machine_unencrypted_by_accident(secret) -> None:
    urls = ["127.0.0.1:8001", "triton.example:8001"]
    with pytest.raises(ValueError, match=r"unencrypted to triton\.example:8001") as caught:
        Client(urls, **secret)
    assert "shared" not in str(caught.value)
    Client(urls[0], **secret)
    Client(urls, **secret, tls=TLS())
    Client(urls, **secret, allow_insecure_credentials=True)
    if "headers" in secret:
        with pytest.raises(ValueError, match="unencrypted"):
            Client(urls).stream("x", **secret)


@pytest.mark.parametrize(
    ("url", "local"),
    [
        ("127.0.0.1:1", True),
        ("127.9.9.9:1", True),
        ("[::1]:1", True),
        ("localhost:1", True),
        ("unix:/run/triton.sock", True),
        ("10.0.0.1:1", False),
        ("localhost.example:1", False),
        ("[2001:db8::1]:1", False),
        ("127.0.0.1.example:1", False),
    ],
)
def test_what_is_this_machine_and_what_is_not(url, local) -> None:
    assert is_local(url) is local


@pytest.mark.parametrize(
    "headers", [{"with space": "x"}, {"grpc-timeout": "1S"}, {"data-bin": "x"}, {"name": "line\nbreak"}, {"name": "ü"}]
)
def test_a_header_that_grpc_cannot_send_is_refused_by_name(serve, headers) -> None:
    (name,) = headers
    server, client = serve(answer("a"))
    for give in (lambda: client.stream("x", headers=headers), lambda: Client(server.url, headers=headers)):
        with pytest.raises(ValueError, match=name):
            give()
    assert server.requests == []


@pytest.mark.parametrize(
    ("traceparent", "tracestate"),
    [
        (TRACE.upper(), None),
        (TRACE.replace("0af7651916cd43dd8448eb211c80319c", "0" * 32), None),
        ("ff" + TRACE[2:], None),
        ("", None),
        (None, "vendor=1"),
    ],
)
def test_malformed_trace_context_is_refused(serve, traceparent, tracestate) -> None:
    _, client = serve(answer("a"))
    with pytest.raises(ValueError, match="trace"):
        client.stream("x", traceparent=traceparent, tracestate=tracestate)


def test_half_a_proof_is_refused_and_a_key_is_not_shown(tmp_path: Path) -> None:
    for half in ({"private_key": b"k"}, {"certificate_chain": b"c"}):
        with pytest.raises(ValueError, match="both or none"):
            TLS(**half)
    assert "sesame" not in repr(TLS(private_key=b"sesame", certificate_chain=b"c"))
    with pytest.raises(FileNotFoundError):
        Client(tls=TLS(tmp_path / "missing.pem"))

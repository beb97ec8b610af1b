"""What is given in the wrong type or beyond its range is refused by name, before anything is dialled."""

from __future__ import annotations

from typing import Any

import pytest

import tokenstream
from tokenstream import TLS, Client, InvalidRequest, Timeout
from unit.scripted_triton import answer

URL = "the url is HOST:PORT"
HALF = "\ud83d"  # of a pair of surrogates


@pytest.mark.parametrize(
    "url", ["127.0.0.1", "a:0", "a:65536", "a:port", "a:-1", "::1", "a b:1", "", [""], "a:", "dns:///a:1", ["a:1", "b"]]
)
def test_an_url_that_is_no_host_and_port_is_refused(url):
    with pytest.raises(ValueError, match=URL):
        Client(url)


def test_no_url_at_all_is_refused():
    with pytest.raises(ValueError, match="no url"):
        Client([])


@pytest.mark.parametrize("url", ["a:1", "[::1]:8001", "unix:/run/triton", " a:65535 "])
def test_an_url_that_can_be_dialled_is_taken(url):
    assert Client(url).url == url.strip()


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("url", 5),
        ("url", b"a:1"),
        ("url", [5]),
        ("model", 5),
        ("timeout", "5"),
        ("timeout", True),
        ("keepalive", "45"),
        ("retries", 1.5),
        ("retries", True),
        ("max_resumes", "5"),
        ("tls", True),
        ("token", 5),
        ("headers", 5),
        ("headers", {"a": 1}),
    ],
)
def test_a_setting_of_the_wrong_type_is_named(name, value: Any):
    with pytest.raises(TypeError, match=name.removesuffix("s")):
        Client(**{"url": "a:1", name: value})


@pytest.mark.parametrize(
    ("name", "value"),
    [("timeout", 0), ("timeout", -1.0), ("timeout", 2e9), ("keepalive", 0), ("keepalive", 0.5), ("keepalive", 2e6)],
)
def test_a_setting_beyond_its_range_is_named(name, value: Any):
    with pytest.raises(ValueError, match=name):
        Client("a:1", **{name: value})


@pytest.mark.parametrize(
    ("name", "given"),
    [
        ("prompt", {"prompt": 5}),
        ("prompt", {"prompt": b"x"}),
        ("messages", {"messages": "hi"}),
        ("messages", {"messages": {"role": "user", "content": "hi"}}),
        ("messages", {"messages": [5]}),
        ("input_ids", {"input_ids": "ab"}),
        ("input_ids", {"input_ids": 5}),
        ("timeout", {"prompt": "x", "timeout": "5"}),
        ("retries", {"prompt": "x", "retries": 1.5}),
        ("headers", {"prompt": "x", "headers": 5}),
        ("headers", {"prompt": "x", "headers": lambda: 5}),
        ("request_id", {"prompt": "x", "request_id": 5}),
        ("request_id", {"prompt": "x", "request_id": 0}),
        ("cache_salt", {"prompt": "x", "cache_salt": 5}),
        ("priority", {"prompt": "x", "priority": "1"}),
        ("priority", {"prompt": "x", "priority": True}),
        ("priority", {"prompt": "x", "priority": 1.0}),
        ("stop", {"prompt": "x", "stop": {"a"}}),
        ("stop", {"prompt": "x", "stop": b"a"}),
        ("seed", {"prompt": "x", "seed": object()}),
        ("tools", {"prompt": "x", "tools": [{1}]}),
        ("messages", {"messages": [{"role": "user", "content": b"x"}]}),
        ("traceparent", {"prompt": "x", "traceparent": 5}),
    ],
)
def test_what_is_asked_in_the_wrong_type_is_named(serve, name, given: Any):
    server, client = serve(answer("a"))
    with pytest.raises(TypeError, match=name):
        client.generate(**given)
    assert server.requests == []


@pytest.mark.parametrize(
    ("name", "given"),
    [
        ("request_id", {"prompt": "x", "request_id": HALF}),
        ("cache_salt", {"prompt": "x", "cache_salt": HALF}),
        ("stop", {"prompt": "x", "stop": ["a", HALF]}),
        ("chat_template_kwargs", {"prompt": "x", "chat_template_kwargs": {HALF: 1}}),
        ("messages", {"messages": [{"role": "user", "content": HALF}]}),
        ("messages", {"messages": [{"role": "user", "content": 10**5000}]}),
        ("priority", {"prompt": "x", "priority": 2**63}),
        ("priority", {"prompt": "x", "priority": -1}),
        ("priority", {"prompt": "x", "priority": 10**5000}),
    ],
    ids=lambda value: ascii(value)[:20] if isinstance(value, str) else "",
)
def test_what_the_wire_cannot_carry_is_refused_by_name(serve, name, given: Any):
    server, client = serve(answer("a"))
    with pytest.raises(InvalidRequest, match=f"^{name} "):
        client.generate(**given)
    assert server.requests == []


@pytest.mark.parametrize(("name", "value"), [("model", HALF), ("url", f"{HALF}:1")])
def test_a_setting_that_is_no_unicode_is_named(name, value):
    with pytest.raises(ValueError, match=f"^{name} is not Unicode text"):
        Client(**{"url": "a:1", name: value})


def test_a_text_to_tokenize_and_ids_to_detokenize_are_checked():
    client: Any = Client("a:1")
    with pytest.raises(TypeError, match="text must be a str, got int"):
        client.tokenize(5)
    for wrong in (5, "ab", None):
        with pytest.raises(TypeError, match="ids must be a sequence of integers"):
            client.detokenize(wrong)


def test_a_number_as_timeout_is_the_total_clock(serve):
    assert Client("a:1", timeout=7).timeout == Timeout(total=7)
    server, client = serve(answer("a"))
    client.generate("x", timeout=60.0)
    assert 59_000_000 < server.requests[0].parameters["timeout"].int64_param <= 60_000_000
    with pytest.raises(ValueError, match="total must be above 0"):
        client.generate("x", timeout=0)


@pytest.mark.parametrize(("value", "kind"), [("5", TypeError), (True, TypeError), (1e300, ValueError)])
def test_a_clock_that_is_no_number_of_seconds_is_named(value: Any, kind):
    with pytest.raises(kind, match="timeout idle"):
        Timeout(idle=value)


def test_a_requests_own_headers_may_be_a_function_that_is_asked_at_every_attempt(serve):
    tokens = iter(["first", "second"])
    server, client = serve(answer("a"), headers=lambda: {"x-of": "client", "x-who": "client"})
    trace = f"00-{'a' * 32}-{'b' * 16}-01"
    for expected in ("first", "second"):
        client.generate("x", headers=lambda: {"X-Who": next(tokens)}, traceparent=trace)
        sent = server.calls[-1].metadata
        assert (sent["x-of"], sent["x-who"], sent["traceparent"]) == ("client", expected, trace)


@pytest.mark.parametrize(
    ("parts", "told"),
    [
        ({"root_certificates": b"root:x:0:0"}, "root_certificates holds no PEM certificate"),
        ({"private_key": b"x", "certificate_chain": b"x"}, "private_key holds no PEM private key"),
    ],
)
def test_a_certificate_that_is_none_is_refused(parts, told):
    with pytest.raises(ValueError, match=told):
        Client("a:1", tls=TLS(**parts))


def test_a_file_without_a_certificate_is_refused_by_its_name(tmp_path):
    path = tmp_path / "passwd"
    path.write_text("root:x:0:0\n")
    with pytest.raises(ValueError, match="passwd holds no PEM certificate"):
        Client("a:1", tls=TLS(path))


def test_the_package_shows_its_public_names_alone():
    assert sorted(dir(tokenstream)) == sorted(tokenstream.__all__)

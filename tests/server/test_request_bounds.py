"""What nobody should send, sent to a real server: one line for who sent it, and everybody else is served."""

from __future__ import annotations

import json
from collections.abc import Iterator

import pytest

from server.raw import Web, Wire, infer, tokens

HUGE = "[" + "[]," * 10 * 2**20 + "[]]"  # thirty megabytes that make ten million values
BAD = b"\xff"


@pytest.fixture(autouse=True)
def still_answering(wire: Wire) -> Iterator[None]:
    yield
    assert len(tokens(wire.ask(input_ids=[1], max_tokens=1))) == 1


def test_a_huge_request_parameter_is_refused_over_grpc_and_http(wire: Wire, web: Web) -> None:
    for name in ("logit_bias", "unknown"):
        told = wire.refusal(infer(name="huge", text_input="x", parameters={name: HUGE}))
        assert told.startswith("the request parameters have 3")
        assert told.endswith("[request=huge tokens=0 code=INVALID_ARG]")
        page = web.post("generate", text_input="x", stream=False, **{name: HUGE})
        assert (page.status, page.json["error"][:28]) == (400, "the request parameters have ")


def test_too_many_request_parameters_are_refused(wire: Wire) -> None:
    told = wire.refusal(infer(text_input="x", parameters={f"x-{i}": 1 for i in range(5000)}))
    assert told.startswith("a request may have at most 256 parameters, got 5000 [")


def test_many_empty_strings_are_refused_by_their_number(wire: Wire) -> None:
    told = wire.refusal(infer(text_input="x", bad_words=[""] * 200_000))
    assert told.startswith("bad_words may hold at most 64 entries, got 200000 [")


@pytest.mark.parametrize(
    ("body", "told"),
    [
        (b'{"text_input": "x", "stream": false, "id": "%b"}', "the request id is not valid UTF-8 [request=auto-"),
        (b'{"text_input": "x", "stream": false, "cache_salt": "%b"}', "a request parameter, or its name, is not valid"),
        (b'{"text_input": "x", "stream": false, "%b": 1}', "a request parameter, or its name, is not valid"),
    ],
)
def test_bytes_that_are_no_utf8_are_refused(web: Web, body: bytes, told: str) -> None:
    page = web.send("generate", body % BAD)
    assert page.status == 400
    assert page.json["error"].startswith(told)
    assert page.json["error"].endswith(" code=INVALID_ARG]")


def test_an_error_about_lines_is_one_line_and_its_tail_is_the_servers(wire: Wire) -> None:
    chat = json.dumps([{"role": "user", "content": "Hi"}])
    for said in (
        {"messages": chat, "chat_template_kwargs": json.dumps({"a\nb": 1})},
        {"input_ids": [1], "resume_fingerprint": "abc\ndef"},
    ):
        told = wire.refusal(infer(name="a\nb] [request=c code=UNAVAILABLE", **said))
        assert "\n" not in told
        assert told.endswith("[request=a_b___request_c_code_UNAVAILABLE tokens=0 code=INVALID_ARG]")

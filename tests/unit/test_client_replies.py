"""What the bytes of a response become, alone and behind others."""

from __future__ import annotations

import dataclasses
import json
import struct

import pytest
from google.protobuf.message import DecodeError
from hypothesis import given
from hypothesis import strategies as st
from tritonclient.grpc import service_pb2 as pb

from tokenstream.errors import InternalError, Overloaded
from tokenstream.replies import Reply, ReplyReader
from tokenstream.results import Timings, TokenLogprob
from unit.scripted_triton import add, add_string, failure, final_mark, token


def read(*responses: pb.ModelStreamInferResponse) -> Reply:
    """The last of them, as one reader reads it behind the others."""
    reader = ReplyReader()
    return [reader.read(response.SerializeToString()) for response in responses][-1]


def test_a_response_is_taken_apart():
    timings = {"queue": 0.5, "exact": "bitwise", "news": 1}
    logprobs = [{"token_id": 9, "logprob": -0.5, "rank": 1, "top": [[9, -0.5], [8, -1.0]]}]
    reply = read(
        token(
            3,
            " é",
            9,
            final=True,
            finish_reason="length",
            fingerprint="abc",
            seed=2**64 - 1,
            num_input_tokens=11,
            timings=json.dumps(timings),
            logprobs=json.dumps(logprobs),
        )
    )
    assert (reply.text, reply.token_ids, reply.index, reply.finish_reason) == (" é", (9,), 3, "length")
    assert (reply.fingerprint, reply.seed, reply.num_input_tokens) == ("abc", 2**64 - 1, 11)
    assert reply.timings == Timings(queue=0.5, exact="bitwise")
    assert reply.logprobs == (TokenLogprob(9, -0.5, 1, ((9, -0.5), (8, -1.0))),)
    assert reply.final
    assert reply.data


def test_an_empty_finish_reason_means_that_more_follows():
    assert read(token(0, "a", 1)).finish_reason is None


def test_a_final_mark_holds_no_data():
    reply = read(final_mark())
    assert reply.final
    assert not reply.data


def test_an_error_text_becomes_an_error_of_its_kind_behind_which_nothing_follows():
    reply = read(failure("[request id: r6] Exceeds maximum queue size"))
    assert isinstance(reply.error, Overloaded)
    assert reply.final


def _malformed() -> list[pb.ModelStreamInferResponse]:
    long_string, odd, unknown, missing, not_text, not_json = (pb.ModelStreamInferResponse() for _ in range(6))
    add(long_string, "text_output", "BYTES", struct.pack("<I", 99) + b"x")
    add(odd, "token_ids", "INT32", b"\x01\x02\x03")
    add(unknown, "token_ids", "FP8", b"\x01")
    missing.infer_response.outputs.add(name="index", datatype="INT32", shape=[1, 1])
    add(not_text, "text_output", "BYTES", struct.pack("<I", 1) + b"\xff")
    add_string(not_json, "timings", "{")
    wrong = []
    for timings in ("[1]", "null", "[" * 100_000, '{"queue": "a"}', '{"preemptions": [1]}'):
        wrong.append(pb.ModelStreamInferResponse())
        add_string(wrong[-1], "timings", timings)
    return [long_string, odd, unknown, missing, not_text, not_json, *wrong]


@pytest.mark.parametrize("response", _malformed())
def test_a_malformed_response_is_an_internal_error(response):
    error = read(response).error
    assert isinstance(error, InternalError)
    assert "malformed" in str(error)


@st.composite
def responses(draw: st.DrawFn) -> pb.ModelStreamInferResponse:
    """Like a server's, or nearly: tensors of few names in any order, of any length."""
    made = pb.ModelStreamInferResponse()
    body = made.infer_response
    body.model_name = draw(st.sampled_from(["llm", "other"]))
    body.id = draw(st.sampled_from(["", "r1", "r2" * 40]))
    if draw(st.booleans()):
        body.parameters["triton_final_response"].bool_param = draw(st.booleans())
    names = draw(st.lists(st.sampled_from(["text_output", "finish_reason", "token_ids", "index", "seed"]), max_size=4))
    for name in names:
        if name in ("text_output", "finish_reason"):
            add_string(made, name, "x" * draw(st.sampled_from([0, 1, 122, 123, 124, 300, 20_000])))
        elif name == "seed":
            add(made, name, "UINT64", struct.pack("<Q", draw(st.integers(0, 2**64 - 1))))
        else:
            count = draw(st.sampled_from([1, 1, 1, 0, 40])) if name == "token_ids" else 1
            ids = draw(st.lists(st.integers(0, 2**31 - 1), min_size=count, max_size=count))
            add(made, name, "INT32", struct.pack(f"<{count}i", *ids))
    if draw(st.sampled_from([False] * 9 + [True])):
        made.error_message = "no [request=r1 tokens=0 code=INTERNAL]"
    if names and draw(st.sampled_from([False] * 9 + [True])):
        del body.raw_output_contents[0]
    return made


@given(st.lists(responses(), min_size=2, max_size=6))
def test_what_was_read_before_changes_nothing(earlier):
    assert plain(read(*earlier)) == plain(read(earlier[-1]))
    assert plain(read(*earlier, *earlier)) == plain(read(earlier[-1]))


@given(st.data())
def test_bytes_that_are_cut_or_changed_are_read_as_protobuf_reads_them(data):
    reader = ReplyReader()
    whole = token(4, " sea", 9).SerializeToString()
    reader.read(whole)
    at = data.draw(st.integers(0, len(whole)))
    bytes_ = data.draw(st.sampled_from([whole[:at], whole[:at] + data.draw(st.binary(max_size=3)) + whole[at + 1 :]]))
    try:
        expected = ReplyReader().read(bytes_)
    except DecodeError:
        with pytest.raises(DecodeError):
            reader.read(bytes_)
    else:
        assert plain(reader.read(bytes_)) == plain(expected)


def plain(reply: Reply) -> dict[str, object]:
    """A reply whose error can be compared."""
    return dataclasses.asdict(dataclasses.replace(reply, error=None)) | {"error": str(reply.error)}


def test_a_token_behind_another_is_read_without_protobuf(monkeypatch):
    reader = ReplyReader()
    reader.read(token(0, "a", 1).SerializeToString())
    monkeypatch.setattr("tokenstream.replies.pb", None)
    assert reader.read(token(1, " longer", 70_000).SerializeToString()).text == " longer"

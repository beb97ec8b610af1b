"""An answer is the same beside any neighbours, and when it is cut anywhere and resumed."""

from __future__ import annotations

import json
import threading
from collections.abc import Sequence
from typing import Any

import pytest
from tritonclient.grpc import service_pb2 as pb

from server.conftest import WITH_THE_DEFAULT_MODEL, eos_token_ids
from server.raw import Response, Wire, infer, text, tokens
from tokenstream import Client, Completion, ServerInfo
from tokenstream.server import TritonServer
from waiting import WAIT

pytestmark = WITH_THE_DEFAULT_MODEL
PROMPT = "Once upon a time there was"
KINDS = (
    {"temperature": 0.0},
    {"temperature": 0.8, "top_p": 0.9},
    {"temperature": 1.5, "top_k": 20, "presence_penalty": 1.0},
    {"temperature": 1.0, "min_p": 0.05, "frequency_penalty": 0.5},
    {"temperature": 0.0, "repetition_penalty": 1.4},
    {"temperature": 1.0, "sampling_parameters": '{"logprobs": 1, "stop": "e "}'},
)


def mixed(i: int) -> pb.ModelInferRequest:
    """Request `i` of a crowd: prompts of different length and kind, each way to sample, streamed or not."""
    words = f"Number {i}." + " tell me more" * (i * 7 % 40)
    prompt: dict[str, Any] = {"text_input": words}
    if i % 5 == 4:
        prompt = {"messages": json.dumps([{"role": "user", "content": words}])}
    return infer(**prompt, **KINDS[i % len(KINDS)], seed=i, max_tokens=4 + i % 9, stream=i % 4 != 3)


def spoken(answer: Sequence[Response]) -> tuple[list[int], str, str]:
    return tokens(answer), text(answer), answer[-1]["finish_reason"]


def test_32_streams_at_once_equal_the_same_requests_one_by_one(wire: Wire, info: ServerInfo) -> None:
    requests = [mixed(i) for i in range(32)]
    together = wire.together(requests)
    alone = [wire.answers(request) for request in requests]
    for crowd, single in zip(together, alone, strict=True):
        assert [response["index"] for response in crowd] == list(range(len(crowd)))
        if info.exact == "bitwise":
            assert spoken(crowd) == spoken(single)


def test_two_clients_at_once_get_their_own_answers(server: TritonServer, wire: Wire, info: ServerInfo) -> None:
    found: dict[int, list[Completion]] = {0: [], 1: []}

    def talk(number: int) -> None:
        with Client(server.grpc_url) as client:
            streams = [client.stream(f"Client {number} says {i}", max_tokens=6, seed=i) for i in range(3)]
            found[number] = [stream.final() for stream in streams]

    threads = [threading.Thread(target=talk, args=(number,)) for number in found]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(WAIT)
    for number, answers in found.items():
        assert len(answers) == 3
        for i, answer in enumerate(answers):
            expected = wire.ask(text_input=f"Client {number} says {i}", max_tokens=6, seed=i)
            assert answer.fingerprint == expected[0]["fingerprint"]
            assert answer.usage.output_tokens == len(answer.token_ids)
            if info.exact == "bitwise":
                assert list(answer.token_ids) == tokens(expected)


@pytest.mark.parametrize("kind", [KINDS[0], KINDS[2], KINDS[4]], ids=["greedy", "sampled", "penalised"])
def test_an_answer_resumed_anywhere_goes_on_as_if_uncut(wire: Wire, info: ServerInfo, kind: dict[str, Any]) -> None:
    asked = {"text_input": PROMPT, "max_tokens": 14, "seed": 11, "ignore_eos": True, **kind}
    whole = wire.ask(**asked)
    for cut in (1, 6, 13):
        rest = wire.ask(**asked, resume_token_ids=tokens(whole)[:cut], resume_fingerprint=whole[0]["fingerprint"])
        assert [response["index"] for response in rest] == list(range(cut, 14))
        assert rest[0]["num_input_tokens"] == whole[0]["num_input_tokens"]
        assert rest[0]["fingerprint"] == whole[0]["fingerprint"]
        assert rest[0]["seed"] == 11
        assert sum(response["num_output_tokens"] for response in rest) == 14 - cut
        assert rest[-1]["finish_reason"] == "length"
        if info.exact == "bitwise":
            assert spoken(rest) == spoken(whole[cut:])


def test_a_stop_string_that_began_before_the_cut_still_ends_the_answer(wire: Wire, info: ServerInfo) -> None:
    asked = {"text_input": PROMPT, "max_tokens": 14, "temperature": 0.0, "ignore_eos": True}
    whole = wire.ask(**asked)
    stop = whole[4]["text_output"] + whole[5]["text_output"][:2]
    assert text(whole).index(stop) == len(text(whole[:4]))
    rest = wire.ask(**asked, stop_words=[stop], resume_token_ids=tokens(whole)[:5])
    assert text(rest) == ""
    assert (rest[0]["index"], rest[-1]["finish_reason"]) == (5, "stop")
    missed = wire.ask(**asked, stop_words=[stop[:-1] + "#"], resume_token_ids=tokens(whole)[:5])
    assert text(missed) == text(whole[4:])


def test_tokens_that_already_end_the_answer_get_the_reason_alone(wire: Wire, info: ServerInfo) -> None:
    ends = eos_token_ids(info)
    assert len(ends) == 2  # of the text, and of a turn
    for extra, ids, reason in (
        ({}, [5, 6, 7], "length"),
        *(({}, [5, end], "stop") for end in ends),
        ({"stop_token_ids": [6]}, [5, 6], "stop"),
    ):
        (only,) = wire.ask(text_input=PROMPT, max_tokens=3, resume_token_ids=ids, seed=4, **extra)
        assert only.final
        assert tokens([only]) == []
        assert (only["text_output"], only["finish_reason"], only["index"]) == ("", reason, len(ids))
        assert only["num_output_tokens"] == 0
        assert only["fingerprint"]


def test_a_server_refuses_to_continue_another_ones_answer(wire: Wire) -> None:
    whole = wire.ask(text_input=PROMPT, max_tokens=3)
    ids, fingerprint = tokens(whole), whole[0]["fingerprint"]
    other = fingerprint[:-1] + ("0" if fingerprint[-1] != "0" else "1")
    for prompt, claimed in ((PROMPT, other), (PROMPT + " not", fingerprint)):
        request = infer(text_input=prompt, max_tokens=9, resume_token_ids=ids, resume_fingerprint=claimed)
        message = wire.refusal(request)
        assert message.startswith("resume_mismatch")
        assert message.endswith("code=INVALID_ARG]")

"""Text, tokens and end of an answer do not depend on where it was cut, whatever its sampling and its characters.

The servers here have a model of a few pieces, some of them parts of characters, and the engine's own text handling;
what they draw depends on all tokens of the answer. That the real engine goes on the same is shown in tests/engine.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import grpc
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tritonclient.grpc import service_pb2 as pb

from llm_engine.request import SamplingParams
from llm_engine.text import TextStream
from tokenstream import Chunk, Client
from unit.scripted_triton import Script, ScriptedCall, ScriptedTriton, inputs, token

# The parts of a character stand in order: \u00e9, \u4e2d, an emoji, and a family of two whose joiner is a piece too.
PIECES = (
    *(b"the", b" sea", b"ee", b"ab", b"ba", b".", b"\n"),
    *(b"\xc3", b"\xa9"),
    *(b"\xe4\xb8", b"\xad"),
    *(b"\xf0\x9f", b"\x98", b"\x80"),
    *(b"\xf0\x9f\x91\xa9", b"\xe2\x80", b"\x8d", b"\xf0\x9f\x91\xa7"),
)
FOLLOWED = frozenset({7, 9, 11, 12, 14, 15, 16})  # by the next piece, nearly always
TOKENS = 20


class Pieces:
    """A tokenizer whose id i is the bytes PIECES[i]."""

    def decode(self, token_ids: list[int], *, skip_special_tokens: bool, clean_up_tokenization_spaces: bool) -> str:
        return b"".join(PIECES[i] for i in token_ids).decode("utf-8", errors="replace")


def draw(sampling: Mapping[str, Any], answer: Sequence[int]) -> int:
    """The next token: noise of (seed, position), less what each penalty takes from tokens of the answer."""
    noise = random.Random(f"{sampling['seed']}/{len(answer)}")
    scores = [noise.random() for _ in PIECES]
    if answer and answer[-1] in FOLLOWED:
        scores[answer[-1] + 1] += 3.0
    for index in set(answer):
        scores[index] -= sampling["presence_penalty"] + sampling["frequency_penalty"] * answer.count(index)
        scores[index] /= sampling["repetition_penalty"]
    return scores.index(max(scores))


def model(at: int | None = None) -> Script:
    """A script that answers, or goes on; fresh answers lose their connection behind `at` tokens."""

    def script(request: pb.ModelInferRequest, call: ScriptedCall) -> Iterator[pb.ModelStreamInferResponse]:
        asked: dict[str, Any] = inputs(request)
        sampling, begun = asked["sampling_parameters"], asked.get("resume_token_ids", [])
        text = TextStream(Pieces(), [], SamplingParams(stop=tuple(sampling["stop"])))
        for each in begun:
            text.push(each)
        answer = list(begun)
        reason = ""
        while not reason:
            if not begun and len(answer) == at:
                call.context.abort(grpc.StatusCode.UNAVAILABLE, "Socket closed")
            answer.append(draw(sampling, answer))
            fresh = text.push(answer[-1])
            reason = "stop" if text.stopped else "length" if len(answer) == sampling["max_tokens"] else ""
            if reason:
                fresh += text.flush()
            first = {"fingerprint": "print"} if len(answer) == len(begun) + 1 else {}
            yield token(len(answer) - 1, fresh, answer[-1], final=bool(reason), finish_reason=reason, **first)

    return script


def ask(urls: Sequence[str], sampling: Mapping[str, Any]) -> tuple[list[Chunk], int]:
    with Client(urls) as client, client.stream("x", **sampling) as stream:
        return list(stream), stream.resumes


@pytest.fixture(scope="module")
def servers() -> Iterator[tuple[ScriptedTriton, ScriptedTriton]]:
    """One whose script cuts, and one that never does."""
    first, second = ScriptedTriton(model()), ScriptedTriton(model())
    yield first, second
    first.close()
    second.close()


penalties = st.sampled_from([0.0, 0.3, 1.5])


@settings(max_examples=30, deadline=None)
@given(
    seed=st.integers(0, 2**63 - 1),
    presence=penalties,
    frequency=penalties,
    repetition=st.sampled_from([1.0, 1.4]),
    stop=st.none() | st.tuples(st.integers(2, 30), st.integers(1, 8)),
)
def test_an_answer_is_the_same_wherever_it_is_cut(
    servers: tuple[ScriptedTriton, ScriptedTriton],
    seed: int,
    presence: float,
    frequency: float,
    repetition: float,
    stop: tuple[int, int] | None,
) -> None:
    first, second = servers
    sampling: dict[str, Any] = {
        "max_tokens": TOKENS,
        "seed": seed,
        "presence_penalty": presence,
        "frequency_penalty": frequency,
        "repetition_penalty": repetition,
        "stop": ["never said"],
    }
    uncut, _ = ask([second.url], sampling)
    if stop is not None:  # what the answer does say, so that it ends inside it
        text = "".join(chunk.text for chunk in uncut)
        sampling["stop"].append(text[stop[0] :][: stop[1]] or text[-1])
        uncut, _ = ask([second.url], sampling)
        assert sampling["stop"][-1] not in "".join(chunk.text for chunk in uncut)
    for at in range(len(uncut)):
        first.script = model(at)
        assert ask([first.url, second.url], sampling) == (uncut, int(at > 0))


def test_the_answers_here_hold_characters_that_a_cut_divides(servers: tuple[ScriptedTriton, ScriptedTriton]) -> None:
    sampling: dict[str, Any] = dict.fromkeys(("presence_penalty", "frequency_penalty"), 0.0)
    sampling |= {"repetition_penalty": 1.0, "max_tokens": TOKENS, "stop": []}
    texts = []
    for seed in range(8):
        chunks, _ = ask([servers[1].url], sampling | {"seed": seed})
        texts += [chunk.text for chunk in chunks]
    assert "" in texts
    assert {"\u00e9", "\u4e2d", "\U0001f600"} <= set("".join(texts))

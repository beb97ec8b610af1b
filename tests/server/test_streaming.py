"""How an answer arrives: one response per token, in order, with one end that says why."""

from __future__ import annotations

import json
from collections.abc import Sequence

import pytest

from server.conftest import eos_token_ids
from server.raw import Response, Wire, infer, text, tokens
from tokenstream import Client, ServerInfo

PROMPT = "The capital of France is"


@pytest.fixture(scope="module")
def plain(wire: Wire) -> list[Response]:
    """A greedy answer of 24 tokens."""
    return wire.ask(text_input=PROMPT, max_tokens=24, temperature=0.0, ignore_eos=True)


def pieces(responses: Sequence[Response]) -> list[str]:
    return [response["text_output"] for response in responses]


def test_every_token_is_one_response_in_order_and_the_last_is_final(plain: list[Response]) -> None:
    assert [response["index"] for response in plain] == list(range(24))
    assert [len(response.tensors["token_ids"]) for response in plain] == [1] * 24
    assert [response.final for response in plain] == [False] * 23 + [True]
    assert [response["finish_reason"] for response in plain] == [""] * 23 + ["length"]


def test_fingerprint_and_seed_come_first_and_timings_last(plain: list[Response], info: ServerInfo) -> None:
    for name in ("fingerprint", "seed"):
        assert [name in response.tensors for response in plain] == [True] + [False] * 23
    assert ["timings" in response.tensors for response in plain] == [False] * 23 + [True]
    timings = json.loads(plain[-1]["timings"])
    assert timings["exact"] == info.exact
    assert timings["preemptions"] == 0
    assert timings["first_token"] == pytest.approx(timings["queue"] + timings["prefill"])
    assert all(timings[stage] >= 0 for stage in ("queue", "prefill", "decode"))


def test_outputs_have_a_batch_dimension_of_one(plain: list[Response]) -> None:
    assert {shape for response in plain for shape in response.shapes.values()} == {(1, 1)}


def test_token_counts_add_up(wire: Wire, client: Client, plain: list[Response]) -> None:
    prompt = client.tokenize(PROMPT)
    assert {response["num_input_tokens"] for response in plain} == {len(prompt)}
    assert sum(response["num_output_tokens"] for response in plain) == len(tokens(plain))


def test_the_text_is_what_the_tokens_decode_to(wire: Wire, client: Client, plain: list[Response]) -> None:
    wild = [
        infer(text_input="日本語とemoji 🎉:", max_tokens=24, temperature=3.0, seed=seed, ignore_eos=True)
        for seed in range(8)
    ]
    for answer in (plain, *wire.together(wild)):
        assert text(answer) == client.detokenize(tokens(answer))


def test_one_response_holds_the_whole_answer_without_streaming(wire: Wire, plain: list[Response]) -> None:
    (whole,) = wire.ask(text_input=PROMPT, max_tokens=24, temperature=0.0, ignore_eos=True, stream=False)
    assert whole.final
    assert tokens([whole]) == tokens(plain)
    assert whole["text_output"] == text(plain)
    assert whole["index"] == 0
    assert whole["num_output_tokens"] == 24
    assert whole["fingerprint"] == plain[0]["fingerprint"]
    assert json.loads(whole["timings"]).keys() == json.loads(plain[-1]["timings"]).keys()
    (echoed,) = wire.ask(
        text_input=PROMPT,
        max_tokens=24,
        temperature=0.0,
        ignore_eos=True,
        stream=False,
        exclude_input_in_output=False,
    )
    assert echoed["text_output"] == PROMPT + text(plain)


def test_only_requested_outputs_are_sent(wire: Wire) -> None:
    wanted = ["text_output", "index", "timings"]
    answer = wire.ask(text_input=PROMPT, max_tokens=3, temperature=0.0, outputs=wanted)
    assert [set(response.tensors) for response in answer] == [set(wanted[:2]), set(wanted[:2]), set(wanted)]
    assert [response.final for response in answer] == [False, False, True]


def test_a_stop_string_across_tokens_cuts_the_text(wire: Wire, plain: list[Response]) -> None:
    whole, parts = text(plain), pieces(plain)
    stop = parts[5][-2:] + parts[6][:2]
    assert stop not in parts[5]
    assert stop not in parts[6]
    until = whole.index(stop)
    for include, expected in ((False, whole[:until]), (True, whole[: until + len(stop)])):
        sampling = json.dumps({"temperature": 0, "max_tokens": 24, "stop": stop, "include_stop_str_in_output": include})
        answer = wire.ask(text_input=PROMPT, sampling_parameters=sampling, ignore_eos=True)
        assert text(answer) == expected
        assert answer[-1]["finish_reason"] == "stop"
        assert tokens(answer) == tokens(plain)[: len(tokens(answer))]


def test_the_first_of_several_stop_words_ends_the_answer(wire: Wire, plain: list[Response]) -> None:
    whole, parts = text(plain), pieces(plain)
    early, late = (parts[3] + parts[4]).strip(" "), parts[10] + parts[11]
    answer = wire.ask(
        text_input=PROMPT, stop_words=[late, early, "never written"], temperature=0.0, max_tokens=24, ignore_eos=True
    )
    assert text(answer) == whole[: min(whole.index(early), whole.index(late))]
    assert answer[-1]["finish_reason"] == "stop"


def test_a_stop_token_ends_the_answer_and_has_no_text(wire: Wire, plain: list[Response]) -> None:
    end = tokens(plain)[6]
    first = tokens(plain).index(end)
    asked = {"text_input": PROMPT, "stop_token_ids": [end], "temperature": 0.0, "max_tokens": 24, "ignore_eos": True}
    answer = wire.ask(**asked)
    assert tokens(answer) == tokens(plain)[: first + 1]
    assert answer[-1]["finish_reason"] == "stop"
    assert text(answer) == text(plain[:first])
    included = wire.ask(**asked, sampling_parameters='{"include_stop_str_in_output": true}')
    assert text(included) == text(plain[: first + 1])


def test_eos_ends_the_answer_unless_it_is_ignored_or_too_early(wire: Wire, info: ServerInfo) -> None:
    (eos,) = eos_token_ids(info)
    sampling = json.dumps({"logit_bias": {str(eos): 100}, "temperature": 0, "max_tokens": 5})
    (only,) = wire.ask(text_input=PROMPT, sampling_parameters=sampling)
    assert (tokens([only]), only["text_output"], only["finish_reason"]) == ([eos], "", "stop")
    late = wire.ask(text_input=PROMPT, sampling_parameters=sampling, min_tokens=3)
    assert eos not in tokens(late)[:3]
    assert (tokens(late)[3:], late[-1]["finish_reason"]) == ([eos], "stop")
    ignored = wire.ask(text_input=PROMPT, sampling_parameters=sampling, ignore_eos=True)
    assert (tokens(ignored), ignored[-1]["finish_reason"]) == ([eos] * 5, "length")


def test_the_same_seed_gives_the_same_answer_and_another_seed_another(wire: Wire) -> None:
    sampled = {"text_input": PROMPT, "max_tokens": 12, "temperature": 1.5, "ignore_eos": True}
    first, again, other = (wire.ask(**sampled, seed=seed) for seed in (2**64 - 1, 2**64 - 1, 2**64 - 2))
    assert first[0]["seed"] == 2**64 - 1
    assert tokens(first) == tokens(again)
    assert tokens(first) != tokens(other)
    drawn = wire.ask(**sampled)
    assert tokens(wire.ask(**sampled, seed=drawn[0]["seed"])) == tokens(drawn)


def test_top_k_of_one_is_greedy(wire: Wire, plain: list[Response]) -> None:
    assert tokens(wire.ask(text_input=PROMPT, max_tokens=24, temperature=1.0, top_k=1, ignore_eos=True)) == tokens(
        plain
    )


def test_logprobs_describe_each_token(wire: Wire, plain: list[Response]) -> None:
    for asked, best in (({"sampling_parameters": '{"logprobs": 2}'}, 2), ({"return_log_probs": True}, 0)):
        answer = wire.ask(text_input=PROMPT, max_tokens=6, temperature=0.0, **asked)
        assert tokens(answer) == tokens(plain)[:6]
        for response, token in zip(answer, tokens(answer), strict=True):
            (entry,) = json.loads(response["logprobs"])
            assert (entry["token_id"], entry["rank"]) == (token, 1)
            assert entry["logprob"] < 0
            assert len(entry["top"]) == best
            assert [top for top, _ in entry["top"][:1]] == [token] * bool(best)
            assert [value for _, value in entry["top"]] == sorted((v for _, v in entry["top"]), reverse=True)
    assert all("logprobs" not in response.tensors for response in plain)


def test_biased_and_bad_words_are_not_written(wire: Wire, plain: list[Response]) -> None:
    first, word = tokens(plain)[0], pieces(plain)[0].strip()
    asked = {"text_input": PROMPT, "max_tokens": 12, "temperature": 0.0, "ignore_eos": True}
    biased = wire.ask(**asked, sampling_parameters=json.dumps({"logit_bias": {first: -100}}))
    assert first not in tokens(biased)
    forced = wire.ask(**asked, sampling_parameters=json.dumps({"logit_bias": {first: 100}}))
    assert tokens(forced) == [first] * 12
    assert word not in text(wire.ask(**asked, bad_words=[word]))


def test_a_sampling_value_means_the_same_wherever_it_stands(wire: Wire) -> None:
    values = {"temperature": 0.9, "top_p": 0.8, "top_k": 40, "seed": 7, "max_tokens": 8, "repetition_penalty": 1.3}
    ways = (
        {"sampling_parameters": json.dumps(values)},
        {"sampling_parameters": json.dumps({name: str(value) for name, value in values.items()})},
        values,
        {"parameters": values},
        {"sampling_parameters": json.dumps(values), **values},
    )
    answers = [tokens(wire.ask(text_input=PROMPT, **way)) for way in ways]
    assert answers == [answers[0]] * len(ways)


def test_our_client_tells_the_same_story(client: Client, plain: list[Response]) -> None:
    with client.stream(PROMPT, max_tokens=24, temperature=0, ignore_eos=True, logprobs=1) as stream:
        chunks = list(stream)
    assert [chunk.text for chunk in chunks] == pieces(plain)
    assert list(stream.token_ids) == tokens(plain)
    assert [entry.token_id for chunk in chunks for entry in chunk.logprobs] == tokens(plain)
    assert stream.finish_reason == "length"
    assert stream.fingerprint == plain[0]["fingerprint"]

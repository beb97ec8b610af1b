"""Operations without an answer, and requests shaped as clients of other backends send them."""

from __future__ import annotations

import json

from server.conftest import eos_token_ids
from server.raw import Wire, add, infer, text, tokens
from tokenstream import Client, ServerInfo

PROMPT = "The capital of France is"


def test_tokenize_and_detokenize_are_inverse(wire: Wire, client: Client) -> None:
    for words in (PROMPT, "naïve 日本語 🎉\n\tdef f(x):", " leading and trailing "):
        (reply,) = wire.ask(operation="tokenize", text_input=words)
        ids = reply.tensors["token_ids"]
        assert reply.final
        assert reply["num_input_tokens"] == len(ids)
        assert reply.shapes["token_ids"] == (1, len(ids))
        (back,) = wire.ask(operation="detokenize", input_ids=list(ids))
        assert (back["text_output"], back.final) == (words, True)
        assert client.detokenize(client.tokenize(words)) == words


def test_tokenize_of_messages_is_the_prompt_of_a_chat(wire: Wire) -> None:
    chat = {"messages": json.dumps([{"role": "user", "content": "Hi"}])}
    (reply,) = wire.ask(operation="tokenize", **chat)
    answer = wire.ask(**chat, max_tokens=4, temperature=0.0)
    assert answer[0]["num_input_tokens"] == reply["num_input_tokens"]
    same = wire.ask(input_ids=list(reply.tensors["token_ids"]), max_tokens=4, temperature=0.0)
    assert tokens(same) == tokens(answer)
    assert same[0]["fingerprint"] == answer[0]["fingerprint"]


def test_info_says_what_a_client_must_know(wire: Wire, info: ServerInfo) -> None:
    (reply,) = wire.ask(operation="info")
    told = json.loads(reply["text_output"])
    assert told == info.details
    assert told["exact"] in ("bitwise", "sampled")
    assert told["max_sequences"] == 32
    assert told["max_context"] == 8192
    assert told["chat"] is True
    assert {"model", "dtype", "digest", "arithmetic", "eos_token_ids", "versions"} <= told.keys()
    assert {"threads_from", "kv_cache_mib", "kv_cache_from"} <= told.keys()
    assert {"weight_format", "weights_mib", "weights_form"} <= told.keys()
    computing = (
        f"weights {told['weight_format']}" if told["kernels"] == "native" else f"torch {told['versions']['torch']}"
    )
    assert computing in told["arithmetic"]


def test_a_tensorrt_llm_shaped_request_is_understood(wire: Wire, info: ServerInfo) -> None:
    (eos,) = eos_token_ids(info)
    ours = wire.ask(text_input=PROMPT, max_tokens=6, temperature=0.0)
    theirs = wire.ask(
        text_input=PROMPT,
        max_tokens=6,
        bad_words=[""],
        stop_words=[""],
        end_id=eos,
        pad_id=eos,
        top_k=1,
        top_p=1.0,
        temperature=1.0,
        beam_width=1,
        stream=True,
        min_tokens=1,
        repetition_penalty=1.0,
        return_log_probs=True,
        return_num_input_tokens=True,
        return_num_output_tokens=True,
        guided_decoding_guide="",
        outputs=["text_output", "num_input_tokens", "num_output_tokens", "logprobs"],
    )
    assert text(theirs) == text(ours)
    for response in theirs:
        assert set(response.tensors) == {"text_output", "num_input_tokens", "num_output_tokens", "logprobs"}
        assert set(response.shapes.values()) == {(1, 1)}
        assert response["num_output_tokens"] == 1
    assert theirs[-1].final


def test_an_end_id_ends_the_answer_like_a_stop_token(wire: Wire) -> None:
    whole = tokens(wire.ask(text_input=PROMPT, max_tokens=8, temperature=0.0))
    answer = wire.ask(text_input=PROMPT, max_tokens=8, temperature=0.0, end_id=whole[3], pad_id=-1)
    assert tokens(answer) == whole[: whole.index(whole[3]) + 1]
    assert answer[-1]["finish_reason"] == "stop"
    assert tokens(wire.ask(text_input=PROMPT, max_tokens=8, temperature=0.0, end_id=-1)) == whole


def test_several_stop_words_come_as_one_row(wire: Wire) -> None:
    whole = wire.ask(text_input=PROMPT, max_tokens=8, temperature=0.0)
    request = infer(text_input=PROMPT, max_tokens=8, temperature=0.0)
    add(request, "stop_words", "BYTES", [1, 3], ["", "never written", whole[2]["text_output"]])
    assert text(wire.answers(request)) == text(whole)[: text(whole).index(whole[2]["text_output"])]

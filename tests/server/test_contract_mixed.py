"""Good and bad requests that come at once: each gets the end it would get alone."""

from __future__ import annotations

import pytest

from server.raw import Wire, add, infer, text, tokens

PROMPT = "The capital of France is"
GREEDY = {"text_input": PROMPT, "max_tokens": 8, "temperature": 0.0, "ignore_eos": True}


@pytest.mark.parametrize("round_", range(3))
def test_each_of_eight_mixed_requests_gets_its_own_end(wire: Wire, round_: int) -> None:
    alone = wire.ask(**GREEDY)
    stop = alone[3]["text_output"]
    unknown = infer(text_input=PROMPT, max_tokens=1)
    add(unknown, "wings", "INT32", [1, 1], [2])
    mixed = [
        infer(name="whole", stream=False, **GREEDY),
        infer(name="range", text_input=PROMPT, max_tokens=-1),
        infer(name="streamed", **GREEDY),
        infer(name="json", text_input=PROMPT, sampling_parameters="{"),
        infer(name="stopped", stop_words=[stop], **GREEDY),
        infer(name="both", text_input=PROMPT, input_ids=[1]),
        infer(name="tokens", operation="tokenize", text_input=PROMPT),
        unknown,
    ]
    whole, in_range, streamed, in_json, stopped, both, tokenized, unheard = wire.together(mixed)
    assert [len(answer) for answer in (whole, in_range, in_json, both, tokenized, unheard)] == [1] * 6
    assert tokens(whole) == tokens(streamed) == tokens(alone)
    assert text(whole) == text(streamed) == text(alone)
    assert text(stopped) == text(alone).partition(stop)[0]
    assert stopped[-1]["finish_reason"] == "stop"
    assert [response.final for response in streamed] == [False] * 7 + [True]
    assert tokenized[0]["num_input_tokens"] == alone[0]["num_input_tokens"]
    assert "max_tokens must be at least 1, got -1 [request=range tokens=0 code=INVALID_ARG]" in in_range[0].error
    assert "sampling_parameters is not valid JSON" in in_json[0].error
    assert "got text_input and input_ids" in both[0].error
    assert "wings" in unheard[0].error

"""The server's greedy answers against transformers' own eager model and `generate`, and prompts against its tokenizer.

Both have the weights of the file's own 4-bit blocks. The server rounds activations, to eight bits by default, and the
reference does not, so that a token counts as right where the reference, given the same tokens before it, finds none
better by more than a small margin.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from datetime import datetime
from typing import Any

import pytest
import torch
from transformers import AutoTokenizer

from llm_tools.prepared import Prepared, load_reference, prepare_source
from server.conftest import WITH_THE_DEFAULT_MODEL, eos_token_ids
from server.raw import Wire, infer, text, tokens
from tokenstream import Client, ServerInfo

pytestmark = WITH_THE_DEFAULT_MODEL
MARGIN = 0.5  # of logits around 20, whose bfloat16 neighbours are 0.125 apart
Q8DOT_MARGIN = 1.0  # where activations are rounded to eight bits; 0.55 was seen
CHATS: tuple[list[dict[str, Any]], ...] = (
    [{"role": "user", "content": "What is 2 + 2?"}],
    [
        {"role": "system", "content": "You are terse."},
        {"role": "user", "content": "Name a colour. 🎨"},
        {"role": "assistant", "content": "Blue."},
        {"role": "user", "content": [{"type": "text", "text": "Another "}, {"type": "text", "text": "one."}]},
    ],
)
TEXTS = ("The capital of France is", "def fibonacci(n):\n", "日本の首都は", " 1, 2, 3, 4,")


@pytest.fixture(scope="module")
def prepared(info: ServerInfo) -> Prepared:
    return prepare_source(info.model)


@pytest.fixture(scope="module")
def margin(info: ServerInfo) -> float:
    return Q8DOT_MARGIN if "q8dot" in info.details["arithmetic"] else MARGIN


@pytest.fixture(scope="module")
def tokenizer(prepared: Prepared) -> Any:
    return AutoTokenizer.from_pretrained(prepared.folder)


@pytest.fixture(scope="module")
def reference(prepared: Prepared) -> Iterator[Any]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield load_reference(prepared, attention="eager")
    torch.set_num_threads(threads)


def regret(reference: Any, prompt: list[int], answer: list[int]) -> torch.Tensor:
    """By how much the reference's best logit exceeds the answer's, at each of its positions."""
    with torch.inference_mode():
        logits: torch.Tensor = reference(torch.tensor([prompt + answer])).logits[0, len(prompt) - 1 : -1]
    return logits.amax(-1) - logits[torch.arange(len(answer)), torch.tensor(answer)]


def test_greedy_answers_are_those_of_generate_but_for_near_ties(
    wire: Wire, tokenizer: Any, reference: Any, margin: float
) -> None:
    asked: dict[str, Any] = {"max_tokens": 24, "temperature": 0.0}
    answers = wire.together([infer(text_input=words, **asked) for words in TEXTS])
    exact = 0
    for words, answer in zip(TEXTS, answers, strict=True):
        prompt, ours = tokenizer(words)["input_ids"], tokens(answer)
        assert regret(reference, prompt, ours).max() < margin
        with torch.inference_mode():
            made = reference.generate(torch.tensor([prompt]), max_new_tokens=24, do_sample=False)
        theirs = made[0, len(prompt) :].tolist()
        fork = next((i for i, pair in enumerate(zip(ours, theirs, strict=False)) if pair[0] != pair[1]), len(theirs))
        exact += fork
        assert text(answer[:fork]) == tokenizer.decode(ours[:fork], skip_special_tokens=True)
        if fork < len(theirs):
            assert regret(reference, prompt, [*ours[:fork], theirs[fork]]).max() < margin
            assert regret(reference, prompt, ours[: fork + 1]).max() < margin
    assert exact >= 24  # near ties are the exception: not every answer forks at once


def test_a_chat_is_the_tokenizers_own_template(
    wire: Wire, client: Client, tokenizer: Any, reference: Any, margin: float
) -> None:
    for chat in CHATS:
        flat = [
            {**message, "content": message["content"] if isinstance(message["content"], str) else "Another one."}
            for message in chat
        ]
        expected = tokenizer.apply_chat_template(flat, add_generation_prompt=True, return_dict=False)
        (reply,) = wire.ask(operation="tokenize", messages=json.dumps(chat))
        assert list(reply.tensors["token_ids"]) == expected
        answer = client.chat(chat, max_tokens=16, temperature=0).final()
        assert answer.usage.input_tokens == len(expected)
        assert regret(reference, expected, list(answer.token_ids)).max() < margin


def test_a_chat_ends_by_itself_where_the_model_says_so(client: Client, info: ServerInfo) -> None:
    chat = [{"role": "user", "content": "Reply with the single word: yes"}]
    answer = client.chat(chat, max_tokens=200, temperature=0).final()
    assert answer.finish_reason == "stop"
    assert answer.token_ids[-1] in eos_token_ids(info)
    assert answer.text == client.detokenize(answer.token_ids)


def test_text_is_tokenized_as_the_tokenizer_does(client: Client, tokenizer: Any) -> None:
    for words in (*TEXTS, "<|im_start|>user", "a\x00b", "\r\n\t "):
        assert client.tokenize(words) == tokenizer(words)["input_ids"]


def test_logprobs_are_the_models_own(wire: Wire, tokenizer: Any, reference: Any, margin: float) -> None:
    answer = wire.ask(text_input=TEXTS[0], max_tokens=6, temperature=0.7, seed=3, sampling_parameters='{"logprobs": 3}')
    prompt = tokenizer(TEXTS[0])["input_ids"]
    with torch.inference_mode():
        logits = reference(torch.tensor([prompt + tokens(answer)])).logits[0, len(prompt) - 1 : -1]
    expected = torch.log_softmax(logits, -1)
    for response, row in zip(answer, expected, strict=True):
        (entry,) = json.loads(response["logprobs"])
        for token, logprob in [(entry["token_id"], entry["logprob"]), *entry["top"]]:
            assert logprob == pytest.approx(row[token].item(), abs=margin)


def test_a_template_time_is_taken_as_it_is(wire: Wire) -> None:
    chat = json.dumps(CHATS[0])
    asked = {"messages": chat, "max_tokens": 1, "template_time": datetime(2024, 2, 29, 12).isoformat()}  # noqa: DTZ001
    assert len(tokens(wire.ask(**asked))) == 1

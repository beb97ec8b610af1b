"""Texts are encoded and decoded by what lies behind the tokenizer, and only where that gives the same."""

from __future__ import annotations

from typing import Any
from unittest import mock

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import processors
from transformers import PreTrainedTokenizerFast

from chat_options import ChatOptions
from llm_engine.request import RequestError, check_token_ids
from prompts import PromptEncoder
from unit.test_text import byte_fallback, byte_level, metaspace, word_piece

examples = settings(max_examples=100, deadline=None)


def with_start() -> PreTrainedTokenizerFast:
    """Puts a special token before every text, and would cut it at five tokens if it were asked to."""
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=byte_level().backend_tokenizer, bos_token="<s>")
    backend = tokenizer.backend_tokenizer
    backend.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    backend.enable_truncation(5)
    backend.enable_padding(length=64)
    return tokenizer


@examples
@given(st.text(min_size=1, max_size=60), st.booleans())
def test_a_text_has_the_ids_that_the_tokenizer_gives_it(text: str, special: bool) -> None:
    for tokenizer in (byte_level(), byte_fallback(), metaspace(), with_start()):
        encoder = PromptEncoder(tokenizer, 1000, len(tokenizer))
        expected = tokenizer(text, add_special_tokens=special)["input_ids"]
        assert encoder.text("text_input", text, ChatOptions(add_special_tokens=special)) == expected


def test_a_text_is_encoded_without_the_interpreters_lock_and_without_what_nobody_needs() -> None:
    tokenizer = byte_level()
    encoder = PromptEncoder(tokenizer, 1000, len(tokenizer))
    with mock.patch.object(type(tokenizer), "__call__", side_effect=AssertionError):
        assert encoder.text("text_input", "the cat")


def test_a_text_that_leaves_no_room_for_an_answer_is_refused_only_where_there_will_be_one() -> None:
    tokenizer = byte_level()
    encoder = PromptEncoder(tokenizer, 10, len(tokenizer))
    assert len(encoder.text("text_input", "z" * 10)) == 10
    with pytest.raises(RequestError, match="the prompt has 10 tokens; at most 9 fit"):
        encoder.text("text_input", "z" * 10, fits=True)
    assert len(encoder.text("text_input", "z" * 9, fits=True)) == 9


@pytest.mark.parametrize("template", [5, True, {"default": 5}, {"tool_use": ["x"]}])
def test_a_chat_template_that_is_no_text_is_none(template: Any) -> None:
    tokenizer = byte_level()
    tokenizer.chat_template = template
    assert PromptEncoder(tokenizer, 1000, len(tokenizer)).text("text_input", "the cat")


class Segments(PreTrainedTokenizerFast):  # type: ignore[misc,unused-ignore]
    """Changes a text before it is encoded, as CPM's does."""

    def __call__(self, text: str, **options: Any) -> Any:
        return super().__call__(text.replace(" ", "_"), **options)


def test_a_tokenizer_that_changes_the_text_itself_is_asked_itself() -> None:
    tokenizer = Segments(tokenizer_object=byte_level().backend_tokenizer)
    encoder = PromptEncoder(tokenizer, 1000, len(tokenizer))
    assert encoder.text("text_input", "the cat") == tokenizer("the cat")["input_ids"]
    assert encoder.text("text_input", "the cat") != byte_level()("the cat")["input_ids"]


@examples
@given(st.lists(st.integers(0, 13), max_size=20))
def test_ids_decode_to_what_a_stream_of_them_says(ids: list[int]) -> None:
    tokenizer = word_piece()
    encoder = PromptEncoder(tokenizer, 1000, len(tokenizer))
    expected = tokenizer.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)
    assert encoder.decode("input_ids", ids) == expected


@pytest.mark.parametrize("place", [0, 4095, 4096, 9999])
@pytest.mark.parametrize("wrong", [-1, 7])
def test_the_first_id_outside_the_vocabulary_is_named_wherever_it_stands(place: int, wrong: int) -> None:
    ids = [3] * 10_000
    check_token_ids("input_ids", ids, 7)
    ids[place:] = [wrong, *[99] * (len(ids) - place - 1)]
    with pytest.raises(RequestError, match=f"input_ids must hold token ids from 0 to 6, got {wrong}"):
        check_token_ids("input_ids", ids, 7)

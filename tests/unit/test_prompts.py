"""From messages to token ids: the form that a template wants, what it is told, how it ends, and what it refuses."""

from __future__ import annotations

import json
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import datetime
from typing import Any

import pytest
import transformers
from tokenizers import Tokenizer, models, pre_tokenizers

from chat_options import ChatOptions
from llm_engine.request import Code, RequestError
from messages import read_messages
from prompts import PromptEncoder
from unit.chat_tokenizers import CHATML, PARTS, TOOLS, byte_level, unigram

HI = {"role": "user", "content": "Hi"}
NOW = datetime(2024, 2, 29, 12)  # noqa: DTZ001


def encoder(tokenizer: Any) -> PromptEncoder:
    return PromptEncoder(tokenizer, 4096, len(tokenizer))


def prompt(template: Any, *messages: dict[str, Any], **options: Any) -> str:
    """The text of the prompt that `messages`, sent as JSON, become."""
    tokenizer = byte_level(template)
    read = read_messages("messages", json.dumps(messages))
    return str(tokenizer.decode(encoder(tokenizer).messages("messages", read, NOW, ChatOptions(**options))))


def refusal(template: Any, *messages: dict[str, Any], **options: Any) -> str:
    with pytest.raises(RequestError) as refused:
        prompt(template, *messages, **options)
    return refused.value.message


@pytest.mark.parametrize("make", [byte_level, unigram])
def test_a_chat_has_the_ids_that_transformers_gives_it(make: Any) -> None:
    tokenizer = make()
    for chat in (
        [HI],
        [{"role": "system", "content": "be brief"}, HI, {"role": "assistant", "content": "a <b>  "}, HI],
        [{"role": "user", "content": "half <|im_ tags <| and | > user </tool"}],
        [{"role": "user", "content": " \n<\n<unused7> "}],
    ):
        expected = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_dict=False)
        assert encoder(tokenizer).messages("messages", chat) == expected


def test_text_parts_are_joined_for_a_template_of_strings_and_kept_for_one_of_parts() -> None:
    parts = {"role": "user", "content": [{"type": "text", "text": "a"}, "b", {"type": "input_text", "text": "c"}]}
    for template in (CHATML, PARTS):
        assert "user\nabc<|im_end|>" in prompt(template, parts)
    assert "user\nHi<|im_end|>" in prompt(PARTS, HI)


@pytest.mark.parametrize("kind", ["image_url", "image", "input_audio", "video", "file", "tool_use"])
def test_a_part_that_is_no_text_is_refused_by_its_type(kind: str) -> None:
    told = refusal(CHATML, HI, {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": kind, kind: {}}]})
    assert told == f"messages[1].content[1] is of type '{kind}'; this model reads text alone, in parts of type \"text\""


CALL = {"role": "assistant", "content": None, "tool_calls": [{"id": "c", "type": "function", "function": {}}]}


def calling(arguments: Any) -> dict[str, Any]:
    return CALL | {"tool_calls": [{"id": "c", "type": "function", "function": {"name": "f", "arguments": arguments}}]}


@pytest.mark.parametrize("arguments", ['{"x": "ä"}', {"x": "ä"}])
def test_a_template_gets_arguments_as_it_reads_them_however_they_were_sent(arguments: Any) -> None:
    for form in ("| tojson", "+ ''"):  # an object, and JSON text
        template = TOOLS.replace("ARGUMENTS", form)
        assert 'f {"x": "ä"}</tool_call>' in prompt(template, HI, calling(arguments), HI)
    for empty in ("", None, {}):
        assert "f {}</tool_call>" in prompt(TOOLS.replace("ARGUMENTS", "| tojson"), HI, calling(empty), HI)


@pytest.mark.parametrize(
    ("message", "told"),
    [
        (calling("{"), "messages[0].tool_calls[0].function.arguments is not valid JSON"),
        (calling("[1]"), "messages[0].tool_calls[0].function.arguments must be a JSON object, got list"),
        (calling(3), "messages[0].tool_calls[0].function.arguments must be a JSON object, got int"),
        (calling('{"a":' * 99_999), "messages[0].tool_calls[0].function.arguments is nested too deeply"),
        (CALL, 'messages[0].tool_calls[0] must be like {"function"'),
        (CALL | {"tool_calls": {}}, "messages[0].tool_calls must be a list"),
        (CALL | {"tool_calls": ["f"]}, 'messages[0].tool_calls[0] must be like {"function"'),
        (CALL | {"tool_calls": []}, "messages[0].content must be a string"),
        ({"role": "assistant", "content": None}, "messages[0].content must be a string"),
        ({"role": "user", "content": {"text": "x"}}, "messages[0].content must be a string"),
        ({"role": "user", "content": [5]}, "messages[0].content[0] is of type 'int'"),
        ({"role": "user", "content": [{"type": "text"}]}, 'messages[0].content[0] must hold a string called "text"'),
        ({"role": "", "content": "x"}, 'messages[0] must be an object like {"role": "user"'),
        ({"content": "x"}, 'messages[0] must be an object like {"role": "user"'),
        ({"role": ["user"], "content": "x"}, 'messages[0] must be an object like {"role": "user"'),
        (HI | {"function_call": {"name": "f"}}, "messages[0].function_call is no longer known; send tool_calls"),
    ],
)
def test_a_malformed_message_is_refused_by_its_place(message: dict[str, Any], told: str) -> None:
    assert refusal(CHATML, message).startswith(told)


def test_tool_calls_are_refused_where_the_template_would_leave_them_out() -> None:
    told = refusal(CHATML, HI, calling("{}"), HI)
    assert told == "messages[1].tool_calls: this model's chat template does not read them"


def test_tools_and_documents_go_to_a_template_that_reads_them_and_are_refused_elsewhere() -> None:
    tools = ({"type": "function", "function": {"name": "f", "description": "d<ä>"}},)
    assert '<tools>[{"type": "function", "function": {"name": "f", "description": "d<ä>"}}]</tools>' in prompt(
        TOOLS.replace("ARGUMENTS", "| tojson"), HI, tools=tools
    )
    assert refusal(CHATML, HI, tools=tools).startswith("tools: this model's chat template does not read them")
    assert refusal(CHATML, HI, documents=({"text": "x"},)).startswith("documents: this model's chat template does not")


def test_a_tokenizer_of_several_templates_takes_the_one_for_tools_where_there_are_tools() -> None:
    several = {"default": CHATML, "tool_use": TOOLS.replace("ARGUMENTS", "| tojson")}
    assert "<tools>" in prompt(several, HI, tools=({"name": "f"},))
    assert "<think>" in prompt(several, HI)


def test_variables_of_the_template_are_set_and_what_it_does_not_read_is_refused() -> None:
    thinking = CHATML.replace("<think>", "{{ '' if enable_thinking is false else '<think>' }}{{ mood }}")
    assert prompt(thinking, HI).endswith("assistant\n<think>")
    assert prompt(thinking, HI, template_kwargs={"enable_thinking": False, "mood": "glad"}).endswith("assistant\nglad")
    told = refusal(thinking, HI, template_kwargs={"colour": 1})
    assert told == "colour: this model's chat template does not read this variable; it reads enable_thinking, mood"
    assert refusal(thinking, HI, template_kwargs={"a\nb": 1}).startswith(r"'a\nb': this model's chat template")
    assert len(refusal(thinking, HI, template_kwargs={"x" * 10**6: 1})) < 300
    assert refusal(CHATML, HI, template_kwargs={"enable_thinking": True}).endswith("it reads none")
    assert prompt(CHATML, HI, template_kwargs={"enable_thinking": False}) == prompt(CHATML, HI)  # it never thinks
    for name in ("messages", "tools", "add_generation_prompt", "bos_token", "raise_exception"):
        told = refusal(CHATML, HI, template_kwargs={name: "x"})
        assert told == f"chat_template_kwargs may not hold '{name}', which the server sets"


def test_a_template_prints_the_time_that_it_is_given() -> None:
    dated = "{{ strftime_now('%d %b %Y') }} " + CHATML
    assert prompt(dated, HI).startswith("29 Feb 2024 <|im_start|>user")


SURE = {"role": "assistant", "content": "Sure, it"}


def test_a_last_message_of_the_assistants_is_refused_unless_the_request_says_what_it_means() -> None:
    told = refusal(CHATML, HI, SURE)
    assert told.startswith("messages[1] is the assistant's: send continue_final_message true to go on with it")
    assert prompt(CHATML, HI, SURE, continue_final_message=True).endswith("assistant\nSure, it")
    for options in ({"add_generation_prompt": True}, {"continue_final_message": False}):
        assert prompt(CHATML, HI, SURE, **options).endswith("Sure, it<|im_end|>\n<|im_start|>assistant\n<think>")
    assert prompt(CHATML, HI, SURE, add_generation_prompt=False).endswith("Sure, it<|im_end|>\n")
    assert prompt(CHATML, HI, add_generation_prompt=False).endswith("Hi<|im_end|>\n")


@pytest.mark.parametrize("text", ["Sure,", "Sure, ", "<think>\nWell", "ends so <|im_end|>", ""])
def test_an_answer_goes_on_right_behind_the_text_of_the_last_message(text: str) -> None:
    for template in (CHATML, PARTS, CHATML.replace("message.content", "message.content | trim")):
        asked = prompt(template, HI, SURE | {"content": text}, continue_final_message=True)
        assert asked.endswith("<|im_start|>assistant\n" + (text.rstrip() if "trim" in template else text))


def test_nothing_goes_on_with_a_message_of_somebody_else_or_one_that_the_template_hides() -> None:
    told = refusal(CHATML, HI, continue_final_message=True)
    assert told == "continue_final_message: messages[0] is of role 'user', not assistant"
    hiding = CHATML.replace("message.content", "message.content[:2]")
    assert refusal(hiding, HI, SURE, continue_final_message=True).startswith("continue_final_message: the model's chat")


def test_a_developers_message_is_the_systems_where_the_template_does_not_know_developers() -> None:
    message = {"role": "developer", "content": "x"}
    assert prompt(CHATML, message, HI).startswith("<|im_start|>system\nx")
    assert prompt("{# developer #}" + CHATML, message, HI).startswith("<|im_start|>developer\nx")


def test_reasoning_is_known_by_any_of_its_names() -> None:
    template = CHATML.replace("{{ message.content }}", "{{ message.reasoning_content }}:{{ message.content }}")
    for name in ("reasoning_content", "reasoning", "thinking"):
        assert "assistant\nwhy:Sure" in prompt(template, HI, SURE | {name: "why"}, HI)


FAILING = {
    "raise_exception('roles must alternate')": "roles must alternate",
    "raise_exception('one\ntwo')": "one",
    "raise_exception('')": "TemplateError",
    "nobody.name": "'nobody' is undefined",
    "messages[0].content.nobody.name": "has no attribute 'nobody'",
    "messages[9].content": "list object has no element 9",
    "1 // 0": "integer division or modulo by zero",
    "'a' + 1": "can only concatenate str",
    "10.0 ** 999": "Numerical result out of range",
    "'x' * 10 ** 15": "MemoryError",
    "range(10 ** 9)": "Range too big",
    "messages | tojson(indent=messages)": "can't multiply sequence",
    "'%d' % 'x'": "%d format: a real number is required",
    "messages.__class__.__mro__": "unsafe",
    "dict(1)": "not iterable",
    "'x'.encode('nothing')": "unknown encoding",
}


@pytest.mark.parametrize("fault", FAILING)
def test_whatever_a_template_raises_is_a_refusal_of_the_messages(fault: str) -> None:
    told = refusal("{{ " + fault + " }}", HI)
    assert told.startswith("messages: the model's chat template refuses them: ")
    assert FAILING[fault] in told
    assert "\n" not in told


def test_a_template_that_never_ends_its_recursion_is_a_refusal() -> None:
    told = refusal("{% macro again() %}{{ again() }}{% endmacro %}{{ again() }}", HI)
    assert "maximum recursion depth exceeded" in told


def test_a_broken_template_refuses_messages_and_leaves_text_alone() -> None:
    for broken in ("{% for %}", "{{ 'x'", "{% nothing %}", "{{ x | nothing }}"):
        assert "the model's chat template refuses them: it is broken at line 1: " in refusal(broken, HI)
        assert encoder(byte_level(broken)).text("text_input", "Hi") == byte_level()("Hi")["input_ids"]


def test_marks_for_training_print_nothing() -> None:
    marked = CHATML.replace("{{ message.content }}", "{%- generation -%} {{ message.content }} {% endgeneration %}")
    assert "user\nHi <|im_end|>" in prompt(marked.replace("\n{%-", " {%-"), HI) or "userHi" in prompt(marked, HI)


def test_the_tokenizers_own_special_tokens_come_where_they_are_asked_for() -> None:
    from tokenizers.processors import TemplateProcessing

    tokenizer = byte_level()
    bos = tokenizer.bos_token_id
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
        single="<|endoftext|> $A", special_tokens=[("<|endoftext|>", bos)]
    )
    asked = encoder(tokenizer)
    for options, in_text, in_chat in (
        (ChatOptions(), True, False),
        (ChatOptions(add_special_tokens=True), True, True),
        (ChatOptions(add_special_tokens=False), False, False),
    ):
        assert (asked.text("text_input", "Hi", options)[0] == bos) is in_text
        assert (asked.messages("messages", [HI], NOW, options)[0] == bos) is in_chat
    marked: Sequence[int] = asked.text("text_input", "a <|im_end|>", ChatOptions(parse_special=False))
    assert (marked[0], tokenizer.eos_token_id in marked) == (bos, False)


def test_any_thread_may_encode_beside_others() -> None:
    asked = encoder(byte_level())
    chats = [[{"role": "user", "content": f"{i} <|im_end|> <think> {i}" * (i % 5)}] for i in range(200)]
    alone = [asked.messages("messages", chat, NOW) for chat in chats]
    with ThreadPoolExecutor(4) as pool:
        assert list(pool.map(lambda chat: asked.messages("messages", chat, NOW), chats)) == alone


def test_a_word_that_a_vocabulary_of_words_lacks_is_the_requests_own_fault() -> None:
    words = Tokenizer(models.WordLevel({"one": 0, "two": 1}))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    tokens = encoder(transformers.PreTrainedTokenizerFast(tokenizer_object=words))
    assert tokens.text("text_input", "two one") == [1, 0]
    with pytest.raises(RequestError, match=r"text_input cannot be encoded by this model's tokenizer: .*UNK") as refused:
        tokens.text("text_input", "one three")
    assert refused.value.code is Code.INVALID_ARG

"""A model's chat template: what it can be told, in which form it wants messages, and the prompt that it makes of them.

The form is found by trying: the template is given small chats, and what it prints shows what it reads. Whatever it
refuses is a RequestError. It does not know tokens beside the text that spells them.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from typing import Any

import jinja2

from chat_options import ChatOptions
from control_tokens import ControlTokens, Marks, Span
from llm_engine.request import RequestError
from quoted import quoted
from template_environment import compiled, variables

Message = Mapping[str, Any]
_MAX_NAME = 64  # characters of a variable's name that is told as it is
_GIVEN = frozenset(
    (
        *("messages", "tools", "documents", "add_generation_prompt", "continue_final_message", "chat_template"),
        *("raise_exception", "strftime_now", "namespace", "dict", "range", "cycler", "joiner", "lipsum", "loop"),
        *("bos_token", "eos_token", "pad_token", "unk_token", "sep_token", "cls_token", "mask_token"),
    )
)
_TRUSTED = frozenset({"system", "developer", "assistant"})  # roles whose words are the application's or the model's
_IDLE: Mapping[str, tuple[Any, ...]] = {"enable_thinking": (False,), "reasoning_effort": ("none",)}
_REASONING = ("reasoning_content", "thinking", "reasoning")  # names of one thing; templates read the first or second
_TAG = "\uf8ff-end-of-the-last-message"
_LONGEST_REASON = 300
_FAILURES = (  # whatever a template, which is the model's program, can raise is about the messages that it was given
    *(jinja2.TemplateError, ArithmeticError, AssertionError, AttributeError, LookupError, MemoryError, RuntimeError),
    *(TypeError, ValueError),
)


@dataclass(frozen=True, slots=True)
class Prompt:
    """A rendered chat, and the spans of it that spell control tokens without being meant as such."""

    text: str
    spelt: Sequence[Span] = ()


class ChatTemplate:
    """One template of a tokenizer; `source` is its text."""

    def __init__(self, tokenizer: Any, source: str, controls: ControlTokens) -> None:
        self._source = source
        self._controls = controls
        self._special: Mapping[str, str] = tokenizer.special_tokens_map
        try:
            self._template, self._variables = compiled(source), variables(source)
        except jinja2.TemplateSyntaxError as error:  # which need not trouble those who send text
            reason = json.dumps(f"it is broken at line {error.lineno}: {error.message}")
            self._template, self._variables = compiled(f"{{{{ raise_exception({reason}) }}}}"), frozenset()
        asks: list[Message] = [{"role": "user", "content": "needle-1"}]
        self._wants_parts = not self._prints(asks, "needle-1") and self._prints(_in_parts(asks), "needle-1")
        called: list[Message] = [
            *asks,
            {"role": "assistant", "content": "", "tool_calls": [_call({"needle": "2"})]},
            {"role": "tool", "name": "f", "tool_call_id": "call00001", "content": "3"},
        ]
        if self._wants_parts:
            called = [*_in_parts(called)]
        self._wants_json = not self._prints(called, "needle", "2") and self._prints(_with_json(called), "needle", "2")

    def render(self, messages: Sequence[Message], options: ChatOptions, clock: datetime) -> Prompt:
        """The prompt of `messages`; its control tokens are the template's own unless `options` say otherwise."""
        self._refuse_unread(messages, options)
        fitting = [self._fitted(message) for message in messages]
        render = self._continued if options.continue_final_message else self._rendered
        if options.parse_special or not self._spells(fitting, options):
            return Prompt(render(fitting, options, clock))
        marks = Marks.unused_in("".join((self._source, *_strings(fitting), *_strings(_told(options)))))
        fitting = [self._marked_message(message, marks) for message in fitting]
        marked = replace(
            options,
            template_kwargs=self._marked(options.template_kwargs, marks, trusted=True),
            tools=tuple(self._marked(tool, marks, trusted=True) for tool in options.tools),
            documents=tuple(self._marked(document, marks, trusted=False) for document in options.documents),
        )
        return Prompt(*marks.taken_out(render(fitting, marked, clock), self._controls.longest))

    def _fitted(self, message: Message) -> dict[str, Any]:
        """In the form that this template reads."""
        fitted = dict(message)
        if fitted["role"] == "developer" and "developer" not in self._source:
            fitted["role"] = "system"
        content = fitted["content"]
        if self._wants_parts and (isinstance(content, str) or not content):
            fitted["content"] = [{"type": "text", "text": content or ""}]
        elif not self._wants_parts and isinstance(content, list):
            fitted["content"] = "".join(part["text"] for part in content)
        return _with_json([fitted])[0] if self._wants_json else fitted

    def _refuse_unread(self, messages: Sequence[Message], options: ChatOptions) -> None:
        """RequestError for what this template would leave unread."""
        for index, message in enumerate(messages):
            if message.get("tool_calls") and "tool_calls" not in self._source:
                raise RequestError(f"messages[{index}].tool_calls: this model's chat template does not read them")
        for name in ("tools", "documents"):
            if getattr(options, name) and name not in self._variables:
                raise RequestError(f"{name}: this model's chat template does not read them; put them into a message")
        own = sorted(self._variables - _GIVEN)
        for name, value in options.template_kwargs.items():
            if name in _GIVEN:
                raise RequestError(f"chat_template_kwargs may not hold {quoted(name)}, which the server sets")
            if name not in self._variables and value not in _IDLE.get(name, ()):
                known = f"it reads {', '.join(own)}" if own else "it reads none"
                told = name if name.isidentifier() and len(name) <= _MAX_NAME else quoted(name)
                raise RequestError(f"{told}: this model's chat template does not read this variable; {known}")

    def _spells(self, messages: Sequence[Message], options: ChatOptions) -> bool:
        """Whether anything spells a control token, be it across two parts."""
        joined = ("".join(p["text"] for p in m["content"]) for m in messages if isinstance(m["content"], list))
        return bool(self._controls.spelt("\0".join((*_strings(messages), *_strings(_told(options)), *joined))))

    def _marked(self, value: Any, marks: Marks, *, trusted: bool) -> Any:
        if isinstance(value, str):
            return marks.around(value, self._controls.spelt(value, special_only=trusted))
        if isinstance(value, Mapping):
            return {
                self._marked(key, marks, trusted=trusted): self._marked(item, marks, trusted=trusted)
                for key, item in value.items()
            }
        return [self._marked(item, marks, trusted=trusted) for item in value] if isinstance(value, list) else value

    def _marked_message(self, message: Message, marks: Marks) -> dict[str, Any]:
        """Its parts end with a mark each, so that no two of them spell a token together."""
        marked: dict[str, Any] = self._marked(message, marks, trusted=message["role"] in _TRUSTED)
        if isinstance(parts := marked["content"], list):
            marked["content"] = [{**part, "text": part["text"] + marks.end} for part in parts[:-1]] + parts[-1:]
        return marked

    def _continued(self, messages: Sequence[Message], options: ChatOptions, clock: datetime) -> str:
        """The prompt up to the end of the last message's text."""
        last = dict(messages[-1])
        if isinstance(last["content"], str):
            said = last["content"]
            last["content"] = f"{said}{_TAG} "
        else:
            *before, part = last["content"]
            said = part["text"]
            last["content"] = [*before, {**part, "text": f"{said}{_TAG} "}]
        text = self._rendered([*messages[:-1], last], options, clock)
        end = text.rfind(_TAG)
        if end < 0:
            raise RequestError(
                "continue_final_message: the model's chat template leaves out the end of the last message, "
                "so that nothing can go on with it"
            )
        trims = not text.startswith(f"{_TAG} ", end)  # and so would have taken the space off what was said
        return text[:end].removesuffix(said[len(said.rstrip()) :]) if trims else text[:end]

    def _rendered(self, messages: Sequence[Message], options: ChatOptions, clock: datetime) -> str:
        goes_on = bool(options.continue_final_message)
        opens = not goes_on if options.add_generation_prompt is None else options.add_generation_prompt
        told = {
            **self._special,
            **options.template_kwargs,
            "messages": [_with_reasoning(message) for message in messages],
            "tools": list(options.tools) or None,
            "documents": list(options.documents) or None,
            "add_generation_prompt": opens,
            "strftime_now": clock.strftime,
        }
        try:
            return self._template.render(told)
        except _FAILURES as error:
            reason = (str(error).splitlines() or [""])[0][:_LONGEST_REASON] or type(error).__name__
            raise RequestError(f"messages: the model's chat template refuses them: {reason}") from None

    def _prints(self, messages: Sequence[Message], *needles: str) -> bool:
        """Whether the prompt of `messages` holds all `needles`, and no list as Python prints it."""
        try:
            text = self._rendered(messages, ChatOptions(), datetime(2000, 1, 1, tzinfo=UTC))
        except RequestError:
            return False
        return all(needle in text for needle in needles) and "'type': 'text'" not in text


def _told(options: ChatOptions) -> tuple[Any, ...]:
    """All of `options` that a template may print."""
    return options.template_kwargs, options.tools, options.documents


def _with_reasoning(message: Message) -> Message:
    """With the model's reasoning under the names that templates read, by whichever it was sent."""
    sent = next((message[name] for name in _REASONING if message.get(name) is not None), None)
    return message if sent is None else {"thinking": sent, **message, "reasoning_content": sent}


def _in_parts(messages: Sequence[Message]) -> list[dict[str, Any]]:
    return [{**m, "content": [{"type": "text", "text": m["content"]}]} for m in messages]


def _call(arguments: Mapping[str, Any]) -> dict[str, Any]:
    return {"id": "call00001", "type": "function", "function": {"name": "f", "arguments": arguments}}


def _with_json(messages: Sequence[Message]) -> list[dict[str, Any]]:
    """With the arguments of tool calls as JSON text."""
    return [
        {**message, "tool_calls": [_as_json(call) for call in message["tool_calls"]]}
        if message.get("tool_calls")
        else dict(message)
        for message in messages
    ]


def _as_json(call: Message) -> dict[str, Any]:
    if "function" in call:
        return {**call, "function": _as_json(call["function"])}
    return {**call, "arguments": json.dumps(call["arguments"], ensure_ascii=False)}


def _strings(value: Any) -> Iterator[str]:
    """All text in `value`, keys included."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        for key, item in value.items():
            yield str(key)
            yield from _strings(item)
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _strings(item)

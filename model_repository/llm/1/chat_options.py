"""What a request may say of its prompt: what the chat template is told, how the prompt ends, which tokens may be in it.

Values come as JSON, or as text that holds JSON. What is of the wrong type is a RequestError naming the field.
It does not know any template.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from json_text import DEEPEST, nested_too_deeply, read_json
from llm_engine.request import RequestError
from quoted import quoted

_ENDS = ("add_generation_prompt", "continue_final_message")
_SHORTHANDS = ("enable_thinking", "reasoning_effort")
_VARIABLES = ("chat_template_kwargs", *_SHORTHANDS)


@dataclass(frozen=True, slots=True)
class ChatOptions:
    """`template_kwargs` are variables of the chat template, `tools` and `documents` lists of objects for it.

    `add_generation_prompt` None opens an assistant's turn behind the messages, `continue_final_message` True goes on
    with the last message instead. `parse_special` says whether control tokens that a text spells become tokens; None:
    in text_input they do, in messages they do not. `add_special_tokens` says whether the tokenizer adds its own; None:
    to text_input it does, to messages it does not. `variables_name` is what the first of template_kwargs was sent as.
    """

    template_kwargs: Mapping[str, Any] = field(default_factory=dict)
    tools: tuple[Mapping[str, Any], ...] = ()
    documents: tuple[Mapping[str, Any], ...] = ()
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    parse_special: bool | None = None
    add_special_tokens: bool | None = None
    variables_name: str = field(default="chat_template_kwargs", compare=False)

    def refuse_without_messages(self) -> None:
        """RequestError naming the first option that only a chat template could honour."""
        for name, given in (
            (self.variables_name, self.template_kwargs),
            ("tools", self.tools),
            ("documents", self.documents),
            ("continue_final_message", self.continue_final_message),
            ("add_generation_prompt", self.add_generation_prompt is False),
        ):
            if given:
                raise RequestError(f"{name} needs messages; other prompts go through no chat template")


def chat_options(values: Mapping[str, Any], sent: Mapping[str, str]) -> ChatOptions:
    """The options among `values`, which `COERCE` has read; a contradiction between two of them is refused.

    `sent` tells the name by which each of them was sent.
    """
    variables = dict(values.get("chat_template_kwargs", {}))
    for name in _SHORTHANDS:
        if name in values and variables.setdefault(name, values[name]) != values[name]:
            raise RequestError(
                f"{name} is given twice with different values: {quoted(variables[name])} in chat_template_kwargs "
                f"and {quoted(values[name])}"
            )
    new, old = (values.get(name) for name in _ENDS)
    if new and old:
        raise RequestError("add_generation_prompt and continue_final_message cannot both be true: choose one")
    tools = values.get("tools", ())
    return ChatOptions(
        template_kwargs=variables,
        variables_name=next((sent[name] for name in _VARIABLES if values.get(name, {}) != {}), "chat_template_kwargs"),
        tools=() if values.get("tool_choice") == "none" else tools,
        documents=values.get("documents", ()),
        add_generation_prompt=new,
        continue_final_message=old,
        parse_special=values.get("parse_special"),
        add_special_tokens=values.get("add_special_tokens"),
    )


def as_bool(name: str, value: object) -> bool:
    """true, false, 1 and 0, as values or as text."""
    if isinstance(value, bool):
        return value
    text = str(value).lower()
    if text in ("true", "1"):
        return True
    if text in ("false", "0"):
        return False
    raise RequestError(f"{name} must be true or false, got {quoted(value)}")


def from_json(name: str, value: object) -> Any:
    """What `value` says if it is text, which must be JSON; else itself. Deep nesting is refused."""
    if isinstance(value, str):
        value = read_json(name, value) if value else None
    refuse_deep(name, value)
    return value


def refuse_deep(name: str, value: object) -> None:
    """RequestError for objects and arrays that are nested more than `DEEPEST` levels deep."""
    level = [value]
    for _ in range(DEEPEST + 1):
        level = [item for part in level for item in _items(part)]
        if not level:
            return
    raise nested_too_deeply(name)


def _items(value: object) -> list[Any]:
    if isinstance(value, Mapping):
        return list(value.values())
    return list(value) if isinstance(value, list | tuple) else []


def _as_object(name: str, value: object) -> Mapping[str, Any]:
    value = from_json(name, value)
    if value is None:
        return {}
    if not isinstance(value, dict):
        raise RequestError(f"{name} must be a JSON object, got {type(value).__name__}")
    return {key: item for key, item in value.items() if item is not None}


def _as_objects(name: str, value: object) -> tuple[Mapping[str, Any], ...]:
    value = from_json(name, value)
    if value is None:
        return ()
    if not isinstance(value, list) or not all(isinstance(item, dict) for item in value):
        raise RequestError(f"{name} must be a JSON array of objects")
    return tuple(value)


def _as_tools(name: str, value: object) -> tuple[Mapping[str, Any], ...]:
    tools = _as_objects(name, value)
    for index, tool in enumerate(tools):
        if tool.get("type", "function") != "function":
            raise RequestError(f'{name}[{index}] is of type {quoted(tool["type"])}; only "function" is known')
        function = tool.get("function", tool)
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            raise RequestError(f'{name}[{index}] must be like {{"type": "function", "function": {{"name": "..."}}}}')
    return tools


def _as_tool_choice(name: str, value: object) -> str:
    if value not in ("none", "auto"):
        raise RequestError(f'{name} may be "auto" or "none", got {quoted(value)}: this server cannot force a tool call')
    return str(value)


def _as_effort(name: str, value: object) -> str:
    if not isinstance(value, str):
        raise RequestError(f"{name} must be a string, got {quoted(value)}")
    return value


COERCE: Mapping[str, Callable[[str, object], Any]] = {
    "chat_template_kwargs": _as_object,
    "enable_thinking": as_bool,
    "reasoning_effort": _as_effort,
    "tools": _as_tools,
    "tool_choice": _as_tool_choice,
    "documents": _as_objects,
    "add_generation_prompt": as_bool,
    "continue_final_message": as_bool,
    "parse_special": as_bool,
    "add_special_tokens": as_bool,
}

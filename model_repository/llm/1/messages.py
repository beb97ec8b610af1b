"""Chat messages as clients send them: JSON text, checked and brought into the one form that templates are given.

Whatever is wrong is a RequestError naming the message. It does not know any template.
"""

from __future__ import annotations

import json
from typing import Any

from chat_options import from_json, parse_json, refuse_deep
from llm_engine.request import RequestError

_TEXT_PARTS = (None, "text", "input_text", "output_text")  # OpenAI's two APIs; None: a part that only has a text


def read_messages(field: str, payload: str) -> list[dict[str, Any]]:
    """The messages of a JSON array.

    Each has a `role`; its `content` is text, or a list of parts {"type": "text", "text": ...} where parts were sent.
    Arguments of tool calls that came as JSON text are objects.
    """
    messages = parse_json(field, payload)
    if not isinstance(messages, list) or not messages:
        raise RequestError(f"{field} must be a JSON array with at least one message")
    refuse_deep(field, messages)
    return [_message(f"{field}[{i}]", message) for i, message in enumerate(messages)]


def refuse_half_characters(name: str, text: str) -> None:
    """Refuse JSON whose escapes spell a lone surrogate: no tokenizer takes it, and no answer could repeat it.

    In an object the key is told that has it.
    """
    if "\\ud" not in text.lower():
        return
    try:
        value = json.loads(text)
        parts = value.items() if isinstance(value, dict) else [("", value)]
        for key, part in parts:
            if half := _half([key, part]):
                place = f"{key} in {name}" if key.isprintable() and key else name
                raise RequestError(f"{place} holds half a character (lone surrogate) {half}")
    except (ValueError, RecursionError):
        return  # not JSON: whoever reads it says so


def _half(value: object) -> str:
    """The first lone surrogate in a JSON value, as ASCII; "" if there is none."""
    try:
        json.dumps(value, ensure_ascii=False).encode()
    except UnicodeEncodeError as error:
        return ascii(error.object[error.start])
    return ""


def _message(field: str, message: object) -> dict[str, Any]:
    if not isinstance(message, dict) or not isinstance(message.get("role"), str) or not message["role"]:
        raise RequestError(f'{field} must be an object like {{"role": "user", "content": "..."}}')
    if message.get("function_call"):
        raise RequestError(f"{field}.function_call is no longer known; send tool_calls")
    read = {key: value for key, value in message.items() if value is not None}
    if message.get("tool_calls") is not None:
        read["tool_calls"] = _tool_calls(f"{field}.tool_calls", message["tool_calls"])
    content = message.get("content")
    if content is None and read.get("tool_calls"):
        content = ""
    read["content"] = (
        [_part(f"{field}.content[{i}]", p) for i, p in enumerate(content)] if isinstance(content, list) else content
    )
    if not isinstance(read["content"], str | list):
        raise RequestError(
            f'{field}.content must be a string, or a list of parts like {{"type": "text", "text": "..."}}'
        )
    return read


def _part(field: str, part: object) -> dict[str, Any]:
    if isinstance(part, str):
        return {"type": "text", "text": part}
    kind = part.get("type") if isinstance(part, dict) else type(part).__name__
    if not isinstance(part, dict) or kind not in _TEXT_PARTS:
        raise RequestError(f'{field} is of type {kind!r}; this model reads text alone, in parts of type "text"')
    if not isinstance(part.get("text"), str):
        raise RequestError(f'{field} must hold a string called "text"')
    return {**part, "type": "text"}


def _tool_calls(field: str, calls: object) -> list[dict[str, Any]]:
    if not isinstance(calls, list):
        raise RequestError(f"{field} must be a list of tool calls")
    return [_tool_call(f"{field}[{i}]", call) for i, call in enumerate(calls)]


def _tool_call(field: str, call: object) -> dict[str, Any]:
    """With its arguments as an object, be they those of `function` or, in the short form, of the call itself."""
    function = call.get("function", call) if isinstance(call, dict) else None
    if not isinstance(call, dict) or not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise RequestError(f'{field} must be like {{"function": {{"name": "...", "arguments": {{}}}}}}')
    place = f"{field}.function.arguments" if function is not call else f"{field}.arguments"
    arguments = from_json(place, function.get("arguments"))
    if arguments is not None and not isinstance(arguments, dict):
        raise RequestError(f"{place} must be a JSON object, got {type(arguments).__name__}")
    read = {**function, "arguments": arguments or {}}
    return read if function is call else {**call, "function": read}

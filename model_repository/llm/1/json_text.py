"""JSON as clients send it, read at a bounded price: Python parses it with the interpreter's lock held.

What is too long, of too many parts or no JSON is a RequestError naming the field. It does not know what the JSON says.
"""

from __future__ import annotations

import json
from collections import Counter
from typing import Any

from llm_engine.request import RequestError
from quoted import quoted

MAX_CHARACTERS = 2**20  # of a JSON text, but for that of messages
MAX_PARTS = 100_000  # values, keys, objects and arrays of one JSON text, counted by their punctuation
DEEPEST = 64  # levels of objects and arrays; templates and tools of real use stay under ten
_MAX_DIGITS = 4300  # of an integer, for Python


def read_json(name: str, text: str, most: int | None = MAX_CHARACTERS, *, bounded: bool = False) -> Any:
    """What a JSON text of at most `most` characters says.

    `bounded`: whoever takes the value refuses large numbers by their names; else those too long for Python are refused.
    Escapes that spell a lone surrogate are refused: no tokenizer takes it, and no answer could repeat it. So is
    a key that stands twice in one object, of which nobody could say which one was meant.
    """
    if most is not None and len(text) > most:
        raise RequestError(f"{name} has {len(text)} characters; at most {most} are read")
    if _punctuation(text) > MAX_PARTS and (parts := _parts(text)) > MAX_PARTS:
        raise RequestError(f"{name} holds at least {parts} values; at most {MAX_PARTS} are read")

    def integer(digits: str) -> int:
        if (count := len(digits.lstrip("-"))) > _MAX_DIGITS and not bounded:
            raise RequestError(f"{name} holds a number of {count} digits; at most {_MAX_DIGITS} are read")
        return int(digits[: _MAX_DIGITS + digits.startswith("-")])  # still beyond every bound

    def distinct(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        value = dict(pairs)
        if len(value) < len(pairs):
            ((twice, _),) = Counter(key for key, _ in pairs).most_common(1)
            raise RequestError(f"{name} has the key {quoted(twice)} twice in one object")
        return value

    try:
        value = json.loads(text, parse_int=integer, object_pairs_hook=distinct)
    except RecursionError:
        raise nested_too_deeply(name) from None
    except ValueError as error:
        raise RequestError(f"{name} is not valid JSON: {error}") from None
    if "\\ud" in text or "\\uD" in text:
        _refuse_half_characters(name, value)
    return value


def _refuse_half_characters(name: str, value: Any) -> None:
    """Refuse a lone surrogate; in an object the key is told that has it."""
    parts = value.items() if isinstance(value, dict) else [("", value)]
    for key, part in parts:
        try:
            json.dumps([key, part], ensure_ascii=False).encode()
        except UnicodeEncodeError as error:
            half = ascii(error.object[error.start])
            place = f"{key} in {name}" if key and key.isprintable() else name
            raise RequestError(f"{place} holds half a character (lone surrogate) {half}") from None
        except RecursionError:
            raise nested_too_deeply(name) from None


def nested_too_deeply(name: str) -> RequestError:
    """What is said of objects and arrays of more than `DEEPEST` levels."""
    return RequestError(f"{name} is nested too deeply: at most {DEEPEST} levels of objects and arrays are read")


def _parts(text: str) -> int:
    """Punctuation of a JSON text outside its strings, or half of their number where that alone is too much."""
    bare = text.replace("\\\\", "").replace('\\"', "")
    strings = bare.count('"') // 2
    if strings > 2 * MAX_PARTS:  # a value and a key for every comma
        return strings // 2
    return _punctuation("".join(bare.split('"')[::2]))


def _punctuation(text: str) -> int:
    return text.count(",") + text.count("[") + text.count("{")

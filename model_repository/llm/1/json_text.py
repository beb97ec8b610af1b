"""JSON as clients send it, read at a bounded price: Python parses it with the interpreter's lock held.

What is too long, of too many parts or no JSON is a RequestError naming the field. It does not know what the JSON says.
"""

from __future__ import annotations

import json
from typing import Any

from llm_engine.request import RequestError

MAX_CHARACTERS = 2**20  # of a JSON text, but for that of messages
MAX_PARTS = 100_000  # values, keys, objects and arrays of one JSON text, counted by their punctuation
DEEPEST = 64  # levels of objects and arrays; templates and tools of real use stay under ten
_MAX_DIGITS = 4300  # of an integer, for Python


def read_json(name: str, text: str, most: int | None = MAX_CHARACTERS) -> Any:
    """What a JSON text of at most `most` characters says.

    Escapes that spell a lone surrogate are refused: no tokenizer takes it, and no answer could repeat it.
    """
    if most is not None and len(text) > most:
        raise RequestError(f"{name} has {len(text)} characters; at most {most} are read")
    if _punctuation(text) > MAX_PARTS and (parts := _parts(text)) > MAX_PARTS:
        raise RequestError(f"{name} holds at least {parts} values; at most {MAX_PARTS} are read")
    try:
        value = json.loads(text, parse_int=_integer)
        if "\\ud" in text or "\\uD" in text:
            json.dumps(value, ensure_ascii=False).encode()
    except RecursionError:
        raise RequestError(
            f"{name} is nested too deeply: at most {DEEPEST} levels of objects and arrays are read"
        ) from None
    except UnicodeEncodeError as error:
        half = ascii(error.object[error.start])
        raise RequestError(f"{name} holds half a character (lone surrogate) {half}") from None
    except ValueError as error:
        raise RequestError(f"{name} is not valid JSON: {error}") from None
    return value


def nested_too_deeply(name: str) -> RequestError:
    """What is said of objects and arrays of more than `DEEPEST` levels."""
    return RequestError(f"{name} is nested too deeply: at most {DEEPEST} levels of objects and arrays are read")


def _integer(digits: str) -> int:
    """Still beyond every bound where Python would not read it whole."""
    return int(digits[:_MAX_DIGITS])


def _parts(text: str) -> int:
    """Punctuation of a JSON text outside its strings, or half of their number where that alone is too much."""
    bare = text.replace("\\\\", "").replace('\\"', "")
    strings = bare.count('"') // 2
    if strings > 2 * MAX_PARTS:  # a value and a key for every comma
        return strings // 2
    return _punctuation("".join(bare.split('"')[::2]))


def _punctuation(text: str) -> int:
    return text.count(",") + text.count("[") + text.count("{")

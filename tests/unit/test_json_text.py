"""JSON of clients: what it says that cannot be taken is refused in our words, by the place where it stands."""

from __future__ import annotations

import pytest

from json_text import read_json
from llm_engine.request import RequestError


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ('[{"a": ' + "7" * 5000 + "}]", "^it holds a number of 5000 digits; at most 4300 are read$"),
        ("-" + "7" * 4301, "^it holds a number of 4301 digits; at most 4300 are read$"),
        ('{"seed": 1, "stop": "\\ud800"}', "^stop in it holds half a character"),
        ('{"st\\ud800p": 1}', "^it holds half a character"),
        ('[{"a": "\\uDC00"}]', "^it holds half a character"),
        ('{"5": 100, "6": 1, "5": 100}', "^it has the key '5' twice in one object$"),
        ("[" * 5000 + "]" * 5000, "^it is nested too deeply"),
        ("[1,", "^it is not valid JSON"),
    ],
)
def test_what_cannot_be_taken_is_told_in_our_words(text: str, told: str) -> None:
    with pytest.raises(RequestError, match=told):
        read_json("it", text)


def test_the_longest_number_is_read_whole_and_longer_ones_are_left_to_whom_bounds_them_by_name() -> None:
    assert read_json("it", "-" + "7" * 4300) == -int("7" * 4300)
    assert read_json("it", "7" * 9000, bounded=True) >= int("7" * 4300)
    assert read_json("it", '{"a": {"5": 1}, "b": {"5": 1}}') == {"a": {"5": 1}, "b": {"5": 1}}

"""docs/requests.md names what a request can say: all of it, and nothing else."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from chat_options import COERCE
from foreign_names import FOREIGN, NO_EFFECT, Refused, Synonym
from parameters import NAMES

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs/requests.md").read_text()
OTHERS = PAGE.partition("## Names that other servers use")[2].partition("Any other key")[0]
ROWS = [[cell.strip() for cell in line.split("|")[1:-1]] for line in OTHERS.splitlines() if line.startswith("| `")]


def named(text: str) -> list[str]:
    return re.findall(r"`([^`]+)`", text)


def test_every_input_and_parameter_of_ours_is_on_the_page() -> None:
    declared = re.findall(r'{ name: "(\w+)"', (ROOT / "model_repository/llm/config.pbtxt").read_text())
    for name in {*declared, *NAMES, *COERCE}:
        assert f"`{name}`" in PAGE, name


@pytest.mark.parametrize("name", FOREIGN)
def test_every_name_of_another_server_is_in_the_row_that_says_what_it_means(name: str) -> None:
    (row,) = [row for row in ROWS if name in named(row[0])]
    match FOREIGN[name]:
        case Synonym(ours):
            assert ours in named(row[1])
        case Refused(reason, neutral):
            assert row[1:] == [", ".join(f"`{json.dumps(value)}`" for value in neutral), reason]


def test_the_page_has_no_other_names() -> None:
    assert {name for row in ROWS for name in named(row[0])} == FOREIGN.keys()
    assert set(named(OTHERS.partition("Without effect")[2])) == NO_EFFECT

"""The programs in docs/client.md do what that page says."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from server.conftest import WITH_THE_DEFAULT_MODEL
from tokenstream.server import TritonServer

PAGE = Path(__file__).parents[2] / "docs/client.md"
PROGRAMS = [block for block in re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL) if "print(" in block]


@WITH_THE_DEFAULT_MODEL
@pytest.mark.parametrize("program", PROGRAMS, ids=["blocking", "asynchronous"])
def test_a_program_of_the_page_prints_an_answer(
    program: str, server: TritonServer, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("TOKENSTREAM_URL", server.grpc_url)
    exec(compile(program, str(PAGE), "exec"), {"__name__": "__main__"})
    assert capsys.readouterr().out.strip()

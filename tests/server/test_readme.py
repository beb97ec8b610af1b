"""What the README prints is what happens."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

from server.conftest import WITH_THE_DEFAULT_MODEL
from tokenstream.server import TritonServer
from waiting import WAIT

README = Path(__file__).parents[2] / "README.md"


@WITH_THE_DEFAULT_MODEL
def test_the_first_program_of_the_readme_runs_as_printed(server: TritonServer) -> None:
    programs = re.findall(r"```python\n(.*?)```", README.read_text(), re.DOTALL)
    assert programs
    for program in programs:
        done = subprocess.run(
            [sys.executable, "-c", program],
            env={**os.environ, "TOKENSTREAM_URL": server.grpc_url},
            capture_output=True,
            text=True,
            timeout=WAIT,
            check=True,
        )
        answer, last = done.stdout.rstrip().rsplit("\n", 1)
        assert answer.strip()
        assert re.match(r"(stop|length) Usage\(input_tokens=\d+, output_tokens=\d+\) TTFT \d+\.\d{3} s", last)

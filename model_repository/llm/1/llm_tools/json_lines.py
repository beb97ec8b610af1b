"""What a tool tells whoever started it: one JSON object per line on standard output, at once.

It does not know who reads them, nor what the tools do.
"""

from __future__ import annotations

import json
import sys


def report(**line: object) -> None:
    """Write one object."""
    sys.stdout.write(json.dumps(line) + "\n")
    sys.stdout.flush()


def report_progress(stage: str, done: int, total: int | None) -> None:
    """Write how much of a stage is done, of how much (None: unknown)."""
    report(stage=stage, done=done, total=total)

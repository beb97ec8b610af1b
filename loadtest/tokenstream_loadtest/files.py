"""The files of a run: the document itself, its numbers as a table, and its report.

It does not know what is in them.
"""

from __future__ import annotations

from pathlib import Path

from .report.page import write_report
from .results import Run, dump_run
from .spreadsheet import write_csv


def write_files(run: Run, folder: Path) -> dict[str, Path]:
    """Write run.json, run.csv and report.html; their paths by "json", "csv" and "html". OSError as `open` does.

    The folder is made if it must be.
    """
    folder.mkdir(parents=True, exist_ok=True)
    files = {"json": folder / "run.json", "csv": folder / "run.csv", "html": folder / "report.html"}
    files["json"].write_bytes(dump_run(run))
    write_csv(run, files["csv"])
    write_report(run, files["html"])
    return files

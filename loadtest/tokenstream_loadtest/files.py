"""The files of a run: the document itself, its numbers as a table, and its report.

All of them are there as a whole, or none is. It does not know what is in them.
"""

from __future__ import annotations

import errno
import itertools
import os
import tempfile
from collections.abc import Callable
from contextlib import ExitStack, suppress
from pathlib import Path

from .report.page import write_report
from .results import Run, dump_run
from .spreadsheet import write_csv

RUN_FILE = "run.json"


def free_folder(wanted: Path) -> Path:
    """`wanted`, or the first of `wanted`-2, `wanted`-3, ... that holds no run."""
    numbered = (wanted.with_name(f"{wanted.name}-{number}") for number in itertools.count(2))
    return next(folder for folder in itertools.chain([wanted], numbered) if not (folder / RUN_FILE).exists())


def check_writable(folder: Path) -> None:
    """OSError if files cannot be written to `folder`, which may not be there yet. It leaves nothing behind."""
    made = [each for each in (folder, *folder.parents) if not each.exists()]
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    finally:
        for each in made:
            with suppress(OSError):  # it was not made, or somebody else has put something there
                each.rmdir()


def write_files(run: Run, folder: Path) -> dict[str, Path]:
    """Write run.json, run.csv and report.html; their paths by "json", "csv" and "html".

    The folder is made if it must be. OSError that names the file of which it is; nothing is there then that was not.
    """
    folder.mkdir(parents=True, exist_ok=True)
    files = {"json": folder / RUN_FILE, "csv": folder / "run.csv", "html": folder / "report.html"}
    writers: dict[str, Callable[[Path], object]] = {
        "json": lambda path: path.write_bytes(dump_run(run)),
        "csv": lambda path: write_csv(run, path),
        "html": lambda path: write_report(run, path),
    }
    with ExitStack() as stack:
        written = []
        for kind, path in files.items():
            beside = path.with_name(f".{path.name}.part")
            stack.callback(beside.unlink, missing_ok=True)
            try:
                if path.is_dir():  # it could not be replaced, once others have been
                    raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR))
                writers[kind](beside)
            except OSError as error:  # a full disk's has no name
                raise OSError(error.errno, error.strerror, str(path)) from error
            written.append((beside, path))
        for beside, path in written:
            beside.replace(path)
    return files

"""All of a run's files are there as a whole, or none is."""

from __future__ import annotations

import errno
from pathlib import Path

import pytest

from tokenstream_loadtest import files
from tokenstream_loadtest.files import free_folder, write_files
from tokenstream_loadtest.results import Run, read_run
from unit.invented_runs import measurement_of, record, run_of

RUN = run_of([measurement_of([record([0.1])], 1.0)])


def test_three_files_are_written_and_nothing_else(tmp_path: Path) -> None:
    written = write_files(RUN, tmp_path / "a" / "b")
    assert sorted(path.name for path in (tmp_path / "a" / "b").iterdir()) == ["report.html", "run.csv", "run.json"]
    assert read_run(written["json"]).scenario == RUN.scenario


def test_a_full_disk_leaves_what_was_there_and_is_told_with_the_files_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(_run: Run, path: Path) -> None:
        path.write_text("half")
        raise OSError(errno.ENOSPC, "No space left on device")

    (tmp_path / "run.json").write_text("an older one")
    monkeypatch.setattr(files, "write_report", full)
    with pytest.raises(OSError, match="No space left") as error:
        write_files(RUN, tmp_path)
    assert error.value.filename == str(tmp_path / "report.html")
    assert {path.name: path.read_text() for path in tmp_path.iterdir()} == {"run.json": "an older one"}


def test_a_file_that_cannot_be_replaced_leaves_the_others_as_they_were(tmp_path: Path) -> None:
    (tmp_path / "run.json").write_text("an older one")
    (tmp_path / "report.html").mkdir()
    with pytest.raises(IsADirectoryError) as error:
        write_files(RUN, tmp_path)
    assert error.value.filename == str(tmp_path / "report.html")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["report.html", "run.json"]
    assert (tmp_path / "run.json").read_text() == "an older one"


def test_a_folder_that_holds_a_run_is_left_alone_and_the_next_free_one_taken(tmp_path: Path) -> None:
    wanted = tmp_path / "mine"
    taken = [free_folder(wanted)]
    for folder in ("mine", "mine-2"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "run.json").touch()
        taken.append(free_folder(wanted))
    assert [folder.name for folder in taken] == ["mine", "mine-2", "mine-3"]

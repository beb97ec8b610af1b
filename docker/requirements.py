"""Prints what an image installs, one requirement a line: the project's dependencies with those of some extras.

    python requirements.py PYPROJECT EXTRA... [--without NAME]...

So a layer with the packages can be made, and kept, without the code that changes more often. Requirements are printed
as pyproject.toml has them, and nothing is resolved: this script knows neither versions nor what is installed.
"""

from __future__ import annotations

import argparse
import re
import tomllib
from collections.abc import Sequence
from pathlib import Path


def requirements(pyproject: Path, extras: Sequence[str], without: Sequence[str] = ()) -> list[str]:
    """The requirements of `pyproject` and its `extras`, sorted, less the packages named in `without`.

    Raises SystemExit with one line when an extra, or a package to leave out, is not there.
    """
    project = tomllib.loads(pyproject.read_text(encoding="utf-8"))["project"]
    optional = project["optional-dependencies"]
    if missing := set(extras) - set(optional):
        raise SystemExit(f"{pyproject} has no extra {', '.join(sorted(missing))}: it has {', '.join(sorted(optional))}")
    wanted = {*project["dependencies"], *(line for extra in extras for line in optional[extra])}
    if unknown := set(without) - {name_of(line) for line in wanted}:
        raise SystemExit(f"{', '.join(sorted(unknown))} cannot be left out: nothing here asks for it")
    return sorted(line for line in wanted if name_of(line) not in without)


def name_of(requirement: str) -> str:
    """The package's name, as the registry spells it (PEP 503)."""
    name = re.split(r"[^A-Za-z0-9._-]", requirement, maxsplit=1)[0]
    return re.sub(r"[-_.]+", "-", name).lower()


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description="Print the requirements of an image.")
    parser.add_argument("pyproject", type=Path)
    parser.add_argument("extras", nargs="*", metavar="extra")
    parser.add_argument("--without", action="append", default=[], metavar="NAME")
    arguments = parser.parse_args()
    print("\n".join(requirements(arguments.pyproject, arguments.extras, arguments.without)))


if __name__ == "__main__":
    main()

"""`python -m tokenstream_loadtest.peers`: installs other servers, measures them and us in turn, writes the comparison.

It goes on where an earlier one with the same settings stopped, and only writes its pages again where all is done. Exit
codes: 0 done, 1 nothing could be measured, 2 wrong usage, 130 Ctrl-C, 143 SIGTERM.
"""

from __future__ import annotations

import argparse
import os
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path

from tokenstream import __version__
from tokenstream.diagnosis import SetupError
from tokenstream.exits import FAILED, INTERRUPTED, OK, unwound_by_sigterm

from ..scenarios import read_scenario
from . import page, recipes
from .contestants import CONTESTANTS, OURS, Contestant, Place
from .environments import peers_folder
from .limits import Limits, measured_limits
from .models import make_models
from .plot import draw
from .quiet import WAIT_SECONDS, wait_quiet
from .rounds import Folder, Left, Settings, Workload, open_folder, run_rounds
from .screen import Screen
from .standings import standings

_SCENARIO = "capacity"
_LEVELS, _PER_CALLER = (1, 4, 16, 32), {1: 12, 4: 6}  # requests for each caller at once, 3 where it is not named
_WARM_UPS = 6
_QUICK_LEVELS, _QUICK_PER_CALLER, _QUICK_TOKENS = (1, 4), 1, 8
_MOST_REPEATS = 3
_QUICK_PATIENCE = 4.0  # seconds for a quiet machine, where numbers do not matter


def _numbers(text: str) -> tuple[int, ...]:
    try:
        found = tuple(int(part) for part in text.split(","))
    except ValueError:
        found = ()
    if not found or min(found) < 1:
        raise argparse.ArgumentTypeError(f"whole numbers above 0 with commas between them are wanted, got {text!r}")
    return found


def _names(text: str) -> tuple[str, ...]:
    known = [contestant.name for contestant in CONTESTANTS if contestant.name != OURS]
    found = tuple(part.strip() for part in text.split(",") if part.strip())
    if unknown := sorted(set(found) - set(known)):
        raise argparse.ArgumentTypeError(f"no such server: {', '.join(unknown)}; there are {', '.join(known)}")
    return found


def _read(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m tokenstream_loadtest.peers", description=(__doc__ or "").split("\n\n")[0]
    )
    add = parser.add_argument
    add("--peers", type=_names, metavar="A,B", help="the others; default: all of them")
    add("--repeats", type=int, choices=range(1, _MOST_REPEATS + 1), help=f"rounds; default {_MOST_REPEATS}, 1 if quick")
    add("--levels", type=_numbers, metavar="N,N", help="callers at once; default 1,4,16,32")
    add("--requests", type=_numbers, metavar="N,N", help="requests of each level, or of all; default 12,24,48,96")
    add("--seed", type=int, default=1, help="of the prompts")
    add("--quick", action="store_true", help="a trial of the whole way with few requests: no numbers to rely on")
    add("--fresh", action="store_true", help="begin anew instead of going on where the last one stopped")
    add("--out", type=Path, default=Path(), metavar="FOLDER", help="where README.md and docs/ are; default: here")
    given = parser.parse_args(arguments)
    given.levels = given.levels or (_QUICK_LEVELS if given.quick else _LEVELS)
    requests = given.requests or tuple(at * _per_caller(at, quick=given.quick) for at in given.levels)
    given.requests = requests * len(given.levels) if len(requests) == 1 else requests
    if len(given.requests) != len(given.levels):
        parser.error(f"--requests has {len(given.requests)} numbers for {len(given.levels)} levels")
    given.repeats = given.repeats or (1 if given.quick else _MOST_REPEATS)
    return given


def _per_caller(level: int, *, quick: bool) -> int:
    return _QUICK_PER_CALLER if quick else _PER_CALLER.get(level, 3)


def main(arguments: Sequence[str] | None = None) -> int:
    """Do what the arguments say; the exit code."""
    given = _read(arguments)
    os.environ.setdefault("GRPC_VERBOSITY", "NONE")  # its own log lines would stand between ours
    chosen = [each for each in CONTESTANTS if each.name == OURS or given.peers is None or each.name in given.peers]
    try:
        with unwound_by_sigterm(), Screen() as screen:
            return _compare(given, chosen, screen)
    except (SetupError, ValueError, OSError) as error:
        sys.stderr.write(f"bench-peers: {' '.join(str(error).split())}\n")
        return FAILED
    except KeyboardInterrupt:
        sys.stderr.write("bench-peers: interrupted; the same command goes on where this one stopped\n")
        return INTERRUPTED


def _compare(given: argparse.Namespace, chosen: Sequence[Contestant], screen: Screen) -> int:
    root = peers_folder()
    screen.begin("preparing the weights")
    patience = _QUICK_PATIENCE if given.quick else WAIT_SECONDS
    cores = tuple(sorted(os.sched_getaffinity(0)))
    place = Place(root, make_models(root / "models", screen.say), cores, screen.begin, screen.say, patience)
    scenario = read_scenario(_SCENARIO)
    tokens = _QUICK_TOKENS if given.quick else None
    pins = (f"tokenstream {__version__}", *(recipe.digest for recipe in recipes.ALL))
    settings = Settings(
        _SCENARIO, given.levels, given.requests, tokens, given.seed, place.models.name, len(cores), pins
    )
    folder = open_folder(root / "results", settings, fresh=given.fresh)
    screen.begin(f"results: {folder.path}")
    draws = scenario.override(max_tokens=tokens).read_workload()
    warm_ups = 1 if given.quick else _WARM_UPS
    workload = Workload(scenario.name, scenario.title, draws, _command(given), warm_ups)
    left = run_rounds(chosen, given.repeats, workload, place, folder)
    return _write(given, chosen, folder, left, _limits(folder, screen, quick=given.quick), screen)


def _limits(folder: Folder, screen: Screen, *, quick: bool) -> Limits | None:
    file = folder.path / "limits.json"
    try:
        if not file.is_file():
            screen.begin("measuring the machine's limits")
            wait_quiet(screen.say, seconds=_QUICK_PATIENCE if quick else WAIT_SECONDS)
        return measured_limits(file, screen.say, quick=quick)
    except SetupError as error:
        screen.begin(f"the limits are left out: {error}")
        return None


def _write(
    given: argparse.Namespace,
    chosen: Sequence[Contestant],
    folder: Folder,
    left: list[Left],
    limits: Limits | None,
    screen: Screen,
) -> int:
    found = standings(chosen, given.repeats, folder)
    if not found:
        screen.begin("nothing could be measured, nothing was written")
        return FAILED
    comparison = page.Comparison(folder.settings, folder.began, _command(given), found, left, limits, given.quick)
    docs = given.out / "docs"
    docs.mkdir(parents=True, exist_ok=True)
    (docs / "peers.svg").write_text(draw(found), encoding="utf-8")
    (docs / "peers.md").write_text(page.full(comparison, "peers.svg"), encoding="utf-8")
    table, readme = page.short(comparison, "docs/peers.md", "docs/peers.svg"), given.out / "README.md"
    placed = readme.is_file() and page.place_between_markers(readme, table)
    screen.begin(f"written: {docs / 'peers.md'}, {docs / 'peers.svg'}{f', {readme}' if placed else ''}")
    sys.stdout.write(table)
    return OK


def _command(given: argparse.Namespace) -> str:
    """As it can be typed again; what is the default is left out."""
    flags = [f"--repeats={given.repeats}", f"--levels={_list(given.levels)}", f"--requests={_list(given.requests)}"]
    flags += [f"--seed={given.seed}"] + (["--quick"] if given.quick else [])
    flags += [f"--peers={','.join(given.peers)}"] if given.peers is not None else []
    return shlex.join(["python", "-m", "tokenstream_loadtest.peers", *flags])


def _list(numbers: Sequence[int]) -> str:
    return ",".join(map(str, numbers))


if __name__ == "__main__":
    sys.exit(main())

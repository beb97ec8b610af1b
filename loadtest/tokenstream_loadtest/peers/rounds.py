"""Rounds: in each, every server is started, measured at every level and stopped, one at a time, with the same prompts.

What a server came to in a round is written at once, so that a comparison goes on where it stopped. A server that cannot
be installed or does not start is left out with its reason; the others are measured all the same.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from pathlib import Path

from tokenstream.diagnosis import ServerFailed, SetupError

from ..bench import Draws, Plan, Progress
from ..measure import measure
from ..results import Measurement, Run, Stage, dump_run, read_run
from ..targets import Failed
from .contestants import Contestant, Place, Serving
from .environments import Unavailable
from .quiet import wait_quiet

_SETTINGS = "settings.json"
LAUNCH = "launch"  # under these names a run's `server` tells of the launch, and of versions
VERSION = "version of "


@dataclass(frozen=True, slots=True)
class Settings:
    """What makes two measurements comparable. `levels`: callers at once; `requests`: of each level.

    `answer_tokens`: of every answer, None for what the scenario says. `pins`: versions of all that is compared.
    """

    scenario: str
    levels: tuple[int, ...]
    requests: tuple[int, ...]
    answer_tokens: int | None
    seed: int
    model: str
    cores: int
    pins: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Workload:
    """The scenario's requests under its name. `command`: how the comparison was started.

    `warm_ups`: requests before each level that do not count; as many as the level asks at once, if that is more.
    """

    scenario: str
    title: str
    requests: Draws
    command: str
    warm_ups: int


@dataclass(frozen=True, slots=True)
class Left:
    """A server that is not in the comparison, and why."""

    title: str
    reason: str


class Folder:
    """One comparison's results: its settings and a run for every server and round that is done."""

    def __init__(self, path: Path, settings: Settings) -> None:
        self.path = path
        self.settings = settings

    @property
    def began(self) -> str:
        """Date and time (UTC), as the folder is named."""
        return self.path.name

    def file(self, contestant: str, repeat: int) -> Path:
        """Where a run lies, or will."""
        return self.path / f"{contestant}-{repeat}.json"

    def runs(self, contestant: str, repeats: int) -> dict[int, Run]:
        """What is done, by round."""
        found = {repeat: self.file(contestant, repeat) for repeat in range(repeats)}
        return {repeat: read_run(file) for repeat, file in found.items() if file.is_file()}

    def write(self, contestant: str, repeat: int, run: Run) -> None:
        """Keep a run: whole, or not at all."""
        file = self.file(contestant, repeat)
        half = file.with_suffix(".part")
        half.write_bytes(dump_run(run))
        half.rename(file)


def open_folder(root: Path, settings: Settings, *, fresh: bool) -> Folder:
    """The newest folder of a comparison with these settings; a new one if there is none, or a `fresh` one is wanted."""
    root.mkdir(parents=True, exist_ok=True)
    wanted = json.loads(json.dumps(asdict(settings)))
    if not fresh:
        for path in sorted((folder.parent for folder in root.glob(f"*/{_SETTINGS}")), reverse=True):
            if json.loads((path / _SETTINGS).read_text()) == wanted:
                return Folder(path, settings)
    path = root / datetime.now(UTC).strftime("%Y-%m-%dT%H%M%S.%fZ")
    path.mkdir()
    (path / _SETTINGS).write_text(json.dumps(wanted, indent=1))
    return Folder(path, settings)


def run_rounds(
    contestants: Sequence[Contestant], repeats: int, workload: Workload, place: Place, folder: Folder
) -> list[Left]:
    """Measure what is not done yet; the servers that had to be left out. KeyboardInterrupt as it comes."""
    left: dict[str, Left] = {}
    for contestant in contestants:
        if len(folder.runs(contestant.name, repeats)) == repeats:
            continue
        place.begin(f"{contestant.title}: installing")
        try:
            contestant.ready(place)
        except (Unavailable, SetupError) as error:
            _leave(left, contestant, error, place)
    for repeat, contestant in _open_ones(contestants, repeats, folder):
        if contestant.name in left:
            continue
        place.begin(f"round {repeat + 1} of {repeats}, {contestant.title}: starting")
        try:
            folder.write(contestant.name, repeat, _round(contestant, repeat, workload, place, folder))
        except (Unavailable, SetupError, Failed) as error:
            _leave(left, contestant, error, place)
    return list(left.values())


def _open_ones(contestants: Sequence[Contestant], repeats: int, folder: Folder) -> Iterator[tuple[int, Contestant]]:
    for repeat in range(repeats):
        for contestant in contestants:
            if not folder.file(contestant.name, repeat).is_file():
                yield repeat, contestant


def _leave(left: dict[str, Left], contestant: Contestant, error: Exception, place: Place) -> None:
    left[contestant.name] = Left(contestant.title, str(error))
    log = error.log if isinstance(error, Unavailable) else error.log_path if isinstance(error, ServerFailed) else None
    place.begin(f"{contestant.title} is left out: {error}{f' (log: {log})' if log else ''}")


def _round(contestant: Contestant, repeat: int, workload: Workload, place: Place, folder: Folder) -> Run:
    """One server at every level. Its run holds a measurement for each, with `repeat` as its number."""
    log = folder.path / f"{contestant.name}-{repeat}.log"
    runs = []
    with contestant.serve(place, log) as serving:
        for level, requests in zip(folder.settings.levels, folder.settings.requests, strict=True):
            place.begin(f"round {repeat + 1}, {contestant.title}: {level} at once, {requests} requests")
            others = wait_quiet(place.say, seconds=place.patience)
            plan = _plan(Stage(concurrency=level, requests=requests), repeat, workload, serving, folder.settings)
            run = asyncio.run(measure(plan, lambda progress: place.say(_told(progress))))
            _check(run, log)
            runs.append(_with_note(run, f"{others:.2f} cores were used by others just before"))
    told = {f"{VERSION}{name}": version for name, version in serving.versions.items()}
    measurements = [replace(measurement, repeat=repeat) for run in runs for measurement in run.measurements]
    first = runs[0]
    return replace(first, server={**first.server, LAUNCH: serving.command, **told}, measurements=tuple(measurements))


def _plan(stage: Stage, repeat: int, workload: Workload, serving: Serving, settings: Settings) -> Plan:
    """The plan of one level. Its prompts follow from the seed, the level and the round alone: all get the same."""
    return Plan(
        scenario=workload.scenario,
        title=workload.title,
        workload=workload.requests,
        stages=(stage,),
        url=serving.url,
        target=serving.kind,
        model=serving.model,
        options=serving.options,
        metrics_url=serving.metrics_url,
        warmup=max(workload.warm_ups, stage.concurrency or 0),
        seed=settings.seed * 1000 + repeat,
        command=workload.command,
    )


def _told(progress: Progress) -> str:
    return (
        f"{progress.stage_label}: {progress.ended} of {progress.sent} requests answered, {progress.errors} errors, "
        f"{progress.tokens} tokens, {progress.seconds:.0f} s"
    )


def _check(run: Run, log: Path) -> None:
    """An interrupted measurement is no result, nor is one of a server that answered nothing: Unavailable."""
    if not run.measurements or run.interrupted:
        raise KeyboardInterrupt
    for measurement in run.measurements:
        if not measurement.all.outcomes.get("ok"):
            errors = [line for lines in measurement.all.examples.values() for line in lines]
            raise Unavailable(f"no request was answered: {(errors or ['for no reason that was given'])[0]}", log)


def _with_note(run: Run, note: str) -> Run:
    def noted(measurement: Measurement) -> Measurement:
        return replace(measurement, notes=(*measurement.notes, note))

    return replace(run, measurements=tuple(map(noted, run.measurements)))

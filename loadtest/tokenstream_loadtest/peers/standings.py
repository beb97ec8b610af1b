"""What a comparison came to: every server's levels over all rounds, and how ours stands to another, round by round.

Numbers are `figures`' own. It does not know how they are shown.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from ..figures import Figure, Level, Spread, levels, spread
from ..results import Measurement, Run
from .contestants import Contestant
from .rounds import LAUNCH, VERSION, Folder


@dataclass(frozen=True, slots=True)
class Standing:
    """One server. `levels`: by callers at once, each with a measurement for every round that is done."""

    name: str
    title: str
    remark: str
    launch: str
    versions: dict[str, str]
    levels: dict[int, Level]
    run: Run

    def value(self, callers: int, figure: Figure) -> Spread | None:
        """A figure over the rounds; None if it was not measured."""
        return self.levels[callers].spread(figure) if callers in self.levels else None

    @property
    def prompt_tokens(self) -> float | None:
        """Of a request, on average, by the server's own count; None if it does not count."""
        groups = [level.group for level in self.levels.values()]
        answered = sum(group.outcomes.get("ok", 0) for group in groups)
        total = sum(group.input_tokens for group in groups)
        return total / answered if answered and total else None


def standings(contestants: Sequence[Contestant], repeats: int, folder: Folder) -> list[Standing]:
    """Those that have been measured at least once, in the given order."""
    found = []
    for contestant in contestants:
        runs = list(folder.runs(contestant.name, repeats).values())
        if runs:
            found.append(_standing(contestant, runs))
    return found


def ratio(ours: Standing, theirs: Standing, callers: int, figure: Figure) -> Spread | None:
    """Ours divided by theirs, over the rounds that both have: pairs with the same prompts, minutes apart."""
    if callers not in ours.levels or callers not in theirs.levels:
        return None
    other = {measurement.repeat: measurement for measurement in theirs.levels[callers].measurements}
    return spread(
        _divided(figure.of(measurement), figure.of(other[measurement.repeat]))
        for measurement in ours.levels[callers].measurements
        if measurement.repeat in other
    )


def measurements(standing: Standing) -> list[Measurement]:
    """All of a server."""
    return [measurement for level in standing.levels.values() for measurement in level.measurements]


def _standing(contestant: Contestant, runs: Sequence[Run]) -> Standing:
    last = runs[-1]
    whole = replace(last, measurements=tuple(measurement for run in runs for measurement in run.measurements))
    told = {name.removeprefix(VERSION): text for name, text in last.server.items() if name.startswith(VERSION)}
    found = {round(level.stage.load): level for level in levels(whole)}
    return Standing(
        contestant.name, contestant.title, contestant.remark, last.server.get(LAUNCH, ""), told, found, whole
    )


def _divided(ours: float | None, theirs: float | None) -> float | None:
    return ours / theirs if ours is not None and theirs else None

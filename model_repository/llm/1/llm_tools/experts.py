"""The numbers of a mixture's experts, told from the names of the tensors that hold them.

transformers merges the experts of a layer in the order of their numbers, whichever these are: a wrong number shifts all
behind it, and only their count is compared. It knows names and shapes, and no files.
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Mapping
from typing import Any

from llm_engine.config import ConfigError

_EXPERT = re.compile(r"(.*experts\.)(\d+)(\..+)")
_COUNTS = ("num_local_experts", "num_experts", "n_routed_experts", "moe_num_experts")  # as configurations name it
_CURE = "fetch the model again, or save it anew with save_pretrained"


def refuse_misnumbered(where: str, shapes: Mapping[str, tuple[int, ...]], config: Mapping[str, Any]) -> None:
    """Raise ConfigError unless every layer has all its experts, each with the same projections of the same shapes.

    `shapes` are those of all stored tensors by name, `config` is what config.json holds.
    """
    layers: dict[str, dict[str, dict[int, str]]] = defaultdict(lambda: defaultdict(dict))
    for name in shapes:
        if found := _EXPERT.fullmatch(name):
            layer, number, projection = found.groups()
            number_as_written = layers[layer][projection].setdefault(int(number), name)
            if number_as_written != name:
                raise ConfigError(f"{where} holds one expert twice, as {number_as_written!r} and {name!r}; {_CURE}")
    stated = _stated(config)
    missing: list[str] = []
    strays: list[str] = []
    odd: list[tuple[str, tuple[int, ...]]] = []
    for layer, projections in layers.items():
        count = stated or max(map(len, projections.values()))
        for projection, names in projections.items():
            missing += [f"{layer}{i}{projection}" for i in range(count) if i not in names]
            strays += [name for i, name in names.items() if i >= count]
            usual = Counter(shapes[name] for name in names.values()).most_common(1)[0][0]
            odd += [(name, usual) for name in names.values() if shapes[name] != usual]
    if missing:
        other = f" (and holds {len(strays)} without a place, first {strays[0]!r})" if strays else ""
        raise ConfigError(f"{where} lacks {_count(missing)} of experts, first {missing[0]!r}{other}; {_CURE}")
    if strays:
        raise ConfigError(
            f"{where} holds {_count(strays)} of more experts than config.json states ({stated}), first {strays[0]!r}; "
            f"{_CURE}"
        )
    if odd:
        name, usual = odd[0]
        raise ConfigError(
            f"{where} holds {_count(odd)} of another shape than other experts', first {name!r}: {list(shapes[name])}, "
            f"not {list(usual)}; {_CURE}"
        )


def _stated(config: Mapping[str, Any]) -> int | None:
    """How many experts a layer has, None where the configuration does not say it, or says several numbers."""
    inner = config.get("text_config")
    if config.get("zero_expert_num"):  # LongCat counts experts without weights among them, or not
        return None
    counts = {
        part[name]
        for part in (config, inner if isinstance(inner, dict) else {})
        for name in _COUNTS
        if type(part.get(name)) is int and part[name] > 0
    }
    return counts.pop() if len(counts) == 1 else None


def _count(found: list[Any]) -> str:
    return f"{len(found)} tensor{'s' if len(found) != 1 else ''}"

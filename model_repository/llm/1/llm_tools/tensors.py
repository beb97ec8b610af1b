"""The proof that a model's weights all came out of its checkpoint, and that nothing of the checkpoint was left over.

What transformers could not place is told by name and count. It knows reports of loading, and no files.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from typing import Any

from llm_engine.config import ConfigError

_CURE = "fetch the model again, or save it anew with save_pretrained of the class that config.json names"


def refuse_unproven(where: str, model: Any, report: Mapping[str, Any], stored: Collection[str] = ()) -> None:
    """Raise ConfigError unless every weight of `model` was loaded once and every stored tensor has its place.

    `report` is what `from_pretrained(output_loading_info=True)` returns beside the model; tied weights and patterns of
    names that the model's class declares harmless are no longer in it. `stored` are the names in the checkpoint.
    """
    if mismatched := sorted(report["mismatched_keys"]):
        name, got, wanted = mismatched[0]
        raise ConfigError(
            f"{where} does not fit its configuration: {_count(mismatched, 'tensor')} of another shape, first {name!r}: "
            f"{list(got)}, not {list(wanted)}; {_CURE}"
        )
    unexpected = _beyond_buffers(model, report["unexpected_keys"])
    if missing := sorted(report["missing_keys"]):
        other = f" (and holds {len(unexpected)} without a place, first {unexpected[0]!r})" if unexpected else ""
        raise ConfigError(f"{where} lacks {_count(missing, 'tensor')}, first {missing[0]!r}{other}; {_CURE}")
    if unexpected:
        raise ConfigError(
            f"{where} holds {_count(unexpected, 'tensor')} without a place in it, first {unexpected[0]!r}; {_CURE}"
        )
    prefix = f"{model.base_model_prefix}."
    if doubled := sorted(name for name in stored if prefix != "." and prefix + name in stored):
        raise ConfigError(
            f"{where} holds {_count(doubled, 'tensor')} twice, first {doubled[0]!r}, also as {prefix + doubled[0]!r}; "
            f"{_CURE}"
        )


def _beyond_buffers(model: Any, names: Iterable[str]) -> list[str]:
    """The names that are not those of buffers which the model computes by itself and old checkpoints stored."""
    prefix = f"{model.base_model_prefix}."
    computed = {name for name, _ in model.named_buffers()} - set(model.state_dict())
    return sorted(name for name in names if not computed & {name, prefix + name, name.removeprefix(prefix)})


def _count(names: Collection[Any], what: str) -> str:
    return f"{len(names)} {what}{'s' if len(names) != 1 else ''}"

"""The CPU kernels' objects of every level that this CPU runs, generic code included; compiled once and kept."""

from __future__ import annotations

from functools import cache
from typing import Any

from llm_engine.config import cache_folder
from llm_kernels.cpu_level import runnable
from llm_kernels.objects import Objects


@cache
def libraries() -> dict[str, Any]:
    """Loaded objects by the names of their levels, the best last."""
    objects = Objects(cache_folder())
    return {level.name: objects.load(level) for level in runnable()}


def best() -> Any:
    """The object of the best level."""
    return list(libraries().values())[-1]

"""The CPU kernels' objects of every level that this CPU runs, generic code included; compiled once and kept.

$TOKENSTREAM_TEST_OBJECT names another one that takes their place: a sanitizer's.
"""

from __future__ import annotations

import ctypes
import os
from functools import cache
from typing import Any

from llm_engine.config import cache_folder
from llm_kernels import packed
from llm_kernels.cpu_level import runnable
from llm_kernels.objects import Objects

OBJECT = "TOKENSTREAM_TEST_OBJECT"


@cache
def libraries() -> dict[str, Any]:
    """Loaded objects by the names of their levels, the best last."""
    if file := os.environ.get(OBJECT):
        packed._ALIGNMENT = 64  # little that is allocated may stay unseen behind what is used
        return {file: ctypes.CDLL(file)}
    objects = Objects(cache_folder())
    return {level.name: objects.load(level) for level in runnable()}


def best() -> Any:
    """The object of the best level."""
    return list(libraries().values())[-1]

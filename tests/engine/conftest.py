"""Hypothesis profiles (quick by default, `HYPOTHESIS_PROFILE=deep` for a soak) and one thread for torch."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator

import pytest
import torch
import transformers
from hypothesis import HealthCheck, settings

torch.set_num_threads(1)
transformers.logging.set_verbosity_error()  # type: ignore[no-untyped-call,unused-ignore]

_SLOW = [HealthCheck.too_slow, HealthCheck.function_scoped_fixture]
settings.register_profile("quick", max_examples=40, deadline=None, derandomize=True, suppress_health_check=_SLOW)
settings.register_profile("deep", max_examples=400, deadline=None, suppress_health_check=_SLOW)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "quick"))


@pytest.fixture(autouse=True, scope="module")
def _no_engine_thread_survives() -> Iterator[None]:
    yield
    assert [t.name for t in threading.enumerate() if t.name == "engine"] == []

"""Triton's metrics without a server: one registry that the stub modules of several instances share, and its text.

It refuses what Triton refuses (and dies of): lowering a counter, one name with two kinds.
It knows nothing of what the numbers mean.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

Labels = frozenset[tuple[str, str]]


class Registry:
    """Families by name and their series by labels, as one server holds them; `calls` counts the round trips.

    The call after `fail_after` more of them fails, once.
    """

    def __init__(self) -> None:
        self.kinds: dict[str, str] = {}
        self.values: dict[tuple[str, Labels], float] = {}
        self.calls = 0
        self.threads: set[int] = set()
        self.fail_after: int | None = None

    def stub(self) -> Any:
        """A `triton_python_backend_utils` of one instance."""
        registry = self

        class MetricFamily:
            COUNTER = "counter"
            GAUGE = "gauge"

            def __init__(self, *, name: str, description: str, kind: str) -> None:
                assert description
                assert registry.kinds.setdefault(name, kind) == kind, f"{name} is registered as another kind"
                self.name, self.kind = name, kind

            def Metric(self, *, labels: dict[str, str]) -> Metric:
                return Metric(registry, self, frozenset(labels.items()))

        return SimpleNamespace(MetricFamily=MetricFamily)

    def value(self, name: str, **labels: str) -> float:
        """The sum of a family's series that have these labels; KeyError if there is none."""
        found = [
            value
            for (family, mine), value in self.values.items()
            if family == name and labels.items() <= dict(mine).items()
        ]
        if not found:
            raise KeyError((name, labels))
        return sum(found)

    def call(self) -> None:
        """Note one round trip."""
        self.calls += 1
        self.threads.add(threading.get_ident())
        if self.fail_after is not None:
            if self.fail_after == 0:
                self.fail_after = None
                raise OSError("the server did not answer")
            self.fail_after -= 1

    def buckets(self, name: str, labels: Mapping[str, str]) -> list[tuple[float, float]]:
        """A histogram's cumulative counts by bound, in order."""
        return sorted(
            (float(dict(mine)["le"]), value)
            for (family, mine), value in self.values.items()
            if family == f"{name}_bucket" and labels.items() <= dict(mine).items()
        )


class Metric:
    """One series; the same name and labels are the same series, whoever asks for it."""

    def __init__(self, registry: Registry, family: Any, labels: Labels) -> None:
        self._registry = registry
        self._family = family
        self._key = (family.name, labels)
        registry.values.setdefault(self._key, 0.0)

    def increment(self, by: float) -> None:
        self._registry.call()
        assert by >= 0 or self._family.kind == "gauge", "a counter is lowered"
        self._registry.values[self._key] += by

    def set(self, value: float) -> None:
        self._registry.call()
        assert self._family.kind == "gauge", "a counter is set"
        self._registry.values[self._key] = value

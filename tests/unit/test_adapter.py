"""The Triton adapter: what its sender sends, and when the model is ready."""

from __future__ import annotations

import importlib
from types import SimpleNamespace
from typing import Any

import pytest

from llm_engine.request import Delta, FinishReason, Timings


class Sender:
    """Notes what is sent; the response with index `broken` cannot be."""

    def __init__(self, broken: int | None) -> None:
        self.broken = broken
        self.sent: list[tuple[Any, int]] = []

    def send(self, response: Any, flags: int = 0) -> None:
        if response.error is None and len(self.sent) == self.broken:
            self.broken = None
            raise OSError("no room")
        self.sent.append((response, flags))


def answered(replies: Any, broken: dict[str, int]) -> tuple[dict[str, Sender], list[str]]:
    """Send three tokens to requests a and b in turn; return their senders and whom the engine was told to cancel."""
    cancelled: list[str] = []
    sending = replies.Replies(1, cancelled.append, lambda seconds: None)
    senders = {key: Sender(broken.get(key)) for key in "ab"}
    call = {"outputs": frozenset({"token_ids"})}
    sending.streams = {key: replies.Stream(senders[key], replies.Call(key, **call)) for key in "ab"}
    timings = Timings(0.1, 0.1, 0.2, 0.3, 0, 0, "bitwise")
    for index in range(3):
        last = {"finish_reason": FinishReason.LENGTH, "timings": timings} if index == 2 else {}
        sending.put([Delta(key, index, (7,), "x", 1, **last) for key in "ab"])
    sending.start()
    sending.stop()
    assert sending.streams == {}
    return senders, cancelled


def test_every_token_is_one_response_and_the_last_is_final(replies: Any) -> None:
    senders, cancelled = answered(replies, {})
    assert [[flags for _, flags in sender.sent] for sender in senders.values()] == [[0, 0, 1], [0, 0, 1]]
    assert cancelled == []


@pytest.mark.parametrize("broken", [0, 1, 2])
def test_a_response_that_cannot_be_sent_ends_its_request_alone_with_one_final(replies: Any, broken: int) -> None:
    senders, cancelled = answered(replies, {"a": broken})
    last, flags = senders["a"].sent[-1]
    assert [f for _, f in senders["a"].sent] == [0] * broken + [1]
    assert flags == 1
    assert "internal error: OSError [request=a tokens=" in last.error.text
    assert cancelled == (["a"] if broken < 2 else [])  # behind its last token the engine has nothing to cancel
    assert [flags for _, flags in senders["b"].sent] == [0, 0, 1]


class Clocked(Sender):
    """Notes under whose name each response went, each of which takes a second of the clock."""

    def __init__(self, name: str, order: list[str], clock: list[float]) -> None:
        super().__init__(None)
        self.name, self.order, self.clock = name, order, clock

    def send(self, response: Any, flags: int = 0) -> None:
        self.order.append(self.name)
        self.clock[0] += 1.0


def test_a_first_token_goes_before_the_others_of_its_step_and_counts_from_arrival_until_it_is_sent(
    replies: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    order: list[str] = []
    clock, ttft = [100.0], []
    monkeypatch.setattr(replies.time, "monotonic", lambda: clock[0])
    sending = replies.Replies(1, str, ttft.append)
    for key, arrived in (("old", 50.0), ("new", 90.0), ("short", 95.0)):
        call = replies.Call(key, outputs=frozenset({"token_ids"}))
        sending.streams[key] = replies.Stream(Clocked(key, order, clock), call, arrived_at=arrived)
    sending.streams["old"].tokens = 5
    timings = Timings(0.1, 0.1, 0.2, 0.3, 0, 0, "bitwise")
    step = [
        Delta("old", 5, (7,), "x", 1),
        Delta("new", 0, (7,), "x", 1, fingerprint="f", seed=1),
        Delta("short", 0, (7,), "x", 1, fingerprint="f", seed=1, finish_reason=FinishReason.LENGTH, timings=timings),
    ]
    sending.put(step)
    sending.start()
    sending.stop()
    assert order == ["new", "short", "old"]
    assert ttft == [11.0, 6.0]


@pytest.mark.parametrize("trouble", [None, "stalled", "device_lost", "draining"])
def test_a_model_is_ready_unless_it_stalls_drains_or_has_lost_its_device(replies: Any, trouble: str | None) -> None:
    adapter = importlib.import_module("model").TritonPythonModel()
    adapter._engine = SimpleNamespace(stalled=trouble == "stalled", device_lost=trouble == "device_lost")
    adapter._watcher = SimpleNamespace(draining=trouble == "draining")
    assert adapter.is_ready() == (trouble is None)

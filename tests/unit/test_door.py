"""The door: a queue for each priority, seats that are free counted in, and nobody kept waiting who could go in."""

from __future__ import annotations

import threading
from collections.abc import Callable
from itertools import count

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from llm_engine.door import Door
from llm_engine.request import Code, Request, RequestError, SamplingParams
from waiting import WAIT

PRIORITIES = (1, 2, 3)


class House:
    """A door, and what a scheduler does behind it: who waits and who has a seat."""

    def __init__(self, seats: int, queue: int) -> None:
        self.door = Door(seats, queue)
        self.seats = seats
        self.waiting: list[Request] = []
        self.seated: list[Request] = []
        self._numbers = count()

    def waits(self, priority: int) -> int:
        return sum(request.priority == priority for request in self.waiting)

    def enter(self, priority: int = 2) -> bool:
        """Whether one more was let in; a refusal says why."""
        request = Request(f"r{next(self._numbers)}", [1], SamplingParams(), priority=priority)
        try:
            self.door.enter(request)
        except RequestError as refused:
            assert refused.code is Code.UNAVAILABLE
            assert 0.1 <= (refused.retry_after or 0) <= 30.0
            assert f"Exceeds maximum queue size: {self.waits(priority)} requests of priority {priority} wait" in str(
                refused
            )
            return False
        self.waiting.append(request)
        return True

    def seat(self, number: int = 0) -> None:
        """One of those who wait gets a seat, if there are both."""
        if self.waiting and len(self.seated) < self.seats:
            request = self.waiting.pop(number % len(self.waiting))
            request.admitted_at = 1.0
            self.door.seated(request)
            self.seated.append(request)

    def leave(self, number: int = 0) -> None:
        """One of those inside leaves, if there is one."""
        if inside := self.waiting + self.seated:
            request = inside[number % len(inside)]
            (self.waiting if request in self.waiting else self.seated).remove(request)
            self.door.leave(request)


steps = st.lists(st.tuples(st.sampled_from(["enter", "enter", "seat", "leave"]), st.integers(0, 50)), max_size=40)


@settings(deadline=None, max_examples=200)
@given(st.integers(1, 3), st.integers(0, 3), steps)
def test_whatever_happens_the_door_lets_in_those_that_find_room_and_no_more(
    seats: int, queue: int, happens: list[tuple[str, int]]
) -> None:
    house = House(seats, queue)
    for kind, number in happens:
        priority, free = PRIORITIES[number % 3], seats - len(house.seated)
        mine, waiting = house.waits(priority), len(house.waiting)
        if kind == "seat":
            house.seat(number)
        elif kind == "leave":
            house.leave(number)
        elif house.enter(priority):
            assert mine < queue + free, "it waits in a queue that is full"
        else:
            assert mine >= queue, "there was a place in its queue"
            assert waiting >= free, "there was a seat that nobody waits for"
        assert house.door.occupancy() == {"running": len(house.seated), "waiting": len(house.waiting)}
        assert house.door.wait_for_room(0) == (len(house.waiting) + len(house.seated) < seats)


@pytest.mark.parametrize("first", PRIORITIES)
def test_of_those_that_come_at_once_seats_and_a_queue_are_let_in_and_a_queue_of_each_other_priority(first: int) -> None:
    house = House(seats=2, queue=3)
    assert [house.enter(first) for _ in range(6)] == [True] * 5 + [False]
    for other in PRIORITIES:
        if other != first:
            assert [house.enter(other) for _ in range(4)] == [True] * 3 + [False]


@pytest.mark.parametrize("of_the_queue", [False, True])
def test_who_leaves_makes_room_for_one_more_and_only_one(of_the_queue: bool) -> None:
    house = House(seats=1, queue=2)
    assert [house.enter() for _ in range(4)] == [True, True, True, False]
    house.seat()
    house.leave(0 if of_the_queue else 2)
    assert [house.enter() for _ in range(2)] == [True, False]


def test_without_a_queue_only_those_that_find_a_seat_are_let_in() -> None:
    house = House(seats=2, queue=0)
    assert [house.enter(priority) for priority in (1, 2, 3)] == [True, True, False]


def test_an_id_is_free_again_once_its_request_has_left() -> None:
    door = Door(2, 2)
    first, second = (Request("same", [1], SamplingParams()) for _ in range(2))
    door.enter(first)
    with pytest.raises(RequestError, match="'same' is already in use") as refused:
        door.enter(second)
    assert refused.value.code is Code.INVALID_ARG
    door.leave(first)
    door.enter(second)
    assert door.live == {"same": second}


def test_a_closed_door_refuses_all_for_its_reason_and_those_inside_leave_as_ever() -> None:
    house = House(seats=1, queue=2)
    assert house.enter()
    assert house.enter()
    house.seat()
    house.door.close("we are closing")
    with pytest.raises(RequestError, match="we are closing") as refused:
        house.door.enter(Request("late", [1], SamplingParams()))
    assert refused.value.code is Code.UNAVAILABLE
    assert house.door.occupancy() == {"running": 1, "waiting": 1}
    house.leave()
    house.leave()
    assert house.door.occupancy() == {"running": 0, "waiting": 0}


def leave(house: House) -> None:
    house.leave()


def close(house: House) -> None:
    house.door.close("we are closing")


@pytest.mark.parametrize("event", [leave, close])
def test_who_waits_for_room_is_woken_by(event: Callable[[House], None]) -> None:
    house = House(seats=1, queue=1)
    house.enter()
    house.seat()
    told: list[bool] = []
    waiter = threading.Thread(target=lambda: told.append(house.door.wait_for_room(2 * WAIT)))
    waiter.start()
    event(house)
    waiter.join(WAIT)
    assert told == [True]


def test_there_is_no_room_while_somebody_waits_although_a_seat_is_free() -> None:
    house = House(seats=3, queue=1)
    house.enter()
    house.door.note_backlog(True)  # for want of blocks, say
    assert not house.door.wait_for_room(0)
    told: list[bool] = []
    waiter = threading.Thread(target=lambda: told.append(house.door.wait_for_room(2 * WAIT)))
    waiter.start()
    house.door.note_backlog(False)
    waiter.join(WAIT)
    assert told == [True]


class Clock:
    """Stands in for the module `time`."""

    def __init__(self) -> None:
        self.now = 1000.0

    def monotonic(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr("llm_engine.door.time", clock)
    return clock


def retry_after(house: House, priority: int = 2) -> float:
    """What the door says to one more of `priority`, whose queue is full."""
    with pytest.raises(RequestError, match="Exceeds maximum queue size") as refused:
        house.door.enter(Request("late", [1], SamplingParams(), priority=priority))
    assert refused.value.retry_after is not None
    return refused.value.retry_after


def full(seats: int = 2, queue: int = 8) -> House:
    """Nobody was there before; now all seats are taken and the queues of priorities 2 and 3 are full."""
    house = House(seats, queue)
    while house.enter():
        house.seat()
    while house.enter(3):
        pass
    return house


def turn_over(house: House, clock: Clock, times: int, seconds: float) -> None:
    """A seat is freed every so many seconds, and the queue is kept full."""
    for _ in range(times):
        clock.now += seconds
        house.leave(len(house.waiting))
        house.seat()
        priority = 2 if house.waits(2) < 8 else 3
        assert house.enter(priority)


@pytest.mark.parametrize("times", [1, 5, 100])
def test_a_full_queue_asks_for_the_time_in_which_half_of_those_ahead_get_seats(clock: Clock, times: int) -> None:
    house = full()
    turn_over(house, clock, times, 0.25)
    assert retry_after(house, 2) == pytest.approx(0.25 * 8 / 2)
    assert retry_after(house, 3) == pytest.approx(0.25 * 16 / 2)  # it waits behind the others


def test_a_pace_that_changes_is_followed(clock: Clock) -> None:
    house = full()
    turn_over(house, clock, 40, 0.25)
    turn_over(house, clock, 40, 0.5)
    assert retry_after(house) == pytest.approx(0.5 * 8 / 2)


def test_seats_that_nobody_frees_are_waited_for_ever_longer_and_never_too_long(clock: Clock) -> None:
    house = full()
    guess = retry_after(house)
    clock.now += 4.0
    assert guess < retry_after(house) == pytest.approx(16.0)
    clock.now += 1e6
    assert retry_after(house) == 30.0


def test_the_quickest_seats_are_not_asked_for_at_once(clock: Clock) -> None:
    house = full()
    turn_over(house, clock, 10, 1e-4)
    assert retry_after(house) == 0.1


def test_time_in_which_nobody_waited_tells_nothing_of_the_pace(clock: Clock) -> None:
    house = full(seats=1)
    turn_over(house, clock, 3, 0.25)
    while house.waiting or house.seated:
        clock.now += 0.25
        house.leave(len(house.waiting))
        house.seat()
    clock.now += 3600.0
    while house.enter():
        house.seat()
    assert retry_after(house) == pytest.approx(0.25 * 8 / 2)


def test_without_a_queue_it_is_the_next_seat_that_is_waited_for(clock: Clock) -> None:
    house = House(seats=1, queue=0)
    for _ in range(3):
        assert house.enter()
        house.seat()
        clock.now += 2.0
        house.leave()
    assert house.enter()
    house.seat()
    assert retry_after(house) == pytest.approx(2.0)


@pytest.mark.parametrize("reason", ["we are closing", "draining: the server is shutting down"])
def test_who_closes_does_not_know_when_to_come_again(reason: str) -> None:
    house = House(seats=1, queue=1)
    house.door.close(reason)
    with pytest.raises(RequestError, match=reason) as refused:
        house.door.enter(Request("late", [1], SamplingParams()))
    assert refused.value.retry_after is None

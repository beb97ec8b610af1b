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

WAIT = 10.0
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

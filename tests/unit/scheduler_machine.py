"""A stand-in for the engine and its device: it drives a scheduler step by step and checks every invariant."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from random import Random
from zlib import crc32

from llm_engine.blocks import BlockPool
from llm_engine.request import Request, SamplingParams, Status
from llm_engine.scheduler import Plan, Scheduler


def request(
    name: str, prompt: int | Sequence[int] = 4, answer: int = 4, *, priority: int = 2, cache_salt: str = ""
) -> Request:
    """A request as the engine hands it over. A prompt given as a length has tokens that no other name's prompt has."""
    ids = Random(name).sample(range(2**31), prompt) if isinstance(prompt, int) else list(prompt)
    return Request(
        id=name,
        prompt_ids=ids,
        params=SamplingParams(),
        priority=priority,
        cache_salt=cache_salt,
        tokens=list(ids),
        prompt_len=len(ids),
        max_total=len(ids) + answer,
    )


@dataclass(eq=False)
class Machine:
    """The engine's loop around a scheduler, with a device that remembers which prefix it wrote into each slot.

    The token at a position depends on the tokens before it, so that a wrong prefix would change the answer. With
    `overlap` a step's tokens are seen after the next step was launched, as on CUDA. `ends_at` ends an answer early.
    """

    scheduler: Scheduler
    overlap: bool = False
    launched: Plan | None = None
    added: list[Request] = field(default_factory=list)
    ends_at: dict[str, int] = field(default_factory=dict)
    marks: dict[str, list[int]] = field(default_factory=dict)  # request -> a digest of each prefix it has computed
    slots: dict[int, int] = field(default_factory=dict)

    def add(self, *requests: Request) -> None:
        for one in requests:
            self.scheduler.add(one)
            self.added.append(one)
            self.marks[one.id] = [crc32(one.cache_salt.encode())]

    def step(self) -> Plan:
        before = list(self.scheduler.running)
        plan = self.scheduler.plan()
        self.check_plan(plan, before)
        self.launch(plan)
        if self.overlap:
            previous, self.launched = self.launched, plan
            if previous:
                self.deliver(previous)
        else:
            self.deliver(plan)
        self.check()
        return plan

    def run(self, limit: int = 2000, each: Callable[[Plan], None] = lambda plan: None) -> None:
        for _ in range(limit):
            if not self.scheduler.has_work:
                return
            each(self.step())
        raise AssertionError(f"{len(self.scheduler.waiting) + len(self.scheduler.running)} requests do not end")

    def known(self, one: Request, position: int) -> int:
        """The token at a position, on the device: sampled tokens are known there before the host sees them."""
        return one.tokens[position] if position < len(one.tokens) else self.sampled(one, position)

    def sampled(self, one: Request, position: int) -> int:
        return self.marks[one.id][position] % 3

    def launch(self, plan: Plan) -> None:
        size = self.scheduler.pool.block_size
        for chunk in plan.chunks:
            one, marks = chunk.request, self.marks[chunk.request.id]
            for position in range(chunk.start + chunk.count):
                mark = hash((marks[position], self.known(one, position)))
                slot = one.blocks[position // size] * size + position % size
                if position >= chunk.start:
                    self.slots[slot] = mark
                assert self.slots[slot] == mark, f"{one.id} reads foreign KV at {position}"
                if position + 1 == len(marks):
                    marks.append(mark)
                assert marks[position + 1] == mark

    def deliver(self, plan: Plan) -> None:
        for chunk in plan.chunks:
            one = chunk.request
            self.scheduler.confirm(chunk)
            if chunk.samples:
                one.in_flight -= 1
                if one.status is not Status.FINISHED:
                    one.tokens.append(self.sampled(one, len(one.tokens)))
                    if len(one.tokens) >= min(one.max_total, self.ends_at.get(one.id, one.max_total)):
                        self.scheduler.finish(one)

    def check_plan(self, plan: Plan, before: Sequence[Request]) -> None:
        scheduler = self.scheduler
        assert sum(chunk.count for chunk in plan.chunks) <= scheduler.max_step_tokens
        assert len({id(chunk.request) for chunk in plan.chunks}) == len(plan.chunks)
        assert not (plan.admitted and plan.preempted)
        for chunk in plan.chunks:
            one = chunk.request
            assert one.status is Status.RUNNING
            assert chunk.count >= 1
            assert chunk.start + chunk.count == one.computed
            assert chunk.samples == (one.computed >= len(one.tokens))
            assert one.computed < one.max_total
        planned = {id(chunk.request) for chunk in plan.chunks}
        for one in scheduler.running:  # nobody stands still, except for a last token on its way
            assert id(one) in planned or len(one.tokens) + one.in_flight >= one.max_total
        prompts = [chunk for chunk in plan.chunks if chunk.count > 1 or not chunk.samples]
        if len(prompts) > 1:
            assert all(chunk.samples or chunk.count >= scheduler.pool.block_size for chunk in prompts)
        if before:
            assert before[0] not in plan.preempted

    def check(self) -> None:
        scheduler = self.scheduler
        scheduler.pool.check([one.blocks for one in self.added])
        everybody = [*scheduler.waiting, *scheduler.running]
        assert len({id(one) for one in everybody}) == len(everybody)
        assert all(one.status is Status.WAITING and not one.blocks and one.seat == -1 for one in scheduler.waiting)
        assert all(one.status is Status.RUNNING for one in scheduler.running)
        seats = [one.seat for one in scheduler.running]
        assert len(set(seats)) == len(seats)
        assert set(seats) <= set(range(scheduler.max_sequences))
        for one in scheduler.running:
            assert one.computed <= len(one.blocks) * scheduler.pool.block_size
            assert one.computed <= len(one.tokens) + one.in_flight

    def assert_nothing_is_left(self) -> None:
        assert not self.scheduler.has_work
        assert all(one.status is Status.FINISHED and not one.blocks and one.seat == -1 for one in self.added)
        assert self.scheduler.pool.free == self.scheduler.pool.blocks
        self.scheduler.pool.check([])


def machine(
    blocks: int = 64,
    block_size: int = 4,
    *,
    max_sequences: int = 4,
    max_step_tokens: int = 64,
    overlap: bool = False,
    prefix_cache: bool = True,
) -> Machine:
    pool = BlockPool(blocks, block_size, prefix_cache=prefix_cache)
    scheduler = Scheduler(pool, max_sequences=max_sequences, max_step_tokens=max_step_tokens, clock=lambda: 7.0)
    return Machine(scheduler, overlap)


def counts(plan: Plan) -> dict[str, int]:
    return {chunk.request.id: chunk.count for chunk in plan.chunks}


def names(requests: Sequence[Request]) -> list[str]:
    return [one.id for one in requests]

"""The block pool keeps its books, shares only equal prefixes, and forgets the least recently used first."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from llm_engine import blocks as blocks_module
from llm_engine.blocks import BlockPool, PoolError


def held_and_registered(pool: BlockPool, tokens: list[int], salt: str = "") -> list[int]:
    """Blocks of a request that has computed all of `tokens`, without looking for a prefix first."""
    blocks: list[int] = []
    assert pool.grow(blocks, len(tokens))
    pool.register(blocks, tokens, pool.chain(salt), 0, len(tokens))
    return blocks


def cached(pool: BlockPool, tokens: list[int], salt: str = "") -> int:
    """How many blocks of `tokens` the pool would find, with the books unchanged but for the order of use."""
    found = pool.match([*tokens, 0], pool.chain(salt))
    count = len(found)
    pool.release(found)
    return count


def test_growing_takes_just_enough_blocks() -> None:
    pool = BlockPool(4, 4)
    blocks: list[int] = []
    taken = []
    for tokens in (0, 1, 4, 5, 16):
        assert pool.grow(blocks, tokens)
        taken.append(len(blocks))
    assert taken == [0, 1, 1, 2, 4]
    assert len(set(blocks)) == 4
    assert pool.free == 0


def test_growing_beyond_the_pool_changes_nothing() -> None:
    pool = BlockPool(2, 4)
    blocks: list[int] = []
    assert pool.grow(blocks, 4)
    before = list(blocks)
    assert not pool.grow(blocks, 12)
    assert blocks == before
    assert pool.free == 1
    pool.check([blocks])


def test_a_prefix_is_found_after_its_holder_is_gone() -> None:
    pool = BlockPool(8, 4)
    tokens = list(range(10))
    first = held_and_registered(pool, tokens)
    full = first[:2]
    pool.release(first)
    assert first == []
    assert pool.free == 8
    assert pool.match(tokens, pool.chain("")) == full
    assert pool.free == 6
    pool.check([full])


def test_a_prefix_is_shared_with_its_living_holder() -> None:
    pool = BlockPool(8, 4)
    first = held_and_registered(pool, list(range(10)))
    second = pool.match([*range(8), 99, 98], pool.chain(""))
    assert second == first[:2]
    assert pool.free == 5
    pool.check([first, second])
    pool.release(first)
    assert pool.free == 6
    pool.check([second])


@pytest.mark.parametrize(("length", "covered"), [(1, 0), (4, 0), (5, 1), (8, 1), (9, 2), (12, 2), (13, 3)])
def test_a_hit_never_covers_the_last_token(length: int, covered: int) -> None:
    pool = BlockPool(8, 4)
    tokens = list(range(16))
    pool.release(held_and_registered(pool, tokens))
    assert len(pool.match(tokens[:length], pool.chain(""))) == covered


def test_a_match_ends_at_the_first_block_that_differs() -> None:
    pool = BlockPool(8, 4)
    held_and_registered(pool, list(range(12)))
    assert cached(pool, [0, 1, 2, 3, 4, 5, 6, 99, 8, 9, 10, 11]) == 1
    assert cached(pool, [99, 1, 2, 3, 4, 5, 6, 7]) == 0


def test_the_same_tokens_behind_another_prefix_are_not_a_hit() -> None:
    pool = BlockPool(8, 4)
    held_and_registered(pool, [1, 1, 1, 1, 2, 2, 2, 2])
    assert cached(pool, [2, 2, 2, 2]) == 0


def test_two_salts_share_nothing() -> None:
    pool = BlockPool(8, 4)
    tokens = list(range(8))
    held_and_registered(pool, tokens, salt="one tenant")
    assert cached(pool, tokens, salt="another") == 0
    assert cached(pool, tokens, salt="") == 0
    assert cached(pool, tokens, salt="one tenant") == 2


def test_pools_of_another_identity_share_no_digest() -> None:
    chains = [
        BlockPool(1, 1, identity=identity).chain(salt) for identity, salt in (("a", "bc"), ("ab", "c"), ("", "abc"))
    ]
    assert len({chain[0] for chain in chains}) == 3


def test_a_digest_collision_is_not_a_hit(monkeypatch: pytest.MonkeyPatch) -> None:
    class Constant:
        def __init__(self, data: bytes, digest_size: int) -> None:
            self.size = digest_size

        def digest(self) -> bytes:
            return b"x" * self.size

    monkeypatch.setattr(blocks_module, "blake2b", Constant)
    pool = BlockPool(8, 4)
    first = held_and_registered(pool, [1, 2, 3, 4])
    assert cached(pool, [5, 6, 7, 8]) == 0
    second = held_and_registered(pool, [5, 6, 7, 8])
    assert cached(pool, [1, 2, 3, 4]) == 1
    pool.check([first, second])


def test_a_block_is_found_only_once_it_is_full_and_confirmed() -> None:
    pool = BlockPool(8, 4)
    tokens = list(range(9))
    blocks: list[int] = []
    chain = pool.chain("")
    assert pool.grow(blocks, len(tokens))
    found = []
    for start, end in ((0, 3), (3, 4), (4, 6), (6, 9)):
        pool.register(blocks, tokens, chain, start, end)
        found.append(cached(pool, tokens))
    assert found == [0, 1, 1, 2]


def test_unknown_tokens_cannot_be_confirmed() -> None:
    pool = BlockPool(2, 4)
    blocks: list[int] = []
    assert pool.grow(blocks, 4)
    with pytest.raises(PoolError, match="not known"):
        pool.register(blocks, [1, 2, 3], pool.chain(""), 0, 4)


def test_of_two_equal_blocks_the_first_entered_is_found() -> None:
    pool = BlockPool(8, 4)
    tokens = list(range(4))
    first = held_and_registered(pool, tokens)
    second = held_and_registered(pool, tokens)
    pool.check([first, second])
    found = pool.match([*tokens, 0], pool.chain(""))
    assert found == first
    pool.release(found)
    twin = second[0]
    pool.release(second)
    fresh: list[int] = []
    assert pool.grow(fresh, 1)
    assert fresh == [twin]  # a block that nobody can find is taken before any other
    assert cached(pool, tokens) == 1


def test_tails_are_forgotten_before_their_prefixes() -> None:
    pool = BlockPool(3, 4)
    tokens = list(range(12))
    pool.release(held_and_registered(pool, tokens))
    taken: list[int] = []
    remaining = [cached(pool, tokens)]
    for size in (1, 5, 9):
        assert pool.grow(taken, size)
        remaining.append(cached(pool, tokens))
    assert remaining == [3, 2, 1, 0]


def test_the_least_recently_used_content_is_forgotten_first() -> None:
    pool = BlockPool(3, 2)
    prompts = [[1, 1], [2, 2], [3, 3]]
    for prompt in prompts:
        pool.release(held_and_registered(pool, prompt))
    pool.release(pool.match([1, 1, 0], pool.chain("")))  # the oldest is used again
    taken: list[int] = []
    assert pool.grow(taken, 1)
    assert [cached(pool, prompt) for prompt in prompts] == [1, 0, 1]


def test_a_held_block_is_never_taken() -> None:
    pool = BlockPool(2, 2)
    first = held_and_registered(pool, [1, 1])
    shared = pool.match([1, 1, 0], pool.chain(""))
    pool.release(first)
    other: list[int] = []
    assert pool.grow(other, 2)
    assert not pool.grow(other, 4)
    assert cached(pool, [1, 1]) == 1
    pool.check([shared, other])


def test_forgotten_blocks_stay_with_their_holders_but_are_found_by_nobody() -> None:
    pool = BlockPool(4, 2)
    sound, unsound = held_and_registered(pool, [1, 1]), held_and_registered(pool, [2, 2])
    pool.release(sound)
    pool.forget(unsound)
    assert [cached(pool, [1, 1]), cached(pool, [2, 2])] == [1, 0]
    pool.check([unsound])
    gone = unsound[0]
    pool.release(unsound)
    fresh: list[int] = []
    assert pool.grow(fresh, 2)
    assert fresh == [gone]
    again = held_and_registered(pool, [2, 2])
    assert cached(pool, [2, 2]) == 1
    pool.check([fresh, again])


def test_without_a_prefix_cache_nothing_is_found() -> None:
    pool = BlockPool(4, 2, prefix_cache=False)
    pool.release(held_and_registered(pool, [1, 1, 2, 2]))
    assert cached(pool, [1, 1, 2, 2]) == 0
    pool.check([])


def test_releasing_twice_is_an_error() -> None:
    pool = BlockPool(4, 2)
    blocks: list[int] = []
    assert pool.grow(blocks, 2)
    copy = list(blocks)
    pool.release(blocks)
    with pytest.raises(PoolError, match="nobody holds"):
        pool.release(copy)


def test_the_check_finds_a_lost_a_stolen_and_a_foreign_block() -> None:
    pool = BlockPool(4, 2)
    blocks: list[int] = []
    assert pool.grow(blocks, 4)
    pool.check([blocks])
    for wrong in ([], [blocks[:1]], [blocks, blocks], [[blocks[0], blocks[0]]], [[*blocks, 4]]):
        with pytest.raises(PoolError):
            pool.check(wrong)


@pytest.mark.parametrize(("blocks", "block_size"), [(0, 4), (4, 0)])
def test_an_empty_pool_is_refused(blocks: int, block_size: int) -> None:
    with pytest.raises(ValueError, match="at least one block"):
        BlockPool(blocks, block_size)


@given(
    st.lists(st.integers(0, 1), min_size=1, max_size=12),
    st.lists(st.integers(0, 1), min_size=1, max_size=12),
    st.integers(1, 4),
)
@settings(max_examples=200, deadline=None)
def test_a_match_is_the_longest_common_run_of_full_blocks(known: list[int], asked: list[int], size: int) -> None:
    pool = BlockPool(32, size)
    blocks = held_and_registered(pool, known)
    common = next(
        (i for i, (a, b) in enumerate(zip(known, asked, strict=False)) if a != b), min(len(known), len(asked))
    )
    expected = min(common, len(asked) - 1) // size
    assert pool.match(asked, pool.chain("")) == blocks[:expected]


class PoolMachine(RuleBasedStateMachine):
    """Requests come, grow and go in any order; a model remembers what was written into each block."""

    def __init__(self) -> None:
        super().__init__()
        self.pool = BlockPool(6, 2)
        self.requests: list[tuple[list[int], list[int], list[bytes]]] = []  # tokens, blocks, chain
        self.written: dict[int, tuple[int, ...]] = {}  # block -> all tokens up to its end

    @rule(tokens=st.lists(st.integers(0, 1), min_size=1, max_size=9))
    def arrive(self, tokens: list[int]) -> None:
        chain = self.pool.chain("")
        blocks = self.pool.match(tokens, chain)
        for index, block in enumerate(blocks):
            assert self.written[block] == tuple(tokens[: 2 * (index + 1)])
        matched = len(blocks)
        if not self.pool.grow(blocks, len(tokens)):
            assert self.pool.free < self.pool.blocks_for(len(tokens)) - matched
            self.pool.release(blocks)
            return
        for index, block in enumerate(blocks[matched:], matched):
            self.written[block] = tuple(tokens[: 2 * (index + 1)])
        self.pool.register(blocks, tokens, chain, 2 * matched, len(tokens))
        self.requests.append((tokens, blocks, chain))

    @precondition(lambda self: self.requests)
    @rule(data=st.data())
    def depart(self, data: st.DataObject) -> None:
        index = data.draw(st.integers(0, len(self.requests) - 1))
        _, blocks, _ = self.requests.pop(index)
        if data.draw(st.booleans()):
            self.pool.forget(blocks)
        self.pool.release(blocks)

    @invariant()
    def the_books_are_right(self) -> None:
        self.pool.check([blocks for _, blocks, _ in self.requests])


PoolMachine.TestCase.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)
TestPoolMachine = PoolMachine.TestCase

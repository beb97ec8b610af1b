"""The block pool: who holds which block of the KV cache, and what the free blocks still remember.

A full block whose KV is confirmed is found again by the chain of tokens it ends (the prefix cache), and keeps that
content after its last holder let go, until the block is the least recently used of the free ones and is taken.
The pool knows neither tensors nor requests: it hands out block ids from 0 to `blocks - 1`, and trusts its one thread.
"""

from __future__ import annotations

from array import array
from collections import Counter, OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from hashlib import blake2b

_DIGEST_BYTES = 16


class PoolError(AssertionError):
    """The pool's own books are wrong: a bug here or in a caller, never a lack of blocks."""


@dataclass(frozen=True, slots=True)
class _Content:
    """What a cached block holds. Two blocks with equal contents end the same chain of tokens under the same salt."""

    digest: bytes
    parent: bytes
    tokens: tuple[int, ...]


class BlockPool:
    """Blocks of `block_size` tokens, counted by holder, with a prefix cache over the full ones.

        chain    root ── digest 0 ── digest 1         one digest per full block, each over its parent and its tokens
        tokens        │ a b c d │ e f g h │ i j       block_size 4: two full blocks and a partial one
        blocks        │    7    │    2    │  5        5 is never found by another request: it is not full

    `identity` names whatever else the KV depends on (weights, dtype): pools that differ in it share no digest.
    The scheme is vLLM's (hash chain over full blocks, LRU of free blocks, tails freed first), with contents compared.
    """

    def __init__(self, blocks: int, block_size: int, *, prefix_cache: bool = True, identity: str = "") -> None:
        if blocks < 1 or block_size < 1:
            raise ValueError(f"a pool needs at least one block of one token, got {blocks} of {block_size}")
        self.blocks = blocks
        self.block_size = block_size
        self._prefix_cache = prefix_cache
        self._identity = identity
        self._holders = [0] * blocks
        self._contents: list[_Content | None] = [None] * blocks
        self._cached: dict[bytes, int] = {}  # digest -> the block that holds its content
        self._free: OrderedDict[int, None] = OrderedDict.fromkeys(range(blocks))  # the next to be taken first

    @property
    def free(self) -> int:
        """Blocks without a holder, whether or not they still remember a content."""
        return len(self._free)

    def blocks_for(self, tokens: int) -> int:
        """Blocks that hold `tokens` tokens."""
        return -(-tokens // self.block_size)

    def chain(self, salt: str) -> list[bytes]:
        """Begin a request's chain: the root of `salt`. `match` and `register` add one digest per full block.

        Requests find each other's blocks only from the same root. A chain belongs to one list of tokens, which may
        grow but never change; so each digest is computed once, however often the request is preempted.
        """
        # The length keeps ("a", "bc") and ("ab", "c") apart.
        root = f"{len(self._identity)}:{self._identity}{salt}".encode()
        return [blake2b(root, digest_size=_DIGEST_BYTES).digest()]

    def match(self, tokens: Sequence[int], chain: list[bytes]) -> list[int]:
        """Find and hold the longest run of cached blocks that `tokens` begin with; the caller must release them.

        The last token is never covered, so that at least one row is computed and yields logits.
        """
        found: list[int] = []
        if self._prefix_cache:
            for index in range((len(tokens) - 1) // self.block_size):
                content = self._content(tokens, chain, index)
                block = self._cached.get(content.digest)
                if block is None or self._contents[block] != content:
                    break
                found.append(block)
        for block in found:
            self._holders[block] += 1
            self._free.pop(block, None)
        return found

    def grow(self, blocks: list[int], tokens: int) -> bool:
        """Append fresh blocks until `blocks` can hold `tokens` tokens; or change nothing and return False."""
        missing = self.blocks_for(tokens) - len(blocks)
        if missing > len(self._free):
            return False
        for _ in range(missing):
            blocks.append(self._take())
        return True

    def register(self, blocks: Sequence[int], tokens: Sequence[int], chain: list[bytes], start: int, end: int) -> None:
        """Enter the blocks that tokens `start` to `end` have filled into the cache.

        Call it only once their KV is written and sound, and in order from a request's first computed token on: a
        block is worth as much as the blocks before it. Of equal contents the first entered stays the one found.
        """
        if end > len(tokens):
            raise PoolError(f"token {end - 1} is not known yet; {len(tokens)} are")
        if not self._prefix_cache:
            return
        for index in range(start // self.block_size, end // self.block_size):
            content = self._content(tokens, chain, index)
            if content.digest not in self._cached:
                self._cached[content.digest] = blocks[index]
                self._contents[blocks[index]] = content

    def forget(self, blocks: Sequence[int]) -> None:
        """Drop what `blocks` hold from the cache: their KV turned out to be unsound. Holders keep their blocks."""
        for block in blocks:
            if content := self._contents[block]:
                del self._cached[content.digest]
                self._contents[block] = None

    def release(self, blocks: list[int]) -> None:
        """Let go of `blocks` and empty the list. Raises PoolError for a block that nobody holds.

        The tail is freed first: it is taken before its prefix, which more requests can use. A block without content
        is worth nothing to anybody and is taken before all others.
        """
        for block in reversed(blocks):
            if self._holders[block] == 0:
                raise PoolError(f"block {block} is released but nobody holds it")
            self._holders[block] -= 1
            if self._holders[block] == 0:
                self._free[block] = None
                self._free.move_to_end(block, last=self._contents[block] is not None)
        blocks.clear()

    def check(self, holders: Iterable[Sequence[int]]) -> None:
        """Verify the books against `holders`, the block lists of all requests. Raises PoolError naming the fault."""
        held: Counter[int] = Counter()
        for blocks in holders:
            held.update(blocks)
            if len(set(blocks)) != len(blocks):
                raise PoolError(f"one request holds a block twice: {blocks}")
        if unknown := held.keys() - set(range(self.blocks)):
            raise PoolError(f"blocks {sorted(unknown)} are held but not the pool's")
        for block, count in enumerate(self._holders):
            if count != held[block]:
                raise PoolError(f"block {block} counts {count} holders, but {held[block]} hold it")
            if (block in self._free) != (count == 0):
                raise PoolError(f"block {block} with {count} holders is {'' if block in self._free else 'not '}free")
        remembered = {content.digest: block for block, content in enumerate(self._contents) if content}
        if remembered != self._cached:
            raise PoolError("the cache and the contents of the blocks differ")

    def _take(self) -> int:
        """Hold the free block that was used least recently, and forget its content."""
        block, _ = self._free.popitem(last=False)
        self.forget((block,))
        self._holders[block] = 1
        return block

    def _content(self, tokens: Sequence[int], chain: list[bytes], index: int) -> _Content:
        """What the full block `index` of `tokens` holds; its digest is added to the chain if it is not there yet."""
        size = self.block_size
        while len(chain) < index + 2:
            first = (len(chain) - 1) * size
            text = array("q", tokens[first : first + size]).tobytes()
            chain.append(blake2b(chain[-1] + text, digest_size=_DIGEST_BYTES).digest())
        return _Content(chain[index + 1], chain[index], tuple(tokens[index * size : (index + 1) * size]))

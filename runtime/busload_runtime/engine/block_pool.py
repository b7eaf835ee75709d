"""The pool of KV blocks: reference counts, prefix cache and the free list that is its least-recently-used order.

Every block is in one of three conditions: in use (`users` > 0), free with content worth finding again (`digest` set),
or free and blank. Free blocks form one doubly linked list through the block objects, so that taking, giving back and
rescuing a block from the middle (a prefix hit) are all O(1). Blank blocks enter at the front and are taken first;
blocks with content enter at the back and are taken last, oldest first.
"""

from array import array
from collections.abc import Sequence
from hashlib import sha256


def chain_digest(parent: bytes, tokens: Sequence[int]) -> bytes:
    """Digest of a full block: SHA-256 over the digest of the block before it (or the salt) and its own token ids.

    Equal digests therefore mean an equal salt and equal tokens from position 0 on.
    """
    return sha256(parent + array("q", tokens).tobytes()).digest()


class Block:
    """One KV block. Lives in the free list exactly while `users` is 0."""

    __slots__ = ("block_id", "digest", "left", "right", "users")

    def __init__(self, block_id: int) -> None:
        self.block_id = block_id
        self.users = 0
        self.digest: bytes | None = None
        self.left: Block = self
        self.right: Block = self


class BlockPool:
    """Blocks 0 .. `num_blocks` - 1. Block objects come to life when first taken, so an untouched pool costs nothing."""

    def __init__(self, num_blocks: int) -> None:
        if num_blocks < 1:
            raise ValueError(f"a pool needs at least 1 block, got {num_blocks}")
        self.num_blocks = num_blocks
        self._blocks: list[Block] = []
        self._cached: dict[bytes, Block] = {}
        self._ends = Block(-1)  # sentinel: its right is the front of the free list, its left the back
        self._listed = 0

    @property
    def free(self) -> int:
        """Blocks that no request uses; those with cached content count."""
        return self._listed + self.num_blocks - len(self._blocks)

    def find(self, digest: bytes) -> Block | None:
        """The block that holds this content, in use or free."""
        return self._cached.get(digest)

    def take(self) -> Block:
        """A blank block for one user. The caller has looked at `free`."""
        front = self._ends.right
        if front.digest is not None or front is self._ends:
            if len(self._blocks) < self.num_blocks:
                front = Block(len(self._blocks))
                self._blocks.append(front)
                front.users = 1
                return front
            if front is self._ends:
                raise RuntimeError("no free KV block")
            self._forget(front)
        self._unlink(front)
        front.users = 1
        return front

    def share(self, block: Block) -> None:
        """One more user for a block found by `find`."""
        if block.users == 0:
            self._unlink(block)
        block.users += 1

    def publish(self, block: Block, digest: bytes) -> None:
        """Makes a block of computed content findable. Of two equal blocks the first stays, the other is private."""
        if self._cached.setdefault(digest, block) is block:
            block.digest = digest

    def release(self, blocks: list[Block]) -> None:
        """One user less for each block of a sequence. Tail first: the heads, which others may share, live longest."""
        for block in reversed(blocks):
            block.users -= 1
            if block.users == 0:
                self._link(block)

    def resize(self, num_blocks: int) -> None:
        """Shrinks or grows the pool. Blocks beyond the new size must be free; their content is forgotten."""
        if num_blocks < 1:
            raise ValueError(f"a pool needs at least 1 block, got {num_blocks}")
        for block in self._blocks[num_blocks:]:
            if block.users:
                raise RuntimeError(f"KV block {block.block_id} is in use and cannot be removed")
            self._forget(block)
            self._unlink(block)
        del self._blocks[num_blocks:]
        self.num_blocks = num_blocks

    def _forget(self, block: Block) -> None:
        if block.digest is not None:
            del self._cached[block.digest]
            block.digest = None

    def _link(self, block: Block) -> None:
        left = self._ends if block.digest is None else self._ends.left
        right = left.right
        left.right = right.left = block
        block.left, block.right = left, right
        self._listed += 1

    def _unlink(self, block: Block) -> None:
        block.left.right, block.right.left = block.right, block.left
        block.left = block.right = block
        self._listed -= 1

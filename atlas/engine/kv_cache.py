"""The KV block pool: which blocks of the arena are free, and who shares the others."""

from __future__ import annotations

from collections import deque


class BlockPool:
    """Reference-counted KV blocks.

    A block leaves the free list by `allocate`, gains owners by `share` and returns when its last owner
    calls `release`. Least recently freed first, so that freed contents live as long as possible.
    """

    def __init__(self, n_blocks: int) -> None:
        self._free = deque(range(n_blocks))
        self._owners = [0] * n_blocks

    @property
    def total(self) -> int:
        return len(self._owners)

    @property
    def free(self) -> int:
        return len(self._free)

    def allocate(self, count: int) -> list[int]:
        """`count` blocks, each with one owner. Raises ValueError when fewer are free."""
        if count > len(self._free):
            raise ValueError(f"{count} KV blocks wanted, {len(self._free)} free")
        blocks = [self._free.popleft() for _ in range(count)]
        for block in blocks:
            self._owners[block] = 1
        return blocks

    def share(self, block: int) -> None:
        """One more owner of a block in use."""
        if self._owners[block] < 1:
            raise ValueError(f"KV block {block} is free and cannot be shared")
        self._owners[block] += 1

    def release(self, blocks: list[int]) -> None:
        """One owner fewer of each block. Raises ValueError on a block that has none: freed twice."""
        for block in blocks:
            if self._owners[block] < 1:
                raise ValueError(f"KV block {block} is released but already free")
            self._owners[block] -= 1
            if self._owners[block] == 0:
                self._free.append(block)

    def check_integrity(self) -> None:
        """Raises AssertionError unless every block is either free or owned."""
        free = set(self._free)
        if len(free) != len(self._free) or any((owners == 0) != (b in free) for b, owners in enumerate(self._owners)):
            raise AssertionError("the KV block pool is inconsistent")

"""How much may be in preparation: requests whose body is being read, decoded, made into a prompt, before any of their
sequences stands in the engine's queue.

They hold bodies and what those become, and wait for threads that all share. Without a bound, whoever sends many large
bodies at once would have all the memory of this process.
"""

from __future__ import annotations

from atlas.serve.errors import too_many

MAX_REQUESTS = 4096
MAX_BYTES = 256 << 20
"""Of bodies. What a body becomes may be larger: `body.MAX_VALUES` bounds that."""


class _Owner:
    """What one client has in preparation."""

    def __init__(self) -> None:
        self.requests = self.bytes = 0


class Preparation:
    """What all clients have in preparation.

    A client may take no more than it leaves free: alone it gets half of everything, and however much some have, a new
    one gets a part. (The rule is that of buffers in network switches: Choudhury and Hahne, "Dynamic queue length
    thresholds", 1998.)
    """

    def __init__(self, max_requests: int = MAX_REQUESTS, max_bytes: int = MAX_BYTES) -> None:
        self.requests = self.bytes = 0
        self.max_requests, self.max_bytes = max_requests, max_bytes
        self._owners: dict[str, _Owner] = {}

    def enter(self, owner: str) -> Place:
        """One request more of this client. Raises ApiError 429."""
        one = self._owners.get(owner) or _Owner()
        if one.requests + 1 > self.max_requests - self.requests - 1:
            message = f"{one.requests} requests of this client are being prepared, as many as may be"
            raise too_many("preparation_full", f"{message}; send more when some are answered", 1)
        self._owners[owner] = one
        self.requests += 1
        one.requests += 1
        return Place(self, owner, one)

    def take(self, one: _Owner, size: int) -> None:
        """So many bytes more. Raises ApiError 429; then nothing has been taken."""
        if one.bytes + size > self.max_bytes - self.bytes - size:
            message = f"requests of {one.bytes} bytes of this client are being prepared, and this one has {size} more"
            accepted = f"at most half of what others leave of {self.max_bytes}"
            raise too_many("preparation_full", f"{message}; accepted: {accepted}", 1)
        self.bytes += size
        one.bytes += size

    def give_back(self, owner: str, one: _Owner, size: int) -> None:
        """A request is prepared, or over."""
        self.bytes -= size
        one.bytes -= size
        self.requests -= 1
        one.requests -= 1
        if not one.requests:
            del self._owners[owner]


class Place:
    """One request in preparation."""

    def __init__(self, preparation: Preparation, owner: str, one: _Owner) -> None:
        self._preparation, self._owner, self._one = preparation, owner, one
        self._bytes, self._left = 0, False

    def hold(self, size: int) -> None:
        """The request has `size` bytes in all. Raises ApiError 429 where that is too much beside the others'."""
        if size > self._bytes and not self._left:
            self._preparation.take(self._one, size - self._bytes)
            self._bytes = size

    def leave(self) -> None:
        """Nothing of it is in preparation any more."""
        if not self._left:
            self._left = True
            self._preparation.give_back(self._owner, self._one, self._bytes)

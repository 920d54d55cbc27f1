"""How much may be in preparation: requests whose body is being read, decoded, made into a prompt, before any of their
sequences stands in the engine's queue; and what is kept of them longer.

They hold bodies and what those become, and wait for threads that all share. Without a bound, whoever sends many large
bodies at once would have all the memory of this process.
"""

from __future__ import annotations

from collections import Counter

from atlas.serve.errors import too_many

MAX_REQUESTS = 4096
MAX_BYTES = 512 << 20
"""Of bodies, and of stored responses that are being sent. What a body becomes may be larger: `body.MAX_VALUES` bounds
that."""


class Preparation:
    """What all clients have in preparation.

    A client may take no more than it leaves free: alone it gets half of everything, and however much some have, a new
    one gets a part. (The rule is that of buffers in network switches: Choudhury and Hahne, "Dynamic queue length
    thresholds", 1998.)
    """

    def __init__(self, max_requests: int = MAX_REQUESTS, max_bytes: int = MAX_BYTES) -> None:
        self.max_requests, self.max_bytes = max_requests, max_bytes
        self.requests, self.bytes = Counter[str](), Counter[str]()  # by owner; those who have none are not there

    def enter(self, owner: str) -> Place:
        """One request more of this client. Raises ApiError 429."""
        own, free = self.requests[owner] + 1, self.max_requests - self.requests.total() - 1
        if own > free:
            message = f"{own - 1} requests of this client are being prepared, as many as may be"
            raise too_many("preparation_full", f"{message}; send more when some are answered", 1)
        self.requests[owner] += 1
        return Place(self, owner, 1)

    def take(self, owner: str, size: int) -> None:
        """So many bytes more. Raises ApiError 429; then nothing has been taken."""
        own, free = self.bytes[owner] + size, self.max_bytes - self.bytes.total() - size
        if own > free:
            message = f"requests of {own - size} bytes of this client are under way, and this one has {size} more"
            accepted = f"at most half of what others leave of {self.max_bytes}"
            raise too_many("preparation_full", f"{message}; accepted: {accepted}", 1)
        self.bytes[owner] += size

    def give_back(self, owner: str, requests: int, size: int) -> None:
        """So much is not needed any more."""
        for counter, amount in ((self.requests, requests), (self.bytes, size)):
            counter[owner] -= amount
            if not counter[owner]:
                del counter[owner]


class Place:
    """What one request has there. requests: 1 until it is prepared, 0 where there is nothing to prepare."""

    def __init__(self, preparation: Preparation, owner: str, requests: int) -> None:
        self._preparation, self._owner = preparation, owner
        self._requests, self._bytes = requests, 0

    def hold(self, size: int) -> None:
        """The request has `size` bytes in all. Raises ApiError 429 where that is too much beside the others'."""
        if size > self._bytes:
            self._preparation.take(self._owner, size - self._bytes)
            self._bytes = size

    def leave(self, kept: int = 0) -> None:
        """It is prepared, and of its bytes `kept` at most are still needed."""
        requests, size = self._requests, max(0, self._bytes - kept)
        self._requests, self._bytes = 0, self._bytes - size
        self._preparation.give_back(self._owner, requests, size)

"""How often a dead engine is started again."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable

WINDOW = 600.0
"""Seconds. An engine that dies more often than allowed within them will not do better next time: the server ends, and
whoever runs it (systemd, Kubernetes) sees that and decides."""


class Restarts:
    """`limit` restarts in any WINDOW seconds."""

    def __init__(self, limit: int, clock: Callable[[], float] = time.monotonic) -> None:
        self._limit, self._clock = limit, clock
        self._taken: deque[float] = deque()

    @property
    def left(self) -> int:
        """Restarts that may be made now."""
        while self._taken and self._clock() - self._taken[0] >= WINDOW:
            self._taken.popleft()
        return self._limit - len(self._taken)

    def take(self) -> bool:
        """Make one; False: there is none left."""
        if self.left <= 0:
            return False
        self._taken.append(self._clock())
        return True

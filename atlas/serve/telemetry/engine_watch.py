"""The engine's numbers for whoever asks, without asking the engine too often."""

from __future__ import annotations

import asyncio
import contextlib
import time

from atlas.engine.client import EngineClient, EngineUnavailableError
from atlas.engine.messages import Stats

MAX_AGE = 1.0
"""Seconds: the engine is asked no more often, however many scrape."""
PATIENCE = 1.0
"""Seconds for which a scrape waits for the engine. It answers between two steps; long prompts on a CPU take longer."""


class EngineWatch:
    """What the engine last said of itself. It is asked when somebody wants to know; unwatched, it says nothing."""

    def __init__(self) -> None:
        self._engine: EngineClient | None = None
        self._known: Stats | None = None
        self._known_at = -MAX_AGE
        self._asking: asyncio.Task[None] | None = None

    async def stats(self, engine: EngineClient | None) -> Stats | None:
        """At most MAX_AGE old, but for an engine that is slow to answer. None: it does not serve."""
        if engine is None or engine.state != "ready":
            return None
        if engine is not self._engine:  # the first, or one that was started after the last died
            self._engine, self._known, self._known_at, self._asking = engine, None, -MAX_AGE, None
        if time.monotonic() - self._known_at >= MAX_AGE:
            if self._asking is None or self._asking.done():
                self._asking = asyncio.create_task(self._ask(engine))
            await asyncio.wait((self._asking,), timeout=PATIENCE)
        return self._known

    async def _ask(self, engine: EngineClient) -> None:
        with contextlib.suppress(EngineUnavailableError):
            stats = await engine.stats(timeout=60.0)
            if engine is self._engine:
                self._known, self._known_at = stats, time.monotonic()

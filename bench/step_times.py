"""Where the time of a run goes, step by step: on the device or on the host."""

from __future__ import annotations

import contextlib
import statistics
import time
from collections import deque
from collections.abc import Iterator
from typing import Any

from atlas.engine.engine import Engine
from atlas.runtime.step import PHASE_DECODE

SLOW = 1.5
"""Times the median: what such a step takes more than the median is called lost."""


class StepTimes:
    """Watches an engine's steps. `ends` and `phases` are by step in the order of their results, `host` by call of
    `Engine.step`: its seconds less those that it waited for the device."""

    def __init__(self) -> None:
        self.started = time.perf_counter()
        self.ends: list[float] = []
        self.phases: list[int] = []
        self.host: list[float] = []
        self._waited = 0.0

    @contextlib.contextmanager
    def watch(self, engine: Engine) -> Iterator[None]:
        """Take the times of what is done inside."""
        runner, backend, phases = engine.runner, engine.runner.backend, deque[int]()
        begin_step, collect, wait, step = backend.begin_step, runner.collect, backend.wait, engine.step

        def beginning(*arguments: Any) -> None:  # of a step that is submitted whole, or in halves
            phases.append(runner.block.phase)
            begin_step(*arguments)

        def collecting(in_flight: Any) -> Any:
            found = collect(in_flight)
            self.ends.append(time.perf_counter())
            self.phases.append(phases.popleft())
            return found

        def waiting(ticket: int) -> None:
            began = time.perf_counter()
            wait(ticket)
            self._waited += time.perf_counter() - began

        def stepping() -> Any:
            self._waited, began = 0.0, time.perf_counter()
            found = step()
            self.host.append(time.perf_counter() - began - self._waited)
            return found

        watched = (
            *((backend, "begin_step", beginning), (backend, "wait", waiting)),
            *((runner, "collect", collecting), (engine, "step", stepping)),
        )
        with contextlib.ExitStack() as stack:
            for owner, name, replacement in watched:
                setattr(owner, name, replacement)
                stack.callback(delattr, owner, name)
            self.started = time.perf_counter()
            yield

    def decode(self) -> list[float]:
        """Seconds of each step of generated tokens."""
        begins = [self.started, *self.ends[:-1]]
        steps = zip(begins, self.ends, self.phases, strict=True)
        return [end - begin for begin, end, phase in steps if phase == PHASE_DECODE]

    def summary(self, tokens: int) -> dict[str, Any]:
        """tokens: that decode steps have sampled."""
        decode = self.decode()
        if not decode:
            return {}
        median = statistics.median(decode)
        slow = {i: each for i, each in enumerate(decode) if each > SLOW * median}
        worst = sorted(slow, key=lambda i: -slow[i])[:6]
        return {
            "decode_tokens_per_second": round(tokens / sum(decode), 1),
            "prefill_seconds": round(self.ends[-1] - self.started - sum(decode), 4),
            "slow_steps": len(slow),
            "lost_seconds": round(sum(slow.values()) - median * len(slow), 4),
            "slowest": {i: round(slow[i] * 1e3, 2) for i in worst},
            "host_ms": {
                "median": round(statistics.median(self.host) * 1e3, 3),
                "worst": round(max(self.host) * 1e3, 3),
            },
        }

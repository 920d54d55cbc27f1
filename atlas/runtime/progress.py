"""A progress bar for the weights that stream in."""

from __future__ import annotations

from collections.abc import Callable

from atlas.progress import Bar


class WeightsBar:
    """Shows bytes loaded on stderr, on a terminal only; call it with bytes done and in all.

    stage: told "weights N %" at every tenth, for whoever cannot see the bar.
    """

    def __init__(self, stage: Callable[[str], None] = lambda text: None) -> None:
        self._bar = Bar()
        self._stage, self._done, self._tenth = stage, 0, 0

    def __call__(self, done: int, total: int) -> None:
        if self._done == 0:
            self._bar.begin("weights", total, "B")
        self._bar.advance(done - self._done)
        self._done = done
        if (tenth := 10 * done // max(total, 1)) > self._tenth:
            self._tenth = tenth
            self._stage(f"weights {10 * tenth} %")
        if done >= total:
            self._bar.close()

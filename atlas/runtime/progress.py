"""A progress bar for the weights that stream in."""

from __future__ import annotations

from collections.abc import Callable

from tqdm import tqdm


class WeightsBar:
    """Shows bytes loaded on stderr, on a terminal only; call it with bytes done and in all.

    stage: told "weights N %" at every tenth, for whoever cannot see the bar.
    """

    def __init__(self, stage: Callable[[str], None] = lambda text: None) -> None:
        self._bar: tqdm[None] | None = None
        self._stage, self._tenth = stage, 0

    def __call__(self, done: int, total: int) -> None:
        if self._bar is None:
            self._bar = tqdm(total=total, desc="weights", unit="B", unit_scale=True, disable=None, leave=False)
        self._bar.update(done - self._bar.n if not self._bar.disable else 0)
        if (tenth := 10 * done // max(total, 1)) > self._tenth:
            self._tenth = tenth
            self._stage(f"weights {10 * tenth} %")
        if done >= total:
            self._bar.close()

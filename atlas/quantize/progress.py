"""How far a run has come: nothing by default, a bar on a terminal."""

from __future__ import annotations

import sys

from tqdm import tqdm


class Progress:
    """Told of stages and how much of them is done; this one says nothing."""

    def begin(self, what: str, total: int, unit: str) -> None:
        """A stage begins; the one before it is over."""

    def advance(self, count: int) -> None:
        """`count` more of the stage's total are done."""

    def close(self) -> None:
        """Nothing more will come."""


class Bar(Progress):
    """A bar on stderr, one line per stage."""

    def __init__(self) -> None:
        self._bar: tqdm[int] | None = None

    def begin(self, what: str, total: int, unit: str) -> None:
        self.close()
        self._bar = tqdm(
            total=total, desc=what, unit=unit, unit_scale=True, file=sys.stderr, dynamic_ncols=True, mininterval=0.5
        )

    def advance(self, count: int) -> None:
        if self._bar is not None:
            self._bar.update(count)

    def close(self) -> None:
        if self._bar is not None:
            self._bar.close()
            self._bar = None

"""How far a long command has come: nothing by default, a bar on a terminal."""

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
    """A bar on stderr, on a terminal only; a stage that is over leaves none.

    lines: where there is no terminal, say in a line that a stage begins.
    """

    def __init__(self, lines: bool = False) -> None:
        self._bar: tqdm[int] | None = None
        self._lines = lines

    def begin(self, what: str, total: int, unit: str) -> None:
        self.close()
        if self._lines and not sys.stderr.isatty():
            print(f"{what}: {total} {unit}s", file=sys.stderr, flush=True)
        self._bar = tqdm(
            total=total,
            desc=what,
            unit=unit,
            unit_scale=total >= 10_000,
            file=sys.stderr,
            dynamic_ncols=True,
            disable=None,
            leave=False,
        )

    def advance(self, count: int) -> None:
        if self._bar is not None:
            self._bar.update(count)

    def close(self) -> None:
        if self._bar is not None:
            self._bar.close()
            self._bar = None

"""What the variants of a model's kernels allow: how many rows a decode step may have, and which graphs are worth it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from atlas.build.kernel_file import PHASES, phase_number
from atlas.build.manifest import KernelEntry
from atlas.runtime.program import Launch
from atlas.runtime.step import PHASE_DECODE

MOST_DECODE_ROWS = 256
"""Rows of one step of generated tokens, where kernels set no bound: what decode kernels are made and tested for."""

_ANY_OR_DECODE = (0, phase_number(PHASES[PHASE_DECODE]))


def most_rows(launches: Iterable[Launch], kernels: Mapping[str, KernelEntry], symbol: str) -> int:
    """Most rows for which each of the launches over `symbol`, "n_rows" or "n_logits", has a decode kernel."""
    most = MOST_DECODE_ROWS if symbol == "n_rows" else 1 << 30
    for launch in launches:
        over = "n_logits" if launch.over_logits else "n_rows"
        entry = kernels.get(launch.key.name())
        if over != symbol or entry is None or not launch.is_made(PHASE_DECODE):
            continue
        bounds = [variant.max_rows for variant in entry.variants if variant.phase in _ANY_OR_DECODE]
        if bounds and 0 not in bounds:
            most = min(most, max(bounds))
    return most


def buckets(decode_rows: int) -> list[int]:
    """Numbers of rows that decode steps are recorded for: the next larger one wastes at most a third of its blocks."""
    found, size = [], 1
    while size < decode_rows:
        found.append(size)
        if size >= 8:
            found.append(size + size // 2)
        size *= 2
    return [rows for rows in found if rows < decode_rows] + [decode_rows] * (decode_rows > 0)

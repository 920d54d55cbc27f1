"""How many rows kernels' variants allow, and which graphs are recorded."""

from __future__ import annotations

import pytest

from atlas.build.manifest import KernelEntry, KernelVariant
from atlas.runtime import variants
from tests.runtime.test_program import smollm2


def kernels(**bounds: list[tuple[int, int]]) -> dict[str, KernelEntry]:
    """Entries of all kernels of a program: (phase, bound) of the variants by op; others serve anything."""
    return {
        key.name(): KernelEntry(
            key.name(),
            key.op,
            "",
            {},
            variants=tuple(KernelVariant(phase=phase, max_rows=rows) for phase, rows in bounds.get(key.op, [(0, 0)])),
        )
        for key in smollm2().closure()
    }


@pytest.mark.parametrize(
    ("bounds", "rows", "logits"),
    [
        ({}, 256, 1 << 30),
        ({"rope_kv_append": [(1, 0), (2, 8), (2, 64)]}, 64, 1 << 30),
        ({"rope_kv_append": [(1, 64), (2, 8), (2, 0)]}, 256, 1 << 30),
        ({"linear": [(1, 0), (2, 8), (2, 128)], "sample": [(0, 100)]}, 128, 100),
    ],
)
def test_most_rows(bounds: dict[str, list[tuple[int, int]]], rows: int, logits: int) -> None:
    """A prompt's variants do not count; a linear serves layers and head."""
    launches = smollm2().launches()
    assert variants.most_rows(launches, kernels(**bounds), "n_rows") == rows
    assert variants.most_rows(launches, kernels(**bounds), "n_logits") == logits


@pytest.mark.parametrize("rows", [1, 3, 8, 100, 256])
def test_every_step_has_a_graph_that_is_not_much_larger(rows: int) -> None:
    buckets = variants.buckets(rows)
    assert buckets == sorted(set(buckets)) and buckets[-1] == rows
    for count in range(1, rows + 1):
        bucket = next(size for size in buckets if size >= count)
        assert bucket <= max(8, count * 1.5) and (count > 4 or bucket <= 4)


def test_nothing_is_recorded_where_no_kernel_is_for_decoding() -> None:
    assert variants.buckets(0) == []

"""How decode products of Hopper are divided among multiprocessors, on cards with more and fewer of them: what their
declarations promise the kernels (kernels/h200/include/atlas/decode_product.cuh), for shapes small and large."""

from __future__ import annotations

import dataclasses

import pytest

from atlas.build import kernel_file, knobs
from atlas.runtime.program import KernelKey
from atlas.targets.hardware import walk
from tests.build.conftest import KERNELS

PRODUCTS = [
    ("linear.decode.cu", ("bf16", "bf16", "f32"), 1),
    ("linear.decode.cu", ("f8g128", "f8", "f32"), 1),
    ("linear.w4.decode.cu", ("bf16", "nvfp4", "f32"), 1),
    ("gated_linear.decode.cu", ("bf16", "bf16", "bf16"), 1),
    ("gated_linear.f8.decode.cu", ("f8g128", "f8", "f8g128"), 2),
    ("gated_linear.w4.decode.cu", ("bf16", "nvfp4", "bf16"), 2),
]
"""File, types of x, weight and out, and row blocks of a group whose sums may go through scratch."""
COLUMNS = (64, 100, 576, 896, 1920, 2048, 3072, 3840, 4096, 6144, 14336, 128256)
DEPTHS = (64, 576, 640, 1024, 2048, 4096, 14336)


@pytest.mark.parametrize("multiprocessors", [78, 114, 132, 144])
@pytest.mark.parametrize(("file", "types", "together"), PRODUCTS)
def test_ranges_and_clusters_fit_any_number_of_multiprocessors(
    file: str, types: tuple[str, str, str], together: int, multiprocessors: int
) -> None:
    hardware = dataclasses.replace(walk(KERNELS)["h200"], multiprocessors=multiprocessors)
    declared = kernel_file.declaration(KERNELS / "h200" / file)
    width = "n" if declared.op == "linear" else "intermediate"
    dtypes = tuple(zip(("x", "weight", "out"), types, strict=True))
    clusters = set()
    for columns in COLUMNS:
        for k in DEPTHS:
            key = KernelKey(declared.op, dtypes, ((width, columns), ("k", k)))
            ranges = set()
            for max_rows in declared.bounds:
                names = knobs.names(key, hardware, max_rows)
                values = declared.knobs(names)
                launch = declared.geometry(names, values)
                blocks, where = launch.grid[0].multiplier, f"{columns} x {k}, {max_rows} rows"
                # A range's sums are those of its own thread block, whatever the number of rows: so are their bits.
                ranges.add((values["RANGES"], values.get("PAIRS")))
                assert 1 <= values["RANGES"] <= blocks <= multiprocessors, where
                # All blocks are resident at once. Of a processing cluster's multiprocessors, which no declaration
                # knows, large clusters leave some out: a tenth of all is kept free for that.
                assert launch.cluster <= hardware.cluster_blocks and blocks % launch.cluster == 0, where
                assert launch.cluster <= 2 or 11 * blocks <= 10 * multiprocessors, where
                assert launch.shared <= hardware.shared_memory_per_block, where
                # Two parts of a range, 128 columns of f32 for each row.
                assert launch.scratch >= values["RANGES"] * 2 * together * 512 * max_rows, where
                clusters.add(launch.cluster)
            assert len(ranges) == 1, f"{columns} x {k}"
    expected = {"linear.decode.cu": {1, 2, 4, 8}, "gated_linear.f8.decode.cu": {1}, "gated_linear.w4.decode.cu": {1}}
    assert clusters == expected.get(file, {1, 2})

"""rope_rows against its reference."""

from __future__ import annotations

import numpy as np
import pytest

from tests.contract.harness import Case, case
from tests.contract.inputs import paged

CASES = [
    case(
        "rope_rows",
        {},
        rotary_dim=rotary_dim,
        rope_sets=sets,
        rope_scale=scale,
        rows=rows,
        seqs=seqs,
        max_blocks=max_blocks,
    )
    for rotary_dim, sets, scale in ((128, 1, 1.0), (64, 1, 1.0), (128, 2, 1.19), (16, 3, 0.5), (10, 1, 1.0))
    for rows, seqs, max_blocks in ((1, 1, 1), (7, 3, 2), (130, 5, 9), (256, 256, 4))
]


def inputs(c: Case, rng: np.random.Generator, base: float = 1e4) -> dict[str, np.ndarray]:
    constants, dims = dict(c.constants), dict(c.dims)
    sets, half = int(constants["rope_sets"]), int(constants["rotary_dim"]) // 2
    frequencies = base ** (-np.arange(half) / half) / (1.0 + np.arange(sets)[:, None])
    pool = Case(c.op, c.dtypes, c.constants, (*c.dims, ("blocks", dims["seqs"] * dims["max_blocks"] + 2)))
    return {
        **paged(pool, rng),
        "inv_freq": frequencies.astype(np.float32),
        "seq_rope": rng.integers(0, sets, dims["seqs"]).astype(np.int32),
    }


@pytest.mark.parametrize("case", CASES, ids=str)
def test_matches_reference(device, case: Case, rng) -> None:
    assert device.check(case, inputs(case, rng)) <= 1.0


def test_turns_and_places_of_far_positions(device, rng) -> None:
    """Angles of 100,000 and more, against float64: one rounding of the product to fp32 is part of the definition."""
    c = case("rope_rows", {}, rotary_dim=64, rope_sets=1, rope_scale=1.0, rows=4, seqs=2, max_blocks=8200)
    given = inputs(c, rng)
    given["row_position"], given["row_seq"] = np.int32([0, 131071, 77777, 15]), np.int32([0, 0, 1, 1])
    given["block_table"] = rng.permutation(2 * 8200).reshape(2, 8200).astype(np.int32)
    found = device.run(c, given)
    angle = np.float64(np.float32(given["row_position"])[:, None] * given["inv_freq"][0])
    np.testing.assert_allclose(found["turns"][:4], np.stack([np.cos(angle), np.sin(angle)], -1), rtol=0, atol=2e-7)
    blocks = given["block_table"][given["row_seq"], given["row_position"] // 16]
    np.testing.assert_array_equal(found["places"][:4], blocks * 16 + given["row_position"] % 16)

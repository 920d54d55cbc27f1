"""rope_kv_append against its reference."""

import numpy as np
import pytest

from tests.contract.harness import Case, case
from tests.contract.inputs import normal, paged

CASES = [
    case(
        "rope_kv_append",
        {"qkv": "f32", "q_out": dtype, "k_cache": dtype, "v_cache": dtype},
        n_heads=n_heads,
        n_kv_heads=n_kv_heads,
        head_dim=head_dim,
        rows=rows,
        seqs=seqs,
        max_blocks=max_blocks,
        blocks=seqs * max_blocks + 2,
    )
    for dtype in ("f32", "bf16")
    for n_heads, n_kv_heads, head_dim in ((9, 3, 64), (4, 4, 128), (8, 1, 96))
    for rows, seqs, max_blocks in ((1, 1, 1), (7, 3, 2), (130, 5, 9))
]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_matches_reference(device, case: Case, rng) -> None:
    half = dict(case.constants)["head_dim"] // 2
    given = {
        **paged(case, rng),
        "qkv": normal(case, "qkv", rng),
        "inv_freq": (1e4 ** (-np.arange(half) / half)).astype(np.float32),
        "k_cache": normal(case, "k_cache", rng),
        "v_cache": normal(case, "v_cache", rng),
    }
    assert device.check(case, given) <= 1.0


def test_far_positions(device, rng) -> None:
    """Angles of 8,000 radians: sine and cosine need a real range reduction there."""
    c = case("rope_kv_append", "f32", n_heads=9, n_kv_heads=3, head_dim=64, rows=3, seqs=1, max_blocks=512, blocks=512)
    given = {
        "row_seq": np.zeros(3, np.int32),
        "row_position": np.array([8191, 4097, 6007], np.int32),
        "block_table": rng.permutation(512).astype(np.int32)[None, :],
        "qkv": normal(c, "qkv", rng),
        "inv_freq": (1e5 ** (-np.arange(32) / 32)).astype(np.float32),
        "k_cache": normal(c, "k_cache", rng),
        "v_cache": normal(c, "v_cache", rng),
    }
    assert device.check(c, given) <= 1.0

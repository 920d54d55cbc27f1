"""paged_attention against its reference, and independence of batch and chunk."""

import numpy as np
import pytest

from tests.contract.harness import Case, case
from tests.contract.inputs import normal, paged


def attention(dtype: str, heads: tuple[int, int, int], rows: int, seqs: int, max_blocks: int) -> Case:
    n_heads, n_kv_heads, head_dim = heads
    blocks = seqs * max_blocks + 2
    sizes = {"rows": rows, "seqs": seqs, "max_blocks": max_blocks, "blocks": blocks}
    return case("paged_attention", dtype, n_heads=n_heads, n_kv_heads=n_kv_heads, head_dim=head_dim, **sizes)


CASES = [
    attention(dtype, heads, *sizes)
    for dtype in ("f32", "bf16")
    for heads in ((9, 3, 64), (4, 4, 128), (8, 1, 96), (16, 2, 64))
    for sizes in ((1, 1, 1), (7, 3, 2), (130, 5, 9), (3, 3, 67))
]


def inputs(c: Case, rng: np.random.Generator, sharpness: float = 1.0) -> dict[str, np.ndarray]:
    """Keys scaled by `sharpness`: large values make the softmax pick one position."""
    return {
        **paged(c, rng),
        "q": normal(c, "q", rng),
        "k_cache": normal(c, "k_cache", rng, sharpness),
        "v_cache": normal(c, "v_cache", rng),
    }


@pytest.mark.parametrize("case", CASES, ids=str)
@pytest.mark.parametrize("sharpness", [1.0, 20.0])
def test_matches_reference(device, case: Case, sharpness: float, rng) -> None:
    assert device.check(case, inputs(case, rng, sharpness)) <= 1.0


@pytest.mark.parametrize("dtype", ["f32", "bf16"])
def test_row_does_not_depend_on_the_batch(device, dtype: str, rng) -> None:
    """Bit for bit: a row alone, and the same row among 130 of 5 sequences."""
    whole = attention(dtype, (9, 3, 64), 130, 5, 9)
    given = inputs(whole, rng)
    expected = device.run(whole, given)["out"]
    alone = case(
        "paged_attention", dtype, n_heads=9, n_kv_heads=3, head_dim=64, rows=1, seqs=1, max_blocks=9, blocks=47
    )
    for row in (0, 1, 64, 129):
        seq = given["row_seq"][row]
        single = {
            "q": given["q"][row : row + 1],
            "row_seq": np.zeros(1, np.int32),
            "row_position": given["row_position"][row : row + 1],
            "block_table": given["block_table"][seq : seq + 1],
            "k_cache": given["k_cache"],
            "v_cache": given["v_cache"],
        }
        actual = device.run(alone, single)["out"]
        assert actual[0].tobytes() == expected[row].tobytes(), f"row {row}"

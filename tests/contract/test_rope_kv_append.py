"""rope_kv_append against its reference."""

import numpy as np
import pytest

from tests.contract.harness import Case, case
from tests.contract.inputs import normal, paged

NORMS = ("q_norm", "k_norm")


def rope(
    dtype: str,
    heads: tuple[int, int, int],
    sizes: tuple[int, int, int],
    rotary_dim: int = 0,
    sets: int = 1,
    scale: float = 1.0,
    norms: tuple[str, ...] = (),
    products: str = "f32",
) -> Case:
    """`rotary_dim` 0: the whole head."""
    n_heads, n_kv_heads, head_dim = heads
    rows, seqs, max_blocks = sizes
    return case(
        "rope_kv_append",
        {"qkv": products, "q_out": dtype, "k_cache": dtype, "v_cache": dtype},
        optional=norms,
        n_heads=n_heads,
        n_kv_heads=n_kv_heads,
        head_dim=head_dim,
        rotary_dim=rotary_dim or head_dim,
        rope_sets=sets,
        eps=1e-6,
        rope_scale=scale,
        rows=rows,
        seqs=seqs,
        max_blocks=max_blocks,
        blocks=seqs * max_blocks + 2,
    )


HEADS = ((9, 3, 64), (4, 4, 128), (8, 1, 96))
SIZES = ((1, 1, 1), (7, 3, 2), (130, 5, 9))

CASES = [
    *(rope(dtype, heads, sizes) for dtype in ("f32", "bf16") for heads in HEADS for sizes in SIZES),
    *(rope(dtype, heads, sizes, norms=NORMS) for dtype in ("f32", "bf16") for heads in HEADS for sizes in SIZES),
    *(
        rope(dtype, heads, sizes, rotary_dim, sets, scale, norms)
        for dtype in ("f32", "bf16")
        for norms in ((), NORMS)
        for heads, rotary_dim, sets, scale in (
            ((4, 1, 256), 256, 1, 1.0),  # Gemma's heads
            ((9, 3, 64), 16, 1, 1.0),  # a quarter turns
            ((4, 4, 128), 128, 2, 1.19),  # longrope: two sets and an attention factor
            ((2, 1, 10), 6, 3, 0.5),  # no vector is full
            ((2, 2, 80), 40, 1, 1.0),
        )
        for sizes in SIZES[1:]
    ),
]
GPU_CASES = [
    rope("bf16", heads, sizes, rotary_dim, norms=norms, products="bf16")
    for heads, rotary_dim in (((4, 2, 128), 0), ((9, 3, 64), 0), ((4, 1, 256), 0), ((2, 2, 80), 40))
    for norms in ((), NORMS)
    for sizes in SIZES[1:]
]


def inputs(c: Case, rng: np.random.Generator, base: float = 1e4) -> dict[str, np.ndarray]:
    """Frequencies of every set differ, and which set a sequence uses is random."""
    constants = dict(c.constants)
    sets, half = int(constants["rope_sets"]), int(constants["rotary_dim"]) // 2
    frequencies = base ** (-np.arange(half) / half) / (1.0 + np.arange(sets)[:, None])
    return {
        **paged(c, rng),
        "qkv": normal(c, "qkv", rng),
        "inv_freq": frequencies.astype(np.float32),
        "seq_rope": rng.integers(0, sets, dict(c.dims)["seqs"]).astype(np.int32),
        "k_cache": normal(c, "k_cache", rng),
        "v_cache": normal(c, "v_cache", rng),
        **{name: normal(c, name, rng) for name in c.optional},
    }


@pytest.mark.parametrize("case", CASES, ids=str)
def test_matches_reference(device, case: Case, rng) -> None:
    assert device.check(case, inputs(case, rng)) <= 1.0


@pytest.mark.parametrize("case", GPU_CASES, ids=str)
def test_products_in_bf16(device, case: Case, rng) -> None:
    if device.name.startswith("cpu"):
        pytest.skip("a CPU's products are f32")
    assert device.check(case, inputs(case, rng)) <= 1.0


def test_far_positions(device, rng) -> None:
    """Angles of 8,000 radians: sine and cosine need a real range reduction there."""
    c = rope("f32", (9, 3, 64), (3, 1, 512))
    given = {
        **inputs(c, rng, 1e5),
        "row_seq": np.zeros(3, np.int32),
        "row_position": np.array([8191, 4097, 6007], np.int32),
        "block_table": rng.permutation(512).astype(np.int32)[None, :],
    }
    assert device.check(c, given) <= 1.0


@pytest.mark.parametrize("norms", [(), NORMS], ids=["plain", "norms"])
def test_row_does_not_depend_on_the_batch(device, norms, rng) -> None:
    """Bit for bit: q of a row alone, and of the same row among 130."""
    whole = rope("f32", (9, 3, 64), (130, 5, 9), rotary_dim=32, norms=norms)
    given = inputs(whole, rng)
    expected = device.run(whole, given)["q_out"]
    alone = rope("f32", (9, 3, 64), (1, 1, 9), rotary_dim=32, norms=norms)
    for row in (0, 64, 129):
        seq = given["row_seq"][row]
        single = {
            **given,
            "qkv": given["qkv"][row : row + 1],
            "row_seq": np.zeros(1, np.int32),
            "row_position": given["row_position"][row : row + 1],
            "seq_rope": given["seq_rope"][seq : seq + 1],
            "block_table": np.arange(9, dtype=np.int32)[None, :],
            "k_cache": given["k_cache"][:11],
            "v_cache": given["v_cache"][:11],
        }
        assert device.run(alone, single)["q_out"][0].tobytes() == expected[row].tobytes(), f"row {row}"

"""paged_attention against its reference, and independence of batch and chunk."""

import numpy as np
import pytest

from atlas.targets.shape import KV_BLOCK_SIZE
from tests.contract.harness import Case, case
from tests.contract.inputs import normal, paged


def attention(
    dtype: str,
    heads: tuple[int, int, int],
    rows: int,
    seqs: int,
    max_blocks: int,
    window: int = 0,
    scale: float | None = None,
) -> Case:
    """`scale` None: the usual 1 / sqrt(head_dim). `dtype` of out; what is read is bf16 where that is f8g128."""
    n_heads, n_kv_heads, head_dim = heads
    read = "bf16" if dtype == "f8g128" else dtype
    return case(
        "paged_attention",
        {"q": read, "k_cache": read, "v_cache": read, "out": dtype},
        n_heads=n_heads,
        n_kv_heads=n_kv_heads,
        head_dim=head_dim,
        window=window,
        scale=head_dim**-0.5 if scale is None else scale,
        rows=rows,
        seqs=seqs,
        max_blocks=max_blocks,
        blocks=seqs * max_blocks + 2,
    )


CASES = [
    *(
        attention(dtype, heads, *sizes)
        for dtype in ("f32", "bf16")
        for heads in ((9, 3, 64), (4, 4, 128), (8, 1, 96), (16, 2, 64))
        for sizes in ((1, 1, 1), (7, 3, 2), (130, 5, 9), (3, 3, 67))
    ),
    *(
        attention(dtype, heads, *sizes, window, scale)
        for dtype in ("f32", "bf16")
        for heads, scale in (((9, 3, 64), None), ((4, 1, 256), 0.0625), ((6, 2, 80), 0.1))
        for window in (1, 16, 40, 512)
        for sizes in ((1, 1, 3), (130, 5, 9), (3, 3, 67))
    ),
]


HEADS_CASES = [
    attention("bf16", heads, *sizes)
    for heads in ((32, 8, 128), (16, 8, 128), (28, 4, 128), (40, 8, 128), (12, 2, 128), (14, 2, 64), (32, 32, 96))
    for sizes in ((1, 1, 1), (7, 3, 2), (130, 5, 9), (3, 3, 67), (100, 100, 4))
]
"""What dense models have: 1, 2, 4, 5, 6 and 7 heads for one of keys and values."""

F8_CASES = [
    attention("f8g128", heads, *sizes, window)
    for heads in ((32, 8, 128), (32, 8, 64), (16, 8, 128), (4, 1, 256))
    for sizes in ((1, 1, 1), (7, 3, 2), (130, 5, 9), (3, 3, 67))
    for window in (0, 40)
]


def first_positions(c: Case, given: dict[str, np.ndarray]) -> np.ndarray:
    """The first position that each row sees."""
    window = dict(c.constants)["window"]
    position = given["row_position"]
    return np.maximum(position - window + 1, 0) if window else np.zeros_like(position)


def inputs(c: Case, rng: np.random.Generator, sharpness: float = 1.0) -> dict[str, np.ndarray]:
    """Keys scaled by `sharpness`: large values make the softmax pick one position. Blocks wholly before
    the window of all rows of their sequence are NaN, and their entries of the table are garbage."""
    given = {
        **paged(c, rng),
        "q": normal(c, "q", rng),
        "k_cache": normal(c, "k_cache", rng, sharpness),
        "v_cache": normal(c, "v_cache", rng),
    }
    firsts, table = first_positions(c, given), given["block_table"]
    for seq in range(len(table)):
        freed = firsts[given["row_seq"] == seq].min() // KV_BLOCK_SIZE
        for name in ("k_cache", "v_cache"):
            given[name][table[seq, :freed]] = np.nan
        table[seq, :freed] = 1 << 30
    return given


@pytest.mark.parametrize("case", F8_CASES, ids=str)
def test_rows_in_f8g128(device, case: Case, rng) -> None:
    if device.name.startswith("cpu"):
        pytest.skip("rows in f8g128 are a GPU's")
    assert device.check(case, inputs(case, rng)) <= 1.0


@pytest.mark.parametrize("case", HEADS_CASES, ids=str)
def test_matches_reference_with_the_heads_of_models(device, case: Case, rng) -> None:
    if device.name.startswith("cpu"):
        pytest.skip("a CPU's kernel takes heads at run time")
    assert device.check(case, inputs(case, rng)) <= 1.0


@pytest.mark.parametrize("case", CASES, ids=str)
@pytest.mark.parametrize("sharpness", [1.0, 20.0])
def test_matches_reference(device, case: Case, sharpness: float, rng) -> None:
    assert device.check(case, inputs(case, rng, sharpness)) <= 1.0


LONG = {"n_heads": 6, "n_kv_heads": 2, "head_dim": 48, "window": 0, "scale": 48**-0.5, "max_blocks": 20, "blocks": 42}


def at_positions(
    dtype: str, positions: list[int], given: dict[str, np.ndarray], seqs: int = 1
) -> tuple[Case, dict[str, np.ndarray]]:
    """Rows at `positions` of sequence 0 of LONG (320 tokens), as many times over as there are sequences."""
    rows = len(positions) * seqs
    c = case("paged_attention", dtype, rows=rows, seqs=seqs, **LONG)
    table = given["block_table"][:1].repeat(seqs, axis=0)
    row = {
        "q": np.tile(given["q"][positions], (seqs, 1)),
        "row_position": np.tile(np.array(positions, np.int32), seqs),
        "row_seq": np.repeat(np.arange(seqs, dtype=np.int32), len(positions)),
    }
    return c, {**given, **row, "block_table": table}


def long_sequence(dtype: str, rng: np.random.Generator) -> dict[str, np.ndarray]:
    """A q for each of 320 positions, and caches."""
    c = case("paged_attention", dtype, rows=320, seqs=1, **LONG)
    return {
        **{name: normal(c, name, rng) for name in ("q", "k_cache", "v_cache")},
        "block_table": rng.permutation(LONG["blocks"])[: LONG["max_blocks"]].astype(np.int32)[None],
    }


BOUNDARIES = [0, 1, 14, 15, 16, 17, 31, 32, 126, 127, 128, 129, 143, 144, 255, 256, 257, 319]
"""Around the ends of blocks, and of the stretches of positions that a kernel may divide a context into."""


@pytest.mark.parametrize("dtype", ["f32", "bf16"])
def test_context_lengths_around_every_boundary(device, dtype: str, rng) -> None:
    """Alone, several at once, and in whole prompts: near the reference, and bit for bit the same."""
    given = long_sequence(dtype, rng)
    prompt, inputs_of_prompt = at_positions(dtype, list(range(320)), given)
    assert device.check(prompt, inputs_of_prompt) <= 1.0
    whole = device.run(prompt, inputs_of_prompt)["out"]
    together = device.run(*at_positions(dtype, BOUNDARIES, given))["out"]
    batch = device.run(*at_positions(dtype, [300], given, seqs=9))["out"]
    for index, position in enumerate(BOUNDARIES):
        alone, one = at_positions(dtype, [position], given)
        assert device.check(alone, one) <= 1.0
        expected = whole[position].tobytes()
        assert device.run(alone, one)["out"][0].tobytes() == expected, f"position {position} alone"
        assert together[index].tobytes() == expected, f"position {position} among others"
    assert {row.tobytes() for row in batch[:9]} == {whole[300].tobytes()}


@pytest.mark.parametrize("dtype", ["f32", "bf16"])
def test_a_nan_reaches_the_rows_that_see_it_and_no_other(device, dtype: str, rng) -> None:
    given = long_sequence(dtype, rng)
    token = int(rng.integers(130, 250))
    block = given["block_table"][0, token // 16]
    for cache in ("k_cache", "v_cache"):
        clean = given[cache].copy()
        given[cache][block, 1, token % 16] = np.nan  # KV head 1: query heads 3 to 5
        positions = list(range(token - 20, token + 20))
        assert device.check(*at_positions(dtype, positions, given)) <= 1.0, f"{cache}: the reference says otherwise"
        out = device.run(*at_positions(dtype, positions, given))["out"][:40].astype(np.float32).reshape(40, 6, 48)
        assert np.isnan(out[20:, 3:]).all(), cache
        assert not np.isnan(out[:20]).any() and not np.isnan(out[:, :3]).any(), cache
        given[cache] = clean


@pytest.mark.parametrize("window", [0, 1, 23, 100])
@pytest.mark.parametrize("dtype", ["f32", "bf16"])
def test_row_does_not_depend_on_the_batch(device, dtype: str, window: int, rng) -> None:
    """Bit for bit: a row alone, and the same row among 130 of 5 sequences. Alone, it may not even look at
    what the sequence's other rows see and it does not."""
    whole = attention(dtype, (9, 3, 64), 130, 5, 9, window)
    given = inputs(whole, rng)
    expected, firsts = device.run(whole, given)["out"], first_positions(whole, given)
    alone = attention(dtype, (9, 3, 64), 1, 1, 9, window)
    for row in (0, 1, 64, 129):
        seq = given["row_seq"][row]
        table = given["block_table"][seq : seq + 1].copy()
        k_cache, v_cache = (_gathered(given[name], table[0]) for name in ("k_cache", "v_cache"))
        used = np.arange(9) >= firsts[row] // KV_BLOCK_SIZE
        used &= np.arange(9) <= given["row_position"][row] // KV_BLOCK_SIZE
        k_cache[:9][~used] = v_cache[:9][~used] = np.nan
        single = {
            "q": given["q"][row : row + 1],
            "row_seq": np.zeros(1, np.int32),
            "row_position": given["row_position"][row : row + 1],
            "block_table": np.where(used, np.arange(9), 1 << 30).astype(np.int32)[None, :],
            "k_cache": k_cache,
            "v_cache": v_cache,
        }
        actual = device.run(alone, single)["out"]
        assert actual[0].tobytes() == expected[row].tobytes(), f"row {row}"


def _gathered(cache: np.ndarray, table: np.ndarray) -> np.ndarray:
    """A pool of 11 blocks that begins with a sequence's 9, in order."""
    blocks = np.where(table < len(cache), table, 0)
    return np.concatenate([cache[blocks], cache[:2]])


@pytest.mark.parametrize("dtype", ["f32", "bf16"])
def test_a_window_hides_the_tokens_before_it(device, dtype: str, rng) -> None:
    """Changing a hidden token of a block that is read changes no bit, were it NaN; a visible one does."""
    c = attention(dtype, (9, 3, 64), 1, 1, 3, 20)
    given = inputs(c, rng)
    given["row_position"][:] = 45  # sees 26..45
    given["block_table"][:] = (0, 1, 2)
    given["k_cache"] = normal(c, "k_cache", rng)
    given["v_cache"] = normal(c, "v_cache", rng)
    before = device.run(c, given)["out"][0].copy()
    for name in ("k_cache", "v_cache"):
        given[name][1, :, :10] = np.nan
    assert device.run(c, given)["out"][0].tobytes() == before.tobytes()
    given["v_cache"][1, :, 10] += 1
    assert device.run(c, given)["out"][0].tobytes() != before.tobytes()

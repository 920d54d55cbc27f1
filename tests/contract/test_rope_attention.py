"""rope_attention against its reference, against the ops that it stands for, and against plain float64."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from atlas.ops import OPS
from atlas.targets.shape import KV_BLOCK_SIZE
from atlas.weights.quantized import BlockArray
from tests.contract.harness import Case, case, poisoned
from tests.contract.inputs import normal

NORMS = ("q_norm", "k_norm")
BOUNDARIES = [0, 1, 2, 14, 15, 16, 17, 31, 32, 126, 127, 128, 129, 143, 144, 255, 256, 257, 319]
"""Around the ends of blocks, and of the stretches of positions that a kernel may divide a context into."""

Given = dict[str, np.ndarray[Any, Any]]


def attention(
    dtype: str,
    heads: tuple[int, int, int],
    rows: int,
    seqs: int,
    max_blocks: int,
    window: int = 0,
    rotary_dim: int = 0,
    sets: int = 1,
    norms: tuple[str, ...] = (),
    scale: float | None = None,
    rope_scale: float = 1.0,
    qkv: str = "f32",
) -> Case:
    """dtype: of out; the caches are f32 where it is, else bf16.  rotary_dim 0: the whole head."""
    n_heads, n_kv_heads, head_dim = heads
    cache = "f32" if dtype == "f32" else "bf16"
    return case(
        "rope_attention",
        {"qkv": qkv, "k_cache": cache, "v_cache": cache, "out": dtype},
        optional=norms,
        n_heads=n_heads,
        n_kv_heads=n_kv_heads,
        head_dim=head_dim,
        rotary_dim=rotary_dim or head_dim,
        rope_sets=sets,
        eps=1e-6,
        rope_scale=rope_scale,
        window=window,
        scale=head_dim**-0.5 if scale is None else scale,
        rows=rows,
        seqs=seqs,
        max_blocks=max_blocks,
        blocks=seqs * max_blocks + 2,
    )


HEADS = ((32, 8, 128), (32, 8, 64), (16, 8, 128), (9, 3, 64), (4, 1, 256))
SIZES = ((1, 1, 1), (2, 2, 3), (7, 3, 2), (40, 40, 3), (130, 5, 9), (256, 256, 2), (3, 3, 67))

CASES = [
    *(attention(dtype, heads, *sizes) for dtype in ("bf16", "f8g128") for heads in HEADS for sizes in SIZES),
    *(attention("bf16", (32, 8, 128), *sizes, norms=NORMS) for sizes in SIZES),
    *(
        attention(dtype, heads, *sizes, norms=norms, qkv="bf16")
        for dtype in ("bf16", "f8g128")
        for heads in HEADS
        for norms in ((), NORMS)
        for sizes in SIZES[2:5]
    ),
    *(
        attention(dtype, heads, *sizes, window, rotary, sets, norms, scale, rope_scale)
        for dtype in ("f32", "bf16", "f8g128")
        for heads, rotary, sets, norms, scale, rope_scale in (
            ((9, 3, 64), 16, 1, (), None, 1.0),  # a quarter turns
            ((4, 4, 128), 128, 2, (), None, 1.19),  # longrope: two sets and an attention factor
            ((4, 1, 256), 256, 1, NORMS, 0.0625, 1.0),  # Gemma's heads
            ((6, 2, 80), 40, 1, ("k_norm",), 0.1, 0.5),
            ((32, 32, 96), 96, 1, (), None, 1.0),
        )
        for window in (0, 1, 16, 40, 512)
        for sizes in ((1, 1, 3), (130, 5, 9), (3, 3, 67))
    ),
]


def runs(c: Case, rng: np.random.Generator) -> list[range]:
    """Positions of each sequence's rows: most have one row, some begin at 0, and one ends where its table does."""
    dims = dict(c.dims)
    rows, seqs, context = dims["rows"], dims["seqs"], dims["max_blocks"] * KV_BLOCK_SIZE
    counts = np.ones(seqs, np.int64)
    while counts.sum() < rows:
        seq = int(rng.integers(seqs))
        counts[seq] += min(int(rng.integers(1, 40)), rows - counts.sum(), context - counts[seq])
    ends = [int(rng.integers(count, context + 1)) for count in counts]
    for seq in range(0, seqs, 5):
        ends[seq] = int(counts[seq])
    ends[int(rng.integers(seqs))] = context
    return [range(end - int(count), end) for end, count in zip(ends, counts, strict=True)]


def inputs(c: Case, rng: np.random.Generator, positions: list[range] | None = None, base: float = 1e4) -> Given:
    """Rows of generated tokens, sequence after sequence, sequences in any order. The caches are NaN wherever no token
    is, at the rows' own positions and in blocks before the window of all rows of their sequence, whose entries of the
    table are garbage."""
    constants, dims = dict(c.constants), dict(c.dims)
    sets, half = int(constants["rope_sets"]), int(constants["rotary_dim"]) // 2
    positions = positions or runs(c, rng)
    frequencies = base ** (-np.arange(half) / half) / (1.0 + np.arange(sets)[:, None])
    order = rng.permutation(dims["seqs"])
    given: Given = {
        "qkv": normal(c, "qkv", rng),
        "inv_freq": frequencies.astype(np.float32),
        "seq_rope": rng.integers(0, sets, dims["seqs"]).astype(np.int32),
        "row_seq": np.concatenate([np.full(len(positions[s]), s, np.int32) for s in order]),
        "row_position": np.concatenate([np.array(positions[s], np.int32) for s in order]),
        "block_table": np.full((dims["seqs"], dims["max_blocks"]), 1 << 30, np.int32),
        **{name: np.full_like(normal(c, name, rng), np.nan) for name in ("k_cache", "v_cache")},
        **{name: normal(c, name, rng) for name in c.optional},
    }
    pool, window = rng.permutation(dims["blocks"]), int(constants["window"])
    old = {name: normal(c, name, rng) for name in ("k_cache", "v_cache")}
    for seq, rows in enumerate(positions):
        first = max(0, rows[0] + 1 - window) // KV_BLOCK_SIZE if window else 0
        for index in range(first, rows[-1] // KV_BLOCK_SIZE + 1):
            block, pool = int(pool[0]), pool[1:]
            given["block_table"][seq, index] = block
            tokens = max(0, min(KV_BLOCK_SIZE, rows[0] - index * KV_BLOCK_SIZE))
            for name, values in old.items():
                given[name][block, :, :tokens] = values[block, :, :tokens]
    return given


@pytest.mark.parametrize("case", CASES, ids=str)
def test_matches_reference(device, case: Case, rng) -> None:
    assert device.check(case, inputs(case, rng)) <= 1.0


@pytest.mark.parametrize("dtype", ["f32", "bf16", "f8g128"])
@pytest.mark.parametrize("position", BOUNDARIES)
def test_positions_around_every_boundary(device, dtype: str, position: int, rng) -> None:
    """A row alone, and with the two after it."""
    for rows in (1, 3):
        c = attention(dtype, (32, 8, 128), rows, 1, 21)
        assert device.check(c, inputs(c, rng, [range(position, position + rows)])) <= 1.0


def test_far_positions(device, rng) -> None:
    """Angles of 8,000 radians: sine and cosine need a real range reduction there."""
    c = attention("bf16", (32, 8, 128), 3, 3, 513)
    given = inputs(c, rng, [range(8191, 8192), range(4097, 4098), range(8200, 8201)], 1e5)
    assert device.check(c, given) <= 1.0


def alone(c: Case, given: Given, row: int, after: Given) -> tuple[Case, Given]:
    """The case of one row, over the caches as they are once the rows before it are appended."""
    dims, seq = dict(c.dims), given["row_seq"][row]
    one = case(c.op, dict(c.dtypes), optional=c.optional, **dict(c.constants), **{**dims, "rows": 1, "seqs": 1})
    single = {
        **given,
        "qkv": given["qkv"][row : row + 1],
        "row_seq": np.zeros(1, np.int32),
        "row_position": given["row_position"][row : row + 1],
        "seq_rope": given["seq_rope"][seq : seq + 1],
        "block_table": given["block_table"][seq : seq + 1],
        **{name: after[name][: dims["blocks"]].copy() for name in ("k_cache", "v_cache")},
    }
    return one, single


@pytest.mark.parametrize("window", [0, 23])
@pytest.mark.parametrize("norms", [(), NORMS], ids=["plain", "norms"])
@pytest.mark.parametrize("dtype", ["bf16", "f8g128"])
def test_row_does_not_depend_on_the_batch(device, dtype: str, norms, window: int, rng) -> None:
    """Bit for bit: a row among 130 of 5 sequences, and the same row in a step of its own once the rows before it are
    there, whatever is in its own place."""
    whole = attention(dtype, (32, 8, 128), 130, 5, 9, window, norms=norms)
    given = inputs(whole, rng)
    after = device.run(whole, given)
    for row in (0, 1, 64, 129):
        one, single = alone(whole, given, row, after)
        block = given["block_table"][given["row_seq"][row], given["row_position"][row] // KV_BLOCK_SIZE]
        for name in ("k_cache", "v_cache"):
            single[name][block, :, given["row_position"][row] % KV_BLOCK_SIZE :] = np.nan
        found = device.run(one, single)
        assert _row(found["out"], 0) == _row(after["out"], row), f"row {row}"
        where = (block, slice(None), given["row_position"][row] % KV_BLOCK_SIZE)
        for name in ("k_cache", "v_cache"):
            assert found[name][where].tobytes() == after[name][where].tobytes(), f"row {row}: {name}"


def _row(out: Any, row: int) -> bytes:
    return bytes((out.raw if isinstance(out, BlockArray) else out)[row].tobytes())


# What follows needs no kernel.


def of_reference(c: Case, given: Given) -> dict[str, Any]:
    """Operands after the op's reference ran."""
    arrays = {operand.name: given[operand.name].copy() for operand in c.operands if operand.name in given}
    arrays["out"] = poisoned(c, "out")
    c.contract.reference(arrays, dict(c.dims), dict(c.constants))
    return arrays


@pytest.mark.parametrize("norms", [(), NORMS], ids=["plain", "norms"])
@pytest.mark.parametrize("window", [0, 5, 40])
def test_the_reference_is_attention(norms: tuple[str, ...], window: int, rng) -> None:
    """Written out in float64, a row and a head at a time."""
    c = attention("f32", (6, 2, 32), 40, 4, 6, window, 16, 2, norms, 0.2, 1.1)
    given = inputs(c, rng)
    found = of_reference(c, given)
    stored: dict[tuple[int, int], tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]] = {}
    for row in range(40):
        seq, position = int(given["row_seq"][row]), int(given["row_position"][row])
        q, k, v = np.split(given["qkv"][row].astype(np.float64).reshape(10, 32), (6, 8))
        turned = []
        for heads, norm in ((q, "q_norm"), (k, "k_norm")):
            if norm in norms:
                heads = heads / np.sqrt((heads**2).mean(-1, keepdims=True) + 1e-6) * given[norm]
            angle = np.float32(position) * given["inv_freq"][given["seq_rope"][seq]]  # fp32, as the contract says
            pair = (heads[:, :8] + 1j * heads[:, 8:16]) * np.exp(1j * angle.astype(np.float64)) * 1.1
            turned.append(np.concatenate([pair.real, pair.imag, heads[:, 16:]], -1))
        q, k = turned
        stored[seq, position] = k, v
        first = max(0, position + 1 - window) if window else 0
        for head in range(6):
            keys, values = [], []
            for token in range(first, position + 1):
                block = given["block_table"][seq, token // KV_BLOCK_SIZE]
                place = (block, head // 3, token % KV_BLOCK_SIZE)
                new = stored.get((seq, token))
                keys.append(new[0][head // 3] if new else given["k_cache"][place])
                values.append(new[1][head // 3] if new else given["v_cache"][place])
            scores = np.array(keys) @ q[head] * 0.2
            weights = np.exp(scores - scores.max())
            expected = weights / weights.sum() @ np.array(values)
            actual = found["out"][row, 32 * head : 32 * head + 32]
            np.testing.assert_allclose(actual, expected, rtol=1e-4, atol=2e-5, err_msg=f"row {row}, head {head}")
        block = given["block_table"][seq, position // KV_BLOCK_SIZE]
        for name, new_heads in (("k_cache", k), ("v_cache", v)):
            cached = found[name][block, :, position % KV_BLOCK_SIZE]
            np.testing.assert_allclose(cached, new_heads, rtol=1e-5, atol=1e-6, err_msg=f"row {row}: {name}")


@pytest.mark.parametrize("dtype", ["f32", "bf16", "f8g128"])
def test_the_reference_is_the_ops_that_it_stands_for(dtype: str, rng) -> None:
    """Bit for bit."""
    c = attention(dtype, (8, 2, 64), 60, 7, 5, 30, norms=NORMS)
    given, dims, constants = inputs(c, rng), dict(c.dims), dict(c.constants)
    found = of_reference(c, given)
    cache = given["k_cache"].dtype
    arrays: dict[str, Any] = {name: array.copy() for name, array in given.items()}
    arrays |= {"q_out": np.empty((60, 512), cache), "out": np.empty((60, 512), cache)}
    OPS["rope_kv_append"].reference(arrays, dims, constants)
    OPS["paged_attention"].reference({**arrays, "q": arrays["q_out"]}, dims, constants)
    out = arrays["out"]
    if dtype == "f8g128":
        out = poisoned(c, "out")
        OPS["quantize_rows"].reference({"x": arrays["out"], "out": out}, dims, {"k": 512})
    assert [_row(out, row) for row in range(60)] == [_row(found["out"], row) for row in range(60)]
    for name in ("k_cache", "v_cache"):
        assert arrays[name].tobytes() == found[name].tobytes() != given[name].tobytes()

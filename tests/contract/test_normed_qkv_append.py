"""normed_qkv_append against its reference, against the ops that it stands for, and rows against the batch."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from atlas.ops import OPS
from tests.contract.harness import Case, case
from tests.contract.inputs import first_rows, normal, values
from tests.contract.test_normed_linear import squares

NORMS = ("q_norm", "k_norm")
WEIGHTS = (("bf16", "bf16"), ("f8g128", "f8"), ("f8g128", "f8g128"))
WEIGHTS_4 = tuple(("bf16", weight) for weight in ("nvfp4", "i4g32b", "i4g32", "i4g32z", "i4g32m"))


def append(
    types: tuple[str, str], heads: tuple[int, int, int], k: int, rows: int, optional: tuple[str, ...] = ()
) -> Case:
    n_heads, n_kv_heads, head_dim = heads
    return case(
        "normed_qkv_append",
        {"x": types[0], "weight": types[1], "q_out": "bf16", "k_cache": "bf16", "v_cache": "bf16"},
        optional=optional,
        n_heads=n_heads,
        n_kv_heads=n_kv_heads,
        head_dim=head_dim,
        rotary_dim=head_dim,
        k=k,
        eps=1e-6,
        rows=rows,
        blocks=rows // 8 + 3,
    )


CASES = [
    append(types, heads, k, rows, optional)
    for types in (*WEIGHTS, *WEIGHTS_4)
    for heads, k, counts, optional in (
        ((4, 2, 128), 576, (1, 2, 3, 7, 8, 9, 16, 17, 32, 33, 64, 65, 100, 128, 129, 256), ()),
        ((9, 3, 64), 200, (1, 8, 40, 129), ("bias",)),  # the last block is half a one
        ((16, 8, 128), 1024, (1, 16, 128), NORMS),
        ((2, 1, 64), 320, (5, 70), ("bias", "k_norm")),
        ((60, 5, 128), 256, (3, 33), ()),  # ranges that begin and end within heads
    )
    for rows in counts
]


def inputs(c: Case, rng: np.random.Generator) -> dict[str, Any]:
    constants, rows, blocks = dict(c.constants), dict(c.dims)["rows"], dict(c.dims)["blocks"]
    given = {"x": values(c, "x", rng), "weight": values(c, "weight", rng, constants["k"] ** -0.5)}
    angle = rng.uniform(0, 2 * np.pi, (rows, int(constants["rotary_dim"]) // 2))
    return {
        **given,
        "squares": squares(c, rng),
        "turns": np.stack([np.cos(angle), np.sin(angle)], -1).astype(np.float32),
        "places": rng.permutation(blocks * 16)[:rows].astype(np.int32),
        # Of another magnitude: what is stored differs from what was there.
        "k_cache": normal(c, "k_cache", rng, 1e6),
        "v_cache": normal(c, "v_cache", rng, 1e6),
        **{name: normal(c, name, rng) for name in c.optional},
    }


@pytest.mark.parametrize("case", CASES, ids=str)
def test_matches_reference(device, case: Case, rng) -> None:
    """Every bound that a kernel has variants for, and numbers of rows around them."""
    assert device.check(case, inputs(case, rng)) <= 1.0


@pytest.mark.parametrize("optional", [(), NORMS], ids=str)
@pytest.mark.parametrize("types", (*WEIGHTS, *WEIGHTS_4[:1]), ids="-".join)
def test_row_does_not_depend_on_the_batch(device, types: tuple[str, str], optional: tuple[str, ...], rng) -> None:
    heads = (4, 2, 128)
    whole = append(types, heads, 576, 256, optional)
    given = inputs(whole, rng)
    expected = device.run(whole, given)
    for rows in (1, 2, 8, 16, 33, 64, 128, 200):
        last = {name: first_rows(given[name], 256 - rows, 256) for name in ("x", "squares", "turns")}
        places = np.arange(rows, dtype=np.int32)
        part = append(types, heads, 576, rows, optional)
        caches = {name: given[name][: dict(part.dims)["blocks"]] for name in ("k_cache", "v_cache")}
        actual = device.run(part, {**given, **last, **caches, "places": places})
        assert actual["q_out"][:rows].tobytes() == expected["q_out"][256 - rows : 256].tobytes(), f"{rows} rows"
        for name in ("k_cache", "v_cache"):
            at = given["places"][256 - rows :]
            wanted = expected[name][at // 16, :, at % 16]
            assert actual[name][places // 16, :, places % 16].tobytes() == wanted.tobytes(), f"{name}, {rows} rows"


@pytest.mark.parametrize("types", WEIGHTS[:2], ids="-".join)
def test_nan_stays_in_its_row_and_head(device, types: tuple[str, str], rng) -> None:
    """Values do not turn: whatever stands beside them."""
    c = append(types, (2, 1, 128), 256, 9, ("bias",))
    given = inputs(c, rng)
    given["bias"][2 * 128 + 128 + 5] = np.inf
    given["squares"][4, 0] = np.nan
    found = device.run(c, given)
    finite = np.isfinite(found["q_out"][:9].astype(np.float32))
    assert not finite[4].any() and finite[[0, 1, 2, 3, 5, 6, 7, 8]].all()
    at = given["places"]
    value = found["v_cache"][at // 16, 0, at % 16].astype(np.float32)
    assert np.isnan(value[4]).all() and np.isinf(value[3, 5]) and np.isfinite(np.delete(value[3], 5)).all()


@pytest.mark.parametrize("optional", [(), ("bias",), NORMS], ids=str)
def test_reference_is_normed_linear_then_rope_kv_append(optional: tuple[str, ...]) -> None:
    """Bit for bit, with turns and places of rope_rows."""
    rng = np.random.default_rng()
    rows, heads, kv_heads, head_dim, k, blocks = 6, 4, 2, 64, 96, 5
    width = (heads + 2 * kv_heads) * head_dim
    rope = {
        "inv_freq": rng.uniform(0, 1, (2, head_dim // 2)).astype(np.float32),
        "seq_rope": np.int32([1, 0, 1]),
        "row_position": np.int32([3, 17, 18, 31, 0, 5]),
        "row_seq": np.int32([0, 1, 1, 1, 2, 2]),
        "block_table": np.int32([[4, -1], [2, 0], [1, -1]]),
    }
    product = {
        "x": rng.standard_normal((rows, k), np.float32),
        "weight": rng.standard_normal((width, k), np.float32),
        "squares": rng.uniform(0.5, 2, (rows, 1)).astype(np.float32),
    }
    if "bias" in optional:
        product["bias"] = rng.standard_normal(width, np.float32)
    norms = {name: rng.standard_normal(head_dim, np.float32) for name in optional if name != "bias"}

    def outputs() -> dict[str, np.ndarray]:
        caches = {name: np.zeros((blocks, kv_heads, 16, head_dim), np.float32) for name in ("k_cache", "v_cache")}
        return {"q_out": np.zeros((rows, heads * head_dim), np.float32), **caches}

    sizes = {"n_heads": heads, "n_kv_heads": kv_heads, "head_dim": head_dim, "rotary_dim": head_dim, "eps": 1e-6}
    turning = {"rotary_dim": head_dim, "rope_sets": 2, "rope_scale": 0.7}
    found, expected, dims = outputs(), outputs(), {"rows": rows, "seqs": 3, "max_blocks": 2, "blocks": blocks}
    rows_of = {"turns": np.empty((rows, head_dim // 2, 2), np.float32), "places": np.empty(rows, np.int32)}
    OPS["rope_rows"].reference({**rope, **rows_of}, dims, turning)
    OPS["normed_qkv_append"].reference({**product, **norms, **rows_of, **found}, dims, {**sizes, "k": k})
    qkv = np.empty((rows, width), np.float32)
    OPS["normed_linear"].reference({**product, "out": qkv}, dims, {"n": width, "k": k})
    OPS["rope_kv_append"].reference({"qkv": qkv, **norms, **rope, **expected}, dims, {**sizes, **turning})
    for name, wanted in expected.items():
        assert np.any(wanted) and found[name].tobytes() == wanted.tobytes(), name

"""normed_logits against its reference; that largest is of out, to the bit; and rows against the batch."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from atlas.ops.normed_logits import kept_rows, largest_of
from tests.contract import test_normed_linear
from tests.contract.harness import Case, case
from tests.contract.inputs import first_rows

TYPES = {"x": "bf16", "weight": "bf16"}


def logits(n: int, k: int, rows: int, optional: tuple[str, ...] = ()) -> Case:
    return case("normed_logits", TYPES, optional=optional, n=n, k=k, rows=rows)


CASES = [
    logits(n, k, rows, optional)
    for n, k, counts, optional in (
        (320, 576, (1, 2, 3, 4, 7, 8, 9, 16, 17, 32, 33, 64, 65, 100, 128, 129, 256), ()),
        (500, 200, (1, 8, 40, 129), ("bias",)),  # the last of them are four columns
        (33000, 128, (3, 128), ()),  # ranges that begin and end within blocks of columns
    )
    for rows in counts
]


def inputs(c: Case, rng: np.random.Generator) -> dict[str, Any]:
    """Rows of every kind, most of them greedy."""
    given = test_normed_linear.inputs(c, rng)
    (count,) = c.shape("temperature", spare=False)
    kind = rng.integers(0, 6, count)
    return {
        **given,
        "temperature": np.where(kind == 1, 0.7, -0.0).astype(np.float32),
        "adjust": np.where(kind == 2, 4, 0).astype(np.int32),
        "n_top": np.where(kind == 3, 0, -1).astype(np.int32),
    }


@pytest.mark.parametrize("case", CASES, ids=str)
def test_matches_reference(device, case: Case, rng) -> None:
    """Every bound that a kernel has variants for, and numbers of rows around them; greedy rows are left alone."""
    assert device.check(case, inputs(case, rng)) <= 1.0


@pytest.mark.parametrize("case", CASES, ids=str)
def test_largest_is_of_out(device, case: Case, rng) -> None:
    """Also of rows that are not kept, whose bits are the same. Every other 16 columns are pairs of equal ones, so that
    two have the largest, and the first of them is asked for."""
    given, rows = inputs(case, rng), dict(case.dims)["rows"]
    columns = np.arange(dict(case.constants)["n"])
    twin = np.where(columns // 16 % 2, columns & ~4, columns)
    given["weight"] = given["weight"][twin]
    if "bias" in given:
        given["bias"] = given["bias"][twin]
    given["squares"][rows // 2, 0] = np.nan
    found = device.run(case, given)
    given["n_top"][:] = 1
    out = device.run(case, given)["out"][:rows]
    largest, ids = largest_of(out)
    np.testing.assert_array_equal(found["largest"][:rows], largest)
    other = np.arange(rows) != rows // 2
    np.testing.assert_array_equal(found["largest_id"][:rows][other], ids[other])
    assert np.isnan(out[rows // 2]).all() and np.isfinite(out[other]).all()


def test_row_does_not_depend_on_the_batch(device, rng) -> None:
    whole = logits(320, 576, 256)
    given = inputs(whole, rng)
    expected = device.run(whole, given)
    for rows in (1, 2, 8, 16, 33, 64, 128, 200):
        names = ("x", "squares", "temperature", "adjust", "n_top")
        some = {**given, **{name: first_rows(given[name], 256 - rows, 256) for name in names}}
        actual, kept = device.run(logits(320, 576, rows), some), kept_rows(some, rows)
        for name in ("largest", "largest_id"):
            assert actual[name][:rows].tobytes() == expected[name][256 - rows : 256].tobytes(), f"{name}, {rows} rows"
        assert actual["out"][:rows][kept].tobytes() == expected["out"][256 - rows : 256][kept].tobytes(), rows

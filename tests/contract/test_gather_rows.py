"""gather_rows against its reference."""

import numpy as np
import pytest

from tests.contract.harness import Case, case
from tests.contract.inputs import normal

CASES = [
    case("gather_rows", "f32", hidden=hidden, rows=rows, logits=logits)
    for hidden in (576, 37)
    for rows, logits in ((1, 1), (130, 5), (7, 7), (3, 1))
]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_matches_reference(device, case: Case, rng) -> None:
    dims = dict(case.dims)
    index = rng.integers(0, dims["rows"], dims["logits"]).astype(np.int32)
    index[-1] = dims["rows"] - 1
    assert device.check(case, {"x": normal(case, "x", rng), "index": index}) == 0.0

"""mask_logits against its reference."""

import numpy as np
import pytest

from tests.contract.harness import Case, case
from tests.contract.inputs import normal

CASES = [
    case("mask_logits", "f32", vocab=vocab, logits=logits) for vocab in (49152, 320, 33, 31) for logits in (1, 2, 5)
]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_matches_reference(device, case: Case, rng) -> None:
    """Rows without a mask, rows that share one, and in one row a mask that allows a single token."""
    logits = dict(case.dims)["logits"]
    mask = rng.integers(0, 1 << 32, case.shape("mask", spare=False), dtype=np.uint64).astype(np.uint32)
    mask[0] = 0
    mask[0, -1] = 1
    index = rng.integers(-1, logits, logits).astype(np.int32)
    index[0] = 0
    given = {"mask_index": index, "mask": mask, "logits": normal(case, "logits", rng)}
    assert device.check(case, given) == 0.0
    after = device.run(case, given)["logits"]
    assert np.isfinite(after[0]).sum() == 1

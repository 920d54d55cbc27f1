"""embedding against its reference: tokens from the host and tokens that only the device knows."""

import numpy as np
import pytest

from tests.contract.harness import Case, case
from tests.contract.inputs import normal

CASES = [
    case("embedding", dtype, vocab=vocab, hidden=hidden, rows=rows, seqs=seqs, slots=9)
    for dtype in ("f32", "bf16")
    for vocab, hidden in ((320, 128), (1003, 576), (50, 60))
    for rows, seqs in ((1, 1), (7, 3), (130, 8))
]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_matches_reference(device, case: Case, rng) -> None:
    dims, vocab = dict(case.dims), dict(case.constants)["vocab"]
    tokens = rng.integers(0, vocab, dims["rows"])
    tokens[rng.random(dims["rows"]) < 0.3] = -1
    tokens[:2] = (vocab - 1, -1)[: dims["rows"]]
    given = {
        "row_token": tokens.astype(np.int32),
        "row_seq": rng.integers(0, dims["seqs"], dims["rows"]).astype(np.int32),
        "seq_slot": rng.permutation(dims["slots"])[: dims["seqs"]].astype(np.int32),
        "last_token": rng.integers(0, vocab, dims["slots"]).astype(np.int32),
        "table": normal(case, "table", rng),
    }
    assert device.check(case, given) == 0.0

"""embedding against its reference: tokens from the host and tokens that only the device knows."""

import numpy as np
import pytest

from atlas.targets.formats import FORMATS, INTEGER_FORMATS
from tests.contract.harness import Case, case
from tests.contract.inputs import blocks, normal

CASES = [
    case("embedding", dtype, vocab=vocab, hidden=hidden, scale=scale, rows=rows, seqs=seqs, slots=9)
    for dtype in ("f32", "bf16")
    for scale in (1.0, 33.94112549695428)
    for vocab, hidden in ((320, 128), (1003, 576), (50, 61))
    for rows, seqs in ((1, 1), (7, 3), (130, 8))
] + [
    case("embedding", dtype, vocab=vocab, hidden=hidden, scale=scale, rows=rows, seqs=3, slots=9)
    for dtype in INTEGER_FORMATS
    for scale in (1.0, 0.7)
    for vocab, hidden, rows in ((320, 576, 33), (33, 71, 7))
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
        "table": (blocks if case.dtype("table") in FORMATS else normal)(case, "table", rng),
    }
    assert device.check(case, given) == 0.0


def test_a_slot_without_a_token_gives_a_row_of_nan(device, rng) -> None:
    """A slot remembers -1 after logits that were no numbers; other rows are as ever."""
    c = case("embedding", "f32", vocab=320, hidden=128, scale=1.0, rows=7, seqs=3, slots=9)
    given = {
        "row_token": np.array([5, -1, 7, -1, -1, 319, 0], np.int32),
        "row_seq": np.array([0, 0, 1, 1, 2, 2, 2], np.int32),
        "seq_slot": np.array([4, 8, 2], np.int32),
        "last_token": np.array([1, 1, 320, 1, -1, 1, 1, 1, 9], np.int32),
        "table": normal(c, "table", rng),
    }
    out = device.run(c, given)["out"][:7]
    assert np.isnan(out[[1, 4]]).all()
    assert (out[[0, 2, 3, 5, 6]] == given["table"][[5, 7, 9, 319, 0]]).all()

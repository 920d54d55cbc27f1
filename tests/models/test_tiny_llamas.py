"""Tiny Llamas with every option of the family against transformers' float32 logits (tests/oracle/tiny_llamas.npz)."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from tests import tiny_model
from tests.models import run
from tests.models.test_smollm2 import REL_L2, REL_L2_BF16, relative_l2
from tests.oracle.make_tiny_oracle import ORACLE, ROWS, VARIANTS, checkpoint, ids


@pytest.mark.parametrize("backend", ["cpu", "reference"])
@pytest.mark.parametrize("variant", sorted(VARIANTS))
def test_logits(tmp_path: Path, variant: str, backend: str) -> None:
    """In chunks of 37 tokens, which cut KV blocks."""
    folder = checkpoint(tmp_path, variant)
    with np.load(ORACLE) as oracle:
        expected = oracle[f"{variant}.logits"]
    for quant, bound in (("f32", REL_L2), ("bf16", REL_L2_BF16)):
        actual = run.logits(run.load(folder, backend, quant), ids(320), chunk=37)[list(ROWS)]
        assert relative_l2(actual, expected) <= bound, quant


def test_the_variants_differ_by_more_than_any_bound() -> None:
    """So that a variant read as another one is seen."""
    with np.load(ORACLE) as oracle:
        rows = {name: oracle[f"{name}.logits"] for name in VARIANTS}
    for a in VARIANTS:
        for b in VARIANTS:
            assert a == b or relative_l2(rows[a], rows[b]) > 2 * REL_L2_BF16, f"{a} and {b}"


def test_a_wrong_reading_of_a_rope_scheme_is_far_off(tmp_path: Path) -> None:
    for variant in ("rope-linear", "rope-llama3"):
        folder = checkpoint(tmp_path / variant, variant)
        tiny_model.drop_field(folder, "rope_scaling")
        with np.load(ORACLE) as oracle:
            expected = oracle[f"{variant}.logits"]
        actual = run.logits(run.load(folder, "reference", "f32"), ids(320))[list(ROWS)]
        assert relative_l2(actual[1:], expected[1:]) > 2 * REL_L2_BF16

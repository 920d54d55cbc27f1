"""shape(config, shard): one derivation for build and load."""

import json
from pathlib import Path

import pytest

from atlas.errors import CheckpointError
from atlas.targets.shape import Shard, shape

KERNELS = Path(__file__).resolve().parents[2] / "kernels"
SMOLLM2 = json.loads((KERNELS / "models" / "smollm2-135m.json").read_text())


def test_a_fine_tune_has_the_same_shape_whatever_it_calls_itself() -> None:
    tuned = {
        **SMOLLM2,
        "_name_or_path": "someone/else",
        "torch_dtype": "float16",
        "rope_theta": 5e5,
        "num_hidden_layers": 2,
    }
    assert shape(tuned).hash() == shape(SMOLLM2).hash()


def test_eps_as_fp32_and_as_decimal_are_one_shape() -> None:
    assert shape({**SMOLLM2, "rms_norm_eps": 9.999999747378752e-06}).hash() == shape(SMOLLM2).hash()


@pytest.mark.parametrize(
    "field", ["hidden_size", "intermediate_size", "num_attention_heads", "vocab_size", "rms_norm_eps"]
)
def test_every_constant_changes_the_hash(field: str) -> None:
    changed = {**SMOLLM2, field: SMOLLM2[field] * 3}
    assert shape(changed).hash() != shape(SMOLLM2).hash()


@pytest.mark.parametrize("field", ["hidden_size", "intermediate_size", "num_attention_heads", "vocab_size"])
def test_a_missing_field_is_named(field: str) -> None:
    config = {k: v for k, v in SMOLLM2.items() if k != field}
    with pytest.raises(CheckpointError, match=f"config.json: required field '{field}' is missing"):
        shape(config)


@pytest.mark.parametrize("value", [0, -4, 1 << 40, "9", 9.5, True])
def test_an_absurd_field_is_named_with_its_value(value: object) -> None:
    with pytest.raises(CheckpointError, match=f"num_attention_heads is {value!r}"):
        shape({**SMOLLM2, "num_attention_heads": value})


def test_contradicting_heads_name_both_fields() -> None:
    with pytest.raises(CheckpointError, match="num_attention_heads 9 is no multiple of num_key_value_heads 2"):
        shape({**SMOLLM2, "num_key_value_heads": 2})


def test_null_is_absent() -> None:
    derived = shape({**SMOLLM2, "head_dim": None, "num_key_value_heads": None})
    assert (derived.head_dim, derived.n_kv_heads) == (64, 9)


def test_a_shard_divides_heads_mlp_and_vocabulary() -> None:
    whole, part = shape(SMOLLM2), shape(SMOLLM2, Shard(tp_rank=2, tp_size=3))
    assert (part.n_heads, part.n_kv_heads, part.intermediate_size) == (3, 1, 512)
    assert part.hidden_size == whole.hidden_size and part.hash() != whole.hash()


def test_a_shard_that_does_not_divide_is_refused() -> None:
    with pytest.raises(CheckpointError, match="tp_size 2 does not divide num_attention_heads 9"):
        shape(SMOLLM2, Shard(tp_size=2))


def test_a_wild_head_dim_is_refused_before_a_compiler_sees_it() -> None:
    with pytest.raises(CheckpointError, match="head_dim is 1000000; accepted: at most 1024"):
        shape({**SMOLLM2, "head_dim": 1_000_000})

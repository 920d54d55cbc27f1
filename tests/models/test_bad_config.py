"""config.json with every field absent or absurd: an error that names the file, at once and in little memory."""

from __future__ import annotations

import copy
import json
import time
from pathlib import Path
from typing import Any

import pytest

from atlas.errors import AtlasError, CheckpointError
from atlas.models import family_of
from atlas.targets.shape import Shard
from tests import family_models, tiny_model
from tests.models import run

ABSURD: list[Any] = [0, -1, 1, 7, 1 << 40, 1 << 70, 1.5, float("nan"), None, "x", "8", True, [], [8], {}, {"a": 1}]
EXTREME: list[Any] = [
    1e-320,
    1e-300,
    1e-30,
    1e-5,
    0.999,
    1e5,
    1e25,
    1e30,
    1e300,
    float("inf"),
    -1.5,
    1 << 24,
    1 << 2000,
]
IGNORED = ("model_type",)
"""Fields that may hold anything: they decide nothing."""

FIELDS = [field for field in tiny_model.CONFIG if field not in IGNORED]


@pytest.mark.parametrize("field", FIELDS)
def test_absurd_values(field: str, tmp_path: Path) -> None:
    """A value is refused, or right (the model's own, or one that this field may lawfully have)."""
    folder = tiny_model.write(tmp_path)
    config = json.loads((folder / "config.json").read_text())
    refused = 0
    for value in ABSURD:
        (folder / "config.json").write_text(json.dumps({**config, field: value}))
        begin = time.perf_counter()
        try:
            run.load(folder, "reference", "f32", max_seqs=1, max_rows=8, kv_memory_bytes=1 << 20)
        except AtlasError as error:
            refused += 1
            assert field in str(error) or "config.json" in str(error), f"{field} = {value!r}: {error}"
        assert time.perf_counter() - begin < 10, f"{field} = {value!r}"
    assert refused >= 8, f"only {refused} of {len(ABSURD)} values refused"


@pytest.mark.parametrize("field", FIELDS)
def test_absent_fields(field: str, tmp_path: Path) -> None:
    """Refused by name, or what the absence means is the model all the same."""
    folder = tiny_model.write(tmp_path)
    tiny_model.drop_field(folder, field)
    try:
        run.load(folder, "reference", "f32", max_seqs=1, max_rows=8, kv_memory_bytes=1 << 20)
    except AtlasError as error:
        assert field in str(error) or "as config.json says" in str(error), str(error)
    else:
        assert field in (
            "num_key_value_heads",
            "head_dim",
            "rms_norm_eps",
            "rope_theta",
            "max_position_embeddings",
        ) or field in ("tie_word_embeddings", "hidden_act", "architectures")


def _places(node: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    entries = node.items() if isinstance(node, dict) else enumerate(node) if isinstance(node, list) else ()
    return [found for key, child in entries for found in ((*path, key), *_places(child, (*path, key)))]


@pytest.mark.parametrize("case", family_models.CASES)
def test_every_entry_of_every_family(case: str) -> None:
    """Whatever number stands at whatever depth, configuring succeeds or refuses: nothing overflows on the way."""
    config = family_models.config(case)
    for path in _places(config):
        for value in (*ABSURD, *EXTREME):
            changed = copy.deepcopy(config)
            *outer, last = path
            node = changed
            for key in outer:
                node = node[key]
            node[last] = value
            try:
                family_of(changed).configure(changed, Shard())
            except CheckpointError as error:
                assert "config.json" in str(error), f"{path} = {value!r}: {error}"
            except Exception as error:
                pytest.fail(f"{path} = {value!r}: {error!r}")

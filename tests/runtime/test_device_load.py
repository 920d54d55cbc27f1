"""Rows that a GPU packs: what the host copies for it, laid out by `load_rows`, is what the host would have packed."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from atlas.models.family import WeightSource
from atlas.runtime import core, load_program, loader
from atlas.runtime.program import Buffer
from atlas.runtime.runner import Runner, RunnerOptions
from atlas.targets.status import closure
from atlas.weights import open_checkpoint
from atlas.weights.layouts import LAYOUTS
from tests import tiny_model


class Tensors:
    """Stands for a checkpoint: bf16 tensors by name."""

    def __init__(self, **arrays: Any) -> None:
        self.arrays = arrays
        self.tensors = {name: SimpleNamespace(dtype="BF16", scheme=None) for name in arrays}

    def read(self, name: str, rows: slice | None = None) -> Any:
        return self.arrays[name][rows if rows is not None else slice(None)]


def kernels(dtype: str, k: int) -> dict[str, Any]:
    return {load_program.key(dtype, k).name(): SimpleNamespace(layouts={"out": "tiles"})}


def runs_of(checkpoint: Tensors, layout: str, k: int, names: list[str]) -> list[loader._Run]:
    rows = [len(checkpoint.arrays[name]) for name in names]
    buffer = Buffer("w", "bf16", (sum(rows), k), "weight")
    source = WeightSource(tuple(names), tuple(rows))
    chosen = LAYOUTS[layout]
    return [
        loader._Run(buffer, source, chosen, 0, first, spans) for first, spans in loader._runs((sum(rows), k), chosen)
    ]


@pytest.mark.parametrize("layout", ["tiles", "tiles_paired"])
@pytest.mark.parametrize("inner", [64, 192, 320])
def test_copied_rows_in_tiles_are_the_packed_run(layout: str, inner: int, monkeypatch: pytest.MonkeyPatch) -> None:
    k = 200
    monkeypatch.setattr(loader, "RUN_BYTES", 4 * k * 256)
    rng = np.random.default_rng()
    checkpoint = Tensors(
        gate=rng.standard_normal((inner, k)).astype(ml_dtypes.bfloat16),
        up=rng.standard_normal((inner, k)).astype(ml_dtypes.bfloat16),
    )
    runs = runs_of(checkpoint, layout, k, ["gate", "up"])
    assert len(runs) > 1 or inner == 64
    for run in runs:
        assert run.raw(checkpoint, kernels("bf16", k), 8192)  # type: ignore[arg-type]
        rows = np.empty((run.rows, k), ml_dtypes.bfloat16)
        run.copy(checkpoint, rows)  # type: ignore[arg-type]
        packed = run.pack(checkpoint)  # type: ignore[arg-type]
        np.testing.assert_array_equal(
            LAYOUTS["tiles"].pack(rows, "bf16").view(np.uint8).reshape(-1), packed.view(np.uint8).reshape(-1)
        )


def test_what_the_device_does_not_make_is_packed_by_the_host() -> None:
    rng = np.random.default_rng()
    checkpoint = Tensors(a=rng.standard_normal((96, 64)).astype(ml_dtypes.bfloat16), b=np.zeros((96, 64), np.float16))
    checkpoint.tensors["b"] = SimpleNamespace(dtype="F16", scheme=None)
    known = kernels("bf16", 64)
    (run,) = runs_of(checkpoint, "tiles", 64, ["a"])
    assert run.raw(checkpoint, known, 8192)  # type: ignore[arg-type]
    assert run.padded
    assert not run.raw(checkpoint, {}, 8192), "no kernel"  # type: ignore[arg-type]
    assert not run.raw(checkpoint, known, 95), "more rows than a step has"  # type: ignore[arg-type]
    for layout, names in (("tiles", ["b"]), ("row_major", ["a"]), ("tiles_paired", ["a", "a"])):
        assert not any(run.raw(checkpoint, known, 8192) for run in runs_of(checkpoint, layout, 64, names))  # type: ignore[arg-type]


def test_a_poisoned_workspace_leaves_arriving_rows_alone(tmp_path: Path) -> None:
    """They lie in the workspace while the load program's steps begin."""
    with open_checkpoint(tiny_model.write(tmp_path)) as checkpoint:
        forward = Runner.load(checkpoint, RunnerOptions(backend="reference", quant="f32"))._bound
    assert core._uses_workspace(forward)
    begin, _ = forward.plan.regions["workspace"]
    assert not core._uses_workspace(load_program.bind(forward, [load_program.Rows("bf16", 64, 0)], [begin], 0))


def test_the_build_compiles_what_loading_runs() -> None:
    from atlas.targets.resolution import facts
    from tests.contract.harness import KERNELS

    for quant, dtype in (("bf16", "bf16"), ("fp8", "f8g128")):
        keys = closure(facts(KERNELS)["llama-3-8b"], quant)
        assert load_program.key(dtype, 4096) in keys and load_program.key(dtype, 14336) in keys

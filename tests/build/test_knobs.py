"""Which knob values a kernel gets: measured, estimated or declared, and what makes values illegal."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path

import pytest

from atlas.build import cost_model, kernel_file, knobs
from atlas.build.kernel_file import Declaration
from atlas.errors import BuildError
from atlas.runtime.program import KernelKey
from atlas.targets.hardware import walk
from atlas.targets.target import Target
from tests.build.conftest import KERNELS

Targets = Callable[..., list[Target]]


def linear(n: int, k: int, dtype: str = "bf16") -> KernelKey:
    return KernelKey("linear", (("x", dtype), ("weight", dtype), ("out", "f32")), (("n", n), ("k", k)))


@pytest.fixture
def target(tree: Path, gpu_targets: Targets) -> Target:
    return gpu_targets(tree)[0]


@pytest.fixture
def declared(tree: Path) -> Declaration:
    return kernel_file.declaration(tree / "cuda/linear.cu")


def write_tuning(tree: Path, text: str) -> None:
    folder = tree / "h200/smollm2-135m/bf16"
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "tuning.toml").write_text(text)


def test_a_kernels_own_table_comes_before_its_ops(tree: Path, target: Target, declared: Declaration) -> None:
    name = linear(960, 576).name()
    write_tuning(tree, f"[linear]\nTILE_M = 16\nTILE_N = 64\n[linear.{name}]\nTILE_N = 32\nSTAGES = 6\n")
    chosen = knobs.choose(declared, linear(960, 576), target)
    assert chosen == knobs.Chosen({"SIDES": 1, "TILE_M": 16, "TILE_N": 32, "WARPS": 4, "STAGES": 6}, "tuned")
    other = knobs.choose(declared, linear(576, 576), target)
    assert other == knobs.Chosen({"SIDES": 1, "TILE_M": 16, "TILE_N": 64, "WARPS": 4, "STAGES": 3}, "tuned")


@pytest.mark.parametrize(
    ("table", "message"),
    [
        ("TILE = 16", r"\[linear\] sets 'TILE'; accepted: SIDES, TILE_M, TILE_N, WARPS, STAGES"),
        ("TILE_M = 24", r"\[linear\] TILE_M = 24; accepted: 16, 32, 64, 128"),
        ('TILE_M = "16"', r"\[linear\] TILE_M = '16'; accepted: 16, 32, 64, 128"),
        ("WARPS = 8\nTILE_N = 16", "linear__|breaks the rule TILE_N % .* tune again, or delete the table"),
        ("TILE_M = 128\nTILE_N = 128\nWARPS = 2", "breaks the rule "),
    ],
)
def test_wrong_tuning_is_refused(tree: Path, target: Target, declared: Declaration, table: str, message: str) -> None:
    write_tuning(tree, f"[linear]\n{table}\n")
    with pytest.raises(BuildError, match=message) as caught:
        knobs.choose(declared, linear(960, 576), target)
    assert "tuning.toml of h200/smollm2-135m/bf16: " in str(caught.value)


def test_every_variant_is_legal_and_the_declared_one_is_among_them(target: Target, declared: Declaration) -> None:
    for dtype in ("bf16", "f32"):
        values = knobs.variants(declared, linear(960, 576, dtype), target.hardware)
        assert declared.knobs({}) in values
        assert len(values) > 30
        assert len({tuple(v.items()) for v in values}) == len(values)
        for v in values:
            assert v["STAGES"] * (v["TILE_M"] + v["TILE_N"]) * 144 <= target.hardware.shared_memory_per_block
            assert v["TILE_M"] * v["TILE_N"] <= v["WARPS"] * 2048


def test_less_shared_memory_leaves_fewer_choices(target: Target, declared: Declaration) -> None:
    small = dataclasses.replace(target.hardware, shared_memory_per_block=48 * 1024)
    values = knobs.variants(declared, linear(960, 576), small)
    assert 0 < len(values) < len(knobs.variants(declared, linear(960, 576), target.hardware))
    assert max(v["STAGES"] * (v["TILE_M"] + v["TILE_N"]) * 144 for v in values) <= 48 * 1024


def test_a_kernel_without_costs_keeps_its_declared_knobs(tree: Path, target: Target) -> None:
    declared = kernel_file.declaration(tree / "cuda/rms_norm.cu")
    key = KernelKey("rms_norm", (("x", "f32"), ("weight", "f32"), ("out", "bf16")), (("hidden", 576), ("eps", 1e-5)))
    assert knobs.choose(declared, key, target) == knobs.Chosen({"THREADS": 256}, "declared")


def test_the_cost_model_looks_at_shape_and_hardware(target: Target, declared: Declaration) -> None:
    def chosen(n: int, k: int, **facts: int) -> dict[str, int]:
        at = dataclasses.replace(target, hardware=dataclasses.replace(target.hardware, **facts))
        result = knobs.choose(declared, linear(n, k), at)
        assert result.source == "cost model"
        return result.values

    # Few columns on many multiprocessors: narrow tiles, so that more of them work.
    narrow, wide = chosen(576, 576), chosen(49152, 576)
    assert narrow["TILE_N"] < wide["TILE_N"]
    # One block after the other on a small device: no point in narrow tiles.
    assert chosen(3072, 4096, multiprocessors=8)["TILE_N"] >= chosen(3072, 4096)["TILE_N"]
    # What does not fit is not chosen.
    small = chosen(49152, 576, shared_memory_per_block=24 * 1024)
    assert small["STAGES"] * (small["TILE_M"] + small["TILE_N"]) * 144 <= 24 * 1024


def test_the_cost_model_is_deterministic_and_prefers_the_declared_among_equals(
    target: Target, declared: Declaration
) -> None:
    key = linear(960, 576)
    candidates = knobs.variants(declared, key, target.hardware)
    names = knobs.names(key, target.hardware)
    first = cost_model.best(declared, names, target.hardware, candidates)
    assert first == cost_model.best(declared, names, target.hardware, list(reversed(candidates)))
    flat = dataclasses.replace(declared, cost={"memory": "n * k"})
    assert cost_model.best(flat, names, target.hardware, candidates) == declared.knobs({})


@pytest.mark.parametrize(
    ("n", "max_rows", "columns"),
    # By hand: rounds of 132 tiles x (columns + 24). 6,144 columns, 1,024 rows: 8 x 24 tiles of 256 are 2 rounds (560),
    # 8 x 32 of 192 are 2, too (432), 8 x 48 of 128 are 3 (456), 8 x 64 of 96 are 4 (480).
    [(6144, 1024, 192), (6144, 64, 48), (576, 512, 32), (6144, 0, 256)],
)
def test_a_declaration_may_state_the_cost_of_a_launch(target: Target, n: int, max_rows: int, columns: int) -> None:
    declared = kernel_file.declaration(KERNELS / "h200/linear.prefill.cu")
    chosen = knobs.choose(declared, linear(n, 4096), target, max_rows)
    assert (chosen.values["COLUMNS"], chosen.source) == (columns, "cost model")
    names = knobs.names(linear(n, 4096), target.hardware, max_rows)
    base, other = cost_model.relative(declared, names, target.hardware, [declared.knobs(names), chosen.values])
    assert base == 1.0 and (other < 1.0) == (columns != 256)


def test_estimates_are_relative_to_the_declared_knobs(target: Target, declared: Declaration) -> None:
    names = knobs.names(linear(960, 576), target.hardware)
    (one,) = cost_model.relative(declared, names, target.hardware, [declared.knobs({})])
    assert one == pytest.approx(1.0)
    assert sum(cost_model.ROWS.values()) == pytest.approx(1.0)
    times = cost_model.microseconds(declared, names, target.hardware, declared.knobs({}), (1, 32, 512, 4096))
    assert times == sorted(times) and times[0] > 0


@pytest.mark.parametrize(("card", "native"), [("a100", 0), ("l40s", 1), ("gb10", 1)])
def test_a_card_without_mma_of_fp8_multiplies_f16(tree: Path, card: str, native: int) -> None:
    hardware = walk(tree)[card]
    declared = kernel_file.declaration(tree / "cuda/gated_linear.f8.cu")
    dtypes = (("x", "f8g128"), ("weight", "f8g128"), ("out", "f8g128"))
    for inner in (1536, 14336):
        key = KernelKey("gated_linear", dtypes, (("intermediate", inner), ("k", 576), ("activation", 0)))
        legal = knobs.variants(declared, key, hardware)
        assert legal and all(choice["NATIVE"] == native for choice in legal)

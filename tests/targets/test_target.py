"""Selection and resolution over generated kernel trees."""

import json
import shutil
from pathlib import Path

import pytest

from atlas.errors import BuildError
from atlas.targets import driver, target
from atlas.targets.driver import Gpu
from atlas.targets.hardware import walk
from atlas.targets.target import resolve, select, tuning

KERNELS = Path(__file__).resolve().parents[2] / "kernels"

CUDA = """
name = "{name}"
kind = "cuda"
description = "a card"
arch = "sm_90a"
compute_capability = [9, 0]
multiprocessors = 132
shared_memory_per_block = 232448
quants = ["bf16"]
"""


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """cpu, an abstract base, two cards that inherit from it, two models."""
    shutil.copytree(KERNELS / "cpu", tmp_path / "cpu")
    for folder in ("base", "card", "other", "models"):
        (tmp_path / folder).mkdir()
    (tmp_path / "base" / "HARDWARE.toml").write_text(
        'name = "base"\nkind = "cuda"\ndescription = "shared"\nabstract = true\n'
    )
    for name in ("card", "other"):
        (tmp_path / name / "HARDWARE.toml").write_text(CUDA.format(name=name) + 'inherits = "base"\n')
    for name in ("small", "large"):
        (tmp_path / "models" / f"{name}.json").write_text(json.dumps({"architectures": ["LlamaForCausalLM"]}))
    (tmp_path / "base" / "linear.cu").write_text("")
    return tmp_path


def pick(tree: Path, **variables: str) -> list[str]:
    environment = {f"ATLAS_TARGET_{name.upper()}": value for name, value in variables.items()}
    return [t.name for t in select(tree, environment).targets]


def test_names_lists_and_patterns_select(tree: Path) -> None:
    cpu = ["cpu/*/f32", "cpu/*/bf16"]
    assert pick(tree, hw="card", model="small") == [*cpu, "card/small/bf16"]
    assert pick(tree, hw="card,other", model="s*", quant="bf16") == [*cpu, "card/small/bf16", "other/small/bf16"]
    assert pick(tree, hw="*", model="*") == [
        *cpu,
        *(f"{h}/{m}/bf16" for h in ("card", "other") for m in ("large", "small")),
    ]
    assert pick(tree, hw="cpu") == cpu


@pytest.mark.parametrize(
    ("variables", "message"),
    [
        ({"hw": "cart"}, "ATLAS_TARGET_HW: unknown name 'cart'; accepted: card, cpu, other; nearest: card"),
        ({"hw": "base"}, "ATLAS_TARGET_HW: unknown name 'base'"),
        (
            {"hw": "card", "model": "smal"},
            "ATLAS_TARGET_MODEL: unknown name 'smal'; accepted: large, small; nearest: small",
        ),
        ({"hw": "card", "quant": "fp8"}, "ATLAS_TARGET_QUANT: unknown name 'fp8'; accepted: bf16, f32"),
        ({"hw": "card", "quant": "f32"}, "no target matches; accepted: card has quants bf16"),
    ],
)
def test_a_selection_that_cannot_be_says_why(tree: Path, variables: dict[str, str], message: str) -> None:
    with pytest.raises(BuildError) as caught:
        pick(tree, **variables)
    assert message in str(caught.value)


def test_native_follows_the_driver(tree: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(driver, "gpus", lambda: ([Gpu("A Card", (9, 0))], ""))
    selection = select(tree, {"ATLAS_TARGET_MODEL": "small"})
    assert [t.name for t in selection.targets][-1] == "card/small/bf16" and "found A Card" in selection.notes[0]
    monkeypatch.setattr(driver, "gpus", lambda: ([Gpu("Old Card", (7, 5))], ""))
    selection = select(tree, {})
    assert not selection.needs_cuda() and "Old Card (compute capability 7.5) has no hardware" in selection.notes[0]
    monkeypatch.setattr(driver, "gpus", lambda: ([], "no NVIDIA driver"))
    assert "no NVIDIA driver; building cpu only" in select(tree, {}).notes[0]


def test_the_driver_query_survives_a_machine_without_one() -> None:
    assert driver.gpus("libdoes-not-exist.so.1") == ([], "no NVIDIA driver (libdoes-not-exist.so.1 not found)")


def test_the_nearest_file_wins_and_drops_nothing_else(tree: Path) -> None:
    chosen = {t.name: t for t in select(tree, {"ATLAS_TARGET_HW": "card,other"}).targets}
    small, large = chosen["card/small/bf16"], chosen["card/large/bf16"]
    (tree / "base" / "swiglu.cu").write_text("")
    order = ["base", "card", "card/small", "card/small/bf16"]
    for level in order[1:]:
        (tree / level).mkdir(exist_ok=True)
        (tree / level / "linear.cu").write_text("")
        assert resolve(small, "linear") == tree / level / "linear.cu"
        assert resolve(small, "swiglu") == tree / "base" / "swiglu.cu"
    assert resolve(large, "linear") == tree / "card" / "linear.cu"
    assert resolve(chosen["other/small/bf16"], "linear") == tree / "base" / "linear.cu"


def test_two_claims_at_one_level_are_an_error(tree: Path) -> None:
    card = select(tree, {"ATLAS_TARGET_HW": "card"}).targets[-1]
    (tree / "base" / "linear.cpp").write_text("")
    with pytest.raises(BuildError, match="op linear: claimed by .*linear.cpp and .*linear.cu"):
        resolve(card, "linear")


def test_a_missing_kernel_names_op_target_and_places(tree: Path) -> None:
    card = select(tree, {"ATLAS_TARGET_HW": "card"}).targets[-1]
    with pytest.raises(BuildError, match="op sample: no kernel for target card/small/bf16; accepted: sample.cu in"):
        resolve(card, "sample")


def test_tuning_comes_from_the_nearest_file(tree: Path) -> None:
    card = select(tree, {"ATLAS_TARGET_HW": "card"}).targets[-1]
    assert tuning(card, "linear") == {}
    (tree / "card" / "tuning.toml").write_text("[linear]\nTILE_M = 64\n")
    (tree / "card" / "small" / "bf16").mkdir(parents=True)
    (tree / "card" / "small" / "bf16" / "tuning.toml").write_text("[swiglu]\nTILE = 2\n")
    assert tuning(card, "linear") == {"TILE_M": 64} and tuning(card, "swiglu") == {"TILE": 2}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("\nmultiprocesors = 3\n", "unknown key 'multiprocesors'.*nearest: multiprocessors"),
        ('\ninherits = "nothing"\n', "inherits 'nothing'"),
        ('\ninherits = "card"\n', "a circle"),
        ("\nkind = 3\n", "not valid TOML|kind is 3"),
    ],
)
def test_a_wrong_hardware_file_is_named(tree: Path, text: str, message: str) -> None:
    (tree / "card" / "HARDWARE.toml").write_text(CUDA.format(name="card") + text)
    with pytest.raises(BuildError, match=message):
        walk(tree)


def test_a_copied_hardware_file_shows_up(tree: Path) -> None:
    (tree / "card" / "HARDWARE.toml").write_text(CUDA.format(name="h200"))
    with pytest.raises(BuildError, match="name is 'h200'; accepted: 'card'"):
        walk(tree)


def test_a_missing_field_is_named(tree: Path) -> None:
    (tree / "card" / "HARDWARE.toml").write_text(CUDA.format(name="card").replace('arch = "sm_90a"\n', ""))
    with pytest.raises(BuildError, match="arch is missing"):
        walk(tree)


def test_every_target_of_the_real_tree_has_every_kernel_of_its_closure() -> None:
    from atlas.build.compile import closure

    selection = select(KERNELS, {"ATLAS_TARGET_HW": "*"})
    names = {t.name for t in selection.targets}
    assert {"h200/smollm2-135m/bf16", "gb10/smollm2-135m/bf16", "cpu/*/f32", "cpu/*/bf16"} <= names
    for chosen in selection.targets:
        if chosen.model != target.ANY_MODEL:
            for key in closure(chosen):
                assert resolve(chosen, key.op).stem == key.op

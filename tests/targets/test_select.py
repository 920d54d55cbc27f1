"""Which targets the ATLAS_TARGET_* variables select, and what is refused."""

import json
from pathlib import Path

import pytest

from atlas.errors import BuildError
from atlas.targets import driver, target
from atlas.targets.driver import Gpu
from atlas.targets.target import every, facts, models, resolve, select

KERNELS = Path(__file__).resolve().parents[2] / "kernels"
CPU = ["cpu/*/f32", "cpu/*/bf16", "cpu/*/int8", "cpu/*/int4"]


def pick(tree: Path, **variables: str) -> list[str]:
    environment = {f"ATLAS_TARGET_{name.upper()}": value for name, value in variables.items()}
    return [t.name for t in select(tree, environment).targets]


def refusal(tree: Path, **variables: str) -> str:
    with pytest.raises(BuildError) as caught:
        pick(tree, **variables)
    return str(caught.value)


def test_names_lists_and_patterns_select(tree: Path) -> None:
    assert pick(tree, hw="card", model="small") == [*CPU, "card/small/bf16"]
    assert pick(tree, hw="card,other", model="s*", quant="bf16") == [*CPU, "card/small/bf16", "other/small/bf16"]
    assert pick(tree, hw="*", model="*") == [
        *CPU,
        *(f"{h}/{m}/bf16" for h in ("card", "other") for m in ("large", "small")),
    ]
    assert pick(tree, hw="cpu") == CPU
    assert pick(tree, hw=" card , cpu ", model="small,") == [*CPU, "card/small/bf16"]


@pytest.mark.parametrize(
    ("variables", "message"),
    [
        ({"hw": "cart"}, "ATLAS_TARGET_HW: unknown name 'cart'; accepted: card, cpu, other; nearest: card"),
        ({"hw": "base"}, "ATLAS_TARGET_HW: unknown name 'base'; accepted: card, cpu, other"),
        ({"hw": "ca?"}, "ATLAS_TARGET_HW: unknown name 'ca?'"),
        ({"hw": ","}, "ATLAS_TARGET_HW: ',' names nothing; accepted: card, cpu, other"),
        (
            {"hw": "card", "model": "smal"},
            "ATLAS_TARGET_MODEL: unknown name 'smal'; accepted: large, later, small; nearest: small",
        ),
        (
            {"hw": "card", "quant": "fp16"},
            "ATLAS_TARGET_QUANT: unknown name 'fp16'; accepted: f32, bf16, fp8, nvfp4, int4, int8; nearest: bf16",
        ),
    ],
)
def test_an_unknown_name_fails_with_the_nearest_ones(tree: Path, variables: dict[str, str], message: str) -> None:
    assert message in refusal(tree, **variables)


READY = "accepted: ready: card/large/bf16, card/small/bf16; `python build_targets.py --list` shows"


@pytest.mark.parametrize(
    ("variables", "message"),
    [
        (
            {"hw": "card", "model": "small", "quant": "fp8"},
            "ATLAS_TARGET_HW=card ATLAS_TARGET_MODEL=small ATLAS_TARGET_QUANT=fp8: card/small/fp8 has no kernels yet: "
            f"card has no fp8 kernels; {READY}",
        ),
        (
            {"hw": "card", "model": "later", "quant": "bf16"},
            f"card/later/bf16 has no kernels yet: no family in atlas/models records LaterForCausalLM; {READY}",
        ),
        # One name that no target with kernels has, beside names that have: nothing is dropped silently.
        (
            {"hw": "card", "model": "small,later"},
            f"model later has no kernels yet: no family in atlas/models records LaterForCausalLM; {READY}",
        ),
        (
            {"hw": "card", "quant": "bf16,int4"},
            "quant int4 has no kernels yet: card has no int4 kernels (2); no family in atlas/models records "
            f"LaterForCausalLM (1); {READY}",
        ),
        ({"hw": "cpu", "quant": "fp8"}, "quant fp8 has no kernels yet: cpu has no fp8 kernels"),
        ({"hw": "cpu", "model": "later"}, "model later has no kernels yet: no family in atlas/models records"),
        (
            {"hw": "car*", "model": "lat*"},
            "ATLAS_TARGET_HW=car* ATLAS_TARGET_MODEL=lat*: no target matches: no family in atlas/models records "
            "LaterForCausalLM; accepted: ready: card/large/bf16, card/small/bf16; hardware: card, cpu, other; "
            "models: large, later, small; quants: f32, bf16, fp8, nvfp4, int4, int8",
        ),
    ],
)
def test_what_has_no_kernels_yet_is_refused_by_name(tree: Path, variables: dict[str, str], message: str) -> None:
    assert message in refusal(tree, **variables)


def test_patterns_skip_what_has_no_kernels_and_say_so(tree: Path) -> None:
    selection = select(tree, {"ATLAS_TARGET_HW": "card"})
    assert [t.name for t in selection.targets] == [*CPU, "card/large/bf16", "card/small/bf16"]
    assert selection.notes == (
        "skipped 16 of 18 targets that have no kernels yet: card has no f32, fp8, nvfp4, int4, int8 kernels (10); "
        "no family in atlas/models records LaterForCausalLM (6)",
    )
    assert (
        select(tree, {"ATLAS_TARGET_HW": "card", "ATLAS_TARGET_MODEL": "small", "ATLAS_TARGET_QUANT": "bf16"}).notes
        == ()
    )


def test_a_model_whose_op_has_no_kernel_is_skipped_but_a_tree_without_one_fails(tree: Path) -> None:
    """An op that one model alone needs is "not yet"; an op without which nothing runs is a broken tree."""
    (tree / "card" / "small").mkdir()
    (tree / "base" / "gated_linear.cu").rename(tree / "card" / "small" / "gated_linear.cu")
    selection = select(tree, {"ATLAS_TARGET_HW": "card"})
    assert [t.name for t in selection.targets] == [*CPU, "card/small/bf16"]
    assert "card has no kernel for op gated_linear" in selection.notes[0]
    message = refusal(tree, hw="card", model="large", quant="bf16")
    absent = "card/large/bf16 has no kernels yet: card has no kernel for op gated_linear"
    assert f"{absent}, sought as gated_linear.cu in" in message
    (tree / "card" / "small" / "gated_linear.cu").unlink()
    message = refusal(tree, hw="card", quant="b*")
    assert message.startswith("op gated_linear: no kernel for target card/") and str(tree / "base") in message


def test_the_status_of_every_target_is_derived(tree: Path) -> None:
    states = {t.name: str(state) for t, state in every(tree).items()}
    assert len(states) == 3 * 3 * 6
    assert states["card/small/bf16"] == states["cpu/small/f32"] == "ready"
    assert states["card/small/f32"] == "no kernels yet: card has no f32 kernels"
    assert states["cpu/later/f32"] == "no kernels yet: no family in atlas/models records LaterForCausalLM"
    assert set(models(tree)) == {"small", "large"} and set(facts(tree)) == {"small", "large", "later"}


def test_a_model_that_its_family_refuses_says_what_it_refuses(tree: Path) -> None:
    file = tree / "models" / "small.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "logits_scaling": 8.0}))
    assert "the family of LlamaForCausalLM does not record it: logits_scaling is 8.0" in refusal(
        tree, hw="card", model="small"
    )


def test_facts_that_give_no_shape_name_the_file(tree: Path) -> None:
    (tree / "models" / "small.json").write_text('{"architectures": ["LlamaForCausalLM"]}')
    assert "models/small.json: required field 'num_attention_heads' is missing" in refusal(tree, hw="card")
    (tree / "models" / "small.json").write_text("{")
    assert "models/small.json: not valid JSON" in refusal(tree, hw="card")
    (tree / "models" / "small.json").write_text("[]")
    assert "models/small.json: holds no JSON object" in refusal(tree, hw="card")


def test_native_follows_the_driver(tree: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(driver, "gpus", lambda: ([Gpu("A Card", (9, 0))], ""))
    selection = select(tree, {"ATLAS_TARGET_MODEL": "small"})
    assert [t.name for t in selection.targets] == [*CPU, "card/small/bf16"]
    assert selection.notes[0] == (
        "ATLAS_TARGET_HW is native: found A Card (of compute capability 9.0 there is also other), building card and cpu"
    )
    monkeypatch.setattr(driver, "gpus", lambda: ([Gpu("Old Card", (7, 5))], ""))
    selection = select(tree, {})
    assert not selection.needs_cuda()
    assert "Old Card (compute capability 7.5) has no hardware directory; building cpu only" in selection.notes[0]
    monkeypatch.setattr(driver, "gpus", lambda: ([], "no NVIDIA driver"))
    assert "no NVIDIA driver; building cpu only" in select(tree, {}).notes[0]


def test_native_prefers_the_directory_that_names_the_device(tree: Path) -> None:
    def chosen(device: str, **names: str) -> list[str]:
        for directory in ("card", "other"):
            line = f"device_names = {names[directory]}\n" if directory in names else ""
            text = (tree / directory / "HARDWARE.toml").read_text().split("device_names")[0]
            (tree / directory / "HARDWARE.toml").write_text(text + line)
        return target.native(target.walk(tree), [Gpu(device, (9, 0))], "")[0]

    assert chosen("Big Card 9") == ["card", "cpu"]
    assert chosen("Big Card 9", other="['*big card*']") == ["other", "cpu"]
    assert chosen("Small", card="['*big card*']") == ["other", "cpu"]
    assert chosen("Small", card="['*big*']", other="['*mid*']") == ["card", "cpu"]
    assert target.native(target.walk(tree), [Gpu("One", (9, 0)), Gpu("Two", (9, 0)), Gpu("Old", (5, 0))], "") == (
        ["card", "cpu"],
        "ATLAS_TARGET_HW is native: found One (of compute capability 9.0 there is also other); Old (compute capability "
        "5.0) has no hardware directory, building card and cpu",
    )


def test_the_driver_query_survives_a_machine_without_one() -> None:
    assert driver.gpus("libdoes-not-exist.so.1") == ([], "no NVIDIA driver (libdoes-not-exist.so.1 not found)")


def test_every_target_of_the_real_tree_has_every_kernel_of_its_closure() -> None:
    from atlas.build.compile import closure

    selection = select(KERNELS, {"ATLAS_TARGET_HW": "*"})
    names = {t.name for t in selection.targets}
    cards = ("h200", "gb10", "rtx5090", "l40s", "a100")
    recorded = ("smollm2-135m", "llama-3.2-1b", "llama-3-8b")
    assert {f"{card}/{model}/bf16" for card in cards for model in recorded} | set(CPU) <= names
    for chosen in selection.targets:
        if chosen.model != target.ANY_MODEL:
            for key, phases in closure(chosen).items():
                for phase in phases:
                    assert resolve(chosen, key.op, phase, dict(key.dtypes)).name.split(".")[0] == key.op


def test_cpu_counts_where_it_was_named_beside_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """No GPU has f32; cpu has, and is what such a selection builds."""
    for hw in ("*", "cpu,h*"):
        selection = select(KERNELS, {"ATLAS_TARGET_HW": hw, "ATLAS_TARGET_QUANT": "f32"})
        assert {target.hardware.name for target in selection.targets} == {"cpu"}
    with pytest.raises(BuildError, match="no kernels yet"):
        select(KERNELS, {"ATLAS_TARGET_HW": "h200", "ATLAS_TARGET_QUANT": "f32"})

"""What build_targets.py and python -m atlas.targets show: as data, and as text."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from atlas.build import report
from atlas.build.manifest import Image, KernelEntry, KernelSet, KernelVariant, Manifest
from atlas.errors import AtlasError, BuildError
from atlas.targets import __main__ as contents
from atlas.targets import inplace, listing
from atlas.targets.hardware import walk
from atlas.targets.status import summary
from atlas.targets.target import every, select

REPOSITORY = Path(__file__).resolve().parents[2]

KERNELS = Path(__file__).resolve().parents[2] / "kernels"
CPU = ["cpu/*/f32", "cpu/*/bf16", "cpu/*/int8", "cpu/*/int4"]


def run(*arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, str(REPOSITORY / "build_targets.py"), *arguments],
        capture_output=True,
        text=True,
        env={"PATH": "/usr/bin:/bin", **{f"ATLAS_TARGET_{name.upper()}": value for name, value in variables.items()}},
    )


def test_the_list_has_the_status_of_every_target(tree: Path) -> None:
    document = listing.tree(tree, {"ATLAS_TARGET_HW": "card", "ATLAS_TARGET_MODEL": "small"})
    assert len(document["targets"]) == 54
    assert {"name": "card/small/bf16", "status": "ready"} in document["targets"]
    later = next(model for model in document["models"] if model["name"] == "later")
    small = next(model for model in document["models"] if model["name"] == "small")
    assert small["lacks"] == ""  # what a hardware has for no model is said once, with the hardware
    assert later["ready"] == [] and later["lacks"] == "no family in atlas/models records LaterForCausalLM"
    assert {h["name"]: h["abstract"] for h in document["hardware"]} == {
        "base": True,
        "card": False,
        "cpu": False,
        "other": False,
    }
    assert document["quants"][1] == {"name": "bf16", "hardware": ["card", "cpu", "other"]}
    assert document["selected"] == [*CPU, "card/small/bf16"]
    text = listing.tree_text(document)
    assert "card, other: bf16; cpu: f32, bf16, int4, int8\n" in text
    assert "no kernels yet for later: no family" in text and "no kernels yet for small" not in text
    assert "fp8    no kernels yet" in text and text.endswith(f"selected: {', '.join(CPU)}, card/small/bf16")


def test_hardware_that_lacks_the_same_is_said_once(tree: Path) -> None:
    """And not that nobody has what one lacks."""
    small = {target: state for target, state in every(tree).items() if target.model == "small"}
    alike = "card, other have no f32, fp8, nvfp4, int4, int8 kernels"
    assert summary(small) == f"{alike}, cpu has no fp8, nvfp4 kernels"


def test_the_list_shows_even_when_the_selection_fails(tree: Path) -> None:
    document = listing.tree(tree, {"ATLAS_TARGET_HW": "cart"})
    assert document["selected"] == [] and "unknown name 'cart'" in document["notes"][0]
    assert "selected: nothing" in listing.tree_text(document)


def test_the_plan_names_file_and_level_of_every_kernel(tree: Path) -> None:
    (tree / "card" / "small").mkdir()
    (tree / "card" / "small" / "linear.cu").write_text("")
    targets = select(tree, {"ATLAS_TARGET_HW": "card", "ATLAS_TARGET_MODEL": "small"}).targets
    plans = {entry["target"]: entry for entry in listing.plan(tree, targets)}
    card = plans["card/small/bf16"]
    assert card["arch"] == "sm_90a" and card["shape"] == "7d05c8c52ef9f3fd" and len(card["kernels"]) == 23
    served = {(k["op"], k["file"], k["why"]) for k in card["kernels"]}
    assert ("linear", "card/small/linear.cu", "this model") in served
    assert ("gated_linear", "base/gated_linear.cu", "inherited from base") in served
    cpu = plans["cpu/*/bf16"]
    assert cpu["shape"] == "*" and {k["file"] for k in cpu["kernels"]} >= {"cpu/linear.cpp", "cpu/sample.cpp"}
    assert "  linear.x_bf16.weight_bf16.out_f32" in listing.plan_text(plans.values())


def test_a_plan_without_a_kernel_fails_naming_op_target_and_places(tree: Path) -> None:
    targets = select(tree, {"ATLAS_TARGET_HW": "card", "ATLAS_TARGET_MODEL": "small"}).targets
    (tree / "base" / "logprobs.cu").unlink()
    with pytest.raises(BuildError) as caught:
        listing.plan(tree, targets)
    levels = ("card/small/bf16", "card/small", "card", "base/small/bf16", "base/small", "base")
    places = ", ".join(str(tree / level) for level in levels)
    assert str(caught.value) == f"op logprobs: no kernel for target card/small/bf16; accepted: logprobs.cu in {places}"


def test_the_matrix_has_one_wheel_per_ready_target_and_one_for_cpu(tree: Path) -> None:
    assert listing.matrix(tree, {}) == {
        "include": [
            {"hw": "cpu", "model": "*", "quant": "*", "tag": "1_cpu"},
            *(
                {"hw": hw, "model": model, "quant": "bf16", "tag": f"1_{hw}_{model}_bf16"}
                for hw in ("card", "other")
                for model in ("large", "small")
            ),
        ]
    }
    assert [
        e["hw"] for e in listing.matrix(tree, {"ATLAS_TARGET_HW": "other", "ATLAS_TARGET_MODEL": "small"})["include"]
    ] == [
        "cpu",
        "other",
    ]
    assert listing.tag("h200", "llama-3.2-1b", "fp8") == "1_h200_llama_3_2_1b_fp8"


def test_two_targets_with_one_tag_are_refused(tree: Path) -> None:
    for name in ("a-b", "a.b"):
        (tree / "models" / f"{name}.json").write_text((tree / "models" / "small.json").read_text())
    with pytest.raises(BuildError, match="build tag: 1_card_a_b_bf16 names more than one target"):
        listing.matrix(tree, {})


def test_the_command_prints_json_alone_on_stdout() -> None:
    selected = {"hw": "gb10", "model": "smollm2-135m"}
    plan = run("--plan", "--json", **selected)
    planned = {entry["target"] for entry in json.loads(plan.stdout) if entry["target"].startswith("gb10/")}
    assert planned == {f"gb10/smollm2-135m/{quant}" for quant in ("bf16", "fp8", "nvfp4", "int4")}, plan.stderr
    assert "skipped 2 of 6 targets" in plan.stderr
    names = [target["name"] for target in json.loads(run("--list", "--json", **selected).stdout)["targets"]]
    assert "h200/qwen3.6-35b-a3b/fp8" in names and len(names) == len(set(names))
    tags = [entry["tag"] for entry in json.loads(run("--matrix").stdout)["include"]]
    assert {"1_cpu", "1_h200_llama_3_8b_bf16", "1_a100_smollm2_135m_bf16"} <= set(tags)


def test_the_command_says_what_is_wrong() -> None:
    failed = run("--plan", hw="h200", model="qwen3.6-35b-a3b", quant="bf16")
    assert failed.returncode == 1 and failed.stderr.startswith(
        "atlas: ATLAS_TARGET_HW=h200 ATLAS_TARGET_MODEL=qwen3.6-35b-a3b"
    )
    assert failed.stdout == "" and "Traceback" not in failed.stderr
    none = run()
    assert none.returncode == 2 and "--list" in none.stderr
    missing = run("--report", "/nowhere")
    assert missing.returncode == 1 and "/nowhere/manifest.json: cannot be read (No such file" in missing.stderr


# ---- reports --------------------------------------------------------------------------------------


def built(folder: Path) -> Manifest:
    variant = KernelVariant(
        source="cuda/linear.cu",
        image=0,
        symbol="atlas_linear_n8",
        grid=((-1, 1, 1),) * 3,
        block=128,
        shared=1024,
        registers=62,
        spills=4,
        stack=8,
        static_shared=256,
        source_hash="a" * 64,
        seconds=0.25,
    )
    kernel = KernelEntry("linear_n8", "linear", "0" * 16, {}, variants=(variant,))
    blob = b"image"
    sha256 = "6105d6cc76af400325e94d588ce511be5bfdbb73b437dc51eca43917d7a43e3d"
    kernel_set = KernelSet("card", "cuda", "small", "bf16", "7d05c8c52ef9f3fd", "sm_90a", (9, 0), (kernel,))
    manifest = Manifest((kernel_set,), (Image(0, len(blob), sha256),), "nvrtc 1")
    folder.mkdir(parents=True)
    (folder / "manifest.json").write_text(manifest.to_json())
    (folder / "images.bin").write_bytes(blob)
    return manifest


def test_a_report_has_every_figure_and_keeps_old_times(tmp_path: Path) -> None:
    folder = tmp_path / "build" / "x" / "generated"
    manifest = built(folder)
    report.write_seconds(folder, report.seconds_of(manifest))
    report.write_seconds(folder, {})  # a second build, all from the cache
    found = report.read(report.latest(tmp_path))
    assert found["image_bytes"] == 5 and found["seconds"] == 0.25 and found["compiler"] == "nvrtc 1"
    (kernel,) = found["sets"][0]["kernels"]
    wanted = {"registers": 62, "spills": 4, "stack": 8, "shared": 1280, "bytes": 5, "seconds": 0.25}
    assert {name: kernel[name] for name in wanted} == wanted
    line = next(line for line in report.text(found).splitlines() if "linear_n8" in line)
    assert line.split() == ["linear_n8", "62", "4", "8", "1280", "5", "0.25", "declared"]


def test_a_damaged_time_file_costs_only_the_times(tmp_path: Path) -> None:
    built(tmp_path / "out")
    (tmp_path / "out" / report.TIMES).write_text('{"a": ')
    assert report.read(tmp_path / "out")["seconds"] == 0


def test_no_build_to_report_says_how_to_make_one(tmp_path: Path) -> None:
    with pytest.raises(
        BuildError, match="build: holds no manifest of an earlier build; name its folder, or run python"
    ):
        report.latest(tmp_path)


# ---- the editable install -------------------------------------------------------------------------


def test_an_editable_install_is_rebuilt_with_the_targets_it_has() -> None:
    recorded = {"ATLAS_TARGET_HW": "cpu", "ATLAS_TARGET_QUANT": "bf16"}
    command, environment = inplace.command(REPOSITORY, {"HOME": "/h"}, REPOSITORY, recorded)
    assert command[-2:] == ["-e", str(REPOSITORY)] and "--no-deps" in command
    assert environment == {"HOME": "/h", **recorded}
    _, environment = inplace.command(REPOSITORY, {"ATLAS_TARGET_HW": "cpu"}, REPOSITORY, recorded)
    assert environment == {"ATLAS_TARGET_HW": "cpu"}


@pytest.mark.parametrize(
    ("editable", "found"), [(None, "has no editable install"), (Path("/else"), "has an editable install of /else")]
)
def test_what_is_no_editable_install_is_not_rebuilt(editable: Path | None, found: str) -> None:
    with pytest.raises(BuildError) as caught:
        inplace.command(REPOSITORY, {}, editable, {})
    assert found in str(caught.value) and "run `pip install -e .` first" in str(caught.value)


def test_an_impossible_selection_is_refused_before_anything_is_installed() -> None:
    with pytest.raises(BuildError, match="unknown name 'h300'"):
        inplace.command(REPOSITORY, {"ATLAS_TARGET_HW": "h300"}, REPOSITORY, {})


# ---- python -m atlas.targets ----------------------------------------------------------------------

RECORD = {
    "version": "0.1.0",
    "core_abi": 1,
    "compiler": "nvrtc 1",
    "selection": {"ATLAS_TARGET_HW": "gb10", "ATLAS_TARGET_MODEL": "", "ATLAS_TARGET_QUANT": ""},
    "targets": [
        {"hardware": "cpu", "kind": "cpu", "model": "*", "quant": "bf16", "arch": "", "shape_hash": "*"},
        {
            "hardware": "gb10",
            "kind": "cuda",
            "model": "smollm2-135m",
            "quant": "bf16",
            "arch": "sm_121a",
            "shape_hash": "7d05c8c52ef9f3fd",
        },
    ],
}


def test_the_contents_of_an_install_are_shown(tmp_path: Path) -> None:
    file = tmp_path / "_targets.json"
    file.write_text(json.dumps(RECORD))
    document = contents.contents(file, {})
    assert document["names"] == ["cpu/*/bf16", "gb10/smollm2-135m/bf16"] and document["difference"] == ""
    text = contents.text(document, {"gb10/smollm2-135m/bf16": 14})
    assert "built with ATLAS_TARGET_HW=gb10" in text and "note:" not in text
    line = next(line for line in text.splitlines() if "gb10/" in line)
    assert line.split() == ["gb10/smollm2-135m/bf16", "sm_121a", "shape", "7d05c8c52ef9f3fd", "14", "kernels"]
    names = ", ".join(sorted(name for name, hardware in walk(KERNELS).items() if not hardware.abstract))
    assert f"its kernel tree has kernels for hardware {names}; models " in text
    assert "the extension does not load: why" in contents.text(document, "why")
    assert "note: changed" in contents.text({**document, "difference": "changed"}, {})


def test_an_install_without_a_record_or_with_a_damaged_one_says_so(tmp_path: Path) -> None:
    with pytest.raises(AtlasError, match="this install: has no record .* run `pip install .`"):
        contents.contents(None, {})
    (tmp_path / "_targets.json").write_text("{}")
    with pytest.raises(AtlasError, match=r"_targets.json: cannot be read \(KeyError: 'targets'\); reinstall Atlas"):
        contents.contents(tmp_path / "_targets.json", {})

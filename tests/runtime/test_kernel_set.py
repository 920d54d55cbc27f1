"""The choice of backend and kernel set, and its reasons."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest

from atlas.build import pack
from atlas.build.manifest import KernelSet, Manifest
from atlas.errors import AtlasError, BuildError, ConfigError, DeviceError
from atlas.runtime.kernel_set import Candidate, candidates, choose, device_images
from atlas.runtime.kernel_sources import Source
from atlas.targets.shape import shape
from tests import fake_packs

FACTS = json.loads((Path(__file__).resolve().parents[2] / "kernels" / "models" / "smollm2-135m.json").read_text())
SHAPE = shape(FACTS)
H200 = {
    "index": 0,
    "name": "NVIDIA H200",
    "compute_capability": (9, 0),
    "total_memory": 1 << 37,
    "multiprocessors": 132,
}
L40S = {**H200, "index": 1, "name": "NVIDIA L40S", "compute_capability": (8, 9)}


def cuda_set(shape_hash: str = SHAPE.hash(), quant: str = "bf16") -> KernelSet:
    return KernelSet("h200", "cuda", "smollm2-135m", quant, shape_hash, "sm_90a", (9, 0), ())


def build(*sets: KernelSet) -> list[Source]:
    cpu = tuple(KernelSet("cpu", "cpu", "*", quant, "*", "", (0, 0), ()) for quant in ("f32", "bf16"))
    return [Source("embedded", Manifest((*cpu, *sets), (), "test"))]


def test_a_device_with_a_matching_set_is_taken_and_the_reason_says_so() -> None:
    choice = choose("auto", None, SHAPE, build(cuda_set()), [L40S, H200])
    assert (choice.backend, choice.name, choice.device) == ("cuda", "h200/smollm2-135m/bf16", 0)
    assert choice.reason == f"NVIDIA H200 matches h200/smollm2-135m/bf16, shape {SHAPE.hash()}, embedded"


def test_a_fine_tune_matches_by_shape_and_another_shape_does_not() -> None:
    tuned = shape({**FACTS, "rope_theta": 1.0e6, "model_type": "other"})
    assert choose("auto", None, tuned, build(cuda_set()), [H200]).backend == "cuda"
    other = shape({**FACTS, "intermediate_size": 2048})
    choice = choose("auto", None, other, build(cuda_set()), [H200])
    assert choice.name == "cpu/*/bf16" and "no kernel set for NVIDIA H200 (compute capability 9.0)" in choice.reason
    assert other.hash() in choice.reason


def test_without_a_gpu_auto_is_cpu_and_says_why() -> None:
    choice = choose("auto", "f32", SHAPE, build(cuda_set()), [], "no NVIDIA driver")
    assert (choice.name, choice.reason) == ("cpu/*/f32", "no GPU: no NVIDIA driver")


@pytest.mark.parametrize(
    ("backend", "quant", "devices", "message"),
    [
        ("cuda", None, [], "no GPU: ; accepted: the CUDA kernel sets here: h200/smollm2-135m/bf16"),
        ("cuda", None, [], "run it where the NVIDIA driver shows a GPU, or use --backend cpu"),
        ("auto", "fp8", [], "no kernel set for quant fp8 on the CPU, and no GPU: ; accepted: cpu/*/f32, cpu/*/bf16"),
        ("cuda", None, [L40S], "no kernel set for NVIDIA L40S (compute capability 8.9)"),
        ("cuda", "f32", [H200], "quant f32; accepted: the CUDA kernel sets here: h200/smollm2-135m/bf16"),
        ("cpu", "fp8", [], "no kernel set for quant fp8; accepted: cpu/*/f32, cpu/*/bf16"),
    ],
)
def test_what_was_asked_for_is_never_replaced(
    backend: str, quant: str | None, devices: list[dict[str, Any]], message: str
) -> None:
    with pytest.raises(DeviceError) as caught:
        choose(backend, quant, SHAPE, build(cuda_set()), devices)
    assert message in str(caught.value)


def test_an_unknown_backend_lists_the_known_ones() -> None:
    with pytest.raises(ConfigError, match="unknown backend 'gpu'; accepted: auto, cpu, cuda, reference"):
        choose("gpu", None, SHAPE, build(), [])


def test_reference_needs_no_extension() -> None:
    assert choose("reference", "bf16", SHAPE, (), []).name == "reference/bf16"


# ---- packs ---------------------------------------------------------------------------------------------

GB10 = {**H200, "index": 2, "name": "NVIDIA GB10", "compute_capability": (12, 1)}
FIX = "run: python -m atlas.build M --hw h200 --quant bf16"


def source(label: str = "cache p", asked_for: bool = False, **changes: Any) -> Source:
    changes = {"shape_hash": SHAPE.hash(), **changes}
    opened = pack.from_bytes(fake_packs.packed(**changes), label)
    return Source(label, opened.manifest, opened.images, asked_for=asked_for)


def broken(label: str = "cache p", asked_for: bool = False) -> Source:
    return Source(label, None, error=BuildError("p", "cut off", "", FIX), asked_for=asked_for)


def test_the_first_source_that_fits_is_taken_and_the_rest_is_not_opened() -> None:
    def sources() -> Any:
        yield source("--kernel-pack a", asked_for=True)
        pytest.fail("opened without need")

    choice = choose("auto", "bf16", SHAPE, sources(), [H200])
    assert (choice.name, choice.source) == ("h200/test-model/bf16", "--kernel-pack a")
    assert choice.reason.endswith(f"matches h200/test-model/bf16, shape {SHAPE.hash()}, --kernel-pack a")


def test_an_embedded_set_comes_before_the_cache_and_the_cache_before_the_cpu() -> None:
    assert choose("auto", None, SHAPE, [*build(cuda_set()), source()], [H200]).source == "embedded"
    assert choose("auto", None, SHAPE, [*build(), source()], [H200]).source == "cache p"
    assert choose("auto", None, SHAPE, [*build(), source(quant="fp8")], [H200]).name == "cpu/*/bf16"


def test_what_the_checkpoint_stores_decides_where_nobody_else_does(caplog: pytest.LogCaptureFixture) -> None:
    """And where there are no kernels for it, bf16 runs and the reason says so."""
    bf16, fp8 = build(cuda_set()), {"cpu": "bf16", "cuda": "fp8"}
    choice = choose("auto", None, SHAPE, [*bf16, source(quant="fp8")], [H200], natural=fp8)
    assert (choice.quant, choice.source) == ("fp8", "cache p")
    assert choice.reason.endswith("cache p; quant fp8 because the checkpoint stores it (--quant takes another)")
    choice = choose("auto", None, SHAPE, bf16, [H200], fix=FIX, natural=fp8)
    told = "quant bf16, to which the checkpoint's fp8 is widened: no kernels for fp8 here"
    assert choice.quant == "bf16" and choice.reason.endswith(told) and f"{told}; {FIX}" in caplog.text
    assert choose("auto", "bf16", SHAPE, [*bf16, source(quant="fp8")], [H200], natural=fp8).quant == "bf16"
    with pytest.raises(DeviceError, match="quant fp8; accepted"):  # asked for, never replaced
        choose("cuda", "fp8", SHAPE, bf16, [H200], natural=fp8)
    asked = source("--kernel-pack a", True)
    assert choose("auto", None, SHAPE, [asked, *build()], [H200], natural=fp8).source == "--kernel-pack a"
    with pytest.raises(DeviceError, match="is for quant int4, not fp8 or bf16, which a GPU takes unless"):
        choose("auto", None, SHAPE, [source("--kernel-pack a", True, quant="int4")], [H200], natural=fp8)


def test_a_refused_pack_is_part_of_the_reason_and_logged(caplog: pytest.LogCaptureFixture) -> None:
    choice = choose("auto", None, SHAPE, [*build(), broken(), source("wheel w")], [H200], fix=FIX)
    assert choice.source == "wheel w" and choice.reason.endswith("wheel w; refused: cache p: p: cut off")
    choice = choose("auto", None, SHAPE, [*build(), broken()], [H200], fix=FIX)
    assert choice.backend == "cpu" and choice.reason.endswith(f"refused: cache p: p: cut off; {FIX}")
    assert "not used: cache p: p: cut off" in caplog.text


def test_a_pack_that_was_asked_for_is_never_replaced() -> None:
    with pytest.raises(BuildError, match="^p: cut off; run: python"):
        choose("auto", None, SHAPE, [broken("--kernel-pack p", True), *build(cuda_set())], [H200])
    asked = [source("--kernel-pack a", True, quant="fp8"), source("--kernel-pack b", True, shape_hash="f" * 16)]
    with pytest.raises(DeviceError) as caught:
        choose("auto", None, SHAPE, [*asked, *build(cuda_set())], [H200], fix=FIX)
    assert str(caught.value) == (
        "kernel_pack: --kernel-pack a h200/test-model/bf16: is for quant fp8, not bf16, "
        "which a GPU takes unless --quant fp8 is given; "
        f"--kernel-pack b h200/test-model/bf16: is compiled for shape ffffffffffffffff, not {SHAPE.hash()}; "
        f"accepted: NVIDIA H200 (compute capability 9.0), shape {SHAPE.hash()}, quant bf16; {FIX}"
    ).replace("a h200/test-model/bf16", "a h200/test-model/fp8")
    with pytest.raises(DeviceError, match="no GPU: no driver; accepted: a GPU that the pack is for, shape"):
        choose("auto", None, SHAPE, [source("--kernel-pack a", True), *build()], [], "no driver")


def test_one_of_several_packs_that_were_asked_for_is_enough() -> None:
    asked = [source("--kernel-pack a", True, quant="fp8"), source("--kernel-pack b", True)]
    assert choose("auto", None, SHAPE, [*asked, *build()], [H200]).source == "--kernel-pack b"


@pytest.mark.parametrize(
    ("changes", "device", "message"),
    [
        ({}, GB10, "sm_90a code runs on compute capability 9.0 only (suffix a), and this device is 12.1"),
        ({"arch": "sm_120a", "capability": (12, 0)}, GB10, "sm_120a code runs on compute capability 12.0 only"),
        ({"arch": "nonsense"}, H200, "arch: 'nonsense' is not an architecture name; accepted: sm_XY or compute_XY"),
        ({"contract": "0" * 16}, H200, "op gated_activation has contract 0000000000000000, accepted: "),
        (
            {"op": "conv2d"},
            H200,
            "kernel gated_activation__hidden576 is of an op 'conv2d' that this version does not have",
        ),
    ],
)
def test_another_architecture_or_contract_is_refused(
    changes: dict[str, Any], device: dict[str, Any], message: str
) -> None:
    if "op" in changes:
        made = source()
        assert made.manifest is not None
        kernels = tuple(dataclasses.replace(k, op="conv2d") for k in made.manifest.sets[0].kernels)
        sets = (dataclasses.replace(made.manifest.sets[0], kernels=kernels),)
        made = dataclasses.replace(made, manifest=dataclasses.replace(made.manifest, sets=sets))
    else:
        made = source(**changes)
    with pytest.raises(DeviceError) as caught:
        choose("cuda", None, SHAPE, [*build(), made], [device], fix=FIX)
    assert f"refused: cache p h200/test-model/bf16: {message}" in str(caught.value) and FIX in str(caught.value)
    with pytest.raises(DeviceError) as caught:
        choose("auto", None, SHAPE, [dataclasses.replace(made, asked_for=True)], [device], fix=FIX)
    assert message in str(caught.value) and str(caught.value).endswith(FIX)


def test_an_extension_that_does_not_load_is_an_error_and_not_a_reason() -> None:
    with pytest.raises(AtlasError, match="^p: cut off"):
        choose("auto", None, SHAPE, [broken("embedded")], [])


def test_the_set_for_the_very_device_comes_before_one_that_runs_on_it() -> None:
    a100 = KernelSet("a100", "cuda", "m", "bf16", SHAPE.hash(), "sm_80", (8, 0), ())
    l40s = KernelSet("l40s", "cuda", "m", "bf16", SHAPE.hash(), "sm_89", (8, 9), ())
    assert choose("auto", None, SHAPE, build(a100, l40s), [L40S]).name == "l40s/m/bf16"
    assert choose("auto", None, SHAPE, build(a100), [L40S]).name == "a100/m/bf16"


def test_ptx_serves_a_device_that_the_machine_code_does_not_run_on() -> None:
    made = source(ptx=True, arch="sm_80", capability=(8, 0))
    choice = choose("auto", None, SHAPE, [made], [GB10])
    assert choice.ptx and "its PTX, which the driver compiles (sm_80 code runs on compute cap" in choice.reason
    kernels, images = device_images(choice)
    assert {kernel.variants[0].image for kernel in kernels.values()} == {0}
    assert [bytes(image) for image in images] == [fake_packs.PTX + b"\0"]
    choice = choose("auto", None, SHAPE, [made], [{**L40S, "compute_capability": (8, 6)}])
    assert not choice.ptx and [bytes(i)[:4] for i in device_images(choice)[1]] == [b"\x7fELF"] * 2
    assert [kernel.variants[0].image for kernel in device_images(choice)[0].values()] == [0, 1]


def test_ptx_with_a_suffix_is_as_narrow_as_its_machine_code() -> None:
    with pytest.raises(DeviceError, match="sm_90a code runs on compute capability 9.0 only"):
        choose("cuda", None, SHAPE, [source(ptx=True)], [GB10])


def test_candidates_say_why_each_set_is_or_is_not_usable() -> None:
    sources = [*build(cuda_set("f" * 16)), broken("wheel w"), source(), source("cache q", quant="fp8")]
    verdicts = {(c.source, c.set_name): c.verdict for c in candidates("bf16", SHAPE, sources, [H200])}
    assert verdicts == {
        ("embedded", "cpu/*/f32"): "is for quant f32, not bf16",
        ("embedded", "cpu/*/bf16"): "usable",
        ("embedded", "h200/smollm2-135m/bf16"): f"is compiled for shape ffffffffffffffff, not {SHAPE.hash()}",
        ("wheel w", ""): f"p: cut off; {FIX}",
        ("cache p", "h200/test-model/bf16"): "usable",
        ("cache q", "h200/test-model/fp8"): "is for quant fp8, not bf16",
    }


def test_candidates_without_a_model_are_about_the_device_alone() -> None:
    sources = [source(quant="fp8"), source("cache q", arch="sm_121a", capability=(12, 1))]
    assert [str(c) for c in candidates(None, None, sources, [L40S, H200])] == [
        "cache p h200/test-model/fp8: usable",
        "cache q h200/test-model/bf16: sm_121a code runs on compute capability 12.1 only (suffix a), "
        "and this device is 8.9",
    ]
    assert candidates(None, None, sources[:1], [], "no driver") == [
        Candidate("cache p", "h200/test-model/fp8", "no GPU: no driver")
    ]

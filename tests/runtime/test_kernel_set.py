"""The choice of backend and kernel set, and its reasons."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from atlas.build.manifest import KernelSet, Manifest
from atlas.errors import ConfigError, DeviceError
from atlas.runtime.kernel_set import choose
from atlas.runtime.kernel_sources import Source
from atlas.targets.shape import shape

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
        ("cuda", None, [], "no GPU: "),
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

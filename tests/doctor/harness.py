"""What tests of the doctor share."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from atlas.build.manifest import KernelSet
from atlas.doctor.report import Context, Result

REPOSITORY = Path(__file__).resolve().parents[2]
H200 = {
    "index": 0,
    "name": "NVIDIA H200",
    "compute_capability": (9, 0),
    "multiprocessors": 132,
    "total_memory": 1 << 37,
}


def context(**known: Any) -> Context:
    """A context without ATLAS_ variables; `known` sets what would be looked up."""
    names = ("model", "quant", "backend", "kernel_packs", "environment", "cgroup", "meminfo")
    given = {name: known.pop(name) for name in names if name in known}
    result = Context(**{"environment": {}, **given})
    vars(result).update(known)
    return result


def cuda_set(arch: str = "sm_90a", capability: tuple[int, int] = (9, 0)) -> KernelSet:
    return KernelSet("h200", "cuda", "smollm2-135m", "bf16", "0" * 16, arch, capability, ())


def problem(results: list[Result]) -> Result:
    """The one problem among results."""
    found = [result for result in results if result.status == "problem"]
    assert len(found) == 1, results
    return found[0]

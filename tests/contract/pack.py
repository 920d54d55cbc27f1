"""Compiles the kernels that the contract tests need for one CUDA hardware, for a machine with a GPU
but no compiler: `python -m tests.contract.pack --hw gb10 --arch sm_90a --out FOLDER`.

`--arch` builds another hardware's kernels for the device at hand: gb10's run on an H200 that way.
"""

from __future__ import annotations

import argparse
import importlib
import os
from pathlib import Path

from atlas.build import compile as compiler
from atlas.build.manifest import KernelSet, Manifest
from atlas.ops import OPS
from atlas.targets.hardware import walk
from atlas.targets.target import ANY_MODEL, Target
from tests.contract.harness import KERNELS, has_cuda_kernel


def build(hw: str, arch: str | None, out: Path, jobs: int) -> KernelSet:
    """Compile every distinct kernel of every contract case."""
    hardware = walk(KERNELS)[hw]
    modules = [importlib.import_module(f"tests.contract.test_{op}") for op in OPS]
    cases = [case for module in modules for case in module.CASES if has_cuda_kernel(case)]
    keys = list(dict.fromkeys(case.key() for case in cases))
    target = Target(hardware, ANY_MODEL, "contract", {})
    blob = compiler.ImageBlob()
    kernels = compiler.compile_keys(KERNELS, target, keys, arch or hardware.arch, jobs, blob)
    kernel_set = KernelSet(
        hw, "cuda", "contract", "tests", "*", arch or hardware.arch, hardware.compute_capability, kernels
    )
    compiler.write(out, Manifest((kernel_set,), tuple(blob.images), "wheels"), bytes(blob.data))
    return kernel_set


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--hw", required=True)
    parser.add_argument("--arch", help="ptxas target instead of the hardware's own")
    parser.add_argument("--out", type=Path, required=True)
    arguments = parser.parse_args()
    result = build(arguments.hw, arguments.arch, arguments.out, os.cpu_count() or 1)
    print(f"{len(result.kernels)} kernels of {result.hardware} for {result.arch} in {arguments.out}")

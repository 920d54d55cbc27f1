"""Compiles the kernels that the contract tests need for one CUDA hardware, for a machine with a GPU
but no compiler: `python -m tests.contract.pack --hw gb10 --arch sm_90a --out FOLDER`.

`--arch` builds another hardware's kernels for the device at hand: gb10's run on an H200 that way.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

from atlas.build import compile as compiler
from atlas.build.kernel_file import PHASES
from atlas.build.manifest import KernelSet, Manifest
from atlas.runtime.program import KernelKey
from atlas.targets.hardware import walk
from atlas.targets.target import ANY_MODEL, Target
from tests.contract.harness import KERNELS


def wanted() -> list[KernelKey]:
    """Every distinct kernel that the tests ask for, found by running them on `reference`.

    Some fail there, NumPy's products being another sum in another batch; what they asked for is known all the same.
    Raises SystemExit with pytest's own words where they did not run.
    """
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "keys"
        command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(Path(__file__).parent)]
        command += ["--contract-backend", "reference", "--contract-keys", str(file)]
        done = subprocess.run(command, capture_output=True, text=True, cwd=KERNELS.parent, check=False)
        if done.returncode not in (0, 1):
            raise SystemExit(done.stdout[-4000:] + done.stderr[-1000:])
        documents = [json.loads(line) for line in file.read_text().splitlines()]
    keys = [
        KernelKey(op, *(tuple(map(tuple, pairs)) for pairs in (dtypes, constants)))
        for op, dtypes, constants in documents
    ]
    return sorted(keys, key=KernelKey.name)


def build(hw: str, arch: str | None, out: Path, jobs: int) -> KernelSet:
    """Compile every distinct kernel of every contract case."""
    hardware = walk(KERNELS)[hw]
    keys = wanted()
    target = Target(hardware, ANY_MODEL, "contract", {})
    blob = compiler.ImageBlob()
    kernels = compiler.compile_keys(KERNELS, target, dict.fromkeys(keys, PHASES), arch or hardware.arch, jobs, blob)
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

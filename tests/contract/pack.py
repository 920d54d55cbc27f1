"""Compiles the kernels that the contract tests need for one CUDA hardware, for a machine with a GPU
but no compiler: `python -m tests.contract.pack --hw gb10 --arch sm_90a --out FOLDER`.

`--arch` builds another hardware's kernels for the device at hand: gb10's run on an H200 that way.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from atlas.build import compile as compiler
from atlas.build import kernel_job
from atlas.build.kernel_file import PHASES
from atlas.build.manifest import KernelEntry, KernelSet, Manifest
from atlas.errors import BuildError
from atlas.runtime.program import KernelKey
from atlas.targets.hardware import walk
from atlas.targets.resolution import MissingKernel, resolve
from atlas.targets.target import ANY_MODEL, Target
from tests.contract.harness import KERNELS


def wanted() -> list[KernelKey]:
    """Every distinct kernel that the tests ask for, found by running them on a backend that computes nothing.

    Most fail there, which is no matter. Raises SystemExit with pytest's own words where they did not run.
    """
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "keys"
        command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(Path(__file__).parent)]
        command += ["--contract-backend", "collect", "--contract-keys", str(file), "--tb=no", "-W", "ignore"]
        done = subprocess.run(command, capture_output=True, text=True, cwd=KERNELS.parent, check=False)
        if done.returncode not in (0, 1):
            raise SystemExit(done.stdout[-4000:] + done.stderr[-1000:])
        documents = [json.loads(line) for line in file.read_text().splitlines()]
    keys = [
        KernelKey(op, *(tuple(map(tuple, pairs)) for pairs in (dtypes, constants)))
        for op, dtypes, constants in documents
    ]
    return sorted(keys, key=KernelKey.name)


def served(target: Target, keys: Iterable[KernelKey]) -> dict[KernelKey, tuple[str, ...]]:
    """The kernels that the hardware has, with the phases that it has them for."""
    found: dict[KernelKey, tuple[str, ...]] = {}
    for key in keys:
        for phase in PHASES:
            try:
                resolve(target, key.op, phase, dict(key.dtypes), dict(key.constants))
            except MissingKernel:
                continue
            found[key] = (*found.get(key, ()), phase)
    return found


def compiled(
    target: Target, keys: Mapping[KernelKey, Sequence[str]], arch: str, jobs: int, blob: compiler.ImageBlob
) -> tuple[list[KernelEntry], list[str]]:
    """Entries of the kernels that compile and pass the build's checks, and what is wrong with the others."""
    entries, wrong = [], []
    with kernel_job.Compiler(jobs) as running:
        planned = []
        for key, phases in keys.items():
            try:
                planned.append(kernel_job.plan(KERNELS, target, key, arch, phases))
            except BuildError as error:
                wrong.append(str(error))
        for job in itertools.chain.from_iterable(planned):
            running.start(job)
        for variants in planned:
            try:
                entries.append(kernel_job.entry([(job, running.result(job)) for job in variants], blob.add, "cubin"))
            except BuildError as error:
                wrong.append(str(error))
    return entries, wrong


def build(hw: str, arch: str | None, out: Path, jobs: int, ops: Sequence[str] = ()) -> tuple[KernelSet, list[str]]:
    """Compile every distinct kernel of every contract case, or of those of `ops`. Returns what did not compile, too."""
    hardware = walk(KERNELS)[hw]
    target = Target(hardware, ANY_MODEL, "contract", {})
    keys = served(target, (key for key in wanted() if not ops or key.op in ops))
    blob = compiler.ImageBlob()
    kernels, wrong = compiled(target, keys, arch or hardware.arch, jobs, blob)
    kernel_set = KernelSet(
        hw, "cuda", "contract", "tests", "*", arch or hardware.arch, hardware.compute_capability, tuple(kernels)
    )
    compiler.write(out, Manifest((kernel_set,), tuple(blob.images), "wheels"), bytes(blob.data))
    return kernel_set, wrong


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--hw", required=True, help="hardware directory of the kernel tree, e.g. h200")
    parser.add_argument("--arch", help="ptxas target instead of the hardware's own")
    parser.add_argument("--out", type=Path, required=True, help="folder for pytest's --pack")
    parser.add_argument("--ops", default="", help="comma list of ops; default: all")
    arguments = parser.parse_args()
    ops = [op for op in arguments.ops.split(",") if op]
    result, errors = build(arguments.hw, arguments.arch, arguments.out, os.cpu_count() or 1, ops)
    print(f"{len(result.kernels)} kernels of {result.hardware} for {result.arch} in {arguments.out}")
    for error in errors:
        print(f"left out: {error}")
    sys.exit(bool(errors))

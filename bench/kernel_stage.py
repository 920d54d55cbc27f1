"""The kernel stage of all dense h200 and gb10 targets, cold: how long it takes, and ptxas' figures by kernel file.

    python -m bench.kernel_stage --jobs 2 --budget 360 --out bench/results/ptxas_dense.json

Nothing is taken from the cache of compiled kernels. Processor time is what counts on a machine that does other things:
wall time is half of it on two cores that do not.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from atlas.build import compile as compiler
from atlas.build.manifest import KernelVariant, Manifest
from atlas.targets import target as targets
from atlas.targets.tree import kernels_root

ROOT = Path(__file__).resolve().parents[1]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hw", default="h200,gb10", help="hardware, as ATLAS_TARGET_HW takes it")
    parser.add_argument("--model", default="*", help="models, as ATLAS_TARGET_MODEL takes them")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="kernels compiled at a time")
    parser.add_argument("--budget", type=float, default=0.0, help="seconds of wall time that it may take at most")
    parser.add_argument("--out", type=Path, help="write the figures here")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as cache:
        os.environ["XDG_CACHE_HOME"] = cache
        began, before = time.perf_counter(), _processor_seconds()
        selection = targets.select(kernels_root(), {"ATLAS_TARGET_HW": given.hw, "ATLAS_TARGET_MODEL": given.model})
        gpu = [target for target in selection.targets if target.hardware.kind == "cuda"]
        manifest, _ = compiler.build(kernels_root(), gpu, given.jobs, lambda text: None, {})
        wall, processor = time.perf_counter() - began, _processor_seconds() - before
    document = {
        "what": f"ptxas' figures of all kernels of the dense {given.hw.replace(',', ' and ')} targets, by file",
        "commit": _git("rev-parse", "--short", "HEAD"),
        "date": datetime.date.today().isoformat(),
        "compiler": manifest.compiler,
        "targets": len(gpu),
        "jobs": given.jobs,
        "load": round(os.getloadavg()[1], 1),
        "wall_seconds": round(wall, 1),
        "processor_seconds_in_all": round(processor, 1),
        **figures(manifest),
    }
    if given.out:
        given.out.write_text(json.dumps(document, indent=1) + "\n")
    print({name: value for name, value in document.items() if name != "files"})
    if given.budget and wall > given.budget:
        print(f"{wall:.0f} s, budget {given.budget:.0f} s", file=sys.stderr)
        return 1
    return 0


def figures(manifest: Manifest) -> dict[str, Any]:
    """Kernels that differ, and their figures by file and architecture."""
    files: dict[str, dict[str, KernelVariant]] = {}
    for kernel_set in manifest.sets:
        for kernel in kernel_set.kernels:
            for variant in kernel.variants:
                files.setdefault(f"{variant.source} for {kernel_set.arch}", {})[variant.source_hash] = variant
    every = [variant for variants in files.values() for variant in variants.values()]
    return {
        "kernels": len(every),
        "processor_seconds": round(sum(variant.seconds for variant in every), 1),
        "image_bytes": sum(image.size for image in manifest.images),
        "files": {name: _of_file(manifest, files[name].values()) for name in sorted(files)},
    }


def _of_file(manifest: Manifest, variants: Iterable[KernelVariant]) -> dict[str, Any]:
    some = list(variants)
    registers = [variant.registers for variant in some]
    shared = [variant.shared + variant.static_shared for variant in some]
    return {
        "kernels": len(some),
        "registers": [min(registers), max(registers)],
        "spilled_bytes_at_most": max(variant.spills for variant in some),
        "kernels_that_spill": sum(variant.spills > 0 for variant in some),
        "shared_memory": [min(shared), max(shared)],
        "processor_seconds": round(sum(variant.seconds for variant in some), 1),
        "image_bytes": sum(manifest.images[variant.image].size for variant in some),
    }


def _processor_seconds() -> float:
    usages = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(usage.ru_utime + usage.ru_stime for usage in usages)


def _git(*arguments: str) -> str:
    return subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True, check=False).stdout.strip()


if __name__ == "__main__":
    raise SystemExit(main())

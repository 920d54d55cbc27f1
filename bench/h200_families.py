"""Every family and option on a GPU: tiny models in bf16 against transformers' float32 logits.

    python -m bench.h200_families --prepare FOLDER [--hw h200]     anywhere; needs the compiler wheels
    python -m bench.h200_families --run FOLDER --out FILE.json     on the device

The first writes the models of tests/family_models.py and compiles a kernel pack for each; the second loads each on
`cuda` and compares logits, and one decoding step in a batch with the same row alone, bit for bit. Models with experts
have no CUDA kernels yet and are left out by name. Exits 1 if anything is out of bounds.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np

from atlas.build.__main__ import main as compile_pack
from tests import family_models
from tests.models import run
from tests.models.test_smollm2 import REL_L2_BF16, relative_l2
from tests.oracle.make_families_oracle import ORACLE, ROWS, SEED
from tests.oracle.make_tiny_oracle import ids

PACK = "kernels.atlaspack"


def prepare(folder: Path, hardware: str) -> int:
    """Write models and packs. The exit code."""
    for name, (kind, _) in family_models.CASES.items():
        if "moe" in kind:
            print(f"{name}: left out, models with experts have no CUDA kernels yet")
            continue
        model = family_models.write(folder / name, name, SEED)
        if code := compile_pack([str(model), "--hw", hardware, "--quant", "bf16", "-o", str(model / PACK)]):
            return code
    return 0


def check(model: Path) -> dict[str, Any]:
    """One model: relative L2 of its logits, and whether a row's bits depend on its batch."""
    with np.load(ORACLE) as oracle:
        expected = oracle[f"{model.name}.logits"]
    runner = run.load(model, "cuda", "bf16", kernel_packs=(str(model / PACK),))
    tokens = ids(family_models.VOCAB)
    error = relative_l2(run.logits(runner, tokens, chunk=37)[list(ROWS)], expected)
    prompts = [tokens[:length] for length in (40, 7, 90, 33)]
    alone = run.greedy(runner, prompts, 12, together=1)
    return {
        "relative_l2": round(error, 5),
        "batch_equals_alone": run.greedy(runner, prompts, 12, together=4) == alone,
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--prepare", type=Path, metavar="FOLDER")
    what.add_argument("--run", type=Path, metavar="FOLDER")
    parser.add_argument("--hw", default="h200")
    parser.add_argument("--commit", default="")
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    if given.prepare:
        return prepare(given.prepare, given.hw)
    smi = ["nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader"]
    found: dict[str, Any] = {}
    for model in sorted(path.parent for path in given.run.glob(f"*/{PACK}")):
        try:
            found[model.name] = check(model)
        except Exception as error:  # one model's failure must not hide the others' results
            found[model.name] = {"error": f"{type(error).__name__}: {error}"}
        print(model.name, found[model.name], flush=True)
    passed = bool(found) and all(
        entry.get("relative_l2", 1.0) <= REL_L2_BF16 and entry["batch_equals_alone"] for entry in found.values()
    )
    document = {
        "what": "tiny models of every family, bf16 on a GPU, against transformers float32",
        "commit": given.commit,
        "gpu": subprocess.run(smi, capture_output=True, text=True).stdout.strip(),
        "bound": REL_L2_BF16,
        "passed": passed,
        "models": found,
    }
    if given.out:
        given.out.write_text(json.dumps(document, indent=1) + "\n")
    return 0 if passed else 1


if __name__ == "__main__":
    sys.exit(main())

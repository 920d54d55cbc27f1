"""Correctness on an H200, in one run: every op, then a whole model.

    python -m bench.h200_check --pack PACK_H200 --pack PACK_GB10 --commit $(git rev-parse HEAD) --out FILE.json

1. Contract tests of each pack (`python -m tests.contract.pack`): the h200 kernels, and those of the other
   cards built for sm_90a, against NumPy.
2. SmolLM2-135M-Instruct in bf16: logits and greedy tokens against transformers (tests/oracle) and against
   the `cpu` backend, and every buffer against `reference`.

Needs an installed Atlas with target h200/smollm2-135m/bf16, pytest, and the model (`--model FILE.gguf`,
or it is fetched). Exits 1 if anything is out of bounds; the JSON is written all the same.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import json
import platform
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from atlas.debug.compare import compare
from atlas.runtime import core
from atlas.weights.fetch import resolve_model
from tests.models import run
from tests.models.test_smollm2 import (
    LEAD_NOISE,
    ORACLE,
    REL_L2_BF16,
    compared,
    greedy_oracle,
    mixed_step,
    relative_l2,
)
from tests.oracle.prompts import LOGIT_PROMPTS

PROMPTS, TOKENS = 16, 64


def contract(pack: Path) -> dict[str, Any]:
    """Run the contract tests of one pack; counts, and the worst error per op."""
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.json"
        started = time.perf_counter()
        command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "tests/contract"]
        command += ["--contract-backend", "cuda", "--pack", str(pack), "--contract-report", str(report)]
        result = subprocess.run(command, capture_output=True, text=True)
        print(result.stdout[-6000:], result.stderr[-2000:], flush=True)
        return {
            "passed": result.returncode == 0,
            "summary": result.stdout.strip().splitlines()[-1] if result.stdout.strip() else "",
            "seconds": round(time.perf_counter() - started, 1),
            "ops": json.loads(report.read_text()) if report.exists() else {},
        }


def first_differences(
    tokens: list[list[int]], wanted: list[list[int]], lead: Callable[[int, int], float]
) -> list[dict[str, Any]]:
    """For prompts where they differ: prompt, first token that differs, and `lead(prompt, token)`, by how
    much the wanted side preferred its own token over the runner-up there."""
    found = []
    for i, (a, b) in enumerate(zip(tokens, wanted, strict=True)):
        different = np.flatnonzero(np.array(a) != np.array(b))
        if len(different):
            first = int(different[0])
            found.append({"prompt": i, "token": first, "lead": round(lead(i, first), 4)})
    return found


def model(path: Path) -> dict[str, Any]:
    """SmolLM2 bf16 on the GPU against transformers, `cpu` and `reference`."""
    with np.load(ORACLE) as arrays:
        oracle = dict(arrays)
    started = time.perf_counter()
    cuda = run.load(path, "cuda", "bf16", max_context=2048)
    result: dict[str, Any] = {
        "kernel_set": cuda.choice.name,
        "reason": cuda.choice.reason,
        "load_seconds": round(time.perf_counter() - started, 2),
        "ledger": {name: round(seconds, 3) for name, seconds in cuda.ledger},
        "logits_relative_l2": {
            name: relative_l2(*compared(run.logits(cuda, oracle[f"{name}.ids"].tolist()), oracle, name))
            for name in LOGIT_PROMPTS
        },
    }
    prompts, wanted = (part[:PROMPTS] for part in greedy_oracle(oracle))
    gaps = [oracle[f"greedy.{i}.gap"] for i in range(PROMPTS)]
    started = time.perf_counter()
    together = run.greedy(cuda, prompts, TOKENS, together=8)
    seconds = time.perf_counter() - started
    alone = run.greedy(cuda, prompts, TOKENS, together=1)
    cpu = run.load(path, "cpu", "bf16", max_context=2048)
    on_cpu = run.greedy(cpu, prompts, TOKENS, together=8)

    def cpu_lead(prompt: int, token: int) -> float:
        """From the CPU's own logits: both texts may have left the oracle's before they part."""
        best = np.sort(run.logits(cpu, prompts[prompt] + on_cpu[prompt][:token])[-1])
        return float(best[-1] - best[-2])

    result |= {
        "prompts": PROMPTS,
        "tokens_each": TOKENS,
        "lead_noise_accepted": LEAD_NOISE,
        "batch_equals_alone": together == alone,
        "differs_from_transformers_f32": first_differences(together, wanted, lambda i, n: float(gaps[i][n])),
        "differs_from_cpu_bf16": first_differences(together, on_cpu, cpu_lead),
        "greedy_seconds_batches_of_8_not_tuned": round(seconds, 2),
    }
    small = {"max_seqs": 4, "max_rows": 64, "max_logits": 4, "max_context": 128, "kv_memory_bytes": 64 << 20}
    runner = run.load(path, "cuda", "bf16", **small)
    reference = run.load(path, "reference", "bf16", programs="cuda", **small)
    worst: dict[str, float] = {}
    for step in range(2):
        mixed_step(runner, np.random.default_rng(), step)
        for difference in compare(runner, reference):
            worst[difference.op] = round(max(worst.get(difference.op, 0.0), difference.ratio), 4)
    result["worst_error_over_tolerance_in_the_program"] = worst
    result["passed"] = (
        result["batch_equals_alone"]
        and max(result["logits_relative_l2"].values()) <= REL_L2_BF16
        and all(
            d["lead"] < LEAD_NOISE for key in ("transformers_f32", "cpu_bf16") for d in result[f"differs_from_{key}"]
        )
        and max(worst.values()) <= 1.0
    )
    return result


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pack", type=Path, action="append", default=[], help="folder made by tests.contract.pack")
    parser.add_argument("--model", type=Path, help="the GGUF; default: fetched")
    parser.add_argument("--commit", required=True, help="what was measured")
    parser.add_argument("--out", type=Path, required=True, help="result file")
    arguments = parser.parse_args()
    smi = ["nvidia-smi", "--query-gpu=name,driver_version,memory.total", "--format=csv,noheader"]
    document: dict[str, Any] = {
        "what": "correctness of ops and of SmolLM2 bf16 on an H200; speed is not judged",
        "commit": arguments.commit,
        "date": time.strftime("%Y-%m-%d"),
        "gpu": subprocess.run(smi, capture_output=True, text=True).stdout.strip(),
        "devices": [
            {**d, "compute_capability": list(d["compute_capability"])} for d in core.extension().cuda_devices()
        ],
        "python": platform.python_version(),
        "compiler": core.embedded()[0].compiler,
    }
    with concurrent.futures.ThreadPoolExecutor() as pool:  # one process each; they wait for the host, not the GPU
        document["contract"] = list(pool.map(contract, arguments.pack))
    arguments.out.write_text(json.dumps(document, indent=1))
    document["smollm2_bf16"] = model(arguments.model or resolve_model("smollm2-135m", offline=False))
    arguments.out.write_text(json.dumps(document, indent=1))
    print(json.dumps(document, indent=1))
    passed = document["smollm2_bf16"]["passed"] and all(entry["passed"] for entry in document["contract"])
    return 0 if passed else 1


if __name__ == "__main__":
    sys.exit(main())

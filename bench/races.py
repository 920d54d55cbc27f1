"""Races in shared memory, op by op: contract cases under compute-sanitizer's racecheck (or another of its tools).

    python -m tests.contract.pack --hw h200 --out PACK           anywhere; needs the compiler wheels
    python -m bench.races --pack PACK --out FILE.json            on the device

Each op, phase and format of weights gets a process of its own with a few of its contract cases, drawn anew in each
run: a whole model under racecheck takes more memory than a machine has. Exits 1 if a case fails, a process does not
end, or something is reported that is not in ORDERED.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import json
import os
import random
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

ORDERED = {
    "gated_linear.prefill.f8": "WAR",
    "gated_linear.prefill.f8g128": "WAR",
    "paged_attention.prefill": "WAR",
    "paged_attention.decode": "RAW",
}
"""Where reports of this kind are none: all lanes of a warp read scales or a tile of work (WAR), or wrote a unit's
results (RAW), and then, after __syncwarp, one of them arrives at the barrier that the next copy, or whoever adds the
results up, waits for. racecheck sees the accesses of that lane only as ordered. Built so that every lane arrives for
itself, the same kernels are clean (docs/benchmarking.md)."""

FORMATS = ("f8", "f8g128", "nvfp4", "i4g32", "i4g32b", "i4g32z", "i4g32m", "bf16")
LARGE = re.compile(r"vocab\d{3,}|logits\d{3,}|k(4096|8192|14336)|rows(256|300)|test_wide|hidden4096")
"""Cases that take minutes under racecheck."""
CASE = re.compile(r"tests/contract/test_(\w+)\.py::test_(?:matches|formats)\w*\[cuda-(decode|prefill)-(.*)\]")
ACCESS = re.compile(r"(?:Race reported between \w+ access|and \w+ access|(?:Read|Write) Thread .*?) at .*")
PYTEST = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-o", "addopts=", "--tb=short"]


def groups(names: list[str], each: int) -> dict[str, list[str]]:
    """Label -> a few test ids of it."""
    found: dict[str, list[str]] = {}
    for name in names:
        match = CASE.match(name)
        if match is None or LARGE.search(name):
            continue
        op, phase, case = match.groups()
        types = [part for part in case.split("-") if part in FORMATS]
        label = f"{op}.{phase}"
        if op.endswith(("linear", "qkv_append")):  # of x, then of weights if these differ
            of_weights = [part for part in types if part not in ("bf16", "f8g128")]
            label += f".{(of_weights or types or ['f32'])[0]}"
        found.setdefault(label, []).append(name)
    return {label: random.sample(some, min(each, len(some))) for label, some in sorted(found.items())}


def run(tool: str, label: str, names: list[str], pack: Path, limit: float) -> dict[str, Any]:
    """One process. What pytest and the tool say of it."""
    command = ["compute-sanitizer", "--tool", tool, "--show-backtrace", "no", "--print-limit", "4"]
    command += ["--error-exitcode", "9", *(["--racecheck-report", "all"] if tool == "racecheck" else [])]
    with tempfile.NamedTemporaryFile("w", suffix=".ids") as file:
        file.write("\n".join(names))
        file.flush()
        command += [*PYTEST, "--contract-backend", "cuda", "--pack", str(pack), f"@{file.name}"]
        started = time.perf_counter()
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=limit, check=False)
            code, text = done.returncode, done.stdout + done.stderr
        except subprocess.TimeoutExpired as expired:
            code, text = 124, str(expired.stdout or "")
    hazards = re.search(r"(?:RACECHECK|ERROR) SUMMARY: (?:\d+ hazards displayed \()?(\d+) error", text)
    kinds = sorted(set(re.findall(r"Potential (\w+) hazard|========= (Invalid [\w ]+) of", text)))
    result: dict[str, Any] = {
        "cases": names,
        "exit": code,
        "seconds": round(time.perf_counter() - started, 1),
        "reports": int(hazards[1]) if hazards else None,
        "kinds": ["".join(kind) for kind in kinds],
        "said": sorted(set(ACCESS.findall(text)))[:12],
        "pytest": next((line for line in reversed(text.splitlines()) if re.search(r"passed|failed|skipped", line)), ""),
    }
    ordered = result["kinds"] == [ORDERED.get(label)]
    result["passed"] = code == 0 or (code == 9 and ordered and " failed" not in result["pytest"])
    return result


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pack", type=Path, required=True)
    parser.add_argument("--tool", default="racecheck")
    parser.add_argument("--only", default="", help="begin of a label, e.g. linear.decode")
    parser.add_argument("--each", type=int, default=3, help="cases of a label")
    parser.add_argument("--jobs", type=int, default=8, help="processes at a time")
    parser.add_argument("--limit", type=float, default=60, help="seconds of a process")
    parser.add_argument("--commit", default="")
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    os.environ |= {"ATLAS_SYNC": "1", "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
    command = [*PYTEST, "--collect-only", "--contract-backend", "cuda", "--pack", str(given.pack), "tests/contract"]
    listed = subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()
    planned = {label: names for label, names in groups(listed, given.each).items() if label.startswith(given.only)}
    document: dict[str, Any] = {"what": f"{given.tool} of contract cases", "commit": given.commit, "labels": {}}
    with concurrent.futures.ThreadPoolExecutor(given.jobs) as pool:
        waiting = {
            pool.submit(run, given.tool, label, names, given.pack, given.limit): label
            for label, names in planned.items()
        }
        for future in concurrent.futures.as_completed(waiting):
            label, result = waiting[future], future.result()
            document["labels"][label] = result
            said = f"exit {result['exit']}, {result['reports']} reports {result['kinds']}, {result['seconds']} s"
            print(f"{label}: {'ok' if result['passed'] else 'FAILED'}, {said}, {result['pytest']}", flush=True)
            if given.out:
                given.out.write_text(json.dumps(document, indent=1, sort_keys=True) + "\n")
    return 0 if planned and all(result["passed"] for result in document["labels"].values()) else 1


if __name__ == "__main__":
    sys.exit(main())

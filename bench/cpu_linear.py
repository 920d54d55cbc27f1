"""The CPU's matrix products, shape by shape: `python -m bench.cpu_linear --models smollm2-135m --out FILE`.

Each product of a model runs as it does in a step, on all allowed cores, with 1, 8 and 512 rows. Few rows take turns
over copies of the weights, so that they come from memory; with many rows that makes no difference. Every figure is
the best of the launches that were timed: all else that runs on a machine only makes them slower. A line gives GB/s
of stored weights and its share of the measured read bandwidth, and the multiply rate and its share of what the
core's probe measured for such products in the same run.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from atlas.bench import machine
from atlas.runtime import core, host, memory_plan
from atlas.runtime.backend import BoundProgram
from atlas.runtime.program import Recorder
from atlas.runtime.step import SYMBOLS, Limits, StepBlock, offsets
from atlas.targets.formats import FORMATS
from atlas.weights.layouts import LAYOUTS

SHAPES = {
    "smollm2-135m": ((960, 576), (576, 576), (3072, 576), (576, 1536), (49152, 576)),
    "llama-3.2-1b": ((3072, 2048), (2048, 2048), (16384, 2048), (2048, 8192)),
    "llama-3-8b": ((6144, 4096), (4096, 4096), (28672, 4096), (4096, 14336)),
}
"""[n, k] of fused QKV, output, fused gate and up, down, and of a head that is small enough to wait for."""

ROWS = (1, 8, 512)
COPIES_BYTES = 192 << 20
"""Weights that few rows take turns over: several times a last-level cache of 32 MB."""
FILL = 0x2B
"""Every byte of weights and rows: an ordinary number in every element type and format."""


def measure(format: str, n: int, k: int, rows: int, threads: int, repeats: int) -> tuple[float, int]:
    """(seconds of the fastest launch, bytes of the weights)."""
    blocks = format in FORMATS
    op, x_dtype = ("linear_a8", "f32") if blocks else ("linear", format)
    stored = LAYOUTS["panel16"].nbytes((n, k), format)
    copies = max(1, COPIES_BYTES // stored) if rows <= 8 else 1
    recorder = Recorder()
    recorder.begin("forward")
    recorder.buffer("x", x_dtype, ("n_rows", k), "state")
    recorder.buffer("out", "f32", ("n_rows", n), "state")
    for copy in range(copies):
        recorder.buffer(f"weight{copy}", format, (n, k), "state")
        operands = {"x": "x", "weight": f"weight{copy}", "out": "out"}
        recorder.launch(op, f"{op}{copy}", operands, {"rows": "n_rows"}, {"n": n, "k": k})
    recorder.begin("sample")
    programs, limits = recorder.finish(), Limits(rows, 1, 1, 1, 1, 1)
    sets, _ = core.embedded()
    kernels = {kernel.name: kernel for s in sets.sets if s.kind == "cpu" for kernel in s.kernels}
    plan = memory_plan.plan(programs, limits, {f"weight{copy}": stored for copy in range(copies)})
    bound = BoundProgram(programs.forward, programs.buffers, plan, limits, kernels)
    backend = core.cpu_backend(threads)
    backend.allocate(plan.total)
    backend.fill(0, FILL, plan.total)
    memory = backend.staging(offsets(limits)[1])
    block = StepBlock(memory, limits)
    block.set_symbols({name: rows if name == "n_rows" else 1 for name in SYMBOLS})
    handle = backend.load(bound)
    backend.begin_step(plan.offsets["step.header"], memory, block.used_bytes())
    return min(min(backend.run_timed(handle, 0, copies)) for _ in range(repeats)), stored


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", default=",".join(SHAPES))
    parser.add_argument("--formats", default="i4g32m,i8g32,bf16,f32")
    parser.add_argument("--threads", type=int, default=host.allowed_cores())
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    rates: dict[str, float] = core.extension().cpu_rates(arguments.threads)
    print(core.cpu_backend(arguments.threads).describe())
    print("measured: " + ", ".join(f"{name} {rate / 1e9:.1f} G/s" for name, rate in rates.items()))
    lines: list[dict[str, Any]] = []
    for model in arguments.models.split(","):
        for format in arguments.formats.split(","):
            kind = "int8" if format in FORMATS else format
            for n, k in SHAPES[model]:
                for rows in ROWS:
                    seconds, stored = measure(format, n, k, rows, arguments.threads, arguments.repeats)
                    read, done = stored / seconds, 2 * n * k * rows / seconds
                    peak = rates[kind] or rates["f32"]
                    lines.append(
                        {"model": model, "format": format, "n": n, "k": k, "rows": rows, "seconds": seconds}
                        | {"bytes_per_s": read, "read_share": read / rates["read"]}
                        | {"operations_per_s": done, "peak_share": done / peak}
                    )
                    print(
                        f"{model} {format:6} {n:6} x {k:5} rows {rows:3}: {seconds * 1e6:9.1f} us, "
                        f"{read / 1e9:6.1f} GB/s ({read / rates['read']:4.0%}), "
                        f"{done / 1e9:6.1f} G operations/s ({done / peak:4.0%})"
                    )
    if arguments.out:
        document = machine.describe() | {"threads": arguments.threads, "rates": rates, "lines": lines}
        arguments.out.write_text(json.dumps(document, indent=1) + "\n")


if __name__ == "__main__":
    main()

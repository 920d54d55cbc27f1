"""`python -m atlas.doctor.self_test LEVEL`: one small `linear` on an instruction-set level, against NumPy.

A process of its own, because a level that this machine does not really have ends it by SIGILL.
"""

from __future__ import annotations

import subprocess
import sys

import numpy as np

from atlas.debug.compare import error_ratio
from atlas.ops import OPS
from atlas.runtime import core, memory_plan
from atlas.runtime.backend import BoundProgram
from atlas.runtime.program import Recorder
from atlas.runtime.step import Limits, StepBlock, offsets
from atlas.weights.layouts import LAYOUTS

ROWS, K, N = 3, 80, 48


def linear_error(level: str) -> float:
    """Largest error over its tolerance of a linear run on `level`; above 1 is wrong."""
    manifest, _ = core.embedded()
    kernels = {k.name: k for s in manifest.sets if s.kind == "cpu" and s.quant == "f32" for k in s.kernels}
    recorder = Recorder()
    recorder.begin("forward")
    for name, extents in (("x", ("n_rows", K)), ("weight", (N, K)), ("out", ("n_rows", N))):
        recorder.buffer(name, "f32", extents, "state")
    operands = {name: name for name in ("x", "weight", "out")}
    recorder.launch("linear", "self_test", operands, {"rows": "n_rows"}, {"k": K, "n": N})
    recorder.begin("sample")
    programs = recorder.finish()
    limits = Limits(n_rows=ROWS, n_seqs=1, n_logits=1, max_blocks=1, n_blocks=1, n_slots=1)
    layouts = kernels[programs.forward.launches[0].key.signature()].layouts
    shapes = {"x": (ROWS, K), "weight": (N, K), "out": (ROWS, N)}
    layout = {name: LAYOUTS[layouts.get(name, "row_major")] for name in shapes}
    sizes = {name: layout[name].nbytes(shape, "f32") for name, shape in shapes.items()}
    plan = memory_plan.plan(programs, limits, sizes)
    bound = BoundProgram(programs.forward, programs.buffers, plan, limits, kernels)

    backend = core.cpu_backend(2, level)
    backend.allocate(plan.total)
    rng = np.random.default_rng(0)
    arrays = {name: rng.standard_normal(shape).astype(np.float32) for name, shape in shapes.items()}
    arrays["weight"] *= np.float32(K**-0.5)  # outputs of order 1, which the tolerance is made for
    for name, array in arrays.items():
        backend.write(plan.offsets[name], layout[name].pack(array))
    memory = backend.staging(offsets(limits)[1])
    block = StepBlock(memory, limits)
    block.set_symbols({"n_rows": ROWS, "n_seqs": 1, "n_logits": 1})
    handle = backend.load(bound)
    backend.begin_step(plan.offsets["step.header"], memory, block.used_bytes())
    backend.run(handle, 0, 1)
    raw = np.empty(sizes["out"] // 4, np.float32)
    backend.read(plan.offsets["out"], raw)
    OPS["linear"].reference(arrays, {"rows": ROWS}, {"k": K, "n": N})
    return error_ratio(
        np.asarray(layout["out"].unpack(raw, shapes["out"], "f32")), arrays["out"], OPS["linear"].tolerance["f32"]
    )


def run(level: str) -> str:
    """Run the test of `level` in a process of its own. Empty if all is well, else what went wrong."""
    try:
        done = subprocess.run(
            [sys.executable, "-m", "atlas.doctor.self_test", level],
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return str(error)
    if done.returncode < 0:
        return f"ended by signal {-done.returncode}"
    if done.returncode != 0:
        return (done.stdout.strip() or done.stderr.strip().rpartition("\n")[2]) or f"exit code {done.returncode}"
    return ""


def main(level: str) -> int:
    """Exit code 1, with a line of text, if the level computes something wrong."""
    ratio = linear_error(level)
    if not ratio <= 1.0:
        print(f"linear is {ratio:.3g} times its tolerance away from NumPy")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))

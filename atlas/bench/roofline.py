"""What a case must move and compute at least, against what the machine was measured to do (Williams et al. 2009).

Bytes and operations are those of the recorded program (atlas/debug/profile.py): each operand of each launch once,
of the KV cache what the step's rows see. The machine's read bandwidth and arithmetic rates come from the core's
probe with the backend's number of threads: a buffer far beyond any cache, and dot products on registers. A model
that fits a cache can be read faster than that bandwidth, so a share above 1 is possible and means just this.
"""

from __future__ import annotations

from typing import Any

from atlas.debug.profile import cost, fill_step
from atlas.engine.engine import Engine
from atlas.runtime import core, host
from atlas.runtime.runner import Runner


def measured_rates(runner: Runner, threads: int | None) -> dict[str, float] | None:
    """read (bytes/s), f32, bf16, int8 (operations/s; 0 where the CPU has none); None on a backend without a probe."""
    if runner.choice.backend != "cpu":
        return None
    rates: dict[str, float] = core.extension().cpu_rates(threads or host.allowed_cores())
    return rates


def arithmetic(runner: Runner) -> str:
    """The kind of product that most of the model's operations are: int8, bf16 or f32."""
    counts: dict[str, int] = {}
    for launch in runner.forward_program.launches:
        if launch.key.op.startswith("linear"):
            constants, dtypes = dict(launch.key.constants), dict(launch.key.dtypes)
            kind = "int8" if launch.key.op == "linear_a8" else "bf16" if dtypes.get("x") == "bf16" else "f32"
            counts[kind] = counts.get(kind, 0) + int(constants["n"]) * int(constants["k"])
    return max(counts, key=lambda kind: counts[kind]) if counts else "f32"


def prefill_cost(engine: Engine, tokens: int) -> tuple[int, int]:
    """(bytes, operations) of one prompt in steps of as many rows as the model was loaded for."""
    runner, total = engine.runner, [0, 0]
    for position in range(0, tokens, runner.limits.n_rows):
        fill_step(runner, 1, min(runner.limits.n_rows, tokens - position), position)
        for index, value in enumerate(cost(runner)):
            total[index] += value
    return total[0], total[1]


def decode_cost(engine: Engine, sequences: int, position: int) -> tuple[int, int]:
    """(bytes, operations) of one decode step of so many sequences."""
    fill_step(engine.runner, sequences, 1, position)
    return cost(engine.runner)


def line(
    runner: Runner, rates: dict[str, float], step: tuple[int, int], tokens: int, tokens_per_s: float
) -> dict[str, Any]:
    """The roofline of one case.

    step: its (bytes, operations), for `tokens` tokens.  tokens_per_s: what was measured.
    """
    kind = arithmetic(runner)
    peak = rates[kind] or rates["f32"]
    seconds = tokens / tokens_per_s
    by_memory, by_arithmetic = step[0] / rates["read"], step[1] / peak
    return {
        "bytes_per_token": round(step[0] / tokens),
        "operations_per_token": round(step[1] / tokens),
        "bandwidth_share": round(by_memory / seconds, 4),
        "arithmetic_share": round(by_arithmetic / seconds, 4),
        "bound": "memory" if by_memory >= by_arithmetic else "arithmetic",
        "arithmetic": kind if rates[kind] else f"f32 (this CPU has no {kind} products)",
        "measured_read_bytes_per_s": round(rates["read"]),
        "measured_operations_per_s": round(peak),
    }


def sentence(roofline: dict[str, Any]) -> str:
    """The line under a case's numbers."""
    read, peak = roofline["measured_read_bytes_per_s"] / 1e9, roofline["measured_operations_per_s"] / 1e9
    moved, done = roofline["bytes_per_token"] / 1e6, roofline["operations_per_token"] / 1e6
    return (
        f"roofline: {moved:.2f} MB and {done:.1f} million operations a token; "
        f"{roofline['bandwidth_share']:.0%} of {read:.1f} GB/s, "
        f"{roofline['arithmetic_share']:.0%} of {peak:.0f} G {roofline['arithmetic']} operations/s; "
        f"{roofline['bound']} bound"
    )

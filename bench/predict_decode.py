"""Predicts the decode speed of a hardware's dense targets from the bytes that a step moves: a bound, not a measurement.

    python -m bench.predict_decode --hw gb10 --gb-per-second 273

A step of one sequence reads every weight once and the KV cache of its tokens; what writes and activations move is left
out, and so are the time between launches and whatever of the bandwidth a kernel does not reach. Prints the table that
docs/kernels/cuda.md quotes.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from atlas.debug.profile import ATTENTION
from atlas.models import family_of, fusion
from atlas.runtime.program import StepPrograms
from atlas.runtime.step import PHASE_DECODE
from atlas.targets import formats, target
from atlas.targets.hardware import walk
from atlas.targets.quant import recipe
from atlas.targets.shape import KV_BLOCK_SIZE, Shard
from atlas.targets.status import has_kernel

TOKENS = 640
"""Of a sequence halfway through 128 tokens in and 1,024 out."""


def weight_bytes(programs: StepPrograms) -> int:
    """Weights that a decode step reads whole: all but the table of ids, unless the head multiplies it too."""
    read = {
        buffer
        for launch in programs.launches()
        if launch.key.op != "embedding" and launch.is_made(PHASE_DECODE)
        for buffer in launch.reads()
        if programs.buffers[buffer].kind == "weight"
    }
    return sum(formats.nbytes(programs.buffers[name].dtype, programs.buffers[name].extents({})) for name in read)


def kv_bytes(programs: StepPrograms, tokens: int) -> int:
    """K and V that a row's attention reads, of all layers; a sliding window's is no longer than it."""
    total = 0
    for launch in programs.launches():
        if launch.key.op not in ATTENTION or not launch.is_made(PHASE_DECODE):
            continue
        window = int(dict(launch.key.constants)["window"])
        for operand in ("k_cache", "v_cache"):
            buffer = programs.buffers[dict(launch.operands)[operand]]
            block = formats.nbytes(buffer.dtype, buffer.extents({"n_blocks": 1}))
            total += block // KV_BLOCK_SIZE * (min(tokens, window) if window else tokens)
    return total


def table(root: Path, hardware: str, bandwidth: float) -> str:
    """Markdown, a row a model; for each quant the bytes of weights, and tokens a second of one and eight sequences."""
    quants = walk(root)[hardware].quants
    heads = ["model", "KV, MB", *(f"{quant}: GB, tokens/s at 1 / 8" for quant in quants)]
    rows: dict[str, list[str]] = {}
    for t, status in target.every(root).items():
        if not status.ready or t.hardware.name != hardware:
            continue
        family = family_of(t.facts)
        config = family.configure(t.facts, Shard())
        roles, has = recipe(t.quant, t.hardware.kind), has_kernel(t)
        programs = fusion.record(family, config, roles, t.hardware.kind, has=has)
        weights, kv = weight_bytes(programs), kv_bytes(programs, TOKENS)
        one, eight = (count * bandwidth / (weights + count * kv) for count in (1, 8))
        row = rows.setdefault(t.model, [f"{kv / 1e6:.0f}", *("-" for _ in quants)])
        row[1 + quants.index(t.quant)] = f"{weights / 1e9:.2f}, {one:,.0f} / {eight:,.0f}"
    lines = [heads, ["---"] * len(heads), *([model, *row] for model, row in rows.items())]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hw", default="gb10")
    parser.add_argument("--gb-per-second", type=float, default=273.0, help="nominal memory bandwidth")
    arguments = parser.parse_args()
    print(table(Path(__file__).parents[1] / "kernels", arguments.hw, arguments.gb_per_second * 1e9))

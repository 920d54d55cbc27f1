"""Versions of Atlas against each other: the time of a decode step, measured in turn on one GPU.

    python -m bench.compare_steps old=TREE:PACK new=TREE:PACK --quant bf16 --model llama-3-8b --out FILE.json

TREE is a source tree with its compiled extension in atlas/ (or an installation behind it on PYTHONPATH), PACK a kernel
pack for the model and quant. Each version loads the model's shape with 4 and with 12 layers, random weights, in
processes of their own, side by side; then steps are replayed from their graphs, version by version, case by case, round
after round, so that the card's clock and temperature are the same for all. A layer's time is the difference of the two
over 8; what this predicts for Llama-3-8B's 32 layers lies within 1 % of the whole model's.

Also: microseconds by which each launch makes the step longer, whether a row has the same bits in batches of 1 to 128
rows, and how far logits are from the first version's. A chain of products alone, or kernels one by one, have misjudged
changes that overlap with their neighbours; this is the model's own sequence of launches.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np

FEW, MANY = 4, 12
CASES = tuple((rows, context) for rows in (1, 8, 32, 128) for context in ("640", "648", "ragged"))
"""Rows, and tokens of each: ragged is 128 to 1,152, 640 in the mean."""
BATCHES = (1, 2, 7, 8, 9, 16, 17, 32, 33, 64, 100, 128)
BLOCK, BLOCKS = 16, 5600
"""Tokens of a KV block, and how many of them 128 sequences have."""
STEPS = 50


# ---- a process that has one model ----------------------------------------------------------------


def contexts(rows: int, context: str) -> Any:
    if context != "ragged" or rows == 1:
        return np.full(rows, 640 if context == "ragged" else int(context))
    return np.random.default_rng(5).permutation(np.linspace(128, 1152, rows).round().astype(int))


def fill(runner: Any, length: Any, shared: bool = False, token: int = 0) -> None:
    """Describe a decode step of sequences of these lengths; `shared`: they all have the first one's KV blocks."""
    from atlas.runtime.step import PHASE_DECODE

    block, rows, counts = runner.block, len(length), -(-length // BLOCK)
    block.set_phase(PHASE_DECODE)
    block.set_symbols({"n_rows": rows, "n_seqs": rows, "n_logits": rows})
    block.row_seq[:rows] = block.logit_row[:rows] = np.arange(rows)
    block.row_token[:rows], block.row_position[:rows] = token, length - 1
    block.row_kind[:rows] = block.logit_temperature[:rows] = block.logit_adjust[:rows] = 0
    block.seq_slot[:rows] = block.seq_rope[:rows] = 0
    for i, begin in enumerate(np.cumsum(counts) - counts):
        own = np.arange(counts[i])
        block.block_table[i, : counts[i]] = own if shared else (begin + own) % runner.limits.n_blocks
    for name in ("logit_slot", "logit_mask", "logit_n_top", "logit_target"):
        getattr(block, name)[:rows] = -1


def replay_ms(runner: Any, length: Any, steps: int = STEPS) -> float:
    """Milliseconds of a step of sequences of these lengths when nothing but the device decides: one step always waits
    behind another."""
    ahead, started = None, 0.0
    for step in range(steps + 8):
        if step == 8:
            started = time.perf_counter()
        if step <= runner.ahead:  # each slot keeps what was filled in
            fill(runner, length)
        submitted = runner.submit()
        if ahead is not None:
            runner.collect(ahead)
        ahead = submitted
    assert ahead is not None
    runner.collect(ahead)
    return (time.perf_counter() - started) / steps * 1e3


def growth_us(runner: Any, rows: int) -> dict[str, float]:
    """Launch -> microseconds by which it makes the step longer, mean over the layers but the first."""
    from atlas.runtime.step import PHASE_DECODE

    fill(runner, contexts(rows, "640"))
    launches = (*runner.forward_program.launches, *runner.sample_program.launches)
    added = np.median(np.array([runner.run_growing(8) for _ in range(3)]), axis=0)
    found: dict[str, list[float]] = {}
    for launch, seconds in zip(launches, added.tolist(), strict=True):
        part, _, name = launch.name.partition(".")
        if launch.is_made(PHASE_DECODE) and part == "layers" and not name.startswith("0."):
            found.setdefault(f"{launch.key.op} {name.partition('.')[2]}", []).append(seconds * 1e6)
    return {name: round(float(np.mean(each)), 2) for name, each in found.items()}


def logits_of(runner: Any, vocab: int) -> tuple[Any, bool]:
    """Logits of a prompt's last rows and of a generated token; whether its row has the same bits in every batch."""
    from atlas.runtime.step import PHASE_PREFILL

    ids = np.random.default_rng(11).integers(0, vocab, 201)
    block = runner.block
    block.set_phase(PHASE_PREFILL)
    block.set_symbols({"n_rows": 200, "n_seqs": 1, "n_logits": 8})
    block.row_token[:200], block.row_position[:200] = ids[:200], np.arange(200)
    block.row_seq[:200] = block.row_kind[:200] = block.seq_slot[:1] = block.seq_rope[0] = 0
    block.block_table[0, :13] = np.arange(13)
    block.logit_row[:8] = np.arange(192, 200)
    block.logit_slot[:8] = block.logit_mask[:8] = -1
    block.logit_temperature[:8] = 0.0
    runner.forward()
    parts, same = [runner.logits()], True
    for rows in BATCHES:
        fill(runner, np.full(rows, 201), shared=True, token=int(ids[200]))
        runner.forward()
        found = runner.logits()
        if rows == 1:
            parts.append(found)
        same = same and bool((found.view(np.uint32) == parts[1].view(np.uint32)).all())
    return np.concatenate(parts), same


def serve(model: Path, quant: str, pack: str, logits: Path) -> None:
    """Load, then answer "time ROWS CONTEXT" and "grow ROWS", one JSON value a line."""
    reply = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # whatever else prints
    from atlas.runtime.runner import Runner, RunnerOptions
    from atlas.weights import open_checkpoint

    config = json.loads((model / "config.json").read_text())
    width = config["num_key_value_heads"] * config["head_dim"] * config["num_hidden_layers"]
    options = RunnerOptions(
        backend="cuda",
        quant=quant,
        max_context=8448,
        max_seqs=128,
        max_rows=1024,
        kv_memory_bytes=BLOCKS * BLOCK * width * 4,
        kernel_packs=(pack,) if pack else (),
    )
    with open_checkpoint(model) as checkpoint:
        runner = Runner.load(checkpoint, options)
    values, same = logits_of(runner, config["vocab_size"])
    np.save(logits, values)
    noise = np.random.default_rng(3).standard_normal(8 << 20).astype(np.float32).view(np.uint32) >> 16
    for name, buffer in runner.buffers.items():
        if name.endswith(("k_cache", "v_cache")):  # bf16; what is in memory now may be anything
            count = int(np.prod(buffer.extents(runner.limits.symbols())))
            for at in range(0, count, len(noise)):
                rest = noise[: min(len(noise), count - at)].astype(np.uint16)
                runner.backend.write(runner.plan.offsets[name] + 2 * at, rest)
    reply.write(json.dumps({"batch_invariant": same, "finite": bool(np.isfinite(values).all())}) + "\n")
    for line in sys.stdin:
        what, rows, *context = line.split()
        timed = what == "time"
        answer = replay_ms(runner, contexts(int(rows), *context)) if timed else growth_us(runner, int(rows))
        reply.write(json.dumps(answer) + "\n")


# ---- the comparison ------------------------------------------------------------------------------


class Model:
    """A process with one version's model of so many layers."""

    def __init__(self, version: str, folder: Path, quant: str, logits: Path) -> None:
        tree, _, pack = version.rpartition(":")
        path = os.pathsep.join(filter(None, (tree, os.environ.get("PYTHONPATH", ""))))
        command = [sys.executable, __file__, "--serve", str(folder), quant, pack, str(logits)]
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env={**os.environ, "PYTHONPATH": path}
        )

    def answer(self, question: str = "") -> Any:
        assert self._process.stdin is not None and self._process.stdout is not None
        if question:
            self._process.stdin.write(question + "\n")
            self._process.stdin.flush()
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError("a process ended; what it printed is above")
        return json.loads(line)

    def end(self) -> None:
        self._process.kill()
        self._process.wait()


def compared(
    versions: dict[str, str], folders: dict[int, Path], quant: str, layers: int, rounds: int
) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as scratch:
        files = {name: {n: Path(scratch, f"{name}.{n}.npy") for n in folders} for name in versions}
        models = {
            name: {n: Model(version, folder, quant, files[name][n]) for n, folder in folders.items()}
            for name, version in versions.items()
        }
        try:
            found: dict[str, Any] = {name: {"ready": [m.answer() for m in models[name].values()]} for name in versions}
            first = np.load(files[next(iter(versions))][MANY]).astype(np.float64)
            for name in versions:
                other = np.load(files[name][MANY])
                found[name]["logits_relative_l2"] = float(np.linalg.norm(other - first) / np.linalg.norm(first))
            times: dict[tuple[str, tuple[int, str]], list[list[float]]] = {}
            for turn in range(rounds):
                for case in CASES:
                    for name in list(versions)[:: 1 if turn % 2 == 0 else -1]:
                        pair = [models[name][n].answer(f"time {case[0]} {case[1]}") for n in (FEW, MANY)]
                        times.setdefault((name, case), []).append(pair)
            for (name, (rows, context)), pairs in times.items():
                few, many = (statistics.median(pair[i] for pair in pairs) for i in (0, 1))
                layer = (many - few) / (MANY - FEW)
                found[name].setdefault("steps", {})[f"{rows} x {context}"] = {
                    "layer_us": round(layer * 1e3, 2),
                    "step_ms": round(few + (layers - FEW) * layer, 4),
                }
            for name in versions:
                found[name]["launches_us"] = {
                    rows: models[name][FEW].answer(f"grow {rows}") for rows in (1, 8, 32, 128)
                }
            return found
        finally:
            for of_version in models.values():
                for model in of_version.values():
                    model.end()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("versions", nargs="+", metavar="NAME=TREE:PACK")
    parser.add_argument("--model", default="llama-3-8b")
    parser.add_argument("--quant", default="bf16")
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--folder", type=Path, default=Path("/dev/shm/atlas_compare"))
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    from bench import random_checkpoint
    from bench.h200_dense import facts

    config = facts(given.model)
    folders = {n: given.folder / f"{given.model}.{n}" for n in (FEW, MANY)}
    for n, folder in folders.items():
        if not (folder / "config.json").exists():
            random_checkpoint.write(folder, config, n, max_context=8448)
    versions = dict(text.split("=", 1) for text in given.versions)
    found = compared(versions, folders, given.quant, config["num_hidden_layers"], given.rounds)
    base = found[next(iter(versions))]["steps"]
    for case in base:
        cells = [f"{v['steps'][case]['layer_us']:8.2f} / {v['steps'][case]['step_ms']:6.3f}" for v in found.values()]
        print(f"{case:>12}  " + "  ".join(cells))
    for name, version in found.items():
        print(name, version["ready"], version["logits_relative_l2"], json.dumps(version["launches_us"]))
    if given.out:
        given.out.write_text(
            json.dumps({"model": given.model, "quant": given.quant, "versions": found}, indent=1) + "\n"
        )
    return 0 if all(ready["batch_invariant"] for version in found.values() for ready in version["ready"]) else 1


if __name__ == "__main__":
    if sys.argv[1:2] == ["--serve"]:
        serve(Path(sys.argv[2]), sys.argv[3], sys.argv[4], Path(sys.argv[5]))
    else:
        sys.exit(main())

"""`python -m atlas.debug.profile MODEL`: where a step's time goes, launch by launch.

One step is made up (so many sequences, each with so many new rows at such a position), run again and again,
and the time of each launch is taken inside the core: on a CPU barrier included, on a GPU from the end of the launch
before it, so that nothing overlaps, and beside it by how much it makes the step longer, where launches do overlap. The
report adds launches of one kind over the layers and, on a CPU, holds them against what the machine was measured to do:
a roofline line per kind.
"""

from __future__ import annotations

import argparse
import dataclasses
import math
import re
import sys
import time
from collections.abc import Mapping, Sequence

import numpy as np

from atlas.errors import AtlasError, ConfigError
from atlas.runtime import core, host
from atlas.runtime.core import CoreBackend
from atlas.runtime.program import Launch
from atlas.runtime.runner import Runner, RunnerOptions
from atlas.runtime.step import PHASE_DECODE, PHASE_PREFILL
from atlas.targets import formats
from atlas.targets.shape import KV_BLOCK_SIZE

ATTENTION = ("paged_attention", "rope_attention")
"""Ops that read K and V of all tokens that a row sees."""


@dataclasses.dataclass(frozen=True)
class Work:
    """What launches of one kind did in one step.

    seconds: the lower quartile of the repeats, barriers included.  bytes: read and written once, caches as far as they
    are seen.  operations: multiplications and additions of products and attention; 0 elsewhere.  added: seconds by
    which they make the step longer, where launches overlap (on a GPU).
    """

    kind: str
    launches: int
    seconds: float
    bytes: int
    operations: int
    added: float = 0.0


@dataclasses.dataclass(frozen=True)
class Profile:
    """A profiled step. step_seconds: forward and sample as they are run in service (on a GPU: as a graph)."""

    work: tuple[Work, ...]
    step_seconds: float


def fill_step(runner: Runner, seqs: int, rows: int, position: int) -> None:
    """Describe a step: `seqs` sequences with `rows` new rows each, the first at `position`; greedy, one logit each.

    Raises:
        ConfigError: the runner was loaded for less.
    """
    block, limits = runner.block, runner.limits
    blocks = -(-(position + rows) // KV_BLOCK_SIZE)
    for name, wanted, limit in (
        ("sequences", seqs, min(limits.n_seqs, limits.n_logits)),
        ("rows", seqs * rows, limits.n_rows),
        ("blocks of a sequence", blocks, limits.max_blocks),
        ("blocks", seqs * blocks, limits.n_blocks),
    ):
        if wanted > limit:
            raise ConfigError("step", f"{wanted} {name}", f"at most {limit}")
    rng, count = np.random.default_rng(0), seqs * rows
    block.set_phase(PHASE_DECODE if rows == 1 else PHASE_PREFILL)
    block.set_symbols({"n_rows": count, "n_seqs": seqs, "n_logits": seqs})
    for field, values in block.fields.items():
        if field not in ("header", "block_table"):
            values[...] = 0
    block.row_token[:count] = rng.integers(0, runner.config.shape.vocab_size, count)
    block.row_seq[:count] = np.repeat(np.arange(seqs), rows)
    block.row_position[:count] = np.tile(np.arange(position, position + rows), seqs)
    block.seq_slot[:seqs] = block.logit_slot[:seqs] = np.arange(seqs)
    block.block_table[:seqs, :blocks] = rng.permutation(limits.n_blocks)[: seqs * blocks].reshape(seqs, blocks)
    block.logit_row[:seqs] = np.arange(1, seqs + 1) * rows - 1
    block.logit_position[:seqs] = position + rows
    block.logit_mask[:seqs] = block.logit_n_top[:seqs] = block.logit_target[:seqs] = -1


def cost(runner: Runner) -> tuple[int, int]:
    """(bytes, operations) of the step that `runner.block` describes, as in Work; nothing is run."""
    launches = _made(runner)
    return (
        sum(_bytes(runner, launch) for launch in launches),
        sum(_operations(runner, launch) for launch in launches),
    )


def _made(runner: Runner) -> list[Launch]:
    """The launches that the step makes."""
    launches = (*runner.forward_program.launches, *runner.sample_program.launches)
    return [launch for launch in launches if launch.is_made(runner.block.phase)]


def profile(runner: Runner, repeats: int) -> Profile:
    """Run the step that `runner.block` describes `repeats` times and take the lower quartile of every launch's time.

    Not the least: where another process held a worker back, a launch may look done before it began.
    """
    backend = runner.backend
    if not isinstance(backend, CoreBackend):
        raise ConfigError("backend", backend.describe(), "cpu or cuda: the core times single launches")
    launches = (*runner.forward_program.launches, *runner.sample_program.launches)
    times = np.quantile([runner.run_timed() for _ in range(repeats)], 0.25, axis=0)
    if backend.name == "cuda":
        added = runner.run_growing(repeats)
        step_seconds = sum(added)
    else:
        added = [0.0] * len(launches)
        step_seconds = min(_timed_step(runner) for _ in range(repeats))
    kinds: dict[str, Work] = {}
    for launch, seconds, longer in zip(launches, times.tolist(), added, strict=True):
        if not launch.is_made(runner.block.phase):
            continue
        kind = f"{launch.key.op} {re.sub(r'^layers[.][0-9]+[.]', '', launch.name)}"
        old = kinds.get(kind, Work(kind, 0, 0.0, 0, 0))
        kinds[kind] = Work(
            kind,
            old.launches + 1,
            old.seconds + seconds,
            old.bytes + _bytes(runner, launch),
            old.operations + _operations(runner, launch),
            old.added + longer,
        )
    return Profile(tuple(kinds.values()), step_seconds)


def _timed_step(runner: Runner) -> float:
    begin = time.perf_counter()
    runner.collect(runner.submit())  # as a server does: `forward` would ask for log-probabilities of every row
    return time.perf_counter() - begin


def _seen(runner: Runner, window: int) -> tuple[int, int]:
    """(tokens of context that the step's sequences read, (row, token) pairs that see each other)."""
    count = runner.block.symbols()["n_rows"]
    position, seq = runner.block.row_position[:count].astype(np.int64), runner.block.row_seq[:count]
    first = np.maximum(0, position + 1 - window) if window else np.zeros_like(position)
    tokens = sum(int(position[seq == s].max() + 1 - first[seq == s].min()) for s in np.unique(seq))
    return tokens, int((position + 1 - first).sum())


def _bytes(runner: Runner, launch: Launch) -> int:
    """Bytes of a launch's operands in this step. Of caches and tables, only what the step's rows touch."""
    symbols, constants = runner.block.symbols(), dict(launch.key.constants)
    total = 0
    for operand, name in launch.operands:
        buffer = runner.buffers[name]
        extents = buffer.extents({**runner.limits.symbols(), **symbols})
        if operand in ("k_cache", "v_cache"):
            tokens = symbols["n_rows"]
            if launch.key.op in ATTENTION:
                tokens = _seen(runner, int(constants.get("window", 0)))[0]
            extents = (tokens, extents[1], extents[3])
        elif launch.key.op == "embedding" and operand == "table":
            extents = (symbols["n_rows"], *extents[1:])
        total += formats.nbytes(buffer.dtype, extents)
    return total


def _operations(runner: Runner, launch: Launch) -> int:
    constants, operands = dict(launch.key.constants), dict(launch.operands)
    shape = runner.buffers[operands["weight"]].shape if "weight" in operands else ()
    if len(shape) == 2:  # a product, whatever is one with it
        return 2 * runner.block.symbols()[dict(launch.dims)["rows"]] * math.prod(map(int, shape))
    if launch.key.op in ATTENTION:
        pairs = _seen(runner, int(constants.get("window", 0)))[1]
        return 4 * pairs * int(constants["n_heads"]) * int(constants["head_dim"])
    return 0


def table(found: Profile, rates: Mapping[str, float]) -> str:
    """The report for people: kinds by time, and where `rates` are known ("read", "f32": bytes and operations a
    second) the shares of them."""

    def share(rate: float, of: str) -> str:
        return f" {rate / rates[of]:>7.0%}" if rates else f" {'':>7}"

    timed = sum(work.seconds for work in found.work)
    added = f" {'added us':>10}" if any(work.added for work in found.work) else ""
    lines = [
        f"{'kind':<40} {'launches':>8} {'us':>10} {'share':>6} {'GB/s':>7} {'of read':>7} {'GFLOP/s':>8} {'of fp32':>7}"
        + added
    ]
    for work in sorted(found.work, key=lambda work: -work.seconds):
        bandwidth, rate = work.bytes / work.seconds, work.operations / work.seconds
        line = (
            f"{work.kind:<40} {work.launches:>8} {work.seconds * 1e6:>10.1f} {work.seconds / timed:>6.1%}"
            f" {bandwidth / 1e9:>7.2f}{share(bandwidth, 'read')}"
        )
        line += f" {rate / 1e9:>8.1f}{share(rate, 'f32')}" if rate else f"{'':>17}"
        lines.append((line + (f" {work.added * 1e6:>10.1f}" if added else "")).rstrip())
    total = f"sum of launches {timed * 1e6:.1f} us; whole step {found.step_seconds * 1e6:.1f} us"
    if rates:
        total += f"; machine: {rates['read'] / 1e9:.1f} GB/s read, {rates['f32'] / 1e9:.1f} GFLOP/s fp32"
    return "\n".join([*lines, total])


def main(argv: Sequence[str]) -> int:
    """The exit code."""
    from atlas.weights import open_checkpoint
    from atlas.weights.fetch import resolve_model

    parser = argparse.ArgumentParser(prog="python -m atlas.debug.profile", description=__doc__, allow_abbrev=False)
    parser.add_argument("model", nargs="?", metavar="MODEL", help="as for serve")
    parser.add_argument("--backend", choices=("cpu", "cuda"), default="cpu", help="what executes the model")
    parser.add_argument("--quant", help="as for serve")
    parser.add_argument("--threads", type=int, help="workers (default: the cores this process may use)")
    parser.add_argument("--level", default="", help="CPU instruction-set level (default: the best)")
    parser.add_argument("--seqs", type=int, default=1, help="sequences in the step")
    parser.add_argument("--rows", type=int, default=1, help="new rows of each: 1 is decoding, more a prompt chunk")
    parser.add_argument("--position", type=int, default=0, help="position of each sequence's first row")
    parser.add_argument("--repeats", type=int, default=20, help="steps to time")
    arguments = parser.parse_args(argv)
    try:
        context = arguments.position + arguments.rows
        options = RunnerOptions(
            backend=arguments.backend,
            quant=arguments.quant,
            threads=arguments.threads,
            level=arguments.level,
            max_context=context,
            max_seqs=arguments.seqs,
            max_rows=arguments.seqs * arguments.rows,
        )
        with open_checkpoint(resolve_model(arguments.model, offline=False)) as checkpoint:
            runner = Runner.load(checkpoint, options)
        fill_step(runner, arguments.seqs, arguments.rows, arguments.position)
        found = profile(runner, arguments.repeats)
    except AtlasError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    threads = arguments.threads or host.allowed_cores()
    print(runner.backend.describe())
    print(table(found, core.extension().cpu_rates(threads) if arguments.backend == "cpu" else {}))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

"""What enters each matrix when the model reads a text: collected from Atlas's own float32 run of it."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

import numpy as np

from atlas.errors import ConfigError
from atlas.models import family_of
from atlas.progress import Progress
from atlas.runtime.program import Launch
from atlas.runtime.runner import Runner, RunnerOptions
from atlas.targets.shape import KV_BLOCK_SIZE, Shard
from atlas.tokenizer import Tokenizer
from atlas.weights import Checkpoint
from atlas.weights.quantized import Array

CONTEXT = 512
"""Tokens of one calibration sequence."""

SAMPLES = 256
"""Input rows kept of each matrix, evenly spaced over the text: what a choice of scales is judged on."""


@dataclasses.dataclass
class Inputs:
    """What entered a matrix [n, k].

    absmax: largest value.  mean_abs, mean_square: of each channel, [k].  rows: some inputs, [SAMPLES, k].
    """

    absmax: float
    mean_abs: Array
    mean_square: Array
    rows: Array


def collect(checkpoint: Checkpoint, text: str, tokens: int, progress: Progress) -> dict[str, Inputs]:
    """`collect_ids` of the first `tokens` tokens of a text.

    Raises:
        ConfigError: the text is shorter than one sequence.
        CheckpointError, DeviceError: the model cannot be run.
    """
    tokenizer = Tokenizer.from_checkpoint(checkpoint)
    ids = tokenizer.encode(text, add_special_tokens=True)[:tokens]
    if len(ids) < min(CONTEXT, tokens):
        raise ConfigError("--calibration", f"a text of {len(ids)} tokens", f"at least {min(CONTEXT, tokens)} tokens")
    return collect_ids(checkpoint, ids, progress)


def collect_ids(checkpoint: Checkpoint, ids: list[int], progress: Progress) -> dict[str, Inputs]:
    """Run tokens through the model in float32 on the CPU, in sequences of CONTEXT.

    Returns the inputs of every matrix, by the name of its tensor in the checkpoint.
    """
    runner = _load(checkpoint)
    context = min(CONTEXT, runner.max_context)
    keep = np.zeros(len(ids), bool)
    keep[np.linspace(0, len(ids) - 1, min(SAMPLES, len(ids))).astype(int)] = True
    sources = family_of(checkpoint.config).weights(runner.config, checkpoint.tensors)
    statistics = {
        launch.name: _Statistics(tuple(sources[weight].tensors))
        for launch in runner.forward_program.launches
        if (weight := matrix_of(launch)) is not None and weight in sources
    }
    progress.begin("calibrating", len(ids), "token")
    for begin in range(0, len(ids), context):
        part = ids[begin : begin + context]
        _fill(runner, part)
        _step(runner, statistics, keep[begin : begin + len(part)])
        progress.advance(len(part))
    return {tensor: inputs for one in statistics.values() for tensor, inputs in one.finish()}


def matrix_of(launch: Launch) -> str | None:
    """The weight buffer of a matrix product of the layers; None for other launches, and for the head."""
    if launch.key.op != "linear" or launch.name == "lm_head":
        return None
    return dict(launch.operands)["weight"]


class _Statistics:
    """Sums over the inputs of one launch."""

    def __init__(self, tensors: tuple[str, ...]) -> None:
        self.tensors, self.count, self.absmax = tensors, 0, 0.0
        self.sum_abs: Array | float = 0.0
        self.sum_square: Array | float = 0.0
        self.rows: list[Array] = []

    def add(self, x: Array, keep: Array) -> None:
        magnitude = np.abs(x)
        self.count += len(x)
        self.absmax = max(self.absmax, float(magnitude.max()))
        self.sum_abs = self.sum_abs + magnitude.sum(axis=0, dtype=np.float64)
        self.sum_square = self.sum_square + np.square(x, dtype=np.float64).sum(axis=0)
        self.rows.append(x[keep])

    def finish(self) -> list[tuple[str, Inputs]]:
        inputs = Inputs(
            self.absmax,
            np.asarray(self.sum_abs / self.count, np.float32),
            np.asarray(self.sum_square / self.count, np.float32),
            np.concatenate(self.rows),
        )
        return [(tensor, inputs) for tensor in self.tensors]


def _load(checkpoint: Checkpoint) -> Runner:
    blocks = -(-CONTEXT // KV_BLOCK_SIZE)
    options = RunnerOptions(backend="cpu", quant="f32", max_seqs=1, max_rows=CONTEXT, max_logits=CONTEXT)
    config = family_of(checkpoint.config).configure(checkpoint.config, Shard())
    context = min(blocks * KV_BLOCK_SIZE, config.max_context)
    return Runner.load(checkpoint, dataclasses.replace(options, max_context=context))


def _fill(runner: Runner, ids: list[int]) -> None:
    """A step that reads `ids` as the start of one sequence, and wants the logits of all: only such rows go through the
    last layer's MLP."""
    block, rows = runner.block, len(ids)
    block.set_symbols({"n_rows": rows, "n_seqs": 1, "n_logits": rows})
    block.row_token[:rows] = ids
    block.row_position[:rows] = np.arange(rows)
    block.row_seq[:rows] = block.row_kind[:rows] = block.seq_slot[:1] = 0
    block.seq_rope[0] = runner.config.rope_set(rows)
    block.block_table[0] = np.arange(runner.limits.max_blocks)
    block.logit_row[:rows] = np.arange(rows)
    block.logit_slot[:rows] = block.logit_mask[:rows] = -1
    block.logit_temperature[:rows] = 0.0


def _step(runner: Runner, statistics: Mapping[str, _Statistics], keep: Array) -> None:
    """Run the step launch by launch up to the head, and look at what enters each matrix."""
    backend, rows = runner.backend, len(keep)
    backend.begin_step(runner.plan.offsets["step.header"], runner.step_memory, runner.block.used_bytes())
    for index, launch in enumerate(runner.forward_program.launches):
        if launch.name == "lm_head":
            break
        if launch.name in statistics:
            statistics[launch.name].add(runner.read(dict(launch.operands)["x"])[:rows], keep)
        runner.run_launch("forward", index)

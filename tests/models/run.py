"""Runs a model through runner and engine, as tests want it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from atlas.engine.engine import Engine
from atlas.engine.messages import SamplingParams
from atlas.runtime.runner import Runner, RunnerOptions
from atlas.runtime.step import PHASE_PREFILL
from atlas.weights import open_checkpoint


def load(model: Path, backend: str, quant: str | None, **options: Any) -> Runner:
    """A runner for teacher-forced logits: every row of a step may ask for its logits."""
    defaults = {"max_seqs": 8, "max_rows": 256, "max_logits": 256, "max_context": None}
    with open_checkpoint(model) as checkpoint:
        return Runner.load(checkpoint, RunnerOptions(backend=backend, quant=quant, **{**defaults, **options}))


def logits(runner: Runner, ids: list[int], chunk: int = 256, phase: int = PHASE_PREFILL) -> np.ndarray[Any, Any]:
    """Logits [len(ids), vocab] of one sequence, teacher-forced in chunks, in steps of a phase."""
    block, parts = runner.block, []
    blocks = np.random.default_rng(0).permutation(runner.limits.n_blocks)[: runner.limits.max_blocks]
    for begin in range(0, len(ids), chunk):
        rows = min(chunk, len(ids) - begin)
        block.set_symbols({"n_rows": rows, "n_seqs": 1, "n_logits": rows})
        block.set_phase(phase)
        block.row_token[:rows] = ids[begin : begin + rows]
        block.row_position[:rows] = np.arange(begin, begin + rows)
        block.row_seq[:rows] = block.seq_slot[:1] = 0
        block.seq_rope[0] = runner.config.rope_set(len(ids))
        block.block_table[0, : len(blocks)] = blocks
        block.logit_row[:rows] = np.arange(rows)
        block.logit_slot[:rows] = block.logit_mask[:rows] = -1
        block.logit_temperature[:rows] = 0.0
        runner.forward()
        parts.append(runner.read("logits")[:rows])
    return np.concatenate(parts)


def greedy(runner: Runner, prompts: list[list[int]], count: int, together: int) -> list[list[int]]:
    """`count` greedy tokens for each prompt, `together` requests at a time."""
    engine = Engine(runner)
    results: list[list[int]] = [[] for _ in prompts]
    waiting = list(range(len(prompts)))[::-1]
    running = 0
    while waiting or engine.busy:
        while waiting and running < together:
            index = waiting.pop()
            engine.add(str(index), prompts[index], SamplingParams(max_tokens=count))
            running += 1
        for output in engine.step():
            assert output.error is None, output.error
            results[int(output.request_id)] += output.token_ids
            running -= output.finish_reason is not None
    return results

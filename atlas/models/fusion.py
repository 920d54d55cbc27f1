"""Fusion: what a GPU runs in one launch where the model's program has two.

A launch costs a GPU about a microsecond and everything that it leaves costs a trip to memory, so neighbours become one:

    residual_add, rms_norm of the same residual     ->  residual_rms_norm
    linear, gated_activation of its product         ->  gated_linear

    rope_kv_append, paged_attention, quantize_rows of its rows if there is one
        ->  rope_attention in decode steps, the same as before in prefill steps

the last where the hardware has a kernel for it. A fused kernel rounds once, at its end: it leaves no gate and up
to round, and adds f32 or bf16 products in fp32. Build and load both get a model's programs from `record` below: the
kernels that are compiled are those that are asked for.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

from atlas.build.kernel_file import PHASES
from atlas.models.family import Family, FormatOf, ModelConfig
from atlas.runtime.program import KernelKey, Launch, Recorder, StepPrograms
from atlas.runtime.step import PHASE_DECODE, PHASE_PREFILL
from atlas.targets.formats import plain_format
from atlas.targets.quant import Recipe

HasKernel = Callable[[KernelKey], bool]
"""Whether the hardware has a kernel for decode steps that it need not have."""


def record(
    family: Family,
    config: ModelConfig,
    recipe: Recipe,
    kind: str,
    format_of: FormatOf = lambda name, role: plain_format(role),
    has: HasKernel = lambda key: False,
) -> StepPrograms:
    """The programs of a model on hardware of a kind, "cuda" or "cpu". format_of: as a family's `record` takes it."""
    programs = family.record(config, recipe, format_of)
    return fused(programs, has) if kind == "cuda" else programs


def fused(programs: StepPrograms, has: HasKernel = lambda key: False) -> StepPrograms:
    """The same programs with neighbouring launches fused. Buffers that only stood between two of them are gone."""
    recorder = Recorder()
    for buffer in programs.buffers.values():
        recorder.buffer(buffer.name, buffer.dtype, buffer.shape, buffer.kind)
    for program in (programs.forward, programs.sample):
        recorder.begin(program.name)
        launches = list(program.launches)
        while launches:
            first = launches.pop(0)
            if launches and (_add_norm(recorder, first, launches[0]) or _gated(recorder, first, launches)):
                launches.pop(0)
            elif taken := _attention(recorder, [first, *launches], has):
                del launches[: taken - 1]
            else:
                recorder.add(first)
    return recorder.finish()


def _add_norm(recorder: Recorder, add: Launch, norm: Launch) -> bool:
    """residual_rms_norm for both, if they are a sum and the norm of that sum. Says whether it was recorded."""
    if (add.key.op, norm.key.op) != ("residual_add", "rms_norm") or add.dims != norm.dims:
        return False
    sum_of, norm_of = dict(add.operands), dict(norm.operands)
    if norm_of["x"] != sum_of["residual"]:
        return False
    constants = {**dict(norm.key.constants), "scale": dict(add.key.constants)["scale"]}
    operands = {**sum_of, "weight": norm_of["weight"], "out": norm_of["out"]}
    recorder.launch("residual_rms_norm", norm.name, operands, dict(add.dims), constants)
    return True


def _gated(recorder: Recorder, linear: Launch, rest: list[Launch]) -> bool:
    """gated_linear for both, if the next launch is the activation of this product and nobody else reads it.

    Rows leave in the type in which they came; where a checkpoint mixes formats within an MLP the two stay apart.
    """
    activation = rest[0]
    if (linear.key.op, activation.key.op) != ("linear", "gated_activation") or linear.dims != activation.dims:
        return False
    if dict(linear.key.dtypes)["x"] != dict(activation.key.dtypes)["out"]:
        return False
    product_of, gated = dict(linear.operands), dict(activation.operands)
    product = product_of.pop("out")
    if gated["gate_up"] != product or _is_read(product, rest[1:]):
        return False
    constants = {**dict(activation.key.constants), "k": dict(linear.key.constants)["k"]}
    recorder.launch("gated_linear", linear.name, {**product_of, "out": gated["out"]}, dict(linear.dims), constants)
    return True


def _attention(recorder: Recorder, launches: list[Launch], has: HasKernel) -> int:
    """How many of the next launches, if they are attention of the rows that were just appended and there is a kernel
    for it, were recorded for prefill steps, with rope_attention for decode steps; 0 if none."""
    ops = [launch.key.op for launch in launches[:3]]
    if ops[:2] != ["rope_kv_append", "paged_attention"]:
        return 0
    rope, attention = launches[:2]
    rope_of, attention_of = dict(rope.operands), dict(attention.operands)
    q, attended = rope_of.pop("q_out"), attention_of["out"]
    alike = all(rope_of[name] == buffer for name, buffer in attention_of.items() if name in rope_of)
    cached = {recorder.buffers[name].dtype for name in (q, rope_of["k_cache"], rope_of["v_cache"])}
    if attention_of["q"] != q or not alike or rope.dims != attention.dims or len(cached) > 1:
        return 0
    outs = [(attended, 2)]
    if ops[2:] == ["quantize_rows"] and recorder.buffers[attended].dtype in cached:
        rows = dict(launches[2].operands)
        outs = [(rows["out"], 3), *outs] if rows["x"] == attended else outs
    constants = {**dict(rope.key.constants), **dict(attention.key.constants)}
    for out, taken in outs:
        left_out = {q, attended} - {out}
        together = recorder.checked(
            "rope_attention", attention.name, {**rope_of, "out": out}, dict(rope.dims), constants, PHASES[PHASE_DECODE]
        )
        if has(together.key) and not any(_is_read(buffer, launches[taken:]) for buffer in left_out):
            for launch in launches[:taken]:
                recorder.add(dataclasses.replace(launch, phase=PHASES[PHASE_PREFILL]))
            recorder.add(together)
            return taken
    return 0


def _is_read(buffer: str, launches: list[Launch]) -> bool:
    """Whether what a buffer holds is read before it is written again."""
    for launch in launches:
        if buffer in launch.reads():
            return True
        if buffer in launch.writes():
            return False
    return False

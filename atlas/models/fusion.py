"""Fusion: what a GPU runs in one launch where the model's program has two.

A launch costs a GPU about a microsecond and everything that it leaves costs a trip to memory, so neighbours become one:

    residual_add, rms_norm of the same residual     ->  residual_rms_norm
    linear, gated_activation of its product         ->  gated_linear

    rope_kv_append, paged_attention, quantize_rows of its rows if there is one
        ->  rope_attention in decode steps, the same as before in prefill steps
    or else paged_attention, quantize_rows
        ->  paged_attention that rounds its rows in decode steps, the same as before in prefill steps

    linear, residual_rms_norm, linear or gated_linear of its rows
        ->  residual_linear, normed_linear or normed_gated_linear in decode steps, the same as before in prefill steps

    rms_norm, one of these products  ->  norm_parts and the product in decode steps, so that it has one kernel there
    linear, residual_add             ->  residual_linear in decode steps, for the same reason

    normed_linear, rope_kv_append of its rows  ->  normed_qkv_append in decode steps, behind a step's rope_rows

    normed_linear that leaves logits, sample   ->  normed_logits, sample_largest

all but the first two where the hardware has kernels for them. A fused kernel rounds once, at its end: it leaves no gate
and up to round, and adds f32 or bf16 products in fp32. Build and load both get a model's programs from `record` below:
the kernels that are compiled are those that are asked for.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence

from atlas.build.kernel_file import PHASES
from atlas.models.family import Family, FormatOf, ModelConfig
from atlas.ops import OPS
from atlas.ops.norm_parts import SHARE
from atlas.ops.normed_logits import OF
from atlas.runtime.program import KernelKey, Launch, Recorder, StepPrograms
from atlas.runtime.step import PHASE_DECODE, PHASE_PREFILL
from atlas.targets.expression import ceil_div
from atlas.targets.formats import plain_format
from atlas.targets.quant import Recipe

HasKernel = Callable[[KernelKey], bool]
"""Whether the hardware has a kernel for decode steps that it need not have."""

Launches = Sequence[Launch]
Rule = Callable[[Recorder, Launches, HasKernel], int]
"""Records what stands for the first of some launches; says for how many, 0 if it does not know them."""


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
    found = _rewritten(programs, has, (_add_norm, _gated, _attention, _rounded_attention))
    samples = [launch for launch in programs.sample.launches if launch.key.op == "sample"]
    found = _rewritten(found, has, (functools.partial(_norm_in_products, samples=samples),))
    made = {launch.key for launch in found.launches()}
    there = {"norm_parts", "rope_rows"}
    found = _rewritten(found, lambda key: has(key) and (key in made or key.op in there), (_norm_parts, _added))
    found = _rewritten(found, has, (functools.partial(_once, told=set()),))
    return _rewritten(found, has, (functools.partial(_sampled, head=found.forward.launches[-1]),))


def _rewritten(programs: StepPrograms, has: HasKernel, rules: Sequence[Rule]) -> StepPrograms:
    """Each launch as the first rule that takes it records it and those behind it, or as it is."""
    recorder = Recorder()
    for buffer in programs.buffers.values():
        recorder.buffer(buffer.name, buffer.dtype, buffer.shape, buffer.kind)
    for program in (programs.forward, programs.sample):
        recorder.begin(program.name)
        at = 0
        while at < len(program.launches):
            rest = program.launches[at:]
            taken = next((taken for rule in rules if (taken := rule(recorder, rest, has))), 0)
            if not taken:
                recorder.add(rest[0])
            at += taken or 1
    return recorder.finish()


def _add_norm(recorder: Recorder, launches: Launches, has: HasKernel) -> int:
    """residual_rms_norm for two, if they are a sum and the norm of that sum."""
    if _ops(launches, 2) != ("residual_add", "rms_norm") or launches[0].dims != launches[1].dims:
        return 0
    add, norm = launches[:2]
    sum_of, norm_of = dict(add.operands), dict(norm.operands)
    if norm_of["x"] != sum_of["residual"]:
        return 0
    constants = {**dict(norm.key.constants), "scale": dict(add.key.constants)["scale"]}
    operands = {**sum_of, "weight": norm_of["weight"], "out": norm_of["out"]}
    recorder.launch("residual_rms_norm", norm.name, operands, dict(add.dims), constants)
    return 2


def _gated(recorder: Recorder, launches: Launches, has: HasKernel) -> int:
    """gated_linear for two, if they are a product and its activation and nobody else reads it.

    Rows leave in the type in which they came; where a checkpoint mixes formats within an MLP the two stay apart.
    """
    if _ops(launches, 2) != ("linear", "gated_activation") or launches[0].dims != launches[1].dims:
        return 0
    linear, activation = launches[:2]
    if dict(linear.key.dtypes)["x"] != dict(activation.key.dtypes)["out"]:
        return 0
    product_of, gated = dict(linear.operands), dict(activation.operands)
    product = product_of.pop("out")
    if gated["gate_up"] != product or _is_read(product, launches[2:]):
        return 0
    constants = {**dict(activation.key.constants), "k": dict(linear.key.constants)["k"]}
    recorder.launch("gated_linear", linear.name, {**product_of, "out": gated["out"]}, dict(linear.dims), constants)
    return 2


def _attention(recorder: Recorder, launches: Launches, has: HasKernel) -> int:
    """Two or three for prefill steps, with rope_attention for decode steps, if they are attention of the rows that were
    just appended and there is a kernel for it."""
    if _ops(launches, 2) != ("rope_kv_append", "paged_attention"):
        return 0
    rope, attention = launches[:2]
    rope_of, attention_of = dict(rope.operands), dict(attention.operands)
    q, attended = rope_of.pop("q_out"), attention_of["out"]
    alike = all(rope_of[name] == buffer for name, buffer in attention_of.items() if name in rope_of)
    cached = {recorder.buffers[name].dtype for name in (q, rope_of["k_cache"], rope_of["v_cache"])}
    if attention_of["q"] != q or not alike or rope.dims != attention.dims or len(cached) > 1:
        return 0
    outs = [(attended, 2)]
    if _ops(launches, 3)[2:] == ("quantize_rows",) and recorder.buffers[attended].dtype in cached:
        rows = dict(launches[2].operands)
        outs = [(rows["out"], 3), *outs] if rows["x"] == attended else outs
    constants = {**dict(rope.key.constants), **dict(attention.key.constants)}
    for out, taken in outs:
        left_out = {q, attended} - {out}
        together = recorder.checked(
            "rope_attention", attention.name, {**rope_of, "out": out}, dict(rope.dims), constants, PHASES[PHASE_DECODE]
        )
        read = any(_is_read(buffer, launches[taken:]) for buffer in left_out)
        if not read and _instead(recorder, launches[:taken], [together], has):
            return taken
    return 0


def _rounded_attention(recorder: Recorder, launches: Launches, has: HasKernel) -> int:
    """Two for prefill steps, with one that leaves rounded rows for decode steps, if they are attention and the rounding
    of its rows, nobody else reads those and there is a kernel for it."""
    if _ops(launches, 2) != ("paged_attention", "quantize_rows") or _rows(launches[0]) != _rows(launches[1]):
        return 0
    attention, rounding = launches[:2]
    attention_of, rounding_of = dict(attention.operands), dict(rounding.operands)
    if rounding_of["x"] != attention_of["out"] or _is_read(attention_of["out"], launches[2:]):
        return 0
    operands, constants = {**attention_of, "out": rounding_of["out"]}, dict(attention.key.constants)
    together = recorder.checked(
        attention.key.op, attention.name, operands, dict(attention.dims), constants, PHASES[PHASE_DECODE]
    )
    return _instead(recorder, launches[:2], [together], has)


def _norm_in_products(recorder: Recorder, launches: Launches, has: HasKernel, samples: Launches) -> int:
    """Three as two, if they are a product that is added to the residual stream, its norm, and the product of its rows.

    A step of a few rows then has no launch between the products. The rows that stand between them are divided by their
    root mean square only where the next product is finished: one thread block has all columns of no row before that.
    """
    ops = _ops(launches, 3)
    if ops[:2] != ("linear", "residual_rms_norm") or ops[2:] not in (("linear",), ("gated_linear",)):
        return 0
    product, norm = launches[:2]
    product_of, norm_of = dict(product.operands), dict(norm.operands)
    added = product_of.pop("out")
    if norm_of.pop("x") != added or product.dims != norm.dims or _is_read(added, launches[2:]):
        return 0
    operands = {**product_of, **norm_of, "norm": norm_of["weight"], "weight": product_of["weight"]}
    constants = {**dict(product.key.constants), **dict(norm.key.constants)}
    del constants["hidden"]
    first = ("residual_linear", product.name, operands, constants)
    return _undivided(recorder, launches[:3], launches[3:], first, has, samples)


def _norm_parts(recorder: Recorder, launches: Launches, has: HasKernel) -> int:
    """Two, if they are a norm of the residual stream and its only product, with the kernel that other products have."""
    if _ops(launches, 2) not in (("rms_norm", "linear"), ("rms_norm", "gated_linear")):
        return 0
    norm = launches[0]
    first = ("norm_parts", norm.name, dict(norm.operands), dict(norm.key.constants))
    return _undivided(recorder, launches[:2], launches[2:], first, has)


def _added(recorder: Recorder, launches: Launches, has: HasKernel) -> int:
    """Two, if they are a product and its sum with the residual stream, behind which only some rows go on: with the
    kernel that other products have, what that leaves for a next product going nowhere."""
    if _ops(launches, 4) != ("linear", "residual_add", "gather_rows", "rms_norm"):
        return 0
    product, add, _, norm = launches[:4]
    product_of, add_of = dict(product.operands), dict(add.operands)
    added = product_of.pop("out")
    if add_of["x"] != added or product.dims != add.dims or _is_read(added, launches[2:]):
        return 0
    dtype, rows = dict(norm.key.dtypes)["out"], dict(product.dims)["rows"]
    shape = recorder.buffers[add_of["residual"]].shape
    operands = {
        **product_of,
        "residual": add_of["residual"],
        "norm": dict(norm.operands)["weight"],
        "out": recorder.buffer(f"unread_{dtype}", dtype, shape, "workspace"),
        "squares": recorder.buffer("unread_squares", "f32", (rows, ceil_div(int(shape[1]), SHARE)), "workspace"),
    }
    constants = {**dict(product.key.constants), **dict(add.key.constants), "eps": dict(norm.key.constants)["eps"]}
    del constants["hidden"]
    one = recorder.checked(
        "residual_linear", product.name, operands, dict(product.dims), constants, PHASES[PHASE_DECODE]
    )
    return _instead(recorder, launches[:2], [one], has)


def _undivided(
    recorder: Recorder,
    launches: Launches,
    rest: Launches,
    first: tuple[str, str, dict[str, str], Mapping[str, int | float]],
    has: HasKernel,
    samples: Launches = (),
) -> int:
    """How many of `launches`, the last two of which are a norm and its product, were recorded for prefill steps only;
    one more where the product's rows are then turned and appended in one launch with it.

    first: op, name, operands and constants of what leaves undivided rows in their place, but for their squares.
    samples: what samples logits, should the product leave some.
    """
    norm, reader = launches[-2:]
    op, name, operands, constants = first
    reader_of, dims = dict(reader.operands), dict(norm.dims)
    normed, rows = operands["out"], dims["rows"]
    if reader_of["x"] != normed or reader.dims != norm.dims or _is_read(normed, rest):
        return 0
    hidden = int(dict(norm.key.constants)["hidden"])
    squares = "squares" if rows == "n_rows" else "logits_squares"
    operands["squares"] = recorder.buffer(squares, "f32", (rows, ceil_div(hidden, SHARE)), "workspace")
    reader_of["squares"] = squares
    # What is over logits has decode kernels in every step.
    phase = "" if norm.over_logits else PHASES[PHASE_DECODE]
    leaves = recorder.checked(op, name, operands, dims, constants, phase)
    reads = recorder.checked(f"normed_{reader.key.op}", reader.name, reader_of, dims, dict(reader.key.constants), phase)
    appends = _appends(recorder, reads, rest)
    if appends and _instead(recorder, [*launches, rest[0]], [leaves, *appends], has):
        return len(launches) + 1
    if [dict(each.operands)["logits"] for each in samples] == [dict(reads.operands)["out"]]:
        head, sample = (_with_largest(recorder, each) for each in (reads, samples[0]))
        # Of both, whatever the first's answer, as in _instead.
        if _instead(recorder, launches, [leaves, head], lambda key: all([has(key), has(sample.key)])):
            return len(launches)
    return _instead(recorder, launches, [leaves, reads], has)


def _appends(recorder: Recorder, product: Launch, rest: Launches) -> list[Launch]:
    """What stands for a normed_linear and what turns and stores its rows, if that is the first of `rest`, else nothing.

    What RoPE and the cache say of a step's rows is the same in every layer: `_once` leaves it to the first.
    """
    if _ops(rest, 1) != ("rope_kv_append",) or product.key.op != "normed_linear":
        return []
    product_of, rope_of, dims = dict(product.operands), dict(rest[0].operands), dict(rest[0].dims)
    qkv, rows = product_of.pop("out"), dims["rows"]
    if rope_of.pop("qkv") != qkv or rest[0].phase or dict(product.dims)["rows"] != rows or _is_read(qkv, rest[1:]):
        return []
    constants = {**dict(rest[0].key.constants), **dict(product.key.constants)}
    frequencies, half = rope_of["inv_freq"], int(constants["rotary_dim"]) // 2
    operands = {
        **rope_of,
        **product_of,
        "turns": recorder.buffer(f"{frequencies}.turns", "f32", (rows, half, 2), "workspace"),
        "places": recorder.buffer("places", "i32", (rows,), "workspace"),
    }

    def launch(op: str, name: str) -> Launch:
        mine = [operand.name for operand in OPS[op].operands if operand.name in operands]
        of = {dim: dims[dim] for dim in OPS[op].dims}
        known = {constant: constants[constant] for constant in OPS[op].constants}
        return recorder.checked(op, name, {each: operands[each] for each in mine}, of, known, PHASES[PHASE_DECODE])

    return [launch("rope_rows", frequencies), launch("normed_qkv_append", product.name)]


def _once(recorder: Recorder, launches: Launches, has: HasKernel, told: set[Launch]) -> int:
    """One, if it works out what an earlier one has, as another launch."""
    if launches[0].key.op != "rope_rows" or launches[0] not in told:
        told.add(launches[0])
        return 0
    return 1


def _with_largest(recorder: Recorder, launch: Launch) -> Launch:
    """What leaves or samples logits, as the op that of greedy rows leaves or reads the largest of every few."""
    operands, constants = dict(launch.operands), dict(launch.key.constants)
    op = "normed_logits" if launch.key.op == "normed_linear" else "sample_largest"
    rows, columns = recorder.buffers[operands["logits" if op == "sample_largest" else "out"]].shape
    groups = ceil_div(int(columns), OF)
    operands["largest"] = recorder.buffer("largest", "f32", (rows, groups), "workspace")
    operands["largest_id"] = recorder.buffer("largest_id", "i32", (rows, groups), "workspace")
    if op == "normed_logits":
        operands |= {name: f"step.logit_{name}" for name in ("temperature", "adjust", "n_top")}
    return recorder.checked(op, launch.name, operands, dict(launch.dims), constants, launch.phase)


def _sampled(recorder: Recorder, launches: Launches, has: HasKernel, head: Launch) -> int:
    """One, if it samples what normed_logits left."""
    if head.key.op != "normed_logits" or launches[0].key.op != "sample":
        return 0
    recorder.add(_with_largest(recorder, launches[0]))
    return 1


def _ops(launches: Launches, count: int) -> tuple[str, ...]:
    return tuple(launch.key.op for launch in launches[:count])


def _rows(launch: Launch) -> str:
    return dict(launch.dims)["rows"]


def _instead(recorder: Recorder, launches: Launches, new: Launches, has: HasKernel) -> int:
    """Records `new` for the steps that they are of and `launches` for the others, if there are kernels for all of
    `new`. Says for how many launches, 0 if for none."""
    there = [has(launch.key) for launch in new]  # of all, whatever the first's answer: who asks notes what is asked for
    if not all(there):
        return 0
    if new[0].phase:
        for launch in launches:
            recorder.add(dataclasses.replace(launch, phase=PHASES[PHASE_PREFILL]))
    for launch in new:
        recorder.add(launch)
    return len(launches)


def _is_read(buffer: str, launches: Launches) -> bool:
    """Whether what a buffer holds is read before it is written again."""
    for launch in launches:
        if buffer in launch.reads():
            return True
        if buffer in launch.writes():
            return False
    return False

"""Which knob values a kernel is compiled with: measured ones, the cost model's, or the declared ones.

`tuning.toml` in a target's directory (or above it) holds what `python -m atlas.build tune` measured:

    [linear]                                            # every linear of the target
    TILE_M = 16
    [linear.linear_x_bf16_weight_bf16_out_f32__n960__k576]    # this kernel, before the others
    TILE_N = 32
    [linear.linear_x_bf16_weight_bf16_out_f32__n960__k576.decode_8]   # its variant for up to 8 rows, before all
    TILE_N = 16

A variant is called after its phase, its most rows, or both, as far as its file has them: `decode`, `8`, `decode_8`.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Mapping
from typing import Any

from atlas.build import cost_model
from atlas.build.kernel_file import Declaration
from atlas.errors import BuildError
from atlas.runtime.program import KernelKey
from atlas.targets import target as targets
from atlas.targets.hardware import Hardware
from atlas.targets.quant import DTYPE_BYTES
from atlas.targets.target import Target

MOST_THREADS = 1024


@dataclasses.dataclass(frozen=True)
class Chosen:
    """Knob values, and where they come from: "tuned", "cost model" or "declared"."""

    values: dict[str, int]
    source: str


def variant_words(phase: str, max_rows: int) -> list[str]:
    """The name of a variant within its kernel, as a list of none or one: "decode_8", "decode", "8"."""
    words = [word for word in (phase, str(max_rows or "")) if word]
    return ["_".join(words)] if words else []


def names(key: KernelKey, hardware: Hardware, max_rows: int = 0) -> dict[str, int]:
    """What a declaration's expressions know: integer constants, element sizes, the variant's bound, the hardware."""
    constants = {name: value for name, value in key.constants if isinstance(value, int)}
    sizes = {f"size_{operand}": DTYPE_BYTES.get(dtype, 0) for operand, dtype in key.dtypes}
    return {
        **constants,
        **sizes,
        "max_rows": max_rows,
        "multiprocessors": hardware.multiprocessors,
        "shared_memory_per_block": hardware.shared_memory_per_block,
        "cluster_blocks": hardware.cluster_blocks,
        "compute_capability": 10 * hardware.compute_capability[0] + hardware.compute_capability[1],
    }


def variants(declared: Declaration, key: KernelKey, hardware: Hardware, max_rows: int = 0) -> list[dict[str, int]]:
    """Every legal choice of knobs, in the order of the declaration."""
    result = []
    stated = declared.knobs(names(key, hardware, max_rows))
    for values in itertools.product(*declared.choices.values()):
        knobs = {**stated, **dict(zip(declared.choices, values, strict=True))}
        if illegal(declared, key, hardware, knobs, max_rows) is None:
            result.append(knobs)
    return result


def illegal(
    declared: Declaration, key: KernelKey, hardware: Hardware, knobs: Mapping[str, int], max_rows: int = 0
) -> str | None:
    """Why these knob values cannot be, or None."""
    known = names(key, hardware, max_rows)
    broken = declared.violated(known | dict(knobs))
    if broken is not None:
        return f"breaks the rule {broken}"
    geometry = declared.geometry(known, knobs)
    if not 0 < geometry.block <= MOST_THREADS or geometry.block % 32:
        return f"gives {geometry.block} threads per block"
    if geometry.shared > hardware.shared_memory_per_block:
        return f"takes {geometry.shared} bytes of shared memory, the hardware has {hardware.shared_memory_per_block}"
    return None


def choose(declared: Declaration, key: KernelKey, target: Target, max_rows: int = 0) -> Chosen:
    """The knob values of a kernel's variant in `target`.

    Raises:
        BuildError: tuning.toml sets an unknown knob, a value that is no choice, or an illegal combination.
    """
    tuned = _tuned(declared, key, target, max_rows)
    if tuned:
        values = {**declared.knobs(names(key, target.hardware, max_rows)), **tuned}
        reason = illegal(declared, key, target.hardware, values, max_rows)
        if reason is not None:
            raise BuildError(
                f"tuning.toml of {target.name}",
                f"[{declared.op}] for {key.name()} {reason}",
                f"values that {declared.path} calls legal",
                "tune again, or delete the table",
            )
        return Chosen(values, "tuned")
    return untuned(declared, key, target.hardware, max_rows)


def untuned(declared: Declaration, key: KernelKey, hardware: Hardware, max_rows: int = 0) -> Chosen:
    """What is chosen where nothing was measured: by the cost model if the kernel states its cost."""
    known = names(key, hardware, max_rows)
    if declared.choices and declared.cost:
        candidates = variants(declared, key, hardware, max_rows)
        if candidates:
            return Chosen(cost_model.best(declared, known, hardware, candidates), "cost model")
    return Chosen(declared.knobs(known), "declared")


def _tuned(declared: Declaration, key: KernelKey, target: Target, max_rows: int) -> dict[str, int]:
    table: Mapping[str, Any] = targets.tuning(target, declared.op)
    where = f"tuning.toml of {target.name}"
    values: dict[str, Any] = {}
    for name in (key.name(), *variant_words(declared.phase, max_rows), ""):
        values |= {knob: value for knob, value in table.items() if not isinstance(value, dict)}
        table = table.get(name, {})
    for knob, value in values.items():
        if knob not in declared.stated_knobs:
            raise BuildError(where, f"[{declared.op}] sets {knob!r}", ", ".join(declared.stated_knobs) or "no knob")
        accepted = declared.choices.get(knob)
        if type(value) is not int or (accepted is not None and value not in accepted):
            text = ", ".join(map(str, accepted)) if accepted is not None else "an integer"
            raise BuildError(where, f"[{declared.op}] {knob} = {value!r}", text)
    return values

"""Which knob values a kernel is compiled with: measured ones, the cost model's, or the declared ones.

`tuning.toml` in a target's directory (or above it) holds what `python -m atlas.build tune` measured:

    [linear]                                            # every linear of the target
    TILE_M = 16
    [linear.linear_x_bf16_weight_bf16_out_f32__n960__k576]    # this kernel, before the others
    TILE_N = 32
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


def names(key: KernelKey) -> dict[str, int]:
    """What a declaration's expressions know of a kernel: integer constants and element sizes."""
    constants = {name: value for name, value in key.constants if isinstance(value, int)}
    return constants | {f"size_{operand}": DTYPE_BYTES[dtype] for operand, dtype in key.dtypes}


def facts(hardware: Hardware) -> dict[str, int]:
    """What legality rules know of the hardware, beside `names`."""
    return {
        "multiprocessors": hardware.multiprocessors,
        "shared_memory_per_block": hardware.shared_memory_per_block,
    }


def variants(declared: Declaration, key: KernelKey, hardware: Hardware) -> list[dict[str, int]]:
    """Every legal choice of knobs, in the order of the declaration."""
    result = []
    for values in itertools.product(*declared.choices.values()):
        knobs = {**declared.knobs, **dict(zip(declared.choices, values, strict=True))}
        if illegal(declared, key, hardware, knobs) is None:
            result.append(knobs)
    return result


def illegal(declared: Declaration, key: KernelKey, hardware: Hardware, knobs: Mapping[str, int]) -> str | None:
    """Why these knob values cannot be, or None."""
    known = names(key) | facts(hardware)
    broken = declared.violated(known | dict(knobs))
    if broken is not None:
        return f"breaks the rule {broken}"
    _, block, shared = declared.geometry(known, knobs)
    if not 0 < block <= MOST_THREADS or block % 32:
        return f"gives {block} threads per block"
    if shared > hardware.shared_memory_per_block:
        return f"takes {shared} bytes of shared memory, the hardware has {hardware.shared_memory_per_block}"
    return None


def choose(declared: Declaration, key: KernelKey, target: Target) -> Chosen:
    """The knob values of a kernel of `target`.

    Raises:
        BuildError: tuning.toml sets an unknown knob, a value that is no choice, or an illegal combination.
    """
    tuned = _tuned(declared, key, target)
    if tuned:
        values = {**declared.knobs, **tuned}
        reason = illegal(declared, key, target.hardware, values)
        if reason is not None:
            raise BuildError(
                f"tuning.toml of {target.name}",
                f"[{declared.op}] for {key.name()} {reason}",
                f"values that {declared.path} calls legal",
                "tune again, or delete the table",
            )
        return Chosen(values, "tuned")
    return untuned(declared, key, target.hardware)


def untuned(declared: Declaration, key: KernelKey, hardware: Hardware) -> Chosen:
    """What is chosen where nothing was measured: by the cost model if the kernel states its cost."""
    if declared.choices and declared.cost:
        candidates = variants(declared, key, hardware)
        if candidates:
            return Chosen(cost_model.best(declared, names(key), hardware, candidates), "cost model")
    return Chosen(dict(declared.knobs), "declared")


def _tuned(declared: Declaration, key: KernelKey, target: Target) -> dict[str, int]:
    table: Mapping[str, Any] = targets.tuning(target, declared.op)
    where = f"tuning.toml of {target.name}"
    own = table.get(key.name(), {})
    values = {knob: value for knob, value in table.items() if not isinstance(value, dict)} | dict(own)
    for knob, value in values.items():
        if knob not in declared.knobs:
            raise BuildError(where, f"[{declared.op}] sets {knob!r}", ", ".join(declared.knobs) or "no knob")
        accepted = declared.choices.get(knob)
        if type(value) is not int or (accepted is not None and value not in accepted):
            text = ", ".join(map(str, accepted)) if accepted is not None else "an integer"
            raise BuildError(where, f"[{declared.op}] {knob} = {value!r}", text)
    return values

"""The named layouts: which formats each can hold, and how to get one."""

from __future__ import annotations

from collections.abc import Sequence

from atlas.errors import ConfigError
from atlas.quantize.layouts.compressed_tensors import FloatQuantized, IntQuantized, Nvfp4Packed, PackQuantized
from atlas.quantize.layouts.fp8 import Fp8Block
from atlas.quantize.layouts.gptq import Awq, Gptq
from atlas.quantize.layouts.layout import Context, Layout
from atlas.quantize.layouts.modelopt import ModelOptFp8, ModelOptNvfp4

LAYOUTS = {
    "fp8": ("compressed-tensors", "modelopt"),
    "fp8-block": ("fp8", "compressed-tensors"),
    "nvfp4": ("compressed-tensors", "modelopt"),
    "int4": ("compressed-tensors", "gptq", "awq"),
    "int4-awq": ("awq", "compressed-tensors", "gptq"),
    "int8": ("compressed-tensors",),
}
"""Format -> the layouts that can hold it, the usual one first."""

GROUPS = {
    "fp8": ("channel", "tensor"),
    "fp8-block": ("128x128",),
    "nvfp4": ("16",),
    "int4": ("128", "64", "32"),
    "int4-awq": ("128", "64", "32"),
    "int8": ("channel", "128", "64", "32"),
}
"""Format -> what `--group` may be, the usual one first; of int4 the largest that divides every k is usual."""


def make(
    format: str, name: str | None, group: str | None, zero_point: bool, calibrated: bool, columns: Sequence[int]
) -> Layout:
    """The layout called `name`, or the format's usual one.

    Args:
        columns: k of every matrix that may be quantised, which the group of integers should divide.

    Raises:
        ConfigError: a layout or group that the format has not, or a layout that needs calibration.
    """
    name = name or LAYOUTS[format][0]
    if name not in LAYOUTS[format]:
        raise ConfigError("--layout", f"{name} with --format {format}", ", ".join(LAYOUTS[format]))
    tensor = format == "fp8" and name == "modelopt"  # what modelopt calls FP8
    groups = ("tensor",) if tensor else GROUPS[format]
    if group is not None and group not in groups:
        raise ConfigError("--group", f"{group} with --format {format} --layout {name}", ", ".join(groups))
    int4 = format in ("int4", "int4-awq")
    if zero_point and not int4:
        raise ConfigError("--zero-point", f"given with --format {format}", "--format int4 or int4-awq")
    if int4:
        return _int4(name, int(group) if group else _largest(columns), zero_point)
    if format == "int8":
        return IntQuantized() if group in (None, "channel") else PackQuantized(8, int(group))
    if format == "fp8-block":
        return Fp8Block() if name == "fp8" else FloatQuantized("block")
    if format == "nvfp4":
        return Nvfp4Packed() if name == "compressed-tensors" else ModelOptNvfp4(calibrated)
    if not tensor:
        return FloatQuantized(group or "channel")
    if not calibrated:
        fix = "add --calibration FILE, or use --layout compressed-tensors"
        raise ConfigError("--layout", "modelopt's FP8 has static activation scales", "a calibration text", fix)
    return ModelOptFp8()


def _int4(name: str, group: int, zero_point: bool) -> Layout:
    if name == "awq":
        return Awq(group)
    return Gptq(group, not zero_point) if name == "gptq" else PackQuantized(4, group, not zero_point)


def _largest(columns: Sequence[int]) -> int:
    """The largest group that divides every k; if none does, the one that the fewest fail."""
    return min((128, 64, 32), key=lambda group: sum(k % group != 0 for k in columns))


__all__ = ["GROUPS", "LAYOUTS", "Context", "Layout", "make"]

"""The virtual header `atlas/instance.h`: what one instance of a kernel is specialised for.

A kernel source is written once per op. Everything that is fixed for a model reaches it through this
header as compile-time constants, so the compiler unrolls and folds it; nothing else differs between
instances.
"""

from __future__ import annotations

from collections.abc import Mapping

from atlas.errors import BuildError
from atlas.ops import OPS
from atlas.runtime.program import KernelKey
from atlas.targets.formats import FORMATS
from atlas.targets.shape import KV_BLOCK_SIZE

HEADER_NAME = "atlas/instance.h"

CUDA_TYPES = {
    "f32": "float",
    "bf16": "__nv_bfloat16",
    "i32": "int",
    "u32": "unsigned",
    "i64": "long long",
    **dict.fromkeys(FORMATS, "unsigned char"),
}
"""Element type -> its name in CUDA C++. What a block format's bytes mean is for its layout to say."""


def instance_header(
    key: KernelKey, symbol: str, knobs: Mapping[str, int], launch: Mapping[str, int], layouts: Mapping[str, str]
) -> str:
    """The text of `atlas/instance.h`.

    Args:
        key: op, element types and constants of the instance, without those that are arguments.
        symbol: the kernel's name in the device image.
        knobs: tuning values, as declared beside the kernel or overridden by a target.
        launch: threads per block, and what else is known of the launch.
        layouts: of operands that are not row-major.

    Raises:
        BuildError: an element type without a name in CUDA C++.
    """
    op = OPS[key.op]
    constants = [
        f"constexpr float {name} = {float(value)!r}f;"
        if name in op.float_constants
        else f"constexpr int {name} = {value};"
        for name, value in key.constants
    ]
    types, given = [], dict(key.dtypes)
    # For the preprocessor, which sees neither types nor strings: code for what an instance has not may not compile.
    defines = [f"#define ATLAS_TYPE_{name.upper()}_{dtype.upper()} 1" for name, dtype in key.dtypes]
    defines += [f"#define ATLAS_LAYOUT_{name.upper()}_{layout.upper()} 1" for name, layout in sorted(layouts.items())]
    for operand in op.operands:
        dtype = given.get(operand.name, operand.dtypes[0])
        if dtype not in CUDA_TYPES:
            raise BuildError(f"kernel {key.op}", f"operand {operand.name} is {dtype!r}", ", ".join(CUDA_TYPES))
        types.append(f"using {operand.name} = {CUDA_TYPES[dtype]};")
    # One that is left out is a null pointer whose type nobody asks for.
    optional = [
        f"constexpr bool HAS_{operand.name.upper()} = {str(operand.name in given).lower()};"
        for operand in op.operands
        if operand.optional
    ]
    bounds = f"__launch_bounds__({launch['block']}, {launch.get('resident', 1)})"
    lines = [
        "// Written by atlas/build/instance.py.",
        "#pragma once",
        "#include <cuda_bf16.h>",
        *_namespace("constants", constants),
        *_namespace("knobs", [f"constexpr int {name} = {value};" for name, value in sorted(knobs.items())]),
        *_namespace("types", types),
        *optional,
        *_namespace("formats", [f'constexpr char {name}[] = "{dtype}";' for name, dtype in key.dtypes]),
        *_namespace("launch", [f"constexpr int {name} = {value};" for name, value in launch.items()]),
        *_namespace("layout", [f"constexpr int kv_block_size = {KV_BLOCK_SIZE};"]),
        *defines,
        f'#define ATLAS_KERNEL extern "C" __global__ void {bounds} {symbol}',
    ]
    return "\n".join(lines) + "\n"


def _namespace(name: str, lines: list[str]) -> list[str]:
    return [f"namespace {name} {{", *lines, "}"]

"""One quantised weight in every layout, written in NumPy from each layout's description, with its exact values.

Nothing of atlas is used here: bits are set one code at a time, in the order in which each description counts them.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

Pieces = dict[str, np.ndarray]
Rng = np.random.Generator

E2M1 = [0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6]
DTYPES = {
    "float64": "F64",
    "float32": "F32",
    "float16": "F16",
    "bfloat16": "BF16",
    "float8_e4m3fn": "F8_E4M3",
    "float8_e5m2": "F8_E5M2",
    "float8_e8m0fnu": "F8_E8M0",
    "int64": "I64",
    "int32": "I32",
    "int8": "I8",
    "uint8": "U8",
}


@dataclasses.dataclass
class Written:
    """pieces: suffix -> stored array.     values: the float32 matrix [n, k] they stand for."""

    config: dict[str, Any]
    pieces: Pieces
    values: np.ndarray


def groups_of(k: int, size: int) -> np.ndarray:
    """The group of each column."""
    return np.arange(k) // size


def scaled(codes: np.ndarray, scales: np.ndarray) -> np.ndarray:
    """float32 codes times scales, elementwise, rounded once."""
    return (codes.astype(np.float64) * scales.astype(np.float64)).astype(np.float32)


def scales_of(rng: Rng, shape: tuple[int, ...], dtype: Any) -> np.ndarray:
    return rng.uniform(0.001, 0.1, shape).astype(dtype)


def set_bits(codes: np.ndarray, bits: int, slots: Callable[[int], int] = lambda at: at) -> np.ndarray:
    """Codes [r, c] into int32 words [r, ceil(c * bits / 32)], code `at` of a word in slot slots(at), low end first."""
    per_word = 32 // bits
    words = np.zeros((codes.shape[0], -(-codes.shape[1] // per_word)), np.uint32)
    for column in range(codes.shape[1]):
        shift = bits * slots(column % per_word)
        words[:, column // per_word] |= codes[:, column].astype(np.uint32) << np.uint32(shift)
    return words.view(np.int32)


# ---- 4 and 8 bits -------------------------------------------------------------------------------------


def gptq(
    rng: Rng,
    n: int,
    k: int,
    *,
    bits: int = 4,
    group: int = 32,
    sym: bool = False,
    act_order: bool = False,
    v2: bool = False,
    dtype: Any = np.float16,
) -> Written:
    size = k if group == -1 else group
    groups, top = -(-k // size), (1 << bits) - 1
    codes = rng.integers(0, top + 1, (k, n))
    zeros = np.full((groups, n), (top + 1) // 2) if sym else rng.integers(0, top + 1, (groups, n))
    scales = scales_of(rng, (groups, n), dtype)
    index = groups_of(k, size)
    index = rng.permutation(index) if act_order else index
    values = scaled(codes - zeros[index], scales[index]).T
    stored = zeros if v2 else (zeros - 1) & top
    pieces = {
        "qweight": set_bits(codes.T, bits).T,
        "qzeros": set_bits(stored, bits),
        "scales": scales,
        "g_idx": index.astype(np.int32),
    }
    config = {"quant_method": "gptq", "bits": bits, "group_size": group, "desc_act": act_order, "sym": sym}
    return Written({**config, "checkpoint_format": "gptq_v2" if v2 else "gptq"}, pieces, values)


def awq(rng: Rng, n: int, k: int, *, group: int = 32, dtype: Any = np.float16) -> Written:
    size = k if group == -1 else group
    groups = -(-k // size)
    codes, zeros = rng.integers(0, 16, (k, n)), rng.integers(0, 16, (groups, n))
    scales = scales_of(rng, (groups, n), dtype)
    index = groups_of(k, size)
    slot = [0, 2, 4, 6, 1, 3, 5, 7].index  # a word's nibbles, low first, are these columns
    pieces = {"qweight": set_bits(codes, 4, slot), "qzeros": set_bits(zeros, 4, slot), "scales": scales}
    config = {"quant_method": "awq", "bits": 4, "group_size": group, "zero_point": True, "version": "gemm"}
    return Written(config, pieces, scaled(codes - zeros[index], scales[index]).T)


def compressed(
    rng: Rng,
    n: int,
    k: int,
    *,
    bits: int = 4,
    group: int = 32,
    strategy: str = "group",
    sym: bool = True,
    packed: bool = True,
    packed_zeros: bool = True,
    act_order: bool = False,
    dtype: Any = ml_dtypes.bfloat16,
) -> Written:
    """pack-quantized and int-quantized. Codes and zero points are signed; packing adds half the range."""
    size = group if strategy == "group" else k
    shape = (1, 1) if strategy == "tensor" else (n, -(-k // size))
    half = 1 << (bits - 1)
    codes = rng.integers(-half, half, (n, k))
    zeros = np.zeros(shape, np.int64) if sym else rng.integers(-half, half, shape)
    scales = scales_of(rng, shape, dtype)
    index = groups_of(k, size)
    index = rng.permutation(index) if act_order else index
    values = scaled(codes - zeros[:, index], np.broadcast_to(scales[:, index], (n, k)))
    stored: Pieces = {"weight_scale": scales[0] if strategy == "tensor" else scales}
    if packed:
        stored["weight_packed"] = set_bits(codes + half, bits)
        stored["weight_shape"] = np.array([n, k], np.int64)
    else:
        stored["weight"] = codes.astype(np.int8)
    if not sym:
        stored["weight_zero_point"] = set_bits(zeros.T + half, bits).T if packed_zeros else zeros.astype(np.int8)
    if act_order:
        stored["weight_g_idx"] = index.astype(np.int32)
    weights = {"num_bits": bits, "type": "int", "symmetric": sym, "strategy": strategy}
    weights |= {"group_size": group if strategy == "group" else None, "actorder": "group" if act_order else None}
    return Written(compressed_config("pack-quantized" if packed else "int-quantized", weights), stored, values)


def compressed_config(format: str, weights: dict[str, Any], **more: Any) -> dict[str, Any]:
    group = {"targets": ["Linear"], "weights": weights, "input_activations": None, "output_activations": None}
    return {
        "quant_method": "compressed-tensors",
        "format": format,
        "quantization_status": "compressed",
        "config_groups": {"group_0": group},
        "ignore": ["lm_head"],
        **more,
    }


# ---- FP8 ----------------------------------------------------------------------------------------------


def fp8(
    rng: Rng,
    n: int,
    k: int,
    *,
    config: dict[str, Any],
    kind: str,
    suffix: str,
    dtype: Any = np.float32,
    block: tuple[int, int] = (128, 128),
    deep: bool = False,
) -> Written:
    """kind: tensor (0-d), tensor1 ([1]), channel ([n, 1]), channel1 ([n]), block."""
    codes = (rng.standard_normal((n, k)) * 60).astype(ml_dtypes.float8_e4m3fn)
    rows, cols = {"block": block, "channel": (1, k), "channel1": (1, k)}.get(kind, (n, k))
    scales = scales_of(rng, (-(-n // rows), -(-k // cols)), dtype)
    values = scaled(codes, scales[groups_of(n, rows)][:, groups_of(k, cols)])
    shapes = {"tensor": (), "tensor1": (1,), "channel1": (n,)}
    stored = scales.reshape(shapes.get(kind, scales.shape))
    stored = stored[:, None, :, None] if deep else stored
    return Written(config, {"weight": codes, suffix: stored, "input_scale": np.float32([1])}, values)


HF_FP8 = {"quant_method": "fp8", "activation_scheme": "dynamic", "fmt": "e4m3", "modules_to_not_convert": ["lm_head"]}


def float_quantized(strategy: str, **more: Any) -> dict[str, Any]:
    weights = {"num_bits": 8, "type": "float", "symmetric": True, "strategy": strategy, "dynamic": False, **more}
    return compressed_config("float-quantized", weights)


# ---- FP4 ----------------------------------------------------------------------------------------------


def fp4_codes(rng: Rng, n: int, k: int) -> tuple[np.ndarray, np.ndarray]:
    """Packed bytes, low nibble first, and the values of the codes."""
    codes = rng.integers(0, 16, (n, k))
    packed = (codes[:, 0::2] + 16 * codes[:, 1::2]).astype(np.uint8)
    return packed, np.array(E2M1, np.float32)[codes]


def nvfp4(rng: Rng, n: int, k: int, *, modelopt: bool, scalar: bool = True) -> Written:
    packed, values = fp4_codes(rng, n, k)
    scales = rng.uniform(1, 448, (n, k // 16)).astype(ml_dtypes.float8_e4m3fn)
    factor = np.float32(rng.uniform(1e-4, 1e-3))
    wide = scales.astype(np.float32)
    if modelopt:
        total = (wide * factor).astype(np.float32)
        pieces = {"weight": packed, "weight_scale": scales, "weight_scale_2": factor if scalar else factor.reshape(1)}
        config: dict[str, Any] = {"quant_method": "modelopt", "quant_algo": "NVFP4", "ignore": ["lm_head"]}
    else:
        divisor = np.float32(1 / factor)
        total = (wide / divisor).astype(np.float32)
        pieces = {"weight_packed": packed, "weight_scale": scales, "weight_global_scale": divisor.reshape(1)}
        weights = {"num_bits": 4, "type": "float", "strategy": "tensor_group", "group_size": 16, "symmetric": True}
        config = compressed_config("nvfp4-pack-quantized", weights)
    pieces["input_scale" if modelopt else "input_global_scale"] = np.float32(0.5)
    pieces = {name: np.asarray(piece) for name, piece in pieces.items()}
    return Written(config, pieces, values * total[:, groups_of(k, 16)])


def mxfp4(rng: Rng, n: int, k: int) -> Written:
    packed, values = fp4_codes(rng, n, k)
    exponents = rng.integers(110, 130, (n, k // 32)).astype(np.uint8)
    scales = np.ldexp(np.float32(1), exponents.astype(np.int32) - 127)
    weights = {"num_bits": 4, "type": "float", "strategy": "group", "group_size": 32, "symmetric": True}
    config = compressed_config("mxfp4-pack-quantized", weights)
    return Written(
        config, {"weight_packed": packed, "weight_scale": exponents}, scaled(values, scales[:, groups_of(k, 32)])
    )


def mxfp8(rng: Rng, n: int, k: int) -> Written:
    codes = (rng.standard_normal((n, k)) * 60).astype(ml_dtypes.float8_e4m3fn)
    exponents = rng.integers(110, 122, (n, k // 32)).astype(np.uint8)
    scales = np.ldexp(np.float32(1), exponents.astype(np.int32) - 127)
    weights = {"num_bits": 8, "type": "float", "strategy": "group", "group_size": 32, "symmetric": True}
    pieces = {"weight": codes, "weight_scale": exponents}
    return Written(compressed_config("mxfp8-quantized", weights), pieces, scaled(codes, scales[:, groups_of(k, 32)]))


LAYOUTS: dict[str, Callable[[Rng, int, int], Written]] = {
    "gptq": gptq,
    "gptq-act-order": lambda rng, n, k: gptq(rng, n, k, act_order=True),
    "gptq-symmetric": lambda rng, n, k: gptq(rng, n, k, sym=True, group=64),
    "gptq-v2": lambda rng, n, k: gptq(rng, n, k, v2=True, group=-1),
    "gptq-8-bits": lambda rng, n, k: gptq(rng, n, k, bits=8),
    "gptq-8-bits-symmetric": lambda rng, n, k: gptq(rng, n, k, bits=8, sym=True, group=-1),
    "gptq-2-bits-bf16": lambda rng, n, k: gptq(rng, n, k, bits=2, dtype=ml_dtypes.bfloat16),
    "awq": awq,
    "awq-rows-bf16": lambda rng, n, k: awq(rng, n, k, group=-1, dtype=ml_dtypes.bfloat16),
    "int4-group": compressed,
    "int4-group-f16": lambda rng, n, k: compressed(rng, n, k, dtype=np.float16, group=64),
    "int4-zeros": lambda rng, n, k: compressed(rng, n, k, sym=False, dtype=np.float16),
    "int4-zeros-unpacked": lambda rng, n, k: compressed(rng, n, k, sym=False, packed_zeros=False),
    "int4-channel": lambda rng, n, k: compressed(rng, n, k, strategy="channel", dtype=np.float32),
    "int4-act-order": lambda rng, n, k: compressed(rng, n, k, act_order=True, sym=False),
    "int8-packed": lambda rng, n, k: compressed(rng, n, k, bits=8, strategy="channel", dtype=np.float16),
    "int8-packed-zeros": lambda rng, n, k: compressed(rng, n, k, bits=8, sym=False),
    "int8-channel": lambda rng, n, k: compressed(rng, n, k, bits=8, strategy="channel", packed=False),
    "int8-tensor": lambda rng, n, k: compressed(rng, n, k, bits=8, strategy="tensor", packed=False),
    "int8-zeros": lambda rng, n, k: compressed(rng, n, k, bits=8, packed=False, sym=False, packed_zeros=False),
    "fp8-block": lambda rng, n, k: fp8(
        rng, n, k, kind="block", suffix="weight_scale_inv", config={**HF_FP8, "weight_block_size": [128, 128]}
    ),
    "fp8-block-bf16": lambda rng, n, k: fp8(
        rng, n, k, kind="block", suffix="weight_scale_inv", config=HF_FP8, dtype=ml_dtypes.bfloat16
    ),
    "fp8-tensor": lambda rng, n, k: fp8(
        rng, n, k, kind="tensor", suffix="weight_scale", config={**HF_FP8, "activation_scheme": "static"}
    ),
    "fp8-no-config": lambda rng, n, k: fp8(rng, n, k, kind="block", suffix="weight_scale_inv", config={}),
    "fbgemm": lambda rng, n, k: fp8(
        rng, n, k, kind="channel", suffix="weight_scale", config={"quant_method": "fbgemm_fp8"}
    ),
    "fp8-compressed-tensor": lambda rng, n, k: fp8(
        rng, n, k, kind="tensor1", suffix="weight_scale", config=float_quantized("tensor"), dtype=ml_dtypes.bfloat16
    ),
    "fp8-compressed-channel": lambda rng, n, k: fp8(
        rng, n, k, kind="channel", suffix="weight_scale", config=float_quantized("channel"), dtype=ml_dtypes.bfloat16
    ),
    "fp8-compressed-block": lambda rng, n, k: fp8(
        rng,
        n,
        k,
        kind="block",
        block=(64, 128),
        suffix="weight_scale",
        config=float_quantized("block", block_structure=[64, 128]),
    ),
    "fp8-modelopt": lambda rng, n, k: fp8(
        rng, n, k, kind="tensor", suffix="weight_scale", config={"quant_method": "modelopt", "quant_algo": "FP8"}
    ),
    "fp8-modelopt-channel": lambda rng, n, k: fp8(
        rng,
        n,
        k,
        kind="channel1",
        suffix="weight_scale",
        config={"quant_method": "modelopt", "quant_algo": "FP8_PER_CHANNEL_PER_TOKEN"},
    ),
    "fp8-modelopt-block": lambda rng, n, k: fp8(
        rng,
        n,
        k,
        kind="block",
        deep=True,
        suffix="weight_scale",
        config={"quant_method": "modelopt", "quant_algo": "FP8_PB_WO"},
    ),
    "nvfp4-modelopt": lambda rng, n, k: nvfp4(rng, n, k, modelopt=True),
    "nvfp4-modelopt-1d": lambda rng, n, k: nvfp4(rng, n, k, modelopt=True, scalar=False),
    "nvfp4-compressed": lambda rng, n, k: nvfp4(rng, n, k, modelopt=False),
    "mxfp4-compressed": mxfp4,
    "mxfp8-compressed": mxfp8,
}
"""Every layout: rng, n, k -> what is written. n and k are multiples of 32."""


def write(folder: Path, tensors: Pieces, config: dict[str, Any], **quantization: Any) -> Path:
    """A model directory that holds exactly these tensors; bytes laid out by hand, so that any dtype may be used."""
    folder.mkdir(parents=True, exist_ok=True)
    stated = {"quantization_config": quantization} if quantization else {}
    (folder / "config.json").write_text(json.dumps({**config, **stated}))
    header, data = {}, b""
    for name, array in tensors.items():
        raw = np.ascontiguousarray(array).tobytes()
        offsets = [len(data), len(data) + len(raw)]
        header[name] = {"dtype": DTYPES[array.dtype.name], "shape": list(array.shape), "data_offsets": offsets}
        data += raw
    text = json.dumps(header).encode()
    (folder / "model.safetensors").write_bytes(len(text).to_bytes(8, "little") + text + data)
    return folder


def write_model(folder: Path, layout: str, config: dict[str, Any], tensors: Pieces, seed: int) -> Pieces:
    """A model whose projections are stored in `layout`, their values drawn anew. Returns all float values."""
    rng = np.random.default_rng(seed)
    stored: Pieces = {}
    values: Pieces = {}
    stated: dict[str, Any] = {}
    for name, array in tensors.items():
        module = name.removesuffix(".weight")
        if not module.endswith("_proj"):
            stored[name] = values[name] = array
            continue
        written = LAYOUTS[layout](rng, *array.shape)
        stated, values[name] = written.config, written.values
        stored |= {f"{module}.{piece}": part for piece, part in written.pieces.items()}
    write(folder, stored, config, **stated)
    return values

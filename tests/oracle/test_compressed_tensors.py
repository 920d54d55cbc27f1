"""Checkpoints that the `compressed-tensors` package compresses read to exactly what the package decompresses.

Needs the `oracle` extra.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from atlas.weights import open_checkpoint

pytestmark = pytest.mark.oracle
torch = pytest.importorskip("torch")
quantization = pytest.importorskip("compressed_tensors.quantization")

NAME = "model.layers.0.self_attn.q_proj"

WEIGHTS: dict[str, tuple[str, dict[str, Any]]] = {
    "int4-group": ("pack-quantized", {"num_bits": 4, "strategy": "group", "group_size": 32}),
    "int4-group-zeros": (
        "pack-quantized",
        {"num_bits": 4, "strategy": "group", "group_size": 64, "symmetric": False},
    ),
    "int4-channel": ("pack-quantized", {"num_bits": 4, "strategy": "channel"}),
    "int4-channel-zeros": ("pack-quantized", {"num_bits": 4, "strategy": "channel", "symmetric": False}),
    "int8-packed": ("pack-quantized", {"num_bits": 8, "strategy": "group", "group_size": 32, "symmetric": False}),
    "int2": ("pack-quantized", {"num_bits": 2, "strategy": "group", "group_size": 32}),
    "int8-channel": ("int-quantized", {"num_bits": 8, "strategy": "channel"}),
    "int8-tensor": ("int-quantized", {"num_bits": 8, "strategy": "tensor"}),
    "fp8-tensor": ("float-quantized", {"num_bits": 8, "type": "float", "strategy": "tensor"}),
    "fp8-channel": ("float-quantized", {"num_bits": 8, "type": "float", "strategy": "channel"}),
    "fp8-block": (
        "float-quantized",
        {"num_bits": 8, "type": "float", "strategy": "block", "block_structure": [128, 128]},
    ),
    "nvfp4": ("nvfp4-pack-quantized", {"num_bits": 4, "type": "float", "strategy": "tensor_group", "group_size": 16}),
    "mxfp4": ("mxfp4-pack-quantized", {"num_bits": 4, "type": "float", "strategy": "group", "group_size": 32}),
    "mxfp8": ("mxfp8-quantized", {"num_bits": 8, "type": "float", "strategy": "group", "group_size": 32}),
}


def parameters(rows: int, columns: int, weights: Any) -> dict[str, Any]:
    """A random weight with random scales, zero points and global scale of its scheme's shapes."""
    generator = torch.Generator().manual_seed(int(np.random.default_rng().integers(1 << 31)))
    group = weights.group_size or columns
    shape = {
        "tensor": (1,),
        "channel": (rows, 1),
        "block": (-(-rows // 128), -(-columns // 128)),
    }.get(weights.strategy, (rows, columns // group))
    state = {
        "weight": torch.randn(rows, columns, generator=generator),
        "weight_scale": torch.rand(shape, generator=generator) * 0.2 + 0.1,
    }
    if not weights.symmetric:
        half = 1 << (weights.num_bits - 1)
        state["weight_zero_point"] = torch.randint(-half, half, shape, generator=generator).to(torch.int8)
    if weights.strategy == "tensor_group":
        state["weight_scale"] = (state["weight_scale"] * 400).to(torch.float8_e4m3fn).float()
        state["weight_global_scale"] = torch.rand(1, generator=generator) * 300 + 100
    if weights.type == "float" and weights.group_size == 32:
        state["weight_scale"] = torch.exp2(torch.randint(-5, 3, shape, generator=generator).float())
    return state


def decompressed(compressor: Any, stored: dict[str, Any], scheme: Any) -> Any:
    """float32 values, by the package; its NVFP4 in float32 too, where its own call would round to bfloat16."""
    if "weight_global_scale" not in stored:
        return compressor.decompress(dict(stored), scheme)["weight"].float()
    from compressed_tensors.compressors.nvfp4.helpers import unpack_fp4_from_uint8
    from compressed_tensors.quantization.lifecycle.forward import dequantize

    rows, half = stored["weight_packed"].shape
    return dequantize(
        unpack_fp4_from_uint8(stored["weight_packed"], rows, 2 * half).float(),
        scale=stored["weight_scale"].float(),
        args=scheme.weights,
        global_scale=stored["weight_global_scale"],
        dtype=torch.float32,
    )


@pytest.mark.parametrize("rows, columns", [(192, 256), (320, 576)])
@pytest.mark.parametrize("name", WEIGHTS)
def test_reads_what_the_package_writes(name: str, rows: int, columns: int, tmp_path: Path) -> None:
    from compressed_tensors.compressors import BaseCompressor
    from safetensors.torch import save_file

    format, arguments = WEIGHTS[name]
    scheme = quantization.QuantizationScheme(
        targets=["Linear"], weights=quantization.QuantizationArgs(**arguments), format=format
    )
    compressor = BaseCompressor.get_value_from_registry(format)
    stored = compressor.compress(parameters(rows, columns, scheme.weights), scheme)
    save_file(
        {f"{NAME}.{piece}": array.contiguous() for piece, array in stored.items()}, tmp_path / "model.safetensors"
    )
    config = quantization.QuantizationConfig(
        config_groups={"group_0": scheme}, format=format, quantization_status="compressed", ignore=["lm_head"]
    )
    text = json.dumps({"quantization_config": config.model_dump(mode="json")})
    (tmp_path / "config.json").write_text(text)
    expected = decompressed(compressor, stored, scheme).numpy()
    with open_checkpoint(tmp_path) as checkpoint:
        np.testing.assert_array_equal(checkpoint.read(f"{NAME}.weight"), expected)
        np.testing.assert_array_equal(checkpoint.read(f"{NAME}.weight", slice(40, 73)), expected[40:73])

"""Checkpoints that `atlas.quantize` writes, decompressed by the `compressed-tensors` package and loaded by
transformers, hold exactly what Atlas reads from them. Needs the `oracle` extra.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from atlas.quantize.job import Options, run
from atlas.weights import open_checkpoint
from tests.quantize.conftest import write_model

pytestmark = pytest.mark.oracle
torch = pytest.importorskip("torch")
pytest.importorskip("compressed_tensors")

CASES = {
    "int4": Options("int4"),
    "int4-zeros": Options("int4", group="32", zero_point=True),
    "int8": Options("int8"),
    "int8-groups": Options("int8", group="64"),
    "fp8": Options("fp8"),
    "fp8-tensor": Options("fp8", group="tensor"),
    "fp8-block": Options("fp8-block", "compressed-tensors"),
    "nvfp4": Options("nvfp4"),
}


@pytest.mark.parametrize("name", CASES)
def test_the_package_decompresses_what_atlas_reads(name: str, tmp_path: Path) -> None:
    from compressed_tensors.compressors import BaseCompressor
    from compressed_tensors.quantization import QuantizationConfig
    from safetensors.torch import load_file

    model = write_model(tmp_path / "model", seed=int(np.random.default_rng().integers(1 << 30)))
    with open_checkpoint(model) as checkpoint:
        run(checkpoint, tmp_path / "out", CASES[name])
    stated = json.loads((tmp_path / "out" / "config.json").read_text())["quantization_config"]
    scheme = QuantizationConfig.model_validate(stated).config_groups["group_0"]
    compressor = BaseCompressor.get_value_from_registry(stated["format"])
    tensors = load_file(tmp_path / "out" / "model.safetensors")
    with open_checkpoint(tmp_path / "out") as written:
        modules = {key.rpartition(".")[0] for key in tensors if key.rpartition(".")[0].endswith("_proj")}
        assert len(modules) == 14
        for module in modules:
            parts: dict[str, Any] = {
                key.rpartition(".")[2]: value for key, value in tensors.items() if key.startswith(f"{module}.")
            }
            if "weight_scale" in parts and parts["weight_scale"].dtype == torch.float16:
                parts["weight_scale"] = parts["weight_scale"].float()  # so that the package computes in float32
            values = compressor.decompress(parts, scheme)["weight"].float().numpy()
            expected = np.asarray(written.read(f"{module}.weight"), np.float32)
            # The package gives NVFP4 in bfloat16.
            rtol = 2.0**-8 if name == "nvfp4" else 0.0
            np.testing.assert_allclose(values, expected, rtol=rtol, atol=0, err_msg=module)


@pytest.mark.parametrize("name", ["int4", "int4-zeros", "int8-groups", "fp8"])
def test_transformers_computes_the_same_logits(name: str, tmp_path: Path) -> None:
    """The whole model, loaded by transformers from the quantised folder and from its dequantised weights."""
    from transformers import AutoModelForCausalLM, CompressedTensorsConfig

    model = write_model(tmp_path / "model", seed=int(np.random.default_rng().integers(1 << 30)), model_type="llama")
    with open_checkpoint(model) as checkpoint:
        run(checkpoint, tmp_path / "out", CASES[name])
    plain = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    with open_checkpoint(tmp_path / "out") as written:
        state = {key: torch.from_numpy(np.asarray(written.read(key), np.float32)) for key in written.tensors}
    plain.load_state_dict(state, strict=True)
    dequantise = CompressedTensorsConfig(dequantize=True)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype=torch.float32, quantization_config=dequantise)
    ids = torch.randint(0, 300, (1, 24))
    with torch.no_grad():
        expected, actual = plain(ids).logits, loaded(ids).logits
    # transformers dequantises in the scale's dtype, float16: exact for codes of 4 bits, one rounding for wider ones.
    bound = 1e-5 if name in ("int4", "fp8") else 2.0**-10
    assert float((actual - expected).norm() / expected.norm()) < bound

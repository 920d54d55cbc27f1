"""Every layout: what is written, read by independent readers and by Atlas, is exactly what the quantisers made."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from atlas.errors import ConfigError
from atlas.quantize import layouts
from atlas.quantize.job import REPORT, Options, run
from atlas.weights import open_checkpoint
from atlas.weights.quantized import QuantizedArray
from atlas.weights.quantizers import quantize_fp8, quantize_int4, quantize_int8, quantize_nvfp4
from atlas.weights.safetensors import DTYPES
from tests.quantize import readers

Array = np.ndarray[Any, Any]
SCALES = "f16+bf16"

# fmt: off
CASES = {
    ("int4", "compressed-tensors", None, False): (
        readers.pack_quantized,
        lambda w: quantize_int4(w, 64, "symmetric", SCALES),
    ),
    ("int4", "compressed-tensors", "32", True): (
        readers.pack_quantized,
        lambda w: quantize_int4(w, 32, "zero", SCALES),
    ),
    ("int4", "gptq", "64", False): (readers.gptq, lambda w: quantize_int4(w, 64, "symmetric", SCALES)),
    ("int4", "gptq", "32", True): (readers.gptq, lambda w: quantize_int4(w, 32, "zero", SCALES)),
    ("int4", "awq", None, False): (readers.awq, lambda w: quantize_int4(w, 64, "zero", SCALES)),
    ("int8", None, None, False): (readers.scaled, lambda w: quantize_int8(w, 0, SCALES)),
    ("int8", None, "32", False): (readers.pack_quantized8, lambda w: quantize_int8(w, 32, SCALES)),
    ("fp8", None, None, False): (readers.scaled, lambda w: quantize_fp8(w, (1, 0))),
    ("fp8-block", None, None, False): (readers.blocks, lambda w: quantize_fp8(w, (128, 128))),
    ("fp8-block", "compressed-tensors", None, False): (readers.blocks, lambda w: quantize_fp8(w, (128, 128))),
    # Scales per tensor, which fused matrices share: judged by the matrices that stand alone, and below.
    ("fp8", None, "tensor", False): (readers.scaled, lambda w: quantize_fp8(w, (0, 0))),
    ("nvfp4", None, None, False): (readers.nvfp4, lambda w: quantize_nvfp4(w, reciprocal=True)),
    ("nvfp4", "modelopt", None, False): (readers.nvfp4, lambda w: quantize_nvfp4(w)),
}
# fmt: on
Case = tuple[str, str | None, str | None, bool]


def stored(folder: Path) -> dict[str, Array]:
    """Every tensor of every file, by a reader of its own: header, offsets, bytes."""
    tensors: dict[str, Array] = {}
    for path in sorted(folder.glob("*.safetensors")):
        raw = path.read_bytes()
        start = 8 + int.from_bytes(raw[:8], "little")
        for name, entry in json.loads(raw[8:start]).items():
            if name != "__metadata__":
                begin, end = entry["data_offsets"]
                dtype = np.dtype(DTYPES[entry["dtype"]])
                assert begin % dtype.itemsize == 0, name
                tensors[name] = np.frombuffer(raw[start + begin : start + end], dtype).reshape(entry["shape"])
    return tensors


def modules(tensors: dict[str, Array], config: dict[str, Any]) -> dict[str, dict[str, Array]]:
    """Tensors of each quantised module."""
    result: dict[str, dict[str, Array]] = {}
    for name, values in tensors.items():
        module, _, part = name.rpartition(".")
        if module.endswith("_proj") and part != "bias":
            result.setdefault(module, {})[part] = values
    return result


@pytest.mark.parametrize("case", CASES, ids=lambda case: "-".join(str(part) for part in case))
def test_written_values_are_exactly_the_quantisers(case: Case, model: Path, tmp_path: Path) -> None:
    reader, quantizer = CASES[case]
    format, layout, group, zero_point = case
    output = tmp_path / "out"
    with open_checkpoint(model) as checkpoint:
        run(checkpoint, output, Options(format, layout, group, zero_point))
        tensors, config = stored(output), json.loads((output / "config.json").read_text())
        quantised = modules(tensors, config)
        assert len(quantised) == 7 * config["num_hidden_layers"]
        shares = format == "nvfp4" or group == "tensor"
        for module, parts in quantised.items():
            values = np.asarray(checkpoint.read(f"{module}.weight"), np.float32)
            if shares and not module.endswith(("o_proj", "down_proj")):
                continue
            array: QuantizedArray = quantizer(values)
            np.testing.assert_array_equal(reader(parts), array.dequantize(), err_msg=module)
        with open_checkpoint(output) as written:
            assert written.tensors.keys() == checkpoint.tensors.keys()
            for module, parts in quantised.items():
                np.testing.assert_array_equal(written.read(f"{module}.weight"), reader(parts), err_msg=module)
        for name in checkpoint.tensors:
            if not name.removesuffix(".weight").endswith("_proj"):
                assert tensors[name].dtype == ml_dtypes.bfloat16
                np.testing.assert_array_equal(tensors[name], checkpoint.read(name))
    with open_checkpoint(output) as written:  # and Atlas reads what it wrote
        assert set(written.tensors) == {f"{module}.weight" for module in quantised} | set(tensors) - {
            f"{module}.{part}" for module, parts in quantised.items() for part in parts
        }
        for module, parts in quantised.items():
            # Dividing by the stored global scale and multiplying by its reciprocal may differ in the last bit.
            rtol = 2**-22 if "weight_global_scale" in parts else 0
            np.testing.assert_allclose(written.read(f"{module}.weight"), reader(parts), rtol=rtol, atol=0)
    assert config["quantization_config"]["quant_method"] in ("compressed-tensors", "gptq", "awq", "fp8", "modelopt")


@pytest.mark.parametrize(
    "layout, name", [("compressed-tensors", "weight_global_scale"), ("modelopt", "weight_scale_2")]
)
def test_matrices_that_engines_join_share_their_global_scale(
    layout: str, name: str, model: Path, tmp_path: Path
) -> None:
    with open_checkpoint(model) as checkpoint:
        run(checkpoint, tmp_path / "out", Options("nvfp4", layout))
        tensors = stored(tmp_path / "out")
        for joined in (("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"), ("mlp.gate_proj", "mlp.up_proj")):
            scales = {float(np.ravel(tensors[f"model.layers.1.{module}.{name}"])[0]) for module in joined}
            assert len(scales) == 1
            largest = max(float(np.abs(checkpoint.read(f"model.layers.1.{module}.weight")).max()) for module in joined)
            expected = largest / 2688 if layout == "modelopt" else 2688 / largest
            assert scales.pop() == pytest.approx(expected, rel=1e-6)
        for module in ("self_attn.q_proj", "mlp.up_proj"):
            parts = {part: tensors[f"model.layers.0.{module}.{part}"] for part in ("weight_scale", name)}
            packed = "weight" if layout == "modelopt" else "weight_packed"
            values = readers.nvfp4({**parts, packed: tensors[f"model.layers.0.{module}.{packed}"]})
            original = np.asarray(checkpoint.read(f"model.layers.0.{module}.weight"), np.float32)
            assert np.linalg.norm(values - original) < 0.12 * np.linalg.norm(original)


def test_what_the_report_says_is_so(model: Path, tmp_path: Path) -> None:
    with open_checkpoint(model) as checkpoint:
        run(checkpoint, tmp_path / "out", Options("int8", group="64"))
        report = json.loads((tmp_path / "out" / REPORT).read_text())
        parts = modules(stored(tmp_path / "out"), {})
        for tensor, said in report["tensors"].items():
            values = np.asarray(checkpoint.read(tensor), np.float64)
            difference = readers.pack_quantized8(parts[tensor.removesuffix(".weight")]) - values
            assert said["relative_l2"] == pytest.approx(np.linalg.norm(difference) / np.linalg.norm(values), rel=1e-6)
            assert said["max_abs"] == pytest.approx(np.abs(difference).max(), rel=1e-6)
            stored_bits = 8 * sum(array.nbytes for array in parts[tensor.removesuffix(".weight")].values())
            assert said["bits"] == pytest.approx(stored_bits / values.size)
    assert report["summary"]["quantised_tensors"] == 14
    assert report["kept"] == {"lm_head": "the head"}


@pytest.mark.parametrize(
    "options, field",
    [
        (Options("int4", "modelopt"), "--layout"),
        (Options("int4", group="128x128"), "--group"),
        (Options("int8", zero_point=True), "--zero-point"),
        (Options("fp8", "modelopt"), "--layout"),
        (Options("int4-awq"), "--calibration"),
        (Options("int4", calibration="a text"), "--calibration"),
        (Options("int4", group="128"), "--group"),
        (Options("nvfp4", ignore=("*",)), "--format"),
    ],
)
def test_options_that_do_not_go_together(options: Options, field: str, model: Path, tmp_path: Path) -> None:
    with open_checkpoint(model) as checkpoint, pytest.raises(ConfigError) as caught:
        run(checkpoint, tmp_path / "out", options)
    assert caught.value.where == field
    assert list(tmp_path.iterdir()) == []


def test_group_is_the_largest_that_divides_every_k() -> None:
    def group(columns: list[int]) -> int:
        return layouts.make("int4", None, None, False, False, columns).group  # type: ignore[attr-defined]

    assert group([128, 256]) == 128
    assert group([576, 1536]) == 64
    assert group([96, 128]) == 32
    assert group([100, 128]) == 128  # nothing divides 100: that matrix is kept, the others get the usual group

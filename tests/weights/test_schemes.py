"""Quantised safetensors: every layout reads to exactly its values, whole and by rows; lies are refused by name."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from atlas.errors import CheckpointError
from atlas.targets.formats import FORMATS
from atlas.weights import open_checkpoint
from atlas.weights.checkpoint import Checkpoint
from atlas.weights.quantized import BlockArray, to_rows
from tests.weights.quantized_files import (
    LAYOUTS,
    Pieces,
    Written,
    awq,
    compressed,
    compressed_config,
    float_quantized,
    gptq,
    nvfp4,
    write,
)

PLAIN = {"architectures": ["LlamaForCausalLM"], "model_type": "llama"}
NAME = "model.layers.0.self_attn.q_proj"

EXACT_FORMATS = {
    "gptq": "i4g32z",
    "gptq-act-order": None,
    "gptq-symmetric": "i4g32",
    "gptq-v2": "i4g32z",
    "gptq-8-bits": None,
    "gptq-8-bits-symmetric": "i8g32",
    "gptq-2-bits-bf16": "i4g32f",
    "awq": "i4g32z",
    "awq-rows-bf16": "i4g32f",
    "int4-group": "i4g32b",
    "int4-group-f16": "i4g32",
    "int4-zeros": "i4g32z",
    "int4-zeros-unpacked": "i4g32f",
    "int4-channel": "i4g32f",
    "int4-act-order": None,
    "int8-packed": "i8g32",
    "int8-packed-zeros": None,
    "int8-channel": "i8g32f",
    "int8-tensor": "i8g32f",
    "int8-zeros": None,
    "fp8-block": "f8g128",
    "fp8-block-bf16": "f8g128",
    "fp8-tensor": "f8",
    "fp8-no-config": "f8g128",
    "fbgemm": "f8",
    "fp8-compressed-tensor": "f8",
    "fp8-compressed-channel": "f8",
    "fp8-compressed-block": "f8g128",
    "fp8-modelopt": "f8",
    "fp8-modelopt-channel": "f8",
    "fp8-modelopt-block": "f8g128",
    "nvfp4-modelopt": "nvfp4",
    "nvfp4-modelopt-1d": "nvfp4",
    "nvfp4-compressed": "nvfp4",
    "mxfp4-compressed": None,
    "mxfp8-compressed": None,
}
"""The smallest block format that holds a layout."""


def opened(folder: Path, written: Written, name: str = NAME, **more: np.ndarray) -> Checkpoint:
    tensors: Pieces = {"model.norm.weight": np.ones(4, np.float32), **more}
    tensors |= {f"{name}.{piece}": array for piece, array in written.pieces.items()}
    return open_checkpoint(write(folder, tensors, PLAIN, **written.config))


@pytest.mark.parametrize("n, k", [(320, 576), (64, 96), (32, 32)])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_reads_to_exactly_its_values(layout: str, n: int, k: int, tmp_path: Path) -> None:
    """Partial edges: 320 and 576 are no multiples of 128, 96 none of 64."""
    written = LAYOUTS[layout](np.random.default_rng(), n, k)
    with opened(tmp_path / "m", written) as checkpoint:
        assert set(checkpoint.tensors) == {"model.norm.weight", f"{NAME}.weight"}
        info = checkpoint.tensors[f"{NAME}.weight"]
        assert info.shape == (n, k) and info.scheme is not None
        assert checkpoint.tensors["model.norm.weight"].scheme is None
        whole = checkpoint.read(info.name)
        assert whole.dtype == np.float32
        np.testing.assert_array_equal(whole, written.values)
        format = info.scheme.block_format()
        # One group whose columns are permuted is one group.
        trivial = layout.endswith("act-order") and k == 32
        assert trivial or format == EXACT_FORMATS[layout]
        for rows in (slice(0, 16), slice(16, n), slice(5, 27), slice(n - 1, None), slice(7, 7)):
            np.testing.assert_array_equal(checkpoint.read(info.name, rows), written.values[rows])
            array = checkpoint.read_quantized(info.name, rows)
            np.testing.assert_array_equal(array.dequantize(), written.values[rows])
            if format is not None:
                stored = BlockArray(to_rows(array, format), FORMATS[format], k)
                # Under float32 scales a zero point as a minimum rounds once more, as does a divisor as a factor.
                atol = 1e-6 if layout == "int4-channel" else 0
                rtol = 2.0**-22 if layout == "nvfp4-compressed" else 0
                np.testing.assert_allclose(stored.astype(np.float32), written.values[rows], rtol, atol)
        with pytest.raises(CheckpointError, match="a quantised tensor"):
            checkpoint.read_quantized("model.norm.weight")


def test_scheme_says_what_the_array_holds(tmp_path: Path) -> None:
    for number, (layout, make) in enumerate(LAYOUTS.items()):
        with opened(tmp_path / str(number), make(np.random.default_rng(), 128, 256)) as checkpoint:
            scheme = checkpoint.tensors[f"{NAME}.weight"].scheme
            array = checkpoint.read_quantized(f"{NAME}.weight")
            assert scheme is not None
            assert array.code == scheme.code, layout
            assert array.group == (scheme.group[0] or 128, scheme.group[1] or 256), layout
            assert (array.group_index is not None) == scheme.act_order, layout
            assert (array.global_scale != 1) == scheme.global_scale, layout
            if not scheme.zero:
                assert array.zeros is None if scheme.bias == 0 else (array.zeros == scheme.bias).all(), layout


def test_columns_that_fill_no_whole_word_or_group(tmp_path: Path) -> None:
    """compressed-tensors packs any k: weight_shape says how many codes of the last word count."""
    for n, k, more in ((5, 70, {}), (5, 70, {"sym": False}), (3, 45, {"strategy": "channel"})):
        written = compressed(np.random.default_rng(), n, k, **more)
        with opened(tmp_path / f"{k}{len(more)}", written) as checkpoint:
            np.testing.assert_array_equal(checkpoint.read(f"{NAME}.weight"), written.values)
            np.testing.assert_array_equal(checkpoint.read(f"{NAME}.weight", slice(1, 3)), written.values[1:3])


def test_gptq_without_group_index(tmp_path: Path) -> None:
    written = gptq(np.random.default_rng(), 64, 128)
    del written.pieces["g_idx"]
    np.testing.assert_array_equal(opened(tmp_path, written).read(f"{NAME}.weight"), written.values)


def test_gptq_in_act_order_needs_its_group_index(tmp_path: Path) -> None:
    written = gptq(np.random.default_rng(), 64, 128, act_order=True)
    del written.pieces["g_idx"]
    with pytest.raises(CheckpointError, match=r"q_proj\.g_idx is missing although desc_act is true"):
        opened(tmp_path, written)


@pytest.mark.parametrize("shape", [(), (1,), (1, 1)])
@pytest.mark.parametrize("modelopt", [True, False])
def test_a_global_scale_is_one_number_of_any_rank(tmp_path: Path, shape: tuple[int, ...], modelopt: bool) -> None:
    written = nvfp4(np.random.default_rng(), 32, 64, modelopt=modelopt)
    name = "weight_scale_2" if modelopt else "weight_global_scale"
    written.pieces[name] = written.pieces[name].reshape(shape)
    np.testing.assert_array_equal(opened(tmp_path, written).read(f"{NAME}.weight"), written.values)


def test_gptq_overrides_by_name(tmp_path: Path) -> None:
    """GPTQModel's `dynamic`: some modules with other bits, some not quantised."""
    rng = np.random.default_rng()
    four, eight = gptq(rng, 64, 128), gptq(rng, 64, 128, bits=8, group=64)
    plain = rng.standard_normal((8, 8)).astype(np.float32)
    four.config["dynamic"] = {"-:.*o_proj": {}, r"+:.*\.1\..*": {"bits": 8, "group_size": 64}}
    other = "model.layers.1.self_attn.q_proj"
    more = {f"{other}.{piece}": array for piece, array in eight.pieces.items()}
    checkpoint = opened(tmp_path, four, **more, **{"model.layers.0.self_attn.o_proj.weight": plain})
    np.testing.assert_array_equal(checkpoint.read(f"{NAME}.weight"), four.values)
    np.testing.assert_array_equal(checkpoint.read(f"{other}.weight"), eight.values)
    np.testing.assert_array_equal(checkpoint.read("model.layers.0.self_attn.o_proj.weight"), plain)


@pytest.mark.parametrize("place", ["config.json", "hf_quant_config.json"])
def test_modelopt_mixed_by_layer(place: str, tmp_path: Path) -> None:
    rng = np.random.default_rng()
    four = nvfp4(rng, 64, 128, modelopt=True)
    eight = LAYOUTS["fp8-modelopt"](rng, 64, 128)
    layers = {NAME: {"quant_algo": "NVFP4", "group_size": 16}, "model.layers.0.mlp.up_proj": {"quant_algo": "FP8"}}
    config = {"quant_algo": "MIXED_PRECISION", "quantized_layers": layers}
    tensors = {f"{NAME}.{piece}": array for piece, array in four.pieces.items()}
    tensors |= {f"model.layers.0.mlp.up_proj.{piece}": array for piece, array in eight.pieces.items()}
    tensors["model.layers.0.mlp.down_proj.weight"] = np.ones((4, 4), ml_dtypes.bfloat16)
    tensors["model.layers.0.self_attn.k_proj.k_scale"] = np.ones((), np.float32)
    folder = write(
        tmp_path, tensors, PLAIN, **({"quant_method": "modelopt", **config} if place == "config.json" else {})
    )
    if place != "config.json":
        (folder / place).write_text(json.dumps({"producer": {"name": "modelopt"}, "quantization": config}))
    with open_checkpoint(folder) as checkpoint:
        np.testing.assert_array_equal(checkpoint.read(f"{NAME}.weight"), four.values)
        np.testing.assert_array_equal(checkpoint.read("model.layers.0.mlp.up_proj.weight"), eight.values)
        assert set(checkpoint.tensors) == {
            f"{NAME}.weight",
            "model.layers.0.mlp.up_proj.weight",
            "model.layers.0.mlp.down_proj.weight",
        }


@pytest.mark.parametrize(
    "excluded", [["model.layers.0.mlp*"], ["*.up_proj"], ["model.layers.0.mlp"], ["model.layers.?.mlp.up_proj"]]
)
def test_modelopt_leaves_out_by_wildcard(excluded: list[str], tmp_path: Path) -> None:
    written = nvfp4(np.random.default_rng(), 64, 128, modelopt=True)
    written.config["ignore"] = excluded
    plain = {"model.layers.0.mlp.up_proj.weight": np.ones((4, 4), ml_dtypes.bfloat16)}
    assert len(opened(tmp_path, written, **plain).tensors) == 3


def test_compressed_groups_by_name_pattern_and_class(tmp_path: Path) -> None:
    rng = np.random.default_rng()
    four, eight = compressed(rng, 64, 128), LAYOUTS["fp8-compressed-channel"](rng, 64, 128)
    weights = four.config["config_groups"]["group_0"]["weights"]
    eights = eight.config["config_groups"]["group_0"]["weights"]
    config = compressed_config(
        "mixed-precision",
        weights,
        config_groups={
            "a": {"targets": ["Linear"], "weights": weights, "format": "pack-quantized"},
            "b": {"targets": [r"re:.*mlp\.(up|gate)_proj"], "weights": eights, "format": "float-quantized"},
        },
        ignore=["lm_head", r"re:.*\.1\..*"],
    )
    tensors = {f"{NAME}.{piece}": array for piece, array in four.pieces.items()}
    tensors |= {f"model.layers.0.mlp.up_proj.{piece}": array for piece, array in eight.pieces.items()}
    tensors["model.layers.1.mlp.up_proj.weight"] = np.ones((4, 4), np.float16)
    with open_checkpoint(write(tmp_path, tensors, PLAIN, **config)) as checkpoint:
        np.testing.assert_array_equal(checkpoint.read(f"{NAME}.weight"), four.values)
        np.testing.assert_array_equal(checkpoint.read("model.layers.0.mlp.up_proj.weight"), eight.values)


@pytest.mark.parametrize(
    ("file", "layout", "config"),
    [
        ("quant_config.json", "awq", {"w_bit": 4, "q_group_size": 32, "zero_point": True, "version": "GEMM"}),
        ("quantize_config.json", "gptq", {"bits": 4, "group_size": 32, "desc_act": False, "sym": False}),
    ],
)
def test_older_files_beside_config_json(file: str, layout: str, config: dict[str, Any], tmp_path: Path) -> None:
    written = LAYOUTS[layout](np.random.default_rng(), 64, 128)
    written.config = {}
    with pytest.raises(CheckpointError, match=r"is a piece of a quantised weight but config\.json has no quant"):
        opened(tmp_path, written)
    (tmp_path / file).write_text(json.dumps(config))
    np.testing.assert_array_equal(open_checkpoint(tmp_path).read(f"{NAME}.weight"), written.values)


def test_a_configuration_inside_text_config(tmp_path: Path) -> None:
    """Multimodal models nest it; the outer one, where there is one, comes first."""
    written = LAYOUTS["gptq"](np.random.default_rng(), 64, 128)
    tensors = {f"{NAME}.{piece}": array for piece, array in written.pieces.items()}
    nested = {**PLAIN, "text_config": {"quantization_config": written.config}}
    for stated in ({}, written.config):
        checkpoint = open_checkpoint(write(tmp_path, tensors, nested, **stated))
        np.testing.assert_array_equal(checkpoint.read(f"{NAME}.weight"), written.values)
        nested["text_config"]["quantization_config"] = {**written.config, "bits": 5}
    with pytest.raises(CheckpointError, match=r"text_config\.quantization_config\.bits is 5; accepted: 2, 4, 8"):
        open_checkpoint(write(tmp_path, tensors, nested))


# ---- configurations that lie ----------------------------------------------------------------------------


def without(piece: str) -> Callable[[Written], None]:
    return lambda written: written.pieces.pop(piece)


def changed(piece: str, change: Callable[[np.ndarray], np.ndarray]) -> Callable[[Written], None]:
    def apply(written: Written) -> None:
        written.pieces[piece] = change(written.pieces[piece])

    return apply


def stated(**fields: Any) -> Callable[[Written], None]:
    return lambda written: written.config.update(fields)


def weights_stated(**fields: Any) -> Callable[[Written], None]:
    return lambda written: written.config["config_groups"]["group_0"]["weights"].update(fields)


def of_value(value: Any) -> Callable[[np.ndarray], np.ndarray]:
    return lambda array: np.full_like(array, value)


LIES: list[tuple[str, Callable[[Written], Any], str]] = [
    ("gptq", without("qzeros"), r"q_proj\.qzeros is missing"),
    ("gptq", without("scales"), r"q_proj\.scales is missing"),
    ("gptq", without("qweight"), r"q_proj\.qweight is missing"),
    ("gptq", stated(bits=3), r"config\.json: quantization_config\.bits is 3; accepted: 2, 4, 8"),
    ("gptq", stated(bits="4"), r"quantization_config\.bits is '4'"),
    ("gptq", stated(bits=8), r"q_proj\.qzeros has shape \[4, 8\]; accepted: \[2, 16\]"),
    ("gptq", stated(group_size=64), r"q_proj\.qzeros has shape \[4, 8\]; accepted: \[2, 8\]"),
    ("gptq", stated(group_size=0), r"group_size is 0"),
    ("gptq", stated(group_size=1 << 40), r"group_size is 1099511627776"),
    ("gptq", stated(checkpoint_format="marlin"), r"checkpoint_format is 'marlin'; accepted: gptq, gptq_v2"),
    ("gptq", stated(dynamic={"+:(": {}}), r"quantization_config\.dynamic is"),
    ("gptq", changed("g_idx", of_value(99)), r"q_proj\.g_idx names group 99; accepted: groups 0 to 3"),
    ("gptq", changed("g_idx", of_value(-1)), r"q_proj\.g_idx names group -1"),
    ("gptq", changed("g_idx", lambda a: a[:-1]), r"q_proj\.g_idx has shape \[127\]; accepted: \[128\]"),
    ("gptq", changed("g_idx", lambda a: a.astype(np.float32)), r"q_proj\.g_idx has type F32"),
    ("gptq", changed("qweight", lambda a: a.astype(np.int64)), r"q_proj\.qweight has type I64; accepted: I32"),
    ("gptq", changed("scales", lambda a: a[:, :-1]), r"q_proj\.scales has shape \[4, 63\]; accepted: \[4, 64\]"),
    ("gptq", changed("scales", lambda a: a.astype(np.int32)), r"q_proj\.scales has type I32; accepted: F16"),
    ("awq", stated(version="gemv"), r"quantization_config\.version is 'gemv'; accepted: gemm"),
    ("awq", stated(zero_point=False), r"zero_point is False"),
    ("awq", stated(bits=8), r"bits is 8; accepted: 4"),
    ("awq", changed("qzeros", lambda a: a[:-1]), r"q_proj\.qzeros has shape \[3, 8\]"),
    ("int4-group", without("weight_scale"), r"q_proj\.weight_scale is missing"),
    ("int4-group", without("weight_packed"), r"q_proj\.weight is missing|q_proj\.weight_.* has 4 bits"),
    ("int4-group", weights_stated(group_size=64), r"q_proj\.weight_scale has shape \[64, 4\]; accepted: \[64, 2\]"),
    ("int4-group", weights_stated(symmetric=False), r"q_proj\.weight_zero_point is missing"),
    ("int4-group", weights_stated(num_bits=3), r"weights\.num_bits is 3; accepted: 2, 4, 8"),
    ("int4-group", weights_stated(num_bits=8), r"q_proj\.weight_shape is \[64, 128\]"),
    ("int4-group", weights_stated(strategy="spiral"), r"weights\.strategy is 'spiral'"),
    ("int4-group", changed("weight_shape", of_value(1 << 50)), r"q_proj\.weight_shape is \[1125899906842624"),
    ("int4-group", changed("weight_shape", of_value(-1)), r"q_proj\.weight_shape is \[-1, -1\]"),
    ("int4-group", stated(format="marlin-24"), r"quantization_config\.format is 'marlin-24'; accepted: pack-quantized"),
    ("int4-group", stated(config_groups={}), r"config_groups is \{\}"),
    ("int4-group", stated(config_groups=3), r"config_groups is 3; accepted: an object"),
    ("int4-group", stated(ignore="lm_head"), r"ignore is 'lm_head'; accepted: a list"),
    ("int4-group", stated(ignore=["re:("]), r"ignore is \['re:\('\]; accepted: regular expressions"),
    ("int4-group", stated(sparsity_config={"format": "sparse-24-bitmask"}), r"sparsity_config\.format is 'sparse-24"),
    ("int4-zeros", changed("weight_zero_point", lambda a: a[:-1]), r"q_proj\.weight_zero_point has shape \[7, 4\]"),
    ("int8-channel", changed("weight_scale", lambda a: a[:-1]), r"q_proj\.weight_scale has shape \[63, 1\]"),
    ("int8-channel", changed("weight", lambda a: a.astype(np.int32)), r"q_proj\.weight has type I32; accepted: I8"),
    ("fp8-block", without("weight_scale_inv"), r"q_proj\.weight has the scales nothing"),
    ("fp8-block", changed("weight_scale_inv", lambda a: np.ones((2, 2), np.float32)), r"weight_scale_inv has shape"),
    ("fp8-block", stated(weight_block_size=[128]), r"weight_block_size is \[128\]"),
    ("fp8-block", stated(weight_block_size=[0, 128]), r"weight_block_size is \[0, 128\]"),
    ("fp8-block", stated(weight_block_size=[1 << 63, 128]), r"weight_block_size is \[9223372036854775808, 128\]"),
    ("fp8-block", stated(weight_block_size=[128, 1 << 20]), r"weight_block_size is .*; accepted: two sizes of 1 to"),
    ("fp8-compressed-block", weights_stated(block_structure=[128, 1 << 80]), r"block_structure is \[128, 1208"),
    ("fp8-compressed-block", weights_stated(block_structure=f"128x{1 << 63}"), r"block_structure is '128x9223"),
    ("fp8-compressed-block", weights_stated(block_structure="128x" + "9" * 5000), r"block_structure is '128x9999"),
    ("fp8-compressed-block", weights_stated(block_structure="128"), r"block_structure is '128'"),
    ("fp8-block", stated(weight_block_size=[32, 32]), r"weight_scale_inv has shape \[1, 1\]|has shape"),
    ("fp8-block", stated(fmt="e5m2"), r"quantization_config\.fmt is 'e5m2'; accepted: e4m3"),
    (
        "fp8-block",
        changed("weight", lambda a: a.astype(ml_dtypes.float8_e5m2)),
        r"q_proj\.weight has type F8_E5M2; accepted: F8_E4M3",
    ),
    ("fp8-no-config", without("weight_scale_inv"), r"q_proj\.weight has type F8_E4M3 but config\.json has no quant"),
    ("fp8-modelopt", stated(quant_algo="NVFP4"), r"q_proj\.weight has type F8_E4M3; accepted: U8 for quant_algo nvfp4"),
    ("nvfp4-modelopt", stated(quant_algo="FP8"), r"q_proj\.weight has type U8; accepted: F8_E4M3"),
    ("nvfp4-modelopt", stated(quant_algo="W4A8_AWQ"), r"quant_algo is 'W4A8_AWQ'; accepted: fp8"),
    ("nvfp4-modelopt", stated(quant_algo=None), r"quant_algo is None"),
    ("nvfp4-modelopt", stated(quant_algo="MIXED_PRECISION"), r"quantized_layers is missing"),
    ("nvfp4-modelopt", without("weight_scale_2"), r"q_proj\.weight_scale_2 is missing"),
    ("nvfp4-modelopt", changed("weight_scale_2", of_value(np.nan)), r"q_proj\.weight_scale_2 is nan"),
    ("nvfp4-modelopt", changed("weight_scale_2", of_value(0)), r"q_proj\.weight_scale_2 is 0\.0"),
    ("nvfp4-modelopt", changed("weight_scale", lambda a: a[:, :-1]), r"weight_scale has shape \[64, 7\]"),
    ("nvfp4-compressed", without("weight_global_scale"), r"q_proj\.weight_global_scale is missing"),
    ("nvfp4-compressed", weights_stated(group_size=128), r"group_size is 128; accepted: 16"),
    (
        "gptq",
        stated(quant_method="wobble"),
        r"config\.json: quantization_config\.quant_method is 'wobble'; accepted: awq",
    ),
    ("gptq", stated(quant_method=None), r"quant_method is None"),
    ("gptq", stated(quant_method="bitsandbytes"), r"quant_method is 'bitsandbytes'"),
    ("gptq", stated(quant_method="awq"), r"quantization_config\.|q_proj\.qzeros has shape"),
    ("gptq", stated(quant_method="fp8"), r"q_proj\.weight is missing"),
]


@pytest.mark.parametrize(("layout", "lie", "message"), LIES, ids=[f"{at}-{lie[0]}" for at, lie in enumerate(LIES)])
def test_lies_are_refused_by_name(layout: str, lie: Callable[[Written], Any], message: str, tmp_path: Path) -> None:
    written = LAYOUTS[layout](np.random.default_rng(), 64, 128)
    lie(written)
    with pytest.raises(CheckpointError, match=message) as caught:
        opened(tmp_path, written)
    assert str(tmp_path) in str(caught.value) and "accepted: " in str(caught.value)


def test_symmetry_that_the_zero_points_deny(tmp_path: Path) -> None:
    written = gptq(np.random.default_rng(), 64, 128)
    written.config["sym"] = True
    checkpoint = opened(tmp_path, written)
    with pytest.raises(CheckpointError, match=r"q_proj\.qzeros holds zero point \d+ although sym is true; accepted: 8"):
        checkpoint.read(f"{NAME}.weight")


@pytest.mark.parametrize(
    "config", [{"quant_method": "awq", "bits": 4, "group_size": 32}, awq, float_quantized("tensor")]
)
def test_plain_weights_that_are_called_quantised(config: Any, tmp_path: Path) -> None:
    """Alone, and beside one that is; a router, a head and norms may be plain whatever is said."""
    plain = {"model.layers.0.mlp.up_proj.weight": np.ones((64, 128), np.float16)}
    other = {
        "model.layers.0.mlp.gate.weight": np.ones((4, 8), np.float16),
        "lm_head.weight": np.ones((4, 8), np.float16),
    }
    if callable(config):
        written = config(np.random.default_rng(), 64, 128)
        assert len(opened(tmp_path / "fine", written, **other).tensors) == 4
        with pytest.raises(CheckpointError, match=r"mlp\.up_proj\.weight has type F16 although config\.json: quant"):
            opened(tmp_path / "m", written, **plain)
        return
    with pytest.raises(CheckpointError, match=r"mlp\.up_proj\.weight has type F16 although config\.json: quant"):
        open_checkpoint(write(tmp_path / "m", plain, PLAIN, **config))
    with pytest.raises(CheckpointError, match="but no tensor is quantised"):
        open_checkpoint(write(tmp_path / "n", other, PLAIN, **config))


def test_a_layer_that_is_named_as_quantised_and_is_not(tmp_path: Path) -> None:
    written = nvfp4(np.random.default_rng(), 64, 128, modelopt=True)
    plain = {"model.layers.0.mlp.up_proj.weight": np.ones((64, 128), np.float16)}
    layers = {NAME: {"quant_algo": "NVFP4"}, "model.layers.0.mlp.up_proj": {"quant_algo": "FP8"}}
    written.config |= {"quant_algo": "MIXED_PRECISION", "quantized_layers": layers}
    with pytest.raises(CheckpointError, match=r"mlp\.up_proj\.weight has type F16 although config\.json: quant"):
        opened(tmp_path, written, **plain)


def test_pieces_in_different_shards(tmp_path: Path) -> None:
    written = gptq(np.random.default_rng(), 64, 128)
    parts: list[Pieces] = [{}, {}]
    for number, (piece, array) in enumerate(written.pieces.items()):
        parts[number % 2][f"{NAME}.{piece}"] = array
    for number, part in enumerate(parts):
        write(tmp_path / "part", part, PLAIN, **written.config)
        (tmp_path / "part" / "model.safetensors").rename(tmp_path / f"part{number}.safetensors")
    (tmp_path / "part" / "config.json").rename(tmp_path / "config.json")
    weight_map = {name: f"part{number}.safetensors" for number, part in enumerate(parts) for name in part}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    with open_checkpoint(tmp_path) as checkpoint:
        np.testing.assert_array_equal(checkpoint.read(f"{NAME}.weight"), written.values)


def test_two_layouts_in_one_module(tmp_path: Path) -> None:
    written = gptq(np.random.default_rng(), 64, 128)
    with pytest.raises(CheckpointError, match=r"q_proj\.weight stands beside .*q_proj\.qweight"):
        opened(
            tmp_path, dataclasses.replace(written, pieces={**written.pieces, "weight": np.ones((64, 128), np.float16)})
        )


@pytest.mark.parametrize("dtype", [np.uint8, np.int8, np.int32, ml_dtypes.float8_e5m2])
def test_integers_without_a_config(dtype: Any, tmp_path: Path) -> None:
    with pytest.raises(
        CheckpointError, match=r"q_proj\.weight has type \S+ but config\.json has no quantization_config"
    ):
        open_checkpoint(write(tmp_path, {f"{NAME}.weight": np.ones((4, 4), dtype)}, PLAIN))

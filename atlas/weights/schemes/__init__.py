"""Quantised checkpoints: which stored tensors make up a weight, and how its values come from them.

One module per family of layouts; METHODS is the table of what is known. What a checkpoint stores decides, tensor
by tensor; its configuration gives what tensors do not show (bits, group sizes, zero-point conventions), and where
the two contradict each other the checkpoint is refused.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Protocol

from atlas.errors import CheckpointError
from atlas.weights.checkpoint import TensorInfo, read_json_object
from atlas.weights.schemes.awq import Awq
from atlas.weights.schemes.compressed_tensors import CompressedTensors
from atlas.weights.schemes.fields import Fields
from atlas.weights.schemes.fp8 import Fp8
from atlas.weights.schemes.gptq import Gptq
from atlas.weights.schemes.modelopt import ModelOpt
from atlas.weights.schemes.stored import Load, Module, QuantizedWeight

__all__ = ["METHODS", "QuantizedWeight", "find"]


class Method(Protocol):
    """One quantisation config, checked."""

    def covers(self, name: str) -> bool:
        """Whether a linear module of this name must be quantised."""

    def weight(self, module: Module) -> QuantizedWeight:
        """The weight that a module's pieces make up; raises CheckpointError naming a tensor that does not fit."""


METHODS: dict[str, Callable[[Fields], Method]] = {
    "awq": Awq,
    "compressed-tensors": CompressedTensors,
    "fbgemm_fp8": Fp8,
    "fp8": Fp8,
    "gptq": Gptq,
    "modelopt": ModelOpt,
    "modelopt_fp4": ModelOpt,
    "modelopt_mixed": ModelOpt,
}
"""quant_method -> its reader."""

_OTHER_FILES = {"hf_quant_config.json": "modelopt", "quantize_config.json": "gptq", "quant_config.json": "awq"}
"""Where older checkpoints keep what config.json lacks, and the quant_method that such a file implies."""

_WEIGHT_PIECES = {
    *("qweight", "qzeros", "scales", "g_idx"),
    *("weight_packed", "weight_shape", "weight_zero_point", "weight_g_idx"),
    *("weight_scale", "weight_scale_inv", "weight_scale_2", "weight_global_scale", "pre_quant_scale"),
}
_ACTIVATION_PIECES = {
    *("input_scale", "input_scale_inv", "input_scale_ub", "input_zero_point", "input_global_scale"),
    *("output_scale", "activation_scale", "k_scale", "v_scale", "q_scale", "prob_output_scale"),
}
"""Scales of activations and of the KV cache: neither is rounded here, so they are not read."""

_FLOATS = ("F64", "F32", "F16", "BF16")
_PROJECTION = re.compile(r"(.*\.)?layers\.\d+\.(self_attn|mlp)\.(experts\.\d+\.)?\w+_proj")


def find(
    config: Mapping[str, Any], stored: Mapping[str, TensorInfo], folder: Path, load: Load
) -> tuple[dict[str, TensorInfo], dict[str, QuantizedWeight]]:
    """The tensors a model sees, and those of them that are quantised, by name.

    config: contents of config.json.     stored: what the files hold.
    load: reads a stored tensor; used for the few small ones that decide how others are read.

    Raises:
        CheckpointError: an unknown quant_method or field; pieces that are missing or do not fit; a weight
            that the configuration calls quantised and that is not, or the reverse.
    """
    method, source = _method(config, folder)
    modules: dict[str, dict[str, TensorInfo]] = {}
    for name, info in stored.items():
        owner, _, piece = name.rpartition(".")
        modules.setdefault(owner, {})[piece] = info
    tensors, quantized = dict(stored), {}
    for name, pieces in modules.items():
        weight = pieces.get("weight")
        for piece in pieces.keys() & (_WEIGHT_PIECES | _ACTIVATION_PIECES):
            del tensors[f"{name}.{piece}"]
        if not pieces.keys() & _WEIGHT_PIECES and (weight is None or weight.dtype in _FLOATS):
            if weight and len(weight.shape) == 2 and method and _PROJECTION.fullmatch(name) and method.covers(name):
                raise CheckpointError(
                    f"{folder}/{weight.file}",
                    f"tensor {name}.weight has type {weight.dtype} although {source} says that it is quantised",
                    f"quantised pieces, or its name among the modules that {source} leaves out",
                )
            continue
        module = Module(name, pieces, str(folder), load)
        found = _weight(module, method, weight)
        quantized[f"{name}.weight"] = found
        tensors[f"{name}.weight"] = TensorInfo(
            f"{name}.weight", found.shape, found.codes.dtype, found.codes.file, found.scheme
        )
    if method and not quantized:
        raise CheckpointError(str(folder), f"{source} but no tensor is quantised", "tensors that it describes")
    return tensors, quantized


def _weight(module: Module, method: Method | None, weight: TensorInfo | None) -> QuantizedWeight:
    if method is None:
        piece = next((piece for piece in module.pieces if piece in _WEIGHT_PIECES), "weight")
        # An FP8 weight and its scale say all there is to know; other pieces do not.
        if weight is None or weight.dtype != "F8_E4M3" or piece == "weight":
            found = (
                f"has type {module.pieces[piece].dtype}" if piece == "weight" else "is a piece of a quantised weight"
            )
            raise module.fail(
                piece,
                f"{found} but config.json has no quantization_config",
                f"{', '.join(_FLOATS)}, or a config for it",
            )
        method = Fp8(Fields({}, module.folder, "quantization_config"))
    other = sorted(module.pieces.keys() & {"qweight", "weight_packed"})
    if weight is not None and other:
        raise module.fail("weight", f"stands beside {module.name}.{other[0]}", "one of the two")
    return method.weight(module)


def _method(config: Mapping[str, Any], folder: Path) -> tuple[Method | None, str]:
    """The checkpoint's quantisation method and how to call its source in an error; None for none."""
    file, where, implied = folder / "config.json", "quantization_config", None
    values = config.get("quantization_config")
    if not values and (values := config.get("compression_config")):
        where, implied = "compression_config", "compressed-tensors"
    text = config.get("text_config")  # where some multimodal models keep it
    if not values and isinstance(text, Mapping) and (values := text.get("quantization_config")):
        where = "text_config.quantization_config"
    if not values:
        for name, method in _OTHER_FILES.items():
            if values := read_json_object(folder / name, required=False):
                file, where, implied = folder / name, "document", method
                break
        else:
            return None, ""
    fields = Fields(values, str(file), where)
    known: Any = fields.get("quant_method") or implied
    if not isinstance(known, str) or known.lower() not in METHODS:
        raise fields.fail("quant_method", ", ".join(METHODS), "use the model in one of these layouts, or unquantised")
    return METHODS[known.lower()](fields), f"{file.name}: {where} has quant_method {known}"

"""Which format each weight gets, per tensor, and that what is loaded has the values of the checkpoint."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest

from atlas.runtime import weight_formats
from atlas.runtime.runner import Runner
from atlas.targets.formats import FORMATS
from atlas.weights import open_checkpoint
from atlas.weights.checkpoint import Checkpoint, TensorInfo
from atlas.weights.quantized import Scheme
from tests.models import run
from tests.tiny_model import write

Q4_0 = Scheme("u4", (1, 32), "f16", bias=8)
Q4_1 = Scheme("u4", (1, 32), "f16", minimum=True)
Q8_0 = Scheme("i8", (1, 32), "f16")
Q6_K = Scheme("i8", (1, 16), "f32")
AWQ = Scheme("u4", (1, 128), "f16", zero=True)
BF16_SCALES = Scheme("u4", (1, 128), "bf16", bias=8)
FP8_BLOCKS, FP8_TENSOR, FP8_CHANNEL, MXFP8 = (
    Scheme("e4m3", group, "f32") for group in ((128, 128), (0, 0), (1, 0), (1, 32))
)
NVFP4 = Scheme("e2m1", (1, 16), "e4m3", global_scale=True)
MXFP4 = Scheme("e2m1", (1, 32), "e8m0")
FLOAT = None


class Stored(Checkpoint):
    """Headers only."""

    def __init__(self, **schemes: Scheme | None) -> None:
        self.tensors = {name: TensorInfo(name, (64, 64), "X", "f", scheme) for name, scheme in schemes.items()}

    def _nothing(self, *_: Any) -> Any:
        raise NotImplementedError

    read = read_quantized = digest = tokenizer_files = close = _nothing


def chosen(role: str, *parts: Scheme | None, beside: Scheme | None = FLOAT) -> str:
    """Format of a buffer made of `parts`, in a checkpoint that has another tensor `beside` them."""
    checkpoint = Stored(**{f"part{i}": part for i, part in enumerate(parts)}, beside=beside)
    source = weight_formats.WeightSource(tuple(f"part{i}" for i in range(len(parts))))
    return weight_formats.chooser(checkpoint, {"w": source})("w", role)


@pytest.mark.parametrize(
    ("role", "parts", "beside", "format"),
    [
        ("f32", [Q4_0], FLOAT, "f32"),
        ("bf16", [Q8_0], FLOAT, "bf16"),
        # Integer blocks stay as they are, whichever recipe; a joined buffer gets what holds all of its parts.
        ("int4m", [Q4_1], FLOAT, "i4g32m"),
        ("int8", [Q4_1, Q4_1], FLOAT, "i4g32m"),
        ("int4m", [Q8_0], FLOAT, "i8g32"),
        ("int4m", [Q4_0, Q8_0], FLOAT, "i8g32"),
        ("int4m", [Q4_0, Q4_1], FLOAT, "i4g32f"),
        ("stored", [Q8_0], FLOAT, "i8g32"),
        # GPUs have kernels for fewer formats.
        ("int4", [Q4_0], FLOAT, "i4g32"),
        ("int4", [Q4_0, AWQ], FLOAT, "i4g32z"),
        ("int4", [Q4_1], FLOAT, "i4g32m"),
        ("int4", [Q4_0, Q4_1], FLOAT, "bf16"),
        ("int4", [Q8_0], FLOAT, "bf16"),
        ("fp8", [FP8_BLOCKS], FLOAT, "f8g128"),
        ("fp8", [FP8_TENSOR, FP8_BLOCKS], FLOAT, "f8g128"),
        ("fp8", [FP8_TENSOR, FP8_CHANNEL], FLOAT, "f8"),
        ("fp8", [MXFP8], FLOAT, "bf16"),
        ("nvfp4", [NVFP4, NVFP4], FLOAT, "nvfp4"),
        ("nvfp4", [MXFP4], FLOAT, "bf16"),
        ("fp8", [NVFP4], FLOAT, "bf16"),
        ("int8", [FP8_TENSOR], FLOAT, "bf16"),
        # What no format holds exactly is dequantised, and never quantised again.
        ("int4m", [Q4_1, Q8_0], FLOAT, "bf16"),
        ("int4m", [Q6_K], FLOAT, "bf16"),
        ("int4m", [FLOAT], Q4_0, "bf16"),
        ("int8", [FLOAT, Q8_0], FLOAT, "bf16"),
        ("fp8", [FLOAT], FP8_BLOCKS, "bf16"),
        # Only a checkpoint without any quantised tensor is quantised at load, and its head is not.
        ("int4m", [FLOAT], FLOAT, "i4g32m"),
        ("int8", [FLOAT, FLOAT], FLOAT, "i8g32"),
        ("int4", [FLOAT], FLOAT, "i4g32b"),
        ("int4", [BF16_SCALES], FLOAT, "i4g32b"),
        ("int4m", [BF16_SCALES], FLOAT, "i4g32f"),
        ("fp8", [FLOAT], FLOAT, "f8"),
        ("nvfp4", [FLOAT], FLOAT, "nvfp4"),
        ("stored", [FLOAT], FLOAT, "bf16"),
    ],
)
def test_the_choice(role: str, parts: list[Scheme | None], beside: Scheme | None, format: str) -> None:
    assert chosen(role, *parts, beside=beside) == format


def test_the_natural_quant_keeps_most_of_the_checkpoint() -> None:
    def natural(**schemes: Scheme | None) -> str:
        return weight_formats.natural_quants(Stored(**schemes))["cpu"]

    assert natural(a=FLOAT, b=FLOAT) == "bf16"
    assert natural(a=Q4_1, b=Q4_0, c=Q8_0) == "int4"
    assert natural(a=Q8_0, b=Q8_0, c=Q4_0, d=FLOAT) == "int8"
    assert natural(a=BF16_SCALES, b=Q4_0) == "int4"
    assert natural(a=Q6_K, b=Q6_K, c=Q8_0) == "bf16"
    assert natural() == "bf16"
    assert natural(a=FP8_BLOCKS, b=NVFP4) == "bf16"  # CPUs have no products of them
    # A table in floats, larger than the layers, does not make an integer checkpoint one of floats.
    tables = {"model.embed_tokens.weight": FLOAT, "lm_head.weight": FLOAT}
    assert natural(**tables, a=Q8_0) == "int8"
    assert natural(**dict.fromkeys(tables, Q8_0), a=FLOAT) == "bf16"


def test_the_natural_quant_of_a_gpu() -> None:
    def natural(**schemes: Scheme | None) -> str:
        return weight_formats.natural_quants(Stored(**schemes))["cuda"]

    assert natural(a=FLOAT, b=FLOAT) == natural() == "bf16"
    assert natural(a=FP8_BLOCKS, b=FLOAT, c=FP8_BLOCKS) == "fp8"
    assert natural(a=NVFP4, b=NVFP4, c=FP8_BLOCKS) == "nvfp4"
    assert natural(a=Q4_1, b=Q4_0, c=BF16_SCALES) == "int4"
    assert natural(a=Q8_0, b=Q8_0) == natural(a=Q6_K) == "bf16"  # GPUs have no products of them
    assert natural(a=FLOAT, b=FLOAT, c=FP8_BLOCKS) == "bf16"
    assert natural(**{"lm_head.weight": FLOAT}, a=NVFP4) == "nvfp4"


@pytest.fixture(scope="module")
def floats(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write(tmp_path_factory.mktemp("floats"), seed=7)


@pytest.mark.parametrize(("quant", "format"), [("int4", "i4g32m"), ("int8", "i8g32")])
@pytest.mark.parametrize("backend", ["cpu", "reference"])
def test_a_float_checkpoint_is_quantised_at_load(floats: Path, backend: str, quant: str, format: str) -> None:
    """Each projection within the step of its format from the checkpoint's values; head and table stay bf16."""
    runner = run.load(floats, backend, quant, max_context=64)
    assert runner.buffers["lm_head.weight"].dtype == runner.buffers["embedding.weight"].dtype == "bf16"
    with open_checkpoint(floats) as checkpoint:
        for name, tensor in (("layers.0.o", "self_attn.o_proj"), ("layers.1.down", "mlp.down_proj")):
            assert runner.buffers[f"{name}.weight"].dtype == format
            layer = name.split(".")[1]
            expected = checkpoint.read(f"model.layers.{layer}.{tensor}.weight").astype(np.float32)
            actual = runner.read(f"{name}.weight")
            groups = expected.reshape(len(expected), -1, 32)
            spread = np.ptp(groups, axis=2) if quant == "int4" else 2 * np.abs(groups).max(axis=2)
            step = spread / (2 ** FORMATS[format].bits - 1)
            error = np.abs(actual - expected).reshape(groups.shape).max(axis=2)
            assert (error <= 1.7 * step + 1e-6).all()  # the 4-bit search may cut off extremes
            assert 0 < np.linalg.norm(actual - expected) < 0.12 * np.linalg.norm(expected)


def test_a_float_checkpoint_becomes_fp8_at_load(floats: Path) -> None:
    """Each value within half a step of three bits under the scale of its row, which the largest fills."""
    runner = run.load(floats, "reference", "fp8", max_context=64)
    with open_checkpoint(floats) as checkpoint:
        gate, up = (checkpoint.read(f"model.layers.1.mlp.{name}_proj.weight") for name in ("gate", "up"))
    expected = np.concatenate([gate, up]).astype(np.float32)
    assert runner.buffers["layers.1.gate_up.weight"].dtype == "f8"
    actual = runner.read("layers.1.gate_up.weight")
    scales = np.abs(expected).max(axis=1, keepdims=True) / 448
    assert (np.abs(actual - expected) <= np.maximum(np.abs(expected) * 2.0**-4, scales * 2.0**-10) * 1.0001).all()
    assert 0.02 < np.linalg.norm(actual - expected) / np.linalg.norm(expected) < 0.03


@pytest.mark.parametrize("backend", ["cpu", "reference"])
def test_loading_by_runs_of_rows_changes_nothing(floats: Path, backend: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Runs of 16 rows, that cross the borders of joined tensors, against one run."""
    for quant in ("f32", "bf16", "int8"):
        whole = run.load(floats, backend, quant, max_context=64)
        with monkeypatch.context() as patch:
            patch.setattr("atlas.runtime.weight_runs.RUN_BYTES", 1)
            parts = run.load(floats, backend, quant, max_context=64)
        begin, end = whole.plan.regions["weights"]
        images = []
        for runner in (whole, parts):
            image = np.empty(end - begin, np.uint8)
            runner.backend.read(begin, image)
            images.append(image.tobytes())
        assert images[0] == images[1]


def test_gguf_blocks_are_kept_bit_for_bit(smollm2_path: Path) -> None:
    """Every code, scale and minimum of the 4-bit file, the head's own format among them."""
    runner = run.load(smollm2_path, "cpu", None, max_context=64)
    assert runner.choice.quant == "int4"
    assert runner.buffers["embedding.weight"].dtype == "i8g32"
    reader = {t.name: t for t in gguf.GGUFReader(smollm2_path).tensors}
    for name, tensors in {
        "embedding.weight": ["token_embd"],
        "layers.3.down.weight": ["blk.3.ffn_down"],
        "layers.29.gate_up.weight": ["blk.29.ffn_gate", "blk.29.ffn_up"],
    }.items():
        stored = [gguf.dequantize(reader[f"{t}.weight"].data, reader[f"{t}.weight"].tensor_type) for t in tensors]
        np.testing.assert_array_equal(runner.read(name), np.concatenate(stored))


def test_memory_stays_bounded_while_loading(smollm2_path: Path) -> None:
    """What is alive at once beside the arena: a few copies of one run of rows, not of the model."""
    import tracemalloc

    with open_checkpoint(smollm2_path) as checkpoint:
        from atlas.runtime.runner import RunnerOptions

        tracemalloc.start()
        try:
            Runner.load(checkpoint, RunnerOptions(backend="cpu", quant="f32", max_context=64, max_seqs=1))
            _, peak = tracemalloc.get_traced_memory()
        finally:
            tracemalloc.stop()
    assert peak < 400 << 20

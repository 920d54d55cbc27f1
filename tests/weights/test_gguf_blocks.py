"""GGUF blocks kept as they are: codes and scales by type, whole and by runs of rows, against the `gguf` package."""

from __future__ import annotations

from pathlib import Path

import gguf
import numpy as np
import pytest
from gguf import GGMLQuantizationType as Q

from atlas.errors import CheckpointError
from atlas.targets.formats import EXACT_IN, FORMATS
from atlas.weights import gguf_blocks, open_checkpoint
from atlas.weights.quantized import BlockArray, to_rows
from tests.weights.gguf_files import HEAD_DIM, HEADS, KV_HEADS, with_types, write

PROJECTIONS = "model.layers.0.self_attn.q_proj.weight", "model.layers.0.self_attn.k_proj.weight"


def random_blocks(kind: str, n: int, k: int) -> np.ndarray:
    """Rows of random bytes, every one a valid block, with finite float16 scales."""
    block, size = gguf.GGML_QUANT_SIZES[Q[kind]]
    raw = np.random.default_rng().integers(0, 256, (n, k // block, size)).astype(np.uint8)
    for at in range(1, min(size, 4), 2):  # high bytes of the one or two scales that most blocks begin with
        exponent = (raw[:, :, at] & 0x7C) == 0x7C
        raw[:, :, at] ^= (exponent * 0x40).astype(np.uint8)
    return raw.reshape(n, -1)


@pytest.mark.parametrize("kind", gguf_blocks.SCHEMES)
def test_codes_and_formats_are_the_blocks(kind: str) -> None:
    raw = random_blocks(kind, 6, 512)
    expected = gguf.dequantize(raw, Q[kind])
    array = gguf_blocks.unpack(kind, raw)
    np.testing.assert_array_equal(array.dequantize(), expected)
    scheme = gguf_blocks.SCHEMES[kind]
    assert array.code == scheme.code and array.group == scheme.group
    assert (array.minimums is not None) == scheme.minimum
    assert scheme.zero is False and (scheme.bias == 0 or (array.zeros == scheme.bias).all())
    smallest = scheme.block_format()
    assert smallest is not None
    for format in EXACT_IN[smallest]:
        back = BlockArray(to_rows(array, format), FORMATS[format], 512)
        np.testing.assert_allclose(
            back.astype(np.float32), expected, rtol=0, atol=0 if format == smallest else np.abs(expected).max() * 1e-6
        )


@pytest.mark.parametrize("kind", [*gguf_blocks.SCHEMES, "Q6_K", "F16"])
def test_rows_in_hugging_face_order(kind: str, tmp_path: Path, cache: Path) -> None:
    """q and k rows come back in order whole, by runs that end anywhere, as codes and as format rows."""
    with open_checkpoint(write(tmp_path / "m.gguf", tensors=with_types((Q[kind],)))) as checkpoint:
        for name, info in checkpoint.tensors.items():
            whole = checkpoint.read(name)
            assert whole.shape == info.shape
            n = info.shape[0]
            for begin, end in ((0, 16), (16, n), (n - 3, n), (5, 5)):
                rows = slice(begin, end)
                np.testing.assert_array_equal(checkpoint.read(name, rows), whole[rows])
                if info.scheme is None:
                    continue
                np.testing.assert_array_equal(checkpoint.read_quantized(name, rows).dequantize(), whole[rows])
                format = info.scheme.block_format()
                assert format is not None
                stored = BlockArray(
                    to_rows(checkpoint.read_quantized(name, rows), format), FORMATS[format], info.shape[1]
                )
                np.testing.assert_array_equal(stored.astype(np.float32), whole[rows])
        assert (checkpoint.tensors[PROJECTIONS[0]].scheme is not None) == (kind in gguf_blocks.SCHEMES)
        # What is asked for and is not there.
        for rows in (slice(0, 10_000), slice(-1, 3), slice(3, 1), slice(0, 4, 2)):
            with pytest.raises(CheckpointError, match="rows"):
                checkpoint.read(PROJECTIONS[1], rows)
        with pytest.raises(CheckpointError, match="norm"):
            checkpoint.read_quantized("model.norm.weight")
    assert HEADS * HEAD_DIM != KV_HEADS * HEAD_DIM


def dequantised_types() -> list[str]:
    """Every block type that the package can dequantise."""
    known = []
    for kind, (block, size) in gguf.GGML_QUANT_SIZES.items():
        try:
            gguf.dequantize(np.zeros((1, size * 256 // block), np.uint8), kind)
            known.append(kind.name)
        except NotImplementedError:
            pass
    return known


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # random bytes hold scales that are no numbers
@pytest.mark.parametrize("kind", dequantised_types())
def test_every_type_reads_as_the_package_has_it(kind: str, tmp_path: Path, cache: Path) -> None:
    dtype = {"F32": np.float32, "F16": np.float16}.get(kind)
    raw = random_blocks(kind, 64, 256) if dtype is None else np.random.default_rng().random((64, 256)).astype(dtype)
    name = "blk.0.attn_output.weight"
    path = write(tmp_path / "m.gguf", tensors={name: (raw, Q[kind]), "token_embd.weight": (raw, Q[kind])})
    expected = raw if dtype is not None else gguf.dequantize(raw, Q[kind])
    with open_checkpoint(path) as checkpoint:
        hf = "model.layers.0.self_attn.o_proj.weight"
        np.testing.assert_array_equal(checkpoint.read(hf).astype(np.float32), expected.astype(np.float32))
        np.testing.assert_array_equal(
            checkpoint.read(hf, slice(16, 33)).astype(np.float32), expected[16:33].astype(np.float32)
        )

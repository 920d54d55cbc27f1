"""Safetensors checkpoints: the `safetensors` library writes them, or bytes are laid out by hand to be wrong."""

from __future__ import annotations

import json
import os
import struct
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import save_file

from atlas.errors import CheckpointError
from atlas.weights import Checkpoint, open_checkpoint, safetensors

CONFIG = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 4}


def tensors() -> dict[str, np.ndarray]:
    rng = np.random.default_rng(1)
    return {
        "model.embed_tokens.weight": rng.standard_normal((6, 4)).astype(ml_dtypes.bfloat16),
        "model.norm.weight": rng.standard_normal(4).astype(np.float32),
        "lm_head.weight": rng.standard_normal((6, 4)).astype(np.float16),
    }


def write(folder: Path, **files: Any) -> Path:
    """A model directory: config.json, and each keyword as FILE.safetensors."""
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(CONFIG))
    for name, content in files.items():
        save_file(content, folder / f"{name}.safetensors")
    return folder


def sharded(folder: Path) -> Path:
    every = tensors()
    names = list(every)
    shards = {"model-00001-of-00002": names[:2], "model-00002-of-00002": names[2:]}
    write(folder, **{shard: {name: every[name] for name in part} for shard, part in shards.items()})
    weight_map = {name: f"{shard}.safetensors" for shard, part in shards.items() for name in part}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    return folder


def raw(folder: Path, header: dict[str, Any] | bytes, data: bytes, length: int | None = None) -> Path:
    """A model.safetensors of exactly these bytes."""
    write(folder)
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    size = len(text) if length is None else length
    (folder / "model.safetensors").write_bytes(struct.pack("<Q", size) + text + data)
    return folder


@pytest.mark.parametrize("make", [lambda folder: write(folder, model=tensors()), sharded], ids=["single", "sharded"])
def test_reads_what_the_library_wrote(tmp_path: Path, make: Any) -> None:
    with open_checkpoint(make(tmp_path / "m")) as checkpoint:
        assert checkpoint.config == CONFIG
        assert checkpoint.generation_config == {}
        assert checkpoint.tensors.keys() == tensors().keys()
        for name, expected in tensors().items():
            array = checkpoint.read(name)
            assert array.dtype == expected.dtype
            assert array.flags.c_contiguous and array.flags.aligned
            assert checkpoint.tensors[name].shape == expected.shape == array.shape
            np.testing.assert_array_equal(array.view(np.uint8), expected.view(np.uint8))
        assert {info.dtype for info in checkpoint.tensors.values()} == {"BF16", "F32", "F16"}
        kept = checkpoint.read("model.norm.weight")
    np.testing.assert_array_equal(kept, tensors()["model.norm.weight"])  # valid after close()
    with pytest.raises(CheckpointError, match=r"model\.norm\.weight.*close"):
        checkpoint.read("model.norm.weight")


def test_unknown_tensor_is_named(tmp_path: Path) -> None:
    checkpoint = open_checkpoint(write(tmp_path / "m", model=tensors()))
    with pytest.raises(CheckpointError, match=r"model\.layers\.9\.x is missing"):
        checkpoint.read("model.layers.9.x")


def test_stray_files_are_ignored(tmp_path: Path) -> None:
    folder = sharded(tmp_path / "m")
    save_file({"model.norm.weight": np.zeros(4, np.float32)}, folder / "consolidated.safetensors")
    (folder / "original").mkdir()
    save_file({"evil": np.zeros(4, np.float32)}, folder / "original" / "model.safetensors")
    (folder / "pytorch_model.bin").write_bytes(b"\x80\x04.")
    checkpoint = open_checkpoint(folder)
    assert checkpoint.tensors.keys() == tensors().keys()
    np.testing.assert_array_equal(checkpoint.read("model.norm.weight"), tensors()["model.norm.weight"])


def test_float8_and_integers(tmp_path: Path) -> None:
    header = {
        "f8": {"dtype": "F8_E4M3", "shape": [2, 2], "data_offsets": [0, 4]},
        "i32": {"dtype": "I32", "shape": [1], "data_offsets": [4, 8]},
        "scalar": {"dtype": "F32", "shape": [], "data_offsets": [8, 12]},
        "empty": {"dtype": "F32", "shape": [0, 3], "data_offsets": [12, 12]},
    }
    data = bytes([0x38, 0xB8, 0x7E, 0x00]) + struct.pack("<i", -7) + struct.pack("<f", 2.5)
    checkpoint = open_checkpoint(raw(tmp_path / "m", header, data))
    assert checkpoint.read("f8").astype(np.float32).tolist() == [[1.0, -1.0], [448.0, 0.0]]
    assert checkpoint.read("i32").tolist() == [-7]
    assert checkpoint.read("scalar").shape == () and checkpoint.read("scalar") == 2.5
    assert checkpoint.read("empty").shape == (0, 3)


def test_unaligned_tensor_is_copied_into_place(tmp_path: Path) -> None:
    header = {
        "byte": {"dtype": "U8", "shape": [1], "data_offsets": [0, 1]},
        "floats": {"dtype": "F32", "shape": [2], "data_offsets": [1, 9]},
    }
    checkpoint = open_checkpoint(raw(tmp_path / "m", header, b"\x07" + struct.pack("<2f", 1.5, -3.0)))
    array = checkpoint.read("floats")
    assert array.flags.aligned
    assert array.tolist() == [1.5, -3.0]
    part = checkpoint.read("floats", slice(1, 2))
    assert part.flags.aligned and part.tolist() == [-3.0]
    assert part.base is None, "a run of rows copies no others"


@pytest.mark.parametrize("most", [1, 3, 1024])
def test_rows_are_read_into_pieces(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, most: int) -> None:
    """Bytes as stored, also from a tensor that begins anywhere; pieces of any size, more than one call takes."""
    monkeypatch.setattr(safetensors, "_MOST_PIECES", most)
    values = np.random.default_rng().integers(0, 256, (13, 6), np.uint8)
    header = {
        "byte": {"dtype": "U8", "shape": [1], "data_offsets": [0, 1]},
        "w": {"dtype": "BF16", "shape": [13, 3], "data_offsets": [1, 79]},
    }
    path = raw(tmp_path / "m", header, b"\x07" + values.tobytes())
    checkpoint = open_checkpoint(path)
    into = np.full((4, 2, 6), 255, np.uint8)
    checkpoint.read_into("w", slice(2, 7), [into[0], into[1, 1:], into[3]])
    np.testing.assert_array_equal(into[[0, 0, 1, 3, 3], [0, 1, 1, 0, 1]], values[2:7])
    assert (into[2] == 255).all() and (into[1, 0] == 255).all()
    expected = into.copy()
    into[[0, 1, 3]] = 0
    into[1, 0] = 255
    Checkpoint.read_into(checkpoint, "w", slice(2, 7), [into[0], into[1, 1:], into[3]])
    np.testing.assert_array_equal(into, expected)
    with pytest.raises(ValueError, match="rows 2:7 of tensor w have 30 bytes"):
        checkpoint.read_into("w", slice(2, 7), [into[0]])
    with pytest.raises(CheckpointError, match="rows 9:14 of tensor w"):
        checkpoint.read_into("w", slice(9, 14), [into[0]])
    file = path / "model.safetensors"
    os.truncate(file, file.stat().st_size - 7)
    with pytest.raises(CheckpointError, match="the file ends within tensor w"):
        checkpoint.read_into("w", slice(0, 13), [np.zeros((13, 6), np.uint8)])
    checkpoint.close()
    with pytest.raises(CheckpointError, match="after close"):
        checkpoint.read_into("w", slice(0, 1), [into[0, :1]])


def test_header_order_and_padding_do_not_matter(tmp_path: Path) -> None:
    header = {
        "z": {"dtype": "F32", "shape": [1], "data_offsets": [4, 8]},
        "a": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]},
    }
    text = json.dumps(header).encode() + b"   "
    checkpoint = open_checkpoint(raw(tmp_path / "m", text, struct.pack("<2f", 1, 2)))
    assert (checkpoint.read("a")[0], checkpoint.read("z")[0]) == (1, 2)


def f32(begin: int, end: int) -> dict[str, Any]:
    return {"dtype": "F32", "shape": [(end - begin) // 4], "data_offsets": [begin, end]}


@pytest.mark.parametrize(
    ("header", "data", "length"),
    [
        pytest.param({"a": f32(0, 8)}, bytes(4), None, id="truncated"),
        pytest.param({"a": f32(0, 8)}, bytes(12), None, id="bytes-left-over"),
        pytest.param({"a": f32(0, 8)}, bytes(8), 1 << 60, id="header-of-2^60"),
        pytest.param({"a": f32(0, 8)}, bytes(8), 1000, id="header-past-the-end"),
        pytest.param({"a": f32(0, 8), "b": f32(4, 12)}, bytes(12), None, id="overlap"),
        pytest.param({"a": f32(0, 8), "b": f32(12, 16)}, bytes(16), None, id="hole"),
        pytest.param({"a": {**f32(0, 8), "shape": [3]}}, bytes(8), None, id="size-differs-from-shape"),
        pytest.param({"a": {**f32(0, 8), "shape": [1 << 40, 1 << 40]}}, bytes(8), None, id="shape-overflows"),
        pytest.param({"a": {**f32(0, 8), "dtype": "F99"}}, bytes(8), None, id="unknown-dtype"),
        pytest.param({"a": {"dtype": "F32", "shape": [2], "data_offsets": [8, 0]}}, bytes(8), None, id="backwards"),
        pytest.param(b'{"a": ', bytes(8), None, id="header-cut"),
        pytest.param(b"[" * 50_000, b"", None, id="deep-nesting"),
    ],
)
def test_damaged_files_are_refused_by_name(
    tmp_path: Path, header: dict[str, Any] | bytes, data: bytes, length: int | None
) -> None:
    with pytest.raises(CheckpointError, match=r"model\.safetensors: .*; download|model\.safetensors: .*download"):
        open_checkpoint(raw(tmp_path / "m", header, data, length))


def test_empty_file_is_refused(tmp_path: Path) -> None:
    folder = write(tmp_path / "m")
    (folder / "model.safetensors").write_bytes(b"")
    with pytest.raises(CheckpointError, match=r"model\.safetensors"):
        open_checkpoint(folder)


def test_missing_shard_is_named(tmp_path: Path) -> None:
    folder = sharded(tmp_path / "m")
    (folder / "model-00002-of-00002.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"model-00002-of-00002\.safetensors: the file is missing"):
        open_checkpoint(folder)


@pytest.mark.parametrize(
    ("weight_map", "message"),
    [
        (
            {"model.norm.weight": "model-00002-of-00002.safetensors"},
            r"model-00002-of-00002\.safetensors: tensor model\.norm\.weight",
        ),
        ({"model.norm.weight": "../other/model.safetensors"}, r"model\.norm\.weight is in '\.\./other"),
        ({"model.norm.weight": 3}, r"model\.norm\.weight is in 3"),
        ({"model.norm.weight": "a" * 5000}, r"model\.norm\.weight is in 'aaa\S+'; accepted: a file name"),
        ({"model.norm.weight": "a\0b\ud800"}, r"the file is missing although"),
        ({}, "weight_map"),
        (None, "weight_map"),
    ],
    ids=["wrong-shard", "outside", "number", "too-long", "no-name", "empty", "absent"],
)
def test_wrong_index_is_refused(tmp_path: Path, weight_map: Any, message: str) -> None:
    folder = sharded(tmp_path / "m")
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    with pytest.raises(CheckpointError, match=message):
        open_checkpoint(folder)


def test_a_tensor_that_the_index_forgot_is_read_with_a_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = sharded(tmp_path / "m")
    path = folder / "model.safetensors.index.json"
    index = json.loads(path.read_text())
    last = open_checkpoint(folder)
    # Of the two shards, one must still be named, or nobody knows of it.
    forgotten = next(name for name, info in last.tensors.items() if _shares_its_file(last, name))
    del index["weight_map"][forgotten]
    path.write_text(json.dumps(index))
    checkpoint = open_checkpoint(folder)
    assert checkpoint.tensors == last.tensors and f"tensor {forgotten} is not in" in caplog.text
    np.testing.assert_array_equal(checkpoint.read(forgotten), last.read(forgotten))


def _shares_its_file(checkpoint: Checkpoint, name: str) -> bool:
    return sum(info.file == checkpoint.tensors[name].file for info in checkpoint.tensors.values()) > 1


def test_single_file_wins_over_an_index_as_in_transformers(tmp_path: Path) -> None:
    folder = sharded(tmp_path / "m")
    save_file({"model.norm.weight": np.full(4, 7, np.float32)}, folder / "model.safetensors")
    assert open_checkpoint(folder).tensors.keys() == {"model.norm.weight"}


@pytest.mark.parametrize("text", ['{"hidden_size": 4, "mod', "[1]", "", "\xff", "[" * 100_000])
def test_bad_config_is_named(tmp_path: Path, text: str) -> None:
    folder = write(tmp_path / "m", model=tensors())
    (folder / "config.json").write_text(text, encoding="latin-1")
    with pytest.raises(CheckpointError, match=r"config\.json"):
        open_checkpoint(folder)


def test_digest_follows_the_weights(tmp_path: Path) -> None:
    first = open_checkpoint(write(tmp_path / "a", model=tensors())).digest()
    assert len(first) == 64
    assert open_checkpoint(write(tmp_path / "b", model=tensors())).digest() == first
    changed = tensors()
    changed["model.norm.weight"][3] += 1
    assert open_checkpoint(write(tmp_path / "c", model=changed)).digest() != first


def test_tokenizer_files(tmp_path: Path) -> None:
    folder = write(tmp_path / "m", model=tensors())
    with pytest.raises(CheckpointError, match=r"tokenizer\.json.*no tokenizer files"):
        open_checkpoint(folder).tokenizer_files()
    (folder / "tokenizer.model").write_bytes(b"x")
    with pytest.raises(CheckpointError, match=r"only tokenizer\.model"):
        open_checkpoint(folder).tokenizer_files()
    (folder / "tokenizer.json").write_text("{}")
    (folder / "tokenizer_config.json").write_text('{"bos_token": "<s>"}')
    (folder / "special_tokens_map.json").write_text('{"bos_token": "old", "pad_token": "<pad>"}')
    (folder / "chat_template.jinja").write_text("{{ x }}")
    files = open_checkpoint(folder).tokenizer_files()
    assert (files.tokenizer_json, files.chat_template) == ("{}", "{{ x }}")
    assert files.tokenizer_config == {"bos_token": "<s>", "pad_token": "<pad>"}


def test_anything_else_says_what_was_found(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"nowhere: there is no such file.*accepted: .*\.gguf"):
        open_checkpoint(tmp_path / "nowhere")
    with pytest.raises(CheckpointError, match="holds nothing"):
        open_checkpoint(tmp_path)
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "pytorch_model.bin").write_bytes(b"")
    with pytest.raises(CheckpointError, match=r"pytorch_model\.bin.*safetensors.*pickled"):
        open_checkpoint(tmp_path)
    with pytest.raises(CheckpointError, match=r"not GGUF \(\.bin\)"):
        open_checkpoint(tmp_path / "pytorch_model.bin")
    save_file({"a": np.zeros(1, np.float32)}, tmp_path / "consolidated.safetensors")
    with pytest.raises(CheckpointError, match=r"only consolidated\.safetensors"):
        open_checkpoint(tmp_path)

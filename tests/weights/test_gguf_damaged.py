"""Damaged and hostile GGUF files: an error that names the file, at once and without memory."""

from __future__ import annotations

import struct
import time
from pathlib import Path

import numpy as np
import pytest
from gguf import GGMLQuantizationType as Q
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from atlas.errors import CheckpointError
from atlas.weights import open_checkpoint
from atlas.weights.gguf_header import read_header
from tests.weights.gguf_files import (
    HIDDEN,
    write,
)

pytestmark = pytest.mark.usefixtures("cache")


def test_truncation_anywhere_is_refused(tmp_path: Path) -> None:
    whole = write(tmp_path / "m.gguf").read_bytes()
    header = read_header(tmp_path / "m.gguf").data_start
    cut = tmp_path / "cut.gguf"
    lengths = [*range(0, header, 37), header - 1, header, (header + len(whole)) // 2, len(whole) - 200]
    for length in lengths:
        cut.write_bytes(whole[:length])
        with pytest.raises(CheckpointError, match=r"cut\.gguf: "):
            open_checkpoint(cut)
    with pytest.raises(CheckpointError, match=r"tensor blk\.0\.ffn_down\.weight ends at byte"):
        open_checkpoint(cut)


def bare(*, magic: bytes = b"GGUF", version: int = 3, tensors: int = 0, fields: int = 0, body: bytes = b"") -> bytes:
    return magic + struct.pack("<IQQ", version, tensors, fields) + body


def string(text: bytes) -> bytes:
    return struct.pack("<Q", len(text)) + text


def entry(name: bytes, dims: tuple[int, ...], kind: int, offset: int) -> bytes:
    return string(name) + struct.pack(f"<I{len(dims)}QIQ", len(dims), *dims, kind, offset)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "0 bytes"),
        (b"GGUF", "4 bytes"),
        (bare(magic=b"GGML") + bytes(8), "magic b'GGML'"),
        (bare(version=1), "version 1"),
        (b"GGUF" + struct.pack(">IQQ", 3, 1, 1), "big-endian"),
        (bare(tensors=1 << 50), "tensor count 1125899906842624"),
        (bare(fields=1 << 63), "metadata count"),
        (bare(fields=1, body=struct.pack("<Q", 1 << 62) + bytes(40)), "length 4611686018427387904"),
        (bare(fields=1, body=string(b"k") + struct.pack("<IQ", 8, 1 << 62)), "string of k has length"),
        (bare(fields=1, body=string(b"k") + struct.pack("<IIQ", 9, 4, 1 << 61)), "array k has length"),
        (bare(fields=1, body=string(b"k") + struct.pack("<IIQ", 9, 8, 1 << 61)), "array k element count"),
        (bare(fields=1, body=string(b"k") + struct.pack("<IIQ", 9, 8, 1) + struct.pack("<Q", 99)), "string 0 of k"),
        (
            bare(fields=1, body=string(b"k") + struct.pack("<I", 9) + struct.pack("<IQ", 9, 1) * 9 + bytes(64)),
            "value type 9 at depth",
        ),
        (bare(fields=1, body=string(b"k") + struct.pack("<I", 77) + bytes(8)), "value type 77"),
        (bare(fields=1, body=string(b"\xff\xfe") + bytes(16)), "not UTF-8"),
        (bare(fields=2, body=(string(b"k") + struct.pack("<II", 4, 1)) * 2), "k occurs twice"),
        (bare(fields=1, body=string(b"general.alignment") + struct.pack("<II", 4, 0)), r"general\.alignment is 0"),
        (bare(fields=1, body=string(b"general.architecture") + struct.pack("<IIQ", 9, 4, 0)), r"architecture is \[\]"),
        (bare(tensors=1, body=entry(b"t", (4,), 999, 0)), "type 999"),
        (bare(tensors=1, body=entry(b"t", (33,), 2, 0)), "whole Q4_0 blocks"),
        (bare(tensors=1, body=entry(b"t", (0,), 0, 0)), r"dimensions \[0\]"),
        (bare(tensors=1, body=entry(b"t", (1,) * 5, 0, 0)), "5 dimensions"),
        (bare(tensors=1, body=entry(b"t", (1 << 62, 1 << 62), 0, 0)), "tensor t ends at byte"),
        (bare(tensors=1, body=entry(b"t", (4,), 0, 8) + bytes(99)), "offset 8; accepted: multiples of 32"),
        (bare(tensors=2, body=entry(b"t", (4,), 0, 0) + entry(b"u", (4,), 0, 0) + bytes(99)), "t and u overlap"),
        (bare(tensors=2, body=entry(b"t", (4,), 0, 0) * 2 + bytes(99)), "t occurs twice"),
    ],
)
def test_hostile_headers_are_refused_at_once(tmp_path: Path, content: bytes, message: str) -> None:
    path = tmp_path / "bad.gguf"
    path.write_bytes(content)
    begin = time.perf_counter()
    with pytest.raises(CheckpointError, match=rf"bad\.gguf: .*{message}"):
        open_checkpoint(path)
    assert time.perf_counter() - begin < 1


@pytest.fixture(scope="module")
def small_file(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    tensors: dict[str, tuple[np.ndarray, Q | None]] = {"output_norm.weight": (np.ones(HIDDEN, np.float32), None)}
    return write(tmp_path_factory.mktemp("small") / "m.gguf", tensors=tensors).read_bytes()


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_damaged_bytes_never_do_worse_than_an_error(tmp_path: Path, small_file: bytes, data: st.DataObject) -> None:
    damaged = bytearray(small_file)
    for at in data.draw(st.lists(st.integers(0, len(damaged) - HIDDEN * 4), min_size=1, max_size=4)):
        damaged[at] = data.draw(st.integers(0, 255))
    path = tmp_path / "fuzz.gguf"
    path.write_bytes(damaged)
    try:
        checkpoint = open_checkpoint(path)
        for name, info in checkpoint.tensors.items():
            assert checkpoint.read(name).shape == info.shape
        checkpoint.tokenizer_files()
    except CheckpointError as error:
        assert "fuzz.gguf" in str(error)

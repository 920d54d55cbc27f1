"""Writes safetensors files of any size, one tensor in memory at a time.

The `safetensors` library writes a file from tensors that are all in memory; here shapes are known before values are,
so the header goes first and each tensor to its place when it comes.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO, Self

import numpy as np

from atlas.weights.quantized import Array
from atlas.weights.safetensors import DTYPES, INDEX, SINGLE

Entry = tuple[str, tuple[int, ...]]
"""dtype as safetensors spells it, and shape."""

_SPELLED = {np.dtype(dtype): name for name, dtype in DTYPES.items()}


def spelled(dtype: np.dtype[np.generic]) -> str:
    """A NumPy dtype as safetensors spells it."""
    return _SPELLED[np.dtype(dtype)]


def nbytes(entry: Entry) -> int:
    """Bytes of a tensor."""
    return np.dtype(DTYPES[entry[0]]).itemsize * math.prod(entry[1])


class Writer:
    """The weights of one checkpoint: model.safetensors, or shards of at most `shard_bytes` and their index.

    Args:
        folder: exists; nothing of the names is in it.
        groups: tensors that belong together and stay in one file, in the order in which they will come.

    Raises (by `write` and `close`):
        OSError: the disk.
    """

    def __init__(self, folder: Path, groups: Sequence[Mapping[str, Entry]], shard_bytes: int) -> None:
        self.folder = folder
        shards: list[dict[str, Entry]] = [{}]
        size = self.total = 0
        for group in groups:
            group_bytes = sum(map(nbytes, group.values()))
            if shards[-1] and size + group_bytes > shard_bytes:
                shards.append({})
                size = 0
            shards[-1] |= group
            size += group_bytes
            self.total += group_bytes
        count = len(shards)
        names = [SINGLE] if count == 1 else [f"model-{i + 1:05}-of-{count:05}.safetensors" for i in range(count)]
        self.files = {name: _File(folder / name, shard) for name, shard in zip(names, shards, strict=True)}
        self._file_of = {tensor: name for name, file in self.files.items() for tensor in file.entries}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        """Let go of files that are not complete."""
        for file in self.files.values():
            file.abandon()

    def write(self, name: str, values: Array) -> None:
        """Put one tensor where it belongs."""
        self.files[self._file_of[name]].write(name, values)

    def close(self) -> None:
        """Write the index, if there is one. Every tensor must have come."""
        missing = [name for file in self.files.values() for name in file.missing]
        assert not missing, missing[:4]
        if len(self.files) > 1:
            index = {"metadata": {"total_size": self.total}, "weight_map": dict(sorted(self._file_of.items()))}
            (self.folder / INDEX).write_text(json.dumps(index, indent=2), encoding="utf-8")


class _File:
    """One safetensors file; open from its first tensor to its last."""

    def __init__(self, path: Path, entries: dict[str, Entry]) -> None:
        self.path, self.entries, self.missing = path, entries, set(entries)
        self._stream: IO[bytes] | None = None
        header: dict[str, object] = {"__metadata__": {"format": "pt"}}
        self._offsets: dict[str, int] = {}
        offset = 0
        # Wide elements first, as the library orders them: readers that map the file need them aligned.
        for name in sorted(entries, key=lambda name: (-np.dtype(DTYPES[entries[name][0]]).itemsize, name)):
            dtype, shape = entries[name]
            end = offset + nbytes(entries[name])
            header[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [offset, end]}
            self._offsets[name] = offset
            offset = end
        text = json.dumps(header, separators=(",", ":")).encode()
        text += b" " * (-len(text) % 8)
        self._header = len(text).to_bytes(8, "little") + text
        self._size = len(self._header) + offset

    def write(self, name: str, values: Array) -> None:
        dtype, shape = self.entries[name]
        assert name in self.missing, f"{name} comes twice"
        assert (spelled(values.dtype), values.shape) == (dtype, shape), (name, values.dtype, values.shape, dtype, shape)
        if self._stream is None:
            self._stream = self.path.open("xb")
            self._stream.write(self._header)
            self._stream.truncate(self._size)
        self._stream.seek(len(self._header) + self._offsets[name])
        self._stream.write(np.ascontiguousarray(values).reshape(-1).view(np.uint8).data)
        self.missing.discard(name)
        if not self.missing:
            self._stream.close()

    def abandon(self) -> None:
        if self._stream is not None:
            self._stream.close()

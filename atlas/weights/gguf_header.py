"""The header of a GGUF file, read with every length and offset checked before it is used.

The `gguf` package's reader trusts counts and lengths, and takes seconds on a vocabulary of 50,000
tokens. Checking a header means visiting all of it, and the values are in hand by then, so this
walker returns them; constants and block sizes come from the package.
"""

from __future__ import annotations

import mmap
import re
import struct
from math import prod
from pathlib import Path
from typing import Any

import msgspec

from atlas.errors import CheckpointError

VERSIONS = (2, 3)
MAX_DIMS = 4
MAX_ARRAY_DEPTH = 4
MAX_ALIGNMENT = 1 << 20
DAMAGED = "the file is damaged or was not downloaded completely: download it again"

_SPLIT_NAME = re.compile(r"^(?P<stem>.+)-(?P<number>\d{5})-of-(?P<count>\d{5})\.gguf$")

# GGUF value type -> struct code; 7 is bool, 8 string, 9 array.
_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_STRING, _ARRAY = 8, 9

# Smallest possible encodings, by which a count can be refused before anything is made for it.
_MIN_FIELD_BYTES = 8 + 4 + 1
_MIN_TENSOR_BYTES = 8 + 4 + 4 + 8


class GgufTensor(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One tensor of a GGUF file.

    type: name of its ggml type, such as ``Q4_1``.
    shape: outermost dimension first (GGUF stores the reverse).
    offset, nbytes: where its bytes are in the file, absolute.
    part: index of the file, for a split model.
    """

    type: str
    shape: tuple[int, ...]
    offset: int
    nbytes: int
    part: int


class GgufHeader(msgspec.Struct, frozen=True):
    """Everything before the data of one file. `data_start` is where tensor bytes begin."""

    metadata: dict[str, Any]
    tensors: dict[str, GgufTensor]
    data_start: int
    size: int


def split_parts(path: Path) -> list[Path]:
    """The files of the model that `path` belongs to, by llama.cpp's naming; [path] when not split."""
    match = _SPLIT_NAME.match(path.name)
    if not match:
        return [path]
    stem, count = match["stem"], int(match["count"])
    return [path.with_name(f"{stem}-{number:05d}-of-{count:05d}.gguf") for number in range(1, count + 1)] or [path]


def first_part(path: Path) -> Path:
    """The first file of the split model that `path` belongs to; `path` when not split."""
    return split_parts(path)[0]


def read_header(path: Path, part: int = 0) -> GgufHeader:
    """Read and check the header of one GGUF file. `part` is noted in each tensor.

    Raises:
        CheckpointError: names the file and the field or tensor; nothing larger than the file is allocated.
    """
    try:
        with path.open("rb") as file:
            size = file.seek(0, 2)
            if size < 24:
                raise CheckpointError(str(path), f"only {size} bytes", "a GGUF file", DAMAGED)
            with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
                return _Walker(path, data, size).header(part)
    except OSError as error:
        raise CheckpointError(str(path), f"cannot be read ({error.strerror})") from None


class _Walker:
    """A position in a mapped file; every step forward is checked against the file's end."""

    def __init__(self, path: Path, data: mmap.mmap, size: int) -> None:
        self.path, self.data, self.size, self.at = path, data, size, 0

    def fail(self, found: str, accepted: str = "", fix: str = DAMAGED) -> CheckpointError:
        return CheckpointError(str(self.path), found, accepted, fix)

    def take(self, count: int, what: str) -> int:
        """Claim `count` bytes and return where they start."""
        start = self.at
        if count > self.size - start:
            raise self.fail(f"{what} has length {count}, but {self.size - start} bytes are left at byte {start}")
        self.at = start + count
        return start

    def unpack(self, code: str, what: str) -> Any:
        layout = struct.Struct("<" + code)
        return layout.unpack_from(self.data, self.take(layout.size, what))[0]

    def string(self, what: str) -> str:
        length = self.unpack("Q", what)
        start = self.take(length, f"the string of {what}")
        try:
            return self.data[start : start + length].decode()
        except UnicodeDecodeError:
            raise self.fail(f"{what} is not UTF-8", "UTF-8 text") from None

    def count(self, number: int, smallest: int, what: str) -> int:
        """A count that the rest of the file can hold at `smallest` bytes each."""
        if number * smallest > self.size - self.at:
            raise self.fail(f"{what} count {number} does not fit in a file of {self.size} bytes")
        return number

    def header(self, part: int) -> GgufHeader:
        magic = self.data[:4]
        if magic != b"GGUF":
            raise self.fail(f"magic {magic!r}", "b'GGUF'", "this is not a GGUF file, or it is damaged")
        self.at = 4
        version = self.unpack("I", "version")
        if version not in VERSIONS:
            swapped = int.from_bytes(version.to_bytes(4, "little"), "big")
            if swapped in VERSIONS:
                raise self.fail(
                    f"big-endian GGUF (version {swapped})",
                    "little-endian",
                    "convert the model for a little-endian machine",
                )
            raise self.fail(f"GGUF version {version}", " or ".join(map(str, VERSIONS)), "convert the model again")
        n_tensors, n_fields = self.unpack("Q", "tensor count"), self.unpack("Q", "metadata count")
        self.count(n_tensors, _MIN_TENSOR_BYTES, "tensor")
        self.count(n_fields, _MIN_FIELD_BYTES, "metadata")
        metadata: dict[str, Any] = {}
        for index in range(n_fields):
            key = self.string(f"metadata key {index}")
            if key in metadata:
                raise self.fail(f"metadata field {key} occurs twice")
            metadata[key] = self.value(self.unpack("I", key), key, 0)
        alignment = metadata.get("general.alignment", 32)
        if not isinstance(alignment, int) or not 8 <= alignment <= MAX_ALIGNMENT or alignment & (alignment - 1):
            raise self.fail(f"general.alignment is {alignment!r}", f"a power of two from 8 to {MAX_ALIGNMENT}")
        return self.tensor_table(n_tensors, metadata, alignment, part)

    def value(self, kind: int, key: str, depth: int) -> Any:
        if kind in _SCALARS:
            return self.unpack(_SCALARS[kind], key)
        if kind == _STRING:
            return self.string(key)
        if kind != _ARRAY or depth == MAX_ARRAY_DEPTH:
            raise self.fail(f"metadata field {key} has value type {kind} at depth {depth}", "types 0 to 12")
        element, number = self.unpack("I", key), self.unpack("Q", key)
        if element in _SCALARS:
            code = _SCALARS[element]
            start = self.take(struct.calcsize("<" + code) * number, f"array {key}")
            return list(struct.unpack_from(f"<{number}{code}", self.data, start))
        self.count(number, 8, f"array {key} element")
        if element == _STRING:
            return self.strings(number, key)
        return [self.value(element, key, depth + 1) for _ in range(number)]

    def strings(self, number: int, key: str) -> list[str]:
        """`number` strings. This is the loop over a vocabulary, so it makes no call per check."""
        length_at = struct.Struct("<Q").unpack_from
        data, at, size, result = self.data, self.at, self.size, []
        try:
            for _ in range(number):
                start = at + 8
                at = start + length_at(data, at)[0]
                if at > size:
                    break
                result.append(data[start:at].decode())
            else:
                self.at = at
                return result
        except UnicodeDecodeError:
            raise self.fail(f"string {len(result)} of {key} is not UTF-8", "UTF-8 text") from None
        except struct.error:
            pass
        raise self.fail(f"string {len(result)} of {key} has a length past the end of the file")

    def tensor_table(self, number: int, metadata: dict[str, Any], alignment: int, part: int) -> GgufHeader:
        # Imported here: it takes 0.2 s, and a cached index needs none of it.
        from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType

        known = {int(kind): (kind.name, *GGML_QUANT_SIZES[kind]) for kind in GGMLQuantizationType}
        entries: dict[str, tuple[str, tuple[int, ...], int, int]] = {}
        for index in range(number):
            name = self.string(f"name of tensor {index}")
            if name in entries:
                raise self.fail(f"tensor {name} occurs twice")
            n_dims = self.unpack("I", f"tensor {name}")
            if not 1 <= n_dims <= MAX_DIMS:
                raise self.fail(f"tensor {name} has {n_dims} dimensions", f"1 to {MAX_DIMS}")
            dims = [self.unpack("Q", f"tensor {name}") for _ in range(n_dims)]
            kind, offset = self.unpack("I", f"tensor {name}"), self.unpack("Q", f"tensor {name}")
            if kind not in known:
                names = ", ".join(label for label, _, _ in known.values())
                raise self.fail(f"tensor {name} has type {kind}", names, "upgrade atlas-infer and the gguf package")
            label, block, block_bytes = known[kind]
            if not all(dims) or dims[0] % block:
                raise self.fail(f"tensor {name} has dimensions {dims}", f"rows of whole {label} blocks of {block}")
            entries[name] = label, tuple(reversed(dims)), offset, prod(dims) // block * block_bytes
        data_start = -(-self.at // alignment) * alignment
        tensors: dict[str, GgufTensor] = {}
        previous, end = "", 0
        for name, (label, shape, offset, nbytes) in sorted(entries.items(), key=lambda entry: entry[1][2]):
            if offset % alignment:
                raise self.fail(f"tensor {name} is at offset {offset}", f"multiples of {alignment}")
            if offset < end:
                raise self.fail(f"tensors {previous} and {name} overlap at offset {offset}")
            previous, end = name, offset + nbytes
            if data_start + end > self.size:
                raise self.fail(f"tensor {name} ends at byte {data_start + end}, the file at byte {self.size}")
            tensors[name] = GgufTensor(label, shape, data_start + offset, nbytes, part)
        return GgufHeader(metadata, tensors, data_start, self.size)

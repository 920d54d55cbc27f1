"""Checkpoints as Hugging Face saves them: config.json and one or several .safetensors files."""

from __future__ import annotations

import hashlib
import json
import logging
import os
import reprlib
import weakref
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt
from safetensors import SafetensorError, safe_open

from atlas.errors import CheckpointError
from atlas.weights.checkpoint import Checkpoint, TensorInfo, TokenizerFiles, read_json_object
from atlas.weights.quantized import QuantizedArray
from atlas.weights.schemes import find

log = logging.getLogger(__name__)

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
DOWNLOAD_AGAIN = "the file is damaged or was not downloaded completely: download it again"
SAMPLE_BYTES = 4096

DTYPES: dict[str, npt.DTypeLike] = {
    "F64": np.float64,
    "F32": np.float32,
    "F16": np.float16,
    "BF16": ml_dtypes.bfloat16,
    "F8_E4M3": ml_dtypes.float8_e4m3fn,
    "F8_E5M2": ml_dtypes.float8_e5m2,
    "F8_E8M0": ml_dtypes.float8_e8m0fnu,
    "I64": np.int64,
    "I32": np.int32,
    "I16": np.int16,
    "I8": np.int8,
    "U64": np.uint64,
    "U32": np.uint32,
    "U16": np.uint16,
    "U8": np.uint8,
    "BOOL": np.bool_,
}


class SafetensorsCheckpoint(Checkpoint):
    """A directory with config.json and either model.safetensors or the shards that the index names.

    Other files in the directory (consolidated.safetensors, original/, pickles) are not looked at. The
    `safetensors` library maps each shard and validates its header before anything is used: length against
    the file, known dtypes, offsets in range without overlap or hole, sizes equal to shape times dtype.

    Raises:
        CheckpointError: names the file, and the tensor where one is at fault.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.config = read_json_object(path / "config.json", required=True)
        self.generation_config = read_json_object(path / "generation_config.json", required=False)
        self._shards: dict[str, _Shard] = {}
        self._files: dict[str, TensorInfo] = {}
        for name, file in self._placement().items():
            entry = self._shards[file].entries[name]
            self._files[name] = TensorInfo(name, tuple(entry["shape"]), entry["dtype"], file)
        self.tensors, self._quantized = find(self.config, self._files, path, self._stored)

    def _placement(self) -> dict[str, str]:
        """Tensor name -> file name, with every file opened and every tensor seen in its file."""
        # The order in which transformers looks, so that a directory that holds both means the same to both.
        if (self.path / SINGLE).is_file():
            return dict.fromkeys(self._open(SINGLE), SINGLE)
        if not (self.path / INDEX).is_file():
            found = ", ".join(sorted(file.name for file in self.path.glob("*.safetensors")))
            raise CheckpointError(str(self.path), f"only {found}", f"{SINGLE} or {INDEX} with its shards")
        weight_map = read_json_object(self.path / INDEX, required=True).get("weight_map")
        if not isinstance(weight_map, dict) or not weight_map:
            raise CheckpointError(str(self.path / INDEX), "no weight_map", "an object: tensor name -> file name")
        names: dict[str, set[str]] = {}
        for name, file in weight_map.items():
            # A plain file name: an index must not reach outside its directory, nor name what no folder can hold.
            if not isinstance(file, str) or Path(file).name != file or len(file.encode(errors="replace")) > 255:
                raise CheckpointError(
                    str(self.path / INDEX), f"tensor {name} is in {reprlib.repr(file)}", "a file name without folders"
                )
            if file not in names:
                names[file] = set(self._open(file))
            if name not in names[file]:
                raise CheckpointError(
                    str(self.path / file),
                    f"tensor {name} is not in it although {INDEX} says so",
                    fix=DOWNLOAD_AGAIN,
                )
        for file, stored in names.items():
            for name in sorted(stored - weight_map.keys()):
                log.warning("%s: tensor %s is not in %s: used all the same", file, name, INDEX)
                weight_map[name] = file
        return dict(weight_map)

    def _open(self, file: str) -> list[str]:
        """Map one file, have its header checked, and return the names in it."""
        path = self.path / file
        if not path.is_file():
            raise CheckpointError(str(path), f"the file is missing although {INDEX} names it", fix="download it again")
        self._shards[file] = shard = _Shard(path)
        return list(shard.entries)

    def read(self, name: str, rows: slice | None = None) -> npt.NDArray[Any]:
        begin, end = self.span(name, rows)
        if name in self._quantized:
            return self._quantized[name].read(self._stored, begin, end).dequantize()
        return self._stored(name, None if rows is None else slice(begin, end))

    def read_into(self, name: str, rows: slice, pieces: Sequence[npt.NDArray[np.uint8]]) -> None:
        begin, end = self.span(name, rows)
        self._shard(name).read_into(name, begin, end, pieces)

    def place(self, name: str) -> tuple[int, int] | None:
        self.info(name)
        if name in self._quantized:
            return None
        shard = self._shard(name)
        return shard.file, shard.data_start + int(shard.entries[name]["data_offsets"][0])

    def read_quantized(self, name: str, rows: slice | None = None) -> QuantizedArray:
        info = self.info(name)
        if name not in self._quantized:
            raise CheckpointError(
                f"{self.path}/{info.file}", f"tensor {name} has type {info.dtype}", "a quantised tensor"
            )
        return self._quantized[name].read(self._stored, *self.span(name, rows))

    def _stored(self, name: str, rows: slice | None = None) -> npt.NDArray[Any]:
        """A stored tensor by the name it has in its file, or some of its rows: a view of the file where its alignment
        allows."""
        return self._shard(name).read(name, rows)

    def _shard(self, name: str) -> _Shard:
        shard = self._shards.get(self._files[name].file)
        if shard is None:
            raise CheckpointError(str(self.path), f"tensor {name} was asked for after close()")
        return shard

    def digest(self) -> str:
        sha = hashlib.sha256(json.dumps(self.config, sort_keys=True).encode())
        for file in sorted(self._shards):
            shard = self._shards[file]
            sha.update(f"{file} {shard.data.size} {shard.data_start}".encode())
            sha.update(shard.data[: shard.data_start].data)
            for entry in shard.entries.values():
                begin, end = (shard.data_start + offset for offset in entry["data_offsets"])
                for at in sample_offsets(begin, end):
                    sha.update(shard.data[at : min(at + SAMPLE_BYTES, end)].data)
        return sha.hexdigest()

    def tokenizer_files(self) -> TokenizerFiles:
        path = self.path / "tokenizer.json"
        if not path.is_file():
            slow = [name for name in ("tokenizer.model", "vocab.json") if (self.path / name).is_file()]
            found = f"only {', '.join(slow)}" if slow else "no tokenizer files"
            fix = "convert it once with transformers: AutoTokenizer.from_pretrained(DIR).save_pretrained(DIR)"
            raise CheckpointError(str(path), f"the file is missing; there are {found}", "tokenizer.json", fix)
        config = read_json_object(self.path / "tokenizer_config.json", required=False)
        # Where older checkpoints keep the special tokens; newer ones have them in tokenizer_config.json too.
        special = read_json_object(self.path / "special_tokens_map.json", required=False)
        templates = (self.path / "chat_template.jinja", self.path / "additional_chat_templates" / "tool_use.jinja")
        try:
            tokenizer_json = path.read_text(encoding="utf-8")
            chat_template, tool_template = (
                file.read_text(encoding="utf-8") if file.is_file() else None for file in templates
            )
        except (OSError, UnicodeDecodeError) as error:
            raise CheckpointError(str(self.path), f"tokenizer files cannot be read ({error})") from None
        return TokenizerFiles(tokenizer_json, {**special, **config}, chat_template, str(path), tool_template)

    def close(self) -> None:
        self._shards.clear()


class _Shard:
    """One mapped file whose header the `safetensors` library has accepted.

    The library checks, but hands out copies and has no float8 for NumPy; so the tensors are views of
    our own mapping, at the offsets of the header that was checked.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            with safe_open(str(path), framework="numpy"):
                pass
            self.data: npt.NDArray[np.uint8] = np.asarray(np.memmap(path, np.uint8, mode="r"))
            self.file = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
            weakref.finalize(self, os.close, self.file)
        except (SafetensorError, OSError, ValueError) as error:
            raise CheckpointError(
                str(path), f"not a valid safetensors file ({error})", "a complete safetensors file", DOWNLOAD_AGAIN
            ) from None
        self.data_start = 8 + int.from_bytes(self.data[:8].tobytes(), "little")
        header = json.loads(self.data[8 : self.data_start].tobytes())
        self.entries: dict[str, dict[str, Any]] = {
            name: entry for name, entry in header.items() if name != "__metadata__"
        }

    def read(self, name: str, rows: slice | None) -> npt.NDArray[Any]:
        entry = self.entries[name]
        if entry["dtype"] not in DTYPES:
            raise CheckpointError(
                str(self.path), f"tensor {name} has type {entry['dtype']}, which cannot be read", ", ".join(DTYPES)
            )
        begin, end = (self.data_start + offset for offset in entry["data_offsets"])
        array = self.data[begin:end].view(DTYPES[entry["dtype"]]).reshape(entry["shape"])
        if rows is not None:
            array = array[rows]
        # The format lets a tensor begin anywhere; compiled code must not be given an unaligned pointer.
        return array if array.flags.aligned else array.copy()

    def read_into(self, name: str, begin: int, end: int, pieces: Sequence[npt.NDArray[np.uint8]]) -> None:
        """Rows [begin, end): read, not copied out of the mapping. To map a page and to unmap it takes 0.3 us each; a
        process does it one page at a time.
        """
        first, last = self.entries[name]["data_offsets"]
        row_bytes = (last - first) // self.entries[name]["shape"][0]
        at, left = self.data_start + first + begin * row_bytes, [piece.data.cast("B") for piece in pieces]
        if sum(map(len, left)) != (end - begin) * row_bytes:
            raise ValueError(f"rows {begin}:{end} of tensor {name} have {(end - begin) * row_bytes} bytes")
        while left:
            count = os.preadv(self.file, left[:_MOST_PIECES], at)
            if count == 0:
                raise CheckpointError(str(self.path), f"the file ends within tensor {name}", fix=DOWNLOAD_AGAIN)
            at += count
            while left and count >= len(left[0]):
                count -= len(left.pop(0))
            if count:
                left[0] = left[0][count:]


_MOST_PIECES = os.sysconf("SC_IOV_MAX")


def sample_offsets(begin: int, end: int) -> tuple[int, ...]:
    """Where to sample a tensor that occupies bytes [begin, end): its start, middle and end."""
    return (begin, begin + (end - begin) // 2, max(begin, end - SAMPLE_BYTES))

"""GGUF checkpoints: an import format. Names and configuration in HF spelling; blocks kept or dequantised."""

from __future__ import annotations

import hashlib
import json
import logging
import os
import weakref
from pathlib import Path
from typing import Any

import ml_dtypes
import msgspec
import numpy as np
import numpy.typing as npt

from atlas.cache import keep, private_folder
from atlas.errors import CheckpointError
from atlas.weights import gguf_blocks
from atlas.weights.checkpoint import Checkpoint, TensorInfo, TokenizerFiles
from atlas.weights.gguf_config import (
    add_rope_factors,
    check_architecture,
    config_from_metadata,
    generation_config_from_metadata,
)
from atlas.weights.gguf_header import GgufHeader, GgufTensor, read_header, split_parts
from atlas.weights.gguf_names import ARCHITECTURES, ROPE_FACTORS, hf_names, unpermute_rows
from atlas.weights.quantized import QuantizedArray
from atlas.weights.safetensors import SAMPLE_BYTES, sample_offsets

log = logging.getLogger(__name__)

# Part of every cached file's path or contents: raise it when what they hold changes.
CACHE_FORMAT = 1
# Far above any model's; a header that says more is not one.
MAX_EXPERTS = 1 << 14
# Vocabulary arrays are only needed to build the tokenizer, once; the index keeps their length.
MAX_INDEXED_ARRAY = 256

_FLOATS: dict[str, npt.DTypeLike] = {
    "F32": np.float32,
    "F16": np.float16,
    "BF16": ml_dtypes.bfloat16,
    "F64": np.float64,
}


class _Index(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """All that opening a model needs from its headers."""

    metadata: dict[str, Any]
    array_lengths: dict[str, int]
    tensors: dict[str, GgufTensor]


class _Sealed(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A cached document with its own hash, so that a damaged one is told from a good one."""

    sha256: str
    body: msgspec.Raw


class GgufCheckpoint(Checkpoint):
    """One GGUF model, in one file or in llama.cpp's numbered parts (give any; all must be there).

    The first opening walks the headers and leaves an index in the user's cache; later ones map the
    files by that index. Tokenizer files are made from the metadata when first asked for, and cached too.

    Raises:
        CheckpointError: names the file and the metadata field or tensor.
    """

    def __init__(self, path: Path) -> None:
        self._parts = split_parts(path)
        self.path = self._parts[0]
        for part in self._parts:
            if not part.is_file():
                raise CheckpointError(
                    str(part),
                    f"the file is missing; {path.name} is one of {len(self._parts)} parts",
                    fix="download all parts",
                )
        self._maps: dict[int, npt.NDArray[np.uint8]] = {}
        self._files: dict[int, int] = {}
        weakref.finalize(self, _close, self._files)
        memo = self._memo()
        self._digest, index = self._cached_index(memo) or self._build_index(memo)
        self._index = index
        self._names: dict[str, tuple[str, int | None]] = {}
        """Hugging Face's name -> the file's, and the index into it where it is a stack of experts."""
        self.tensors = {}
        file = str(self.path)
        architecture = check_architecture(index.metadata, file)
        self._architecture = ARCHITECTURES[architecture]
        for name, tensor in index.tensors.items():
            if name in ROPE_FACTORS:
                continue
            stacked = name.endswith("_exps.weight")
            if stacked and (len(tensor.shape) != 3 or tensor.shape[0] > MAX_EXPERTS):
                raise CheckpointError(
                    file, f"tensor {name} has shape {list(tensor.shape)}", f"at most {MAX_EXPERTS} matrices"
                )
            names = hf_names(architecture, name, tensor.shape[0])
            if not names:
                raise CheckpointError(
                    file, f"tensor {name} is not known for this architecture", f"the tensors of {architecture}"
                )
            shape = tensor.shape[1:] if stacked else tensor.shape
            scheme = gguf_blocks.SCHEMES.get(tensor.type) if len(shape) == 2 else None
            for expert, hugging_face in enumerate(names):
                self._names[hugging_face] = name, expert if stacked else None
                self.tensors[hugging_face] = TensorInfo(
                    hugging_face, shape, tensor.type, self._parts[tensor.part].name, scheme
                )
        embedding = index.tensors.get("token_embd.weight")
        rows = embedding.shape[0] if embedding else index.array_lengths.get("tokenizer.ggml.tokens")
        self.config = config_from_metadata(index.metadata, index.tensors.keys(), rows, file)
        if factors := {kind: self._rope_factors(name) for name, kind in ROPE_FACTORS.items() if name in index.tensors}:
            add_rope_factors(self.config, factors, index.metadata, file)
        self.generation_config = generation_config_from_metadata(index.metadata)

    def _rope_factors(self, name: str) -> npt.NDArray[np.float32]:
        tensor = self._index.tensors[name]
        if tensor.type != "F32":
            raise CheckpointError(str(self.path), f"tensor {name} has type {tensor.type}", "F32")
        return self._bytes(tensor).view(np.float32)

    # ---- the index and its cache ---------------------------------------------------------------

    def _memo(self) -> str:
        """Changes whenever one of the files may have: path, size, modification time and inode of each."""
        sha = hashlib.sha256(f"{CACHE_FORMAT}".encode())
        for part in self._parts:
            status = part.stat()
            sha.update(f"\0{part.resolve()}\0{status.st_size} {status.st_mtime_ns} {status.st_ino}".encode())
        return sha.hexdigest()

    def _cached_index(self, memo: str) -> tuple[str, _Index] | None:
        try:
            memos = private_folder("gguf", "seen")
            if memos is None or not (memos / memo).exists():
                return None
            digest = (memos / memo).read_text(encoding="ascii").strip()
            if len(digest) != 64 or not digest.isalnum():
                return None
            folder = private_folder("gguf", digest)
            if folder is None:
                return None
            sealed = msgspec.json.decode((folder / "index.json").read_bytes(), type=_Sealed)
            if hashlib.sha256(sealed.body).hexdigest() != sealed.sha256:
                log.warning("%s is damaged: made again", folder / "index.json")
                return None
            return digest, msgspec.json.decode(sealed.body, type=_Index)
        except (OSError, ValueError, msgspec.MsgspecError) as error:
            log.warning("the cached index of %s cannot be used (%s): made again", self.path, error)
            return None

    def _build_index(self, memo: str) -> tuple[str, _Index]:
        headers = [read_header(part, number) for number, part in enumerate(self._parts)]
        self._check_parts(headers)
        metadata = headers[0].metadata
        tensors: dict[str, GgufTensor] = {}
        for part, header in zip(self._parts, headers, strict=True):
            for name, tensor in header.tensors.items():
                if name in tensors:
                    raise CheckpointError(str(part), f"tensor {name} is in an earlier part too")
                tensors[name] = tensor
        large = {key: len(value) for key, value in metadata.items() if _is_large(value)}
        index = _Index({key: value for key, value in metadata.items() if key not in large}, large, tensors)
        digest = self._hash(headers)
        memos, folder = private_folder("gguf", "seen"), private_folder("gguf", digest)
        if memos is not None and folder is not None:
            body = msgspec.json.encode(index)
            sealed = _Sealed(hashlib.sha256(body).hexdigest(), msgspec.Raw(body))
            keep(folder / "index.json", msgspec.json.encode(sealed))
            keep(memos / memo, digest.encode())
        return digest, index

    def _check_parts(self, headers: list[GgufHeader]) -> None:
        for number, (part, header) in enumerate(zip(self._parts, headers, strict=True)):
            count = header.metadata.get("split.count", 1) or 1
            if count != len(self._parts) or header.metadata.get("split.no", 0) != number:
                raise CheckpointError(
                    str(part),
                    f"it says it is part {header.metadata.get('split.no', 0)} (from 0) of {count}",
                    f"part {number} of {len(self._parts)}, as its name says",
                    "give the first part under its own name (NAME-00001-of-0000N.gguf), all others beside it",
                )

    def _hash(self, headers: list[GgufHeader]) -> str:
        sha = hashlib.sha256(f"gguf {CACHE_FORMAT}".encode())
        for part, header in zip(self._parts, headers, strict=True):
            with part.open("rb") as file:
                sha.update(f"{header.size} {header.data_start}".encode())
                sha.update(file.read(header.data_start))
                for tensor in header.tensors.values():
                    end = tensor.offset + tensor.nbytes
                    for at in sample_offsets(tensor.offset, end):
                        file.seek(at)
                        sha.update(file.read(min(SAMPLE_BYTES, end - at)))
        return sha.hexdigest()

    # ---- tensors -------------------------------------------------------------------------------

    def read(self, name: str, rows: slice | None = None) -> npt.NDArray[Any]:
        raw, tensor = self._rows(name, rows)
        if tensor.type in _FLOATS:
            values = raw.view(_FLOATS[tensor.type]).reshape(len(raw), *self.info(name).shape[1:])
            if self._architecture.norm_offset and name.endswith("norm.weight"):
                return values.astype(np.float32) - np.float32(self._architecture.norm_offset)
            return values
        return self._dequantize(name, raw, tensor).reshape(len(raw), *self.info(name).shape[1:])

    def place(self, name: str) -> tuple[int, int] | None:
        self.info(name)
        stored, expert = self._names[name]
        tensor = self._index.tensors[stored]
        if tensor.type not in _FLOATS or self._reordered(name) or name.endswith("norm.weight"):
            return None
        if tensor.part not in self._files:
            self._files[tensor.part] = os.open(self._parts[tensor.part], os.O_RDONLY | os.O_CLOEXEC)
        return self._files[tensor.part], tensor.offset + (expert or 0) * (tensor.nbytes // tensor.shape[0])

    def read_quantized(self, name: str, rows: slice | None = None) -> QuantizedArray:
        info = self.info(name)
        if info.scheme is None:
            raise CheckpointError(
                info.file, f"tensor {name} has type {info.dtype}", f"one of {', '.join(gguf_blocks.SCHEMES)}"
            )
        raw, tensor = self._rows(name, rows)
        return gguf_blocks.unpack(tensor.type, raw)

    def _rows(self, name: str, rows: slice | None) -> tuple[npt.NDArray[np.uint8], GgufTensor]:
        """Stored bytes of rows in Hugging Face's order, uint8 [rows, bytes per row]; a view where it is the file's."""
        begin, end = self.span(name, rows)
        stored, expert = self._names[name]
        tensor = self._index.tensors[stored]
        data = self._bytes(tensor).reshape(*tensor.shape[: 1 if expert is None else 2], -1)
        if expert is not None:
            data = data[expert]
        if not self._reordered(name):
            return data[begin:end], tensor
        field = "num_attention_heads" if ".q_proj." in name else "num_key_value_heads"
        if tensor.shape[0] % (2 * self.config[field]):
            raise CheckpointError(
                str(self.path),
                f"tensor {name} has {tensor.shape[0]} rows",
                f"a multiple of 2 * {field} ({self.config[field]})",
            )
        return data[unpermute_rows(np.arange(tensor.shape[0]), self.config[field])[begin:end]], tensor

    def _reordered(self, name: str) -> bool:
        """Whether the file has the rows in another order."""
        return self._architecture.permuted and name.rsplit(".", 2)[-2] in ("q_proj", "k_proj")

    def _bytes(self, tensor: GgufTensor) -> npt.NDArray[np.uint8]:
        if tensor.part not in self._maps:
            self._maps[tensor.part] = np.memmap(self._parts[tensor.part], np.uint8, mode="r")
        return np.asarray(self._maps[tensor.part][tensor.offset : tensor.offset + tensor.nbytes])

    def _dequantize(self, name: str, raw: npt.NDArray[np.uint8], tensor: GgufTensor) -> npt.NDArray[np.float32]:
        """Blocks as float32, by the `gguf` package: it knows every type, where `gguf_blocks` knows some."""
        if not len(raw):
            return np.empty(0, np.float32)
        from gguf.constants import GGMLQuantizationType
        from gguf.quants import dequantize

        try:
            values = dequantize(raw, GGMLQuantizationType[tensor.type])
        except NotImplementedError:
            raise CheckpointError(
                str(self._parts[tensor.part]),
                f"tensor {name} has type {tensor.type}, which cannot be dequantised",
            ) from None
        return np.ascontiguousarray(values, dtype=np.float32)

    def digest(self) -> str:
        return self._digest

    def close(self) -> None:
        self._maps.clear()
        _close(self._files)

    # ---- tokenizer -----------------------------------------------------------------------------

    def tokenizer_files(self) -> TokenizerFiles:
        # Imported here: who reads weights need not load a tokenizer library.
        from atlas.tokenizer.gguf import tokenizer_documents, warn_without_pre

        warn_without_pre(self._index.metadata, str(self._parts[0]))
        folder = private_folder("gguf", self._digest)
        documents = self._cached_tokenizer(folder)
        if documents is None:
            documents = tokenizer_documents(read_header(self._parts[0]).metadata, str(self._parts[0]))
            if folder is not None:
                for file, text in zip(("tokenizer.json", "tokenizer_config.json"), documents, strict=True):
                    keep(folder / file, text.encode())
                # Last: it vouches for the two above.
                keep(folder / "tokenizer.sha256", _sums(documents).encode())
        return TokenizerFiles(documents[0], json.loads(documents[1]), None, str(self.path))

    def _cached_tokenizer(self, folder: Path | None) -> tuple[str, str] | None:
        if folder is None or not (folder / "tokenizer.sha256").exists():
            return None
        try:
            sums = (folder / "tokenizer.sha256").read_text(encoding="utf-8")
            documents = (
                (folder / "tokenizer.json").read_text(encoding="utf-8"),
                (folder / "tokenizer_config.json").read_text(encoding="utf-8"),
            )
        except (OSError, ValueError) as error:
            log.warning("the cached tokenizer in %s cannot be read (%s): made again", folder, error)
            return None
        if _sums(documents) != sums:
            log.warning("the cached tokenizer in %s is damaged or of another version: made again", folder)
            return None
        return documents


def _close(files: dict[int, int]) -> None:
    while files:
        os.close(files.popitem()[1])


def _is_large(value: Any) -> bool:
    return isinstance(value, list) and len(value) > MAX_INDEXED_ARRAY


def _sums(documents: tuple[str, str]) -> str:
    return "\n".join([str(CACHE_FORMAT), *(hashlib.sha256(text.encode()).hexdigest() for text in documents)])

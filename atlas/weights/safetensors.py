"""Checkpoints as Hugging Face saves them: config.json and one or several .safetensors files."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import numpy.typing as npt
from safetensors import SafetensorError, safe_open

from atlas.errors import CheckpointError
from atlas.weights.checkpoint import Checkpoint, TensorInfo, TokenizerFiles, read_json_object

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
DOWNLOAD_AGAIN = "the file is damaged or was not downloaded completely: download it again"
SAMPLE_BYTES = 4096


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
        self._shards: dict[str, Any] = {}
        self.tensors = {}
        for name, file in self._placement().items():
            shard = self._shards[file]
            piece = shard.get_slice(name)
            self.tensors[name] = TensorInfo(name, tuple(piece.get_shape()), piece.get_dtype(), file)

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
            # A plain file name: an index must not reach outside its directory.
            if not isinstance(file, str) or Path(file).name != file:
                raise CheckpointError(
                    str(self.path / INDEX), f"tensor {name} is in {file!r}", "a file name without folders"
                )
            if file not in names:
                names[file] = set(self._open(file))
            if name not in names[file]:
                raise CheckpointError(
                    str(self.path / file),
                    f"tensor {name} is not in it although {INDEX} says so",
                    fix=DOWNLOAD_AGAIN,
                )
        return dict(weight_map)

    def _open(self, file: str) -> list[str]:
        """Map one file, have its header checked, and return the names in it."""
        path = self.path / file
        if not path.is_file():
            raise CheckpointError(str(path), f"the file is missing although {INDEX} names it", fix="download it again")
        try:
            shard: Any = safe_open(str(path), framework="numpy")
        except (SafetensorError, OSError, ValueError) as error:
            raise CheckpointError(
                str(path),
                f"not a valid safetensors file ({error})",
                "a complete safetensors file",
                DOWNLOAD_AGAIN,
            ) from None
        self._shards[file] = shard
        return list(shard.keys())

    def read(self, name: str) -> npt.NDArray[Any]:
        info = self.info(name)
        shard = self._shards.get(info.file)
        if shard is None:
            raise CheckpointError(str(self.path), f"tensor {name} was asked for after close()")
        try:
            array: npt.NDArray[Any] = shard.get_tensor(name)
        except (SafetensorError, AttributeError, TypeError, ValueError) as error:
            raise CheckpointError(
                str(self.path / info.file), f"tensor {name} of type {info.dtype} cannot be read ({error})"
            ) from None
        return array

    def digest(self) -> str:
        sha = hashlib.sha256(json.dumps(self.config, sort_keys=True).encode())
        for file in sorted(self._shards):
            path = self.path / file
            size = path.stat().st_size
            with path.open("rb") as stream:
                header_bytes = int.from_bytes(stream.read(8), "little")
                sha.update(f"{file} {size} {header_bytes}".encode())
                header = stream.read(header_bytes)
                sha.update(header)
                for entry in json.loads(header).values():
                    if "data_offsets" in entry:
                        begin, end = (8 + header_bytes + offset for offset in entry["data_offsets"])
                        for at in sample_offsets(begin, end):
                            stream.seek(at)
                            sha.update(stream.read(min(SAMPLE_BYTES, end - at)))
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
        template = self.path / "chat_template.jinja"
        try:
            tokenizer_json = path.read_text(encoding="utf-8")
            chat_template = template.read_text(encoding="utf-8") if template.is_file() else None
        except (OSError, UnicodeDecodeError) as error:
            raise CheckpointError(str(self.path), f"tokenizer files cannot be read ({error})") from None
        return TokenizerFiles(tokenizer_json, {**special, **config}, chat_template, str(path))

    def close(self) -> None:
        self._shards.clear()


def sample_offsets(begin: int, end: int) -> tuple[int, ...]:
    """Where to sample a tensor that occupies bytes [begin, end): its start, middle and end."""
    return (begin, begin + (end - begin) // 2, max(begin, end - SAMPLE_BYTES))

"""The seam between model files and everything that uses them.

Model code sees one kind of checkpoint whatever the format on disk: tensor names and `config` are
spelled as Hugging Face spells them, and `read` returns rows in Hugging Face order.
"""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import numpy as np
import numpy.typing as npt

from atlas.errors import CheckpointError
from atlas.weights.quantized import QuantizedArray, Scheme

ACCEPTED = "a directory with config.json and *.safetensors, a .gguf file, or a directory with one GGUF model"

# No real config, index or tokenizer comes near this; it keeps a wrong file from filling memory.
MAX_JSON_BYTES = 256 << 20


@dataclass(frozen=True)
class TensorInfo:
    """One tensor, known before its values are read.

    name: Hugging Face name, for example ``model.layers.0.self_attn.q_proj.weight``.
    shape: as Hugging Face has it unquantised, ``[out, in]`` for a projection.
    dtype: ``F32``, ``F16``, ``BF16``, ... as safetensors spells it, or a GGUF type such as ``Q4_1``;
        of the stored codes where the tensor is quantised.
    file: name of the file that holds it (its codes).
    scheme: how it is quantised; None for plain values and for GGUF types that are only dequantised.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    file: str
    scheme: Scheme | None = None


@dataclass(frozen=True)
class TokenizerFiles:
    """What a tokenizer is built from, as contents, so that it need not exist as files.

    tokenizer_json: a `tokenizers` document.
    tokenizer_config: contents of tokenizer_config.json; empty when absent.
    chat_template: contents of chat_template.jinja; None when absent.
    source: file name to put in errors.
    tool_template: contents of additional_chat_templates/tool_use.jinja; None when absent.
    """

    tokenizer_json: str
    tokenizer_config: dict[str, Any]
    chat_template: str | None
    source: str
    tool_template: str | None = None


class Checkpoint(ABC):
    """An opened checkpoint: headers are read and validated, no weight is.

    path: what was opened.
    config: always in the spelling of Hugging Face's config.json, also for GGUF.
    generation_config: contents of generation_config.json; for GGUF made from its metadata; may be {}.
    tensors: by Hugging Face name, also for GGUF. A quantised weight stands under the name it has
        unquantised, whatever the stored pieces are called; the pieces (scales, zero points, ...) do not appear.
    """

    path: Path
    config: dict[str, Any]
    generation_config: dict[str, Any]
    tensors: dict[str, TensorInfo]

    @abstractmethod
    def read(self, name: str, rows: slice | None = None) -> npt.NDArray[Any]:
        """A tensor, or those of its rows: C-contiguous; possibly a read-only view of the file.

        Float tensors keep their stored dtype (float32, float16, `ml_dtypes.bfloat16`); quantised
        ones come as float32, exactly dequantised. Only the bytes of the rows are touched.

        rows: along the first axis, step 1; None for all. Cheapest in multiples of 16.

        Raises:
            CheckpointError: the checkpoint has no such tensor, its type cannot be read, or its values
                contradict its scheme.
        """

    def read_into(self, name: str, rows: slice, pieces: Sequence[npt.NDArray[np.uint8]]) -> None:
        """The bytes of rows of a float tensor as they are stored, one after another into `pieces`, which hold them all.

        Raises:
            CheckpointError: as `read`, and where the file ends early.
        """
        data, begin = self.read(name, rows).reshape(-1).view(np.uint8), 0
        for piece in pieces:
            piece.data.cast("B")[:] = data[begin : begin + piece.size].data
            begin += piece.size

    def place(self, name: str) -> tuple[int, int] | None:
        """The open file that has a float tensor's bytes as `read` gives them, and where in it they begin; None where no
        file has them so."""
        return None

    @abstractmethod
    def read_quantized(self, name: str, rows: slice | None = None) -> QuantizedArray:
        """Codes and scales of a tensor that has a scheme, or of those of its rows.

        Raises:
            CheckpointError: as `read`, and for a tensor without a scheme.
        """

    @abstractmethod
    def digest(self) -> str:
        """64 hex digits that identify the weights: a hash of headers, sizes and samples of every tensor.

        Two checkpoints that differ only inside a part of a tensor that is not sampled get the same
        digest: it names a model in caches and fingerprints, it is no defence against tampering.
        """

    @abstractmethod
    def tokenizer_files(self) -> TokenizerFiles:
        """What to build this checkpoint's tokenizer from. Raises CheckpointError when there is none."""

    @abstractmethod
    def close(self) -> None:
        """Let go of the files. Arrays that `read` returned stay valid."""

    def info(self, name: str) -> TensorInfo:
        """`tensors[name]`, or a CheckpointError that names the checkpoint and the tensor."""
        try:
            return self.tensors[name]
        except KeyError:
            raise CheckpointError(
                str(self.path),
                f"tensor {name} is missing",
                fix="download the model again, or check that it is complete",
            ) from None

    def span(self, name: str, rows: slice | None) -> tuple[int, int]:
        """First row and end of `rows` of a tensor; all of them for None. Raises CheckpointError beyond it."""
        shape = self.info(name).shape
        count = shape[0] if shape else 0
        if rows is None:
            return 0, count
        begin, end, step = rows.start or 0, count if rows.stop is None else rows.stop, rows.step or 1
        if step != 1 or not 0 <= begin <= end <= count:
            raise CheckpointError(str(self.path), f"rows {begin}:{end} of tensor {name}", f"rows within 0:{count}")
        return begin, end

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def open_checkpoint(path: Path) -> Checkpoint:
    """Open a directory (config.json and safetensors, or GGUF) or a GGUF file.

    Raises:
        CheckpointError: nothing usable is there, or a header is damaged; names what was found.
    """
    # Imported here: these modules import this one for the base class.
    from atlas.weights.gguf import GgufCheckpoint
    from atlas.weights.safetensors import SafetensorsCheckpoint

    path = Path(path)
    if path.is_file():
        if path.suffix == ".gguf" or _magic(path) == b"GGUF":
            return GgufCheckpoint(path)
        raise CheckpointError(str(path), f"a file that is not GGUF ({path.suffix or 'no suffix'})", ACCEPTED)
    if not path.is_dir():
        raise CheckpointError(str(path), "there is no such file or directory", ACCEPTED)
    if (path / "config.json").is_file() and any(path.glob("*.safetensors*")):
        return SafetensorsCheckpoint(path)
    if any(path.glob("*.gguf")):
        return GgufCheckpoint(_only_gguf(path))
    names = sorted(entry.name for entry in path.iterdir())
    listing = ", ".join(names[:12]) + (f" and {len(names) - 12} more" if len(names) > 12 else "")
    fix = ""
    if any(name.endswith((".bin", ".pt", ".pth")) for name in names):
        fix = "pickled weights are never read: use the model's safetensors files"
    raise CheckpointError(str(path), f"a directory that holds {listing or 'nothing'}", ACCEPTED, fix)


def _magic(path: Path) -> bytes:
    try:
        with path.open("rb") as file:
            return file.read(4)
    except OSError as error:
        raise CheckpointError(str(path), f"cannot be read: {error.strerror}", ACCEPTED) from None


def _only_gguf(directory: Path) -> Path:
    """The GGUF model of a directory; the parts of one split model count as one."""
    from atlas.weights.gguf_header import first_part

    models = sorted({first_part(file) for file in directory.glob("*.gguf")})
    if len(models) > 1:
        names = ", ".join(model.name for model in models)
        raise CheckpointError(str(directory), f"{len(models)} GGUF models: {names}", fix="give one of these files")
    return models[0]


def read_json_object(path: Path, *, required: bool) -> dict[str, Any]:
    """The JSON object in a file; {} when it is absent and not required.

    Raises:
        CheckpointError: absent but required, too large, not JSON, or not an object.
    """
    try:
        if path.stat().st_size > MAX_JSON_BYTES:
            raise CheckpointError(str(path), f"{path.stat().st_size} bytes", f"at most {MAX_JSON_BYTES} bytes")
        value = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        if not required:
            return {}
        raise CheckpointError(str(path), "the file is missing", fix="download the model again") from None
    except (ValueError, RecursionError) as error:
        # A download cut short is by far the most common cause.
        raise CheckpointError(str(path), f"not JSON ({error})", "a JSON object", "download it again") from None
    except OSError as error:
        raise CheckpointError(str(path), f"cannot be read ({error.strerror})") from None
    if not isinstance(value, dict):
        raise CheckpointError(str(path), f"JSON of type {type(value).__name__}", "a JSON object")
    return value

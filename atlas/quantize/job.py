"""One run of `python -m atlas.quantize`: a checkpoint in, a quantised checkpoint out. `run` reads top to bottom."""

from __future__ import annotations

import dataclasses
import json
import logging
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from atlas.errors import CheckpointError, ConfigError
from atlas.progress import Progress
from atlas.quantize import activation_aware, calibration, folder, layouts, report
from atlas.quantize.layouts import Context, Layout
from atlas.quantize.selection import PLAIN_DTYPES, Selection, fused_with, select
from atlas.quantize.writer import Entry, Writer, nbytes
from atlas.weights import Checkpoint
from atlas.weights.quantized import Array
from atlas.weights.safetensors import DTYPES, SafetensorsCheckpoint

_log = logging.getLogger(__name__)

REPORT = "quantization_report.json"


@dataclasses.dataclass(frozen=True)
class Options:
    """What to make. format, layout, group, zero_point: see `layouts.make`.

    calibration: text, or None.  calibration_tokens: how many of its tokens are run.
    ignore: patterns of modules to keep.  shard_bytes: largest file.  force: replace an existing checkpoint.
    """

    format: str
    layout: str | None = None
    group: str | None = None
    zero_point: bool = False
    calibration: str | None = None
    calibration_tokens: int = 4096
    ignore: tuple[str, ...] = ()
    shard_bytes: int = 5 << 30
    force: bool = False


def run(checkpoint: Checkpoint, output: Path, options: Options, progress: Progress | None = None) -> report.Report:
    """Quantise a checkpoint into the folder `output`.

    Raises:
        ConfigError: options that do not go together, or an output that may not be written.
        CheckpointError: weights that cannot be read or quantised; names the tensor.
    """
    progress = progress or Progress()
    folder.check_place(output, checkpoint.path, options.force)
    layout, selection = plan(checkpoint, options)
    warn_of_loss(checkpoint, selection)
    inputs = _calibrate(checkpoint, layout, options, progress)
    changes: Mapping[str, activation_aware.Change] = {}
    if options.format == "int4-awq":
        assert inputs is not None
        changes = activation_aware.search(checkpoint, inputs, selection, layout, progress)
    entries = [_entries(checkpoint, name, layout, selection) for name in checkpoint.tensors]
    need = sum(nbytes(entry) for group in entries for entry in group.values())
    errors = []
    progress.begin("quantising", sum(math.prod(info.shape) for info in checkpoint.tensors.values()), "weight")
    with folder.unfinished(output, need) as work, Writer(work, entries, options.shard_bytes) as writer:
        maxima = _SharedMaxima(checkpoint, selection, changes) if layout.shares_scale else None
        for name, group in zip(checkpoint.tensors, entries, strict=True):
            module = name.removesuffix(".weight")
            change = changes.get(name)
            if not _is_quantised(name, selection):
                values = _kept(checkpoint.read(name), group[name], change)
                writer.write(name, values)
                progress.advance(values.size)
                continue
            values = _values(checkpoint, name, change)
            context = _context(name, maxima, inputs, change)
            array = layout.quantize(values, context)
            for part, packed in layout.pack(array, context).items():
                writer.write(f"{module}.{part}", packed)
            errors.append(report.measure(name, values, array, sum(map(nbytes, group.values()))))
            progress.advance(values.size)
        writer.close()
        result = report.Report(_described(checkpoint, layout, options), tuple(errors), dict(selection.kept))
        _write_documents(checkpoint, work, layout, selection, result)
    return result


def plan(checkpoint: Checkpoint, options: Options) -> tuple[Layout, Selection]:
    """The layout, and what it will hold. Raises ConfigError where that is nothing."""
    wanted = select(checkpoint, {}, options.ignore)
    columns = [linear.shape[1] for linear in wanted.linears]
    layout = layouts.make(
        options.format, options.layout, options.group, options.zero_point, options.calibration is not None, columns
    )
    if options.format == "int4-awq" and options.calibration is None:
        raise ConfigError("--calibration", "not given with --format int4-awq", "a text like what the model will see")
    refuse = {linear.module: why for linear in wanted.linears if (why := layout.refuses(*linear.shape))}
    if refuse and options.group is not None:
        module, why = next(iter(refuse.items()))
        raise ConfigError(
            "--group", f"{options.group} for {module}: {why}", fix=f"leave --group out, or --ignore {module}"
        )
    for module, why in refuse.items():
        _log.warning("%s stays as it is: %s", module, why)
    selection = select(checkpoint, refuse, options.ignore)
    if not selection.linears:
        why = next(iter(refuse.values()), "no matrix inside a layer was found, or --ignore names all of them")
        found = f"{options.format} quantises nothing of this model ({why})"
        raise ConfigError("--format", found, fix="try another --group or --format")
    return layout, selection


def warn_of_loss(checkpoint: Checkpoint, selection: Selection) -> None:
    """Say so where what is quantised now was quantised before: each time adds its own error."""
    before = {checkpoint.tensors[linear.tensor].dtype for linear in selection.linears} - set(PLAIN_DTYPES)
    if before:
        _log.warning(
            "%s: its weights are quantised already (%s); quantising them again loses far more than quantising the "
            "original would: use the original checkpoint where there is one",
            checkpoint.path,
            ", ".join(sorted(before)),
        )


def _calibrate(
    checkpoint: Checkpoint, layout: Layout, options: Options, progress: Progress
) -> Mapping[str, calibration.Inputs] | None:
    if options.calibration is None:
        return None
    if options.format != "int4-awq" and not layout.calibrated:
        accepted = "--format int4-awq, or --layout modelopt"
        raise ConfigError("--calibration", f"of no use with --format {options.format} in this layout", accepted)
    return calibration.collect(checkpoint, options.calibration, options.calibration_tokens, progress)


def _entries(checkpoint: Checkpoint, name: str, layout: Layout, selection: Selection) -> dict[str, Entry]:
    """What one tensor of the source becomes."""
    info, module = checkpoint.tensors[name], name.removesuffix(".weight")
    if _is_quantised(name, selection):
        return {f"{module}.{part}": entry for part, entry in layout.entries(*info.shape).items()}
    # What a GGUF held in blocks stays as bf16; plain tensors keep their type.
    return {name: (info.dtype if info.dtype in PLAIN_DTYPES else "BF16", info.shape)}


def _is_quantised(name: str, selection: Selection) -> bool:
    module = name.removesuffix(".weight")
    return name != module and module in selection.modules


def _values(checkpoint: Checkpoint, name: str, change: activation_aware.Change | None) -> Array:
    values = np.asarray(checkpoint.read(name), np.float32)
    return values if change is None else change.apply(values)


def _kept(values: Array, entry: Entry, change: activation_aware.Change | None) -> Array:
    if change is not None:
        values = change.apply(np.asarray(values, np.float32))
    return np.asarray(values).astype(DTYPES[entry[0]], copy=False)


class _SharedMaxima:
    """The largest value of all matrices that share a scale per tensor; each is read once more for it."""

    def __init__(
        self, checkpoint: Checkpoint, selection: Selection, changes: Mapping[str, activation_aware.Change]
    ) -> None:
        self._checkpoint, self._changes, self._known = checkpoint, changes, dict[str, float]()
        self._modules = selection.modules

    def of(self, module: str) -> float:
        if module not in self._known:
            members = [name for name in fused_with(module) if name in self._modules]
            self._known |= dict.fromkeys(members, max(self._absmax(f"{name}.weight") for name in members))
        return self._known[module]

    def _absmax(self, tensor: str) -> float:
        values = _values(self._checkpoint, tensor, self._changes.get(tensor))
        return float(np.abs(values).max(initial=0))


def _context(
    name: str,
    maxima: _SharedMaxima | None,
    inputs: Mapping[str, calibration.Inputs] | None,
    change: activation_aware.Change | None,
) -> Context:
    """What is known about a matrix besides its values."""
    seen = None if inputs is None else inputs.get(name)
    return Context(
        name,
        0.0 if maxima is None else maxima.of(name.removesuffix(".weight")),
        None if seen is None else (change or activation_aware.Change()).importance(seen),
        None if seen is None else seen.absmax,
    )


def _described(checkpoint: Checkpoint, layout: Layout, options: Options) -> dict[str, Any]:
    return {
        "source": checkpoint.path.name,
        "format": options.format,
        "layout": options.layout or layouts.LAYOUTS[options.format][0],
        "calibrated": options.calibration is not None,
        "stored_as": type(layout).__name__,
    }


def _write_documents(
    checkpoint: Checkpoint, work: Path, layout: Layout, selection: Selection, result: report.Report
) -> None:
    """config.json and everything else that is not weights."""
    config = dict(checkpoint.config)
    config.pop("compression_config", None)  # of the source; quantization_config is replaced below
    if "torch_dtype" not in config and "dtype" not in config:
        config["torch_dtype"] = "bfloat16"
    config["quantization_config"] = layout.quantization_config(selection.kept)
    documents: dict[str, Any] = {**layout.files(selection.kept), "config.json": config, REPORT: result.document()}
    if checkpoint.generation_config:
        documents["generation_config.json"] = checkpoint.generation_config
    if isinstance(checkpoint, SafetensorsCheckpoint):
        folder.copy_companions(checkpoint.path, work)
    else:
        try:
            files = checkpoint.tokenizer_files()
        except CheckpointError as error:
            _log.warning("no tokenizer is written: %s", error)
        else:
            (work / "tokenizer.json").write_text(files.tokenizer_json, encoding="utf-8")
            documents["tokenizer_config.json"] = files.tokenizer_config
            if files.chat_template is not None:
                (work / "chat_template.jinja").write_text(files.chat_template, encoding="utf-8")
    for name, contents in documents.items():
        (work / name).write_text(json.dumps(contents, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")

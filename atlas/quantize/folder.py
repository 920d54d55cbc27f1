"""The output folder: written beside its place and moved there whole, so that no half of it passes for a checkpoint."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from atlas.errors import ConfigError

MARKER = "INCOMPLETE"
"""File in a folder that is still being written; it holds the process's id."""

_WEIGHTS = (".safetensors", ".gguf", ".bin", ".pt", ".pth", ".onnx", ".h5", ".msgpack", ".npz")
_OWN = ("config.json", "generation_config.json", "hf_quant_config.json", "quantize_config.json")


def check_place(output: Path, source: Path, force: bool) -> None:
    """Whether a checkpoint may be written to `output`. Raises ConfigError.

    A folder that holds something is replaced only with `force`, and only if it is a checkpoint and nothing else.
    """
    model = source if source.is_dir() else source.parent
    if output.resolve() == model.resolve() or output.resolve() in model.resolve().parents:
        raise ConfigError("--output", f"{output} holds the model itself", "another folder")
    if output.is_file():
        raise ConfigError("--output", f"{output} is a file", "a folder that does not exist yet")
    if not output.exists() or not any(output.iterdir()):
        return
    names = sorted(entry.name for entry in output.iterdir())
    if not force:
        raise ConfigError(
            "--output",
            f"{output} holds {', '.join(names[:4])}{', ...' if len(names) > 4 else ''}",
            "a new folder",
            "choose another, or add --force to replace a checkpoint",
        )
    if not (output / "config.json").is_file() or any(entry.is_dir() for entry in output.iterdir()):
        raise ConfigError(
            "--output",
            f"{output} is no checkpoint that --force may replace (it holds {', '.join(names[:4])})",
            "a folder with config.json and no folders in it",
        )


@contextmanager
def unfinished(output: Path, need: int) -> Iterator[Path]:
    """A folder NAME.incomplete to write to, which takes the place of `output` when the block ends well.

    need: bytes that will be written. Whatever goes wrong removes the folder; a process that is killed leaves it,
    with a file INCOMPLETE in it, and the next run clears it away.

    Raises:
        ConfigError: too little space, or another process is writing the same checkpoint.
    """
    output = output.absolute()
    work = output.with_name(output.name + ".incomplete")
    output.parent.mkdir(parents=True, exist_ok=True)
    free = shutil.disk_usage(output.parent).free
    if free < need:
        raise ConfigError("--output", f"{free} bytes free at {output.parent}", f"at least {need} bytes")
    _clear(work)
    work.mkdir()
    (work / MARKER).write_text(str(os.getpid()), encoding="ascii")
    try:
        yield work
        (work / MARKER).unlink()
        _replace(output, work)
    except BaseException:
        shutil.rmtree(work, ignore_errors=True)
        raise


def _clear(work: Path) -> None:
    """Remove what an earlier run left behind."""
    if not work.exists():
        return
    try:
        pid = int((work / MARKER).read_text(encoding="ascii"))
    except (OSError, ValueError):
        raise ConfigError("--output", f"{work} is in the way", "nothing there", "move or delete it") from None
    if _alive(pid):
        raise ConfigError("--output", f"process {pid} is writing {work}", "one process at a time")
    shutil.rmtree(work)


def _alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True


def _replace(output: Path, work: Path) -> None:
    old = output.with_name(output.name + ".replaced")
    if output.exists():
        os.replace(output, old)
    os.replace(work, output)
    if old.exists():
        shutil.rmtree(old)


def copy_companions(source: Path, work: Path) -> list[str]:
    """Copy what stands beside the weights of a folder: tokenizer, templates, licence. Returns the names."""
    copied = []
    for entry in sorted(source.iterdir()):
        name = entry.name
        skipped = name in _OWN or name.startswith((".", "README")) or name.endswith((".index.json", *_WEIGHTS))
        if entry.is_file() and not skipped and not name.startswith("quantization_report"):
            shutil.copyfile(entry, work / name)
            copied.append(name)
    return copied

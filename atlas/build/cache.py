"""Compiled kernels by content hash, under `$XDG_CACHE_HOME/atlas/kernels`.

An entry is one file: a line of JSON, the cubin, the PTX. It appears whole, by rename, and carries the
hash of its content, so that a torn or damaged entry is compiled again rather than used. Keys are
hashes of what a kernel is compiled from and with; no path of the machine is in one.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import logging
import os
import stat
import tempfile
from pathlib import Path
from typing import Any

log = logging.getLogger(__name__)

_FORMAT = 2


@dataclasses.dataclass(frozen=True)
class Compiled:
    """A compiled kernel and what its compilers said about it.

    image: the cubin. ptx: the text it was assembled from.
    spills, stack: bytes per thread in local memory. static_shared: bytes per block.
    reads, writes: indices of pointer parameters that reach a load, a store (atlas/build/inspect.py).
    seconds: processor time that compiling took, whatever else the machine did.
    """

    image: bytes
    ptx: bytes
    registers: int
    spills: int
    stack: int
    static_shared: int
    reads: tuple[int, ...]
    writes: tuple[int, ...]
    seconds: float = dataclasses.field(default=0.0, compare=False)


def cache_root() -> Path:
    """`$XDG_CACHE_HOME/atlas`, by default `~/.cache/atlas`. It need not exist."""
    base = os.environ.get("XDG_CACHE_HOME", "")
    # The XDG specification: a relative value is to be ignored.
    return (Path(base) if os.path.isabs(base) else Path.home() / ".cache") / "atlas"


def private_folder(name: str) -> Path | None:
    """`cache_root()/name`, made with mode 0700; None, with a warning, where it cannot be used safely.

    What lies there is later run on a device: a folder that belongs to somebody else, or that others
    can write to, could hand us an image of their making.
    """
    try:
        cache_root().parent.mkdir(parents=True, exist_ok=True)
        for folder in (cache_root(), cache_root() / name):
            folder.mkdir(mode=0o700, exist_ok=True)
            status = folder.lstat()
            reason = ""
            if not stat.S_ISDIR(status.st_mode):
                reason = "is not a plain directory"
            elif status.st_uid != os.getuid():
                reason = f"belongs to user id {status.st_uid}, not to you"
            elif status.st_mode & 0o022:
                reason = "can be written by others (chmod 700 it)"
            if reason:
                log.warning("the cache %s %s: not used, everything is compiled", folder, reason)
                return None
        return folder
    except OSError as error:
        log.warning("no cache in %s (%s): everything is compiled", cache_root(), error)
        return None


def load(folder: Path | None, digest: str) -> Compiled | None:
    """The entry of `digest`; None where there is none or it is damaged."""
    if folder is None:
        return None
    try:
        head, _, body = (folder / f"{digest}.kernel").read_bytes().partition(b"\n")
        facts: dict[str, Any] = json.loads(head)
        if facts.pop("format") != _FORMAT or facts.pop("sha256") != hashlib.sha256(body).hexdigest():
            return None
        size = facts.pop("image_bytes")
        facts["reads"], facts["writes"] = tuple(facts["reads"]), tuple(facts["writes"])
        return Compiled(image=body[:size], ptx=body[size:], **facts)
    except (OSError, ValueError, TypeError, KeyError, AttributeError):
        return None


def store(folder: Path | None, digest: str, result: Compiled) -> None:
    """Keep `result`. A cache that cannot be written costs time, not correctness: it is logged."""
    if folder is None:
        return
    facts = dataclasses.asdict(result)
    body = facts.pop("image") + facts.pop("ptx")
    facts |= {
        "format": _FORMAT,
        "image_bytes": len(result.image),
        "sha256": hashlib.sha256(body).hexdigest(),
    }
    try:
        write_atomically(folder / f"{digest}.kernel", json.dumps(facts, sort_keys=True).encode() + b"\n" + body, 0o600)
    except OSError as error:
        log.warning("cannot write the cache %s: %s", folder, error)


def write_atomically(path: Path, data: bytes, mode: int = 0o644) -> None:
    """Put `data` at `path` so that a reader sees the old file or the new one, never a part."""
    descriptor, temporary = tempfile.mkstemp(prefix=path.name + ".", dir=path.parent)
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(data)
            os.chmod(temporary, mode)
        os.replace(temporary, path)
    except BaseException:
        os.unlink(temporary)
        raise

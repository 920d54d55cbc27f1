"""The user's cache folder: private, written atomically, never trusted blindly. Standard library only."""

from __future__ import annotations

import logging
import os
import stat
import tempfile
from pathlib import Path

log = logging.getLogger(__name__)


def cache_root() -> Path:
    """`$XDG_CACHE_HOME/atlas`, by default ~/.cache/atlas. It need not exist."""
    base = os.environ.get("XDG_CACHE_HOME", "")
    # The XDG specification: a relative value is to be ignored.
    return (Path(base) if os.path.isabs(base) else Path.home() / ".cache") / "atlas"


def private_folder(*parts: str) -> Path | None:
    """`cache_root()/parts`, made with mode 0700; None, with a warning, where it cannot be used safely.

    A folder that belongs to somebody else, or that others can write to, could hand us an index, a
    tokenizer or a device image of their making, so it is not used.
    """
    folder = cache_root()
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        for part in ("", *parts):
            folder = folder / part
            folder.mkdir(mode=0o700, exist_ok=True)
            status = folder.lstat()
            if not stat.S_ISDIR(status.st_mode):
                log.warning("the cache %s is not a plain directory: not used", folder)
                return None
            if status.st_uid != os.getuid():
                log.warning("the cache %s belongs to user id %d, not to you: not used", folder, status.st_uid)
                return None
            if status.st_mode & 0o022:
                log.warning("the cache %s can be written by others: not used (chmod 700 it)", folder)
                return None
        return folder
    except OSError as error:
        log.warning("no cache in %s (%s): its work is repeated each time", folder, error)
        return None


def write_atomic(path: Path, data: bytes, mode: int = 0o600) -> None:
    """Put `data` at `path` so that a reader sees the old file or the new one, never a part.

    Raises:
        OSError: the folder cannot be written.
    """
    handle, name = tempfile.mkstemp(prefix=path.name + ".", dir=path.parent)
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(data)
            os.chmod(name, mode)
        os.replace(name, path)
    except BaseException:
        os.unlink(name)
        raise


def keep(path: Path, data: bytes) -> None:
    """Write a cache file. One that cannot be written costs time, not correctness: it is logged."""
    try:
        write_atomic(path, data)
    except OSError as error:
        log.warning("cannot write the cache file %s: %s", path, error)

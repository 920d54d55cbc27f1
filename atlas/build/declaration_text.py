"""The TOML at the top of a kernel file, and what a file has of another one's (atlas/build/kernel_file.py)."""

from __future__ import annotations

import functools
import re
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from atlas.errors import BuildError

LIKE = "like"
"""Names a file beside this one, whose keys hold where this one does not state them."""

_DECLARATION = re.compile(r"/\* atlas\n(.*?)\*/", re.DOTALL)


def tables(path: Path) -> dict[str, Any] | None:
    """The tables of a kernel file's declaration, not to be changed; None if it has none.

    Raises BuildError: bad TOML, or LIKE names no declaration, or one that is like another.
    """
    own = _written(path)
    if own is None or LIKE not in own:
        return own
    name, other = own[LIKE], None
    if isinstance(name, str) and Path(name).name == name and path.with_name(name).is_file():
        other = _written(path.with_name(name))
    if other is None or LIKE in other:
        accepted = f"a kernel file beside it with a declaration that has no {LIKE} itself"
        raise BuildError(str(path), f"{LIKE} is {name!r}", accepted)
    return _over(other, {table: content for table, content in own.items() if table != LIKE})


def _over(base: Mapping[str, Any], own: Mapping[str, Any]) -> dict[str, Any]:
    """The keys of both, tables in tables too; `own` where both have one."""
    both = dict(base)
    for key, value in own.items():
        known = base.get(key)
        both[key] = _over(known, value) if isinstance(known, dict) and isinstance(value, dict) else value
    return both


def _written(path: Path) -> dict[str, Any] | None:
    status = path.stat()
    return _parsed(path, status.st_mtime_ns, status.st_size)


@functools.lru_cache(maxsize=1024)
def _parsed(path: Path, modified: int, size: int) -> dict[str, Any] | None:
    """What stands in a file, which is read again when it changes."""
    del modified, size
    match = _DECLARATION.search(path.read_text())
    try:
        return tomllib.loads(match.group(1)) if match else None
    except tomllib.TOMLDecodeError as error:
        raise BuildError(str(path), f"declaration is not valid TOML: {error}") from None

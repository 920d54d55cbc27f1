"""Compiled kernels by content hash, under `$XDG_CACHE_HOME/atlas/kernels`.

An entry is one file: a hash, a line of JSON, the cubin, the PTX. It appears whole, by rename. The hash is
over its key and everything after it, so that a torn, damaged or renamed entry is compiled again rather
than used. Keys are hashes of what a kernel is compiled from and with; no path of the machine is in one.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
from pathlib import Path
from typing import Any

from atlas.cache import keep

_FORMAT = 3


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


def load(folder: Path | None, digest: str) -> Compiled | None:
    """The entry of `digest`; None where there is none or it is damaged."""
    if folder is None:
        return None
    path = folder / f"{digest}.kernel"
    try:
        if not path.is_file():  # a FIFO would be waited for
            return None
        seal, _, content = path.read_bytes().partition(b"\n")
        if seal.decode() != _seal(digest, content):
            return None
        # Sealed, so written by `store`: nothing below can be of another kind.
        head, _, body = content.partition(b"\n")
        facts: dict[str, Any] = json.loads(head)
        size = facts.pop("image_bytes")
        facts["reads"], facts["writes"] = tuple(facts["reads"]), tuple(facts["writes"])
        return Compiled(image=body[:size], ptx=body[size:], **facts)
    except (OSError, ValueError):
        return None


def store(folder: Path | None, digest: str, result: Compiled) -> None:
    """Keep `result`. A cache that cannot be written costs time, not correctness: it is logged."""
    if folder is None:
        return
    facts = dataclasses.asdict(result)
    body = facts.pop("image") + facts.pop("ptx")
    facts["image_bytes"] = len(result.image)
    content = json.dumps(facts, sort_keys=True).encode() + b"\n" + body
    keep(folder / f"{digest}.kernel", _seal(digest, content).encode() + b"\n" + content)


def _seal(digest: str, content: bytes) -> str:
    return hashlib.sha256(f"atlas kernel {_FORMAT} {digest}\n".encode() + content).hexdigest()

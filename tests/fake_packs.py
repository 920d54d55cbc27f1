"""Kernel packs without a compiler: device images that are an ELF header for a GPU and some bytes."""

from __future__ import annotations

import hashlib
import json
import struct
from typing import Any

from atlas.build import pack
from atlas.build.compile import ImageBlob
from atlas.build.manifest import KernelEntry, KernelSet, KernelVariant, Manifest
from atlas.ops import OPS

SHAPE = "0123456789abcdef"
PTX = b".version 8.8\n.target sm_80\n.visible .entry k() { ret; }\n"


def cubin(payload: bytes = b"", machine: int = 190, sections_at: int = 0, sections: int = 0) -> bytes:
    """A 64-bit little-endian ELF file for `machine` (190: a GPU)."""
    ident = b"\x7fELF" + bytes((2, 1, 1)) + bytes(9)
    rest = struct.pack("<HHIQQQIHHHHHH", 2, machine, 1, 0, 0, sections_at, 0, 64, 0, 0, 64, sections, 0)
    return ident + rest + payload


def entry(op: str, image: int, **changes: Any) -> KernelEntry:
    fields: dict[str, Any] = {
        "name": f"{op}__hidden576",
        "op": op,
        "contract": OPS[op].contract_hash(),
        "layouts": {},
    }
    variant: dict[str, Any] = {
        "source": f"cuda/{op}.cu",
        "image": image,
        "symbol": f"atlas_{op}",
        "grid": ((0, 1, 1), (-1, 1, 1), (-1, 1, 1)),
        "block": 128,
        "knobs": {"THREADS": 128},
        "source_hash": "ab" * 32,
    }
    for name, value in changes.items():
        (fields if name in fields else variant)[name] = value
    return KernelEntry(**fields, variants=(KernelVariant(**variant),))


def build(
    hardware: str = "h200",
    arch: str = "sm_90a",
    capability: tuple[int, int] = (9, 0),
    quant: str = "bf16",
    shape_hash: str = SHAPE,
    ptx: bool = False,
    **changes: Any,
) -> tuple[Manifest, bytes]:
    """A manifest of one set with two kernels, and its images. changes: fields of every kernel."""
    blob = ImageBlob()
    kernels = []
    for op in ("gated_activation", "rms_norm"):
        image = blob.add(cubin(f"code of {op}".encode()))
        kernels.append(entry(op, image, ptx=blob.add(PTX) if ptx else -1, **changes))
    kernel_set = KernelSet(hardware, "cuda", "test-model", quant, shape_hash, arch, capability, tuple(kernels))
    manifest = Manifest((kernel_set,), tuple(blob.images), "test", selection={"targets": kernel_set.name})
    return manifest, bytes(blob.data)


def packed(**changes: Any) -> bytes:
    """The file of `build`."""
    return pack.to_bytes(*build(**changes))


def signed(data: bytes) -> bytes:
    """`data` with the checksum that belongs to it: what is wrong in it is then for the parser to find."""
    if len(data) < 56:
        return data
    return data[:24] + hashlib.sha256(data[:24] + data[56:]).digest() + data[56:]


def file_of(manifest: bytes, blob: bytes) -> bytes:
    """A correctly framed and signed file around any manifest text."""
    body = manifest + bytes(-(64 + len(manifest)) % 64) + blob
    head = struct.pack("<8sIIQ40x", pack.MAGIC, pack.FORMAT, len(manifest), 64 + len(body))
    return signed(head + body)


def with_document(document: Any, blob: bytes) -> bytes:
    return file_of(json.dumps(document).encode(), blob)

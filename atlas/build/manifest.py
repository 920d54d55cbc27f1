"""The manifest of kernel sets: what was compiled, from what, for what, and what it needs to run.

Written by the build, embedded beside the device images, read at load. Everything a load must check
before it runs a kernel stands here: core ABI, op contracts, shape, architecture, image hashes.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
from typing import Any

from atlas.build import strict_json
from atlas.build.strict_json import Malformed, integer, mapping, record, sequence, text
from atlas.errors import BuildError

FORMAT = 3
"""Version of this document."""

CORE_ABI = 5
"""kCoreAbi of csrc/core/program.h that the kernels were built for; a test holds the two together."""


@dataclasses.dataclass(frozen=True)
class KernelVariant:
    """One compiled variant of a kernel.

    phase: 0 any, 1 prefill, 2 decode.  max_rows: most rows of a launch, 0: any number.
    image: index into Manifest.images.  symbol: its entry in the image.
    grid: (dim index or -1, divisor, multiplier) per axis; block: threads; shared: dynamic bytes.
    cluster: blocks of a cluster, along x.  pdl: launched with programmatic dependent launch.
    cooperative: launched only if all blocks fit at once.
    arguments: constants that are arguments, in this order, behind the dims.
    scratch: bytes of device memory of its own, its last argument; 0: none.
    registers, spills, stack, static_shared: as ptxas reports them.
    source: the file, relative to the kernel tree.  source_hash: of everything it was compiled from.
    ptx: index into Manifest.images of the same kernel as PTX, -1 where only the cubin is embedded.
    knobs: the tuning values it was compiled with; knobs_from: where they come from ("declared", ...).
    seconds: what compiling took, for reports; never written to a manifest: two builds give the same bytes.
    """

    phase: int = 0
    max_rows: int = 0
    source: str = ""
    image: int = -1
    symbol: str = ""
    grid: tuple[tuple[int, int, int], ...] = ()
    block: int = 1
    shared: int = 0
    cluster: int = 1
    pdl: bool = False
    cooperative: bool = False
    arguments: tuple[str, ...] = ()
    scratch: int = 0
    registers: int = 0
    spills: int = 0
    stack: int = 0
    static_shared: int = 0
    source_hash: str = ""
    ptx: int = -1
    knobs: dict[str, int] = dataclasses.field(default_factory=dict)
    knobs_from: str = "declared"
    seconds: float = dataclasses.field(default=0.0, compare=False)


@dataclasses.dataclass(frozen=True)
class KernelEntry:
    """One kernel of a set.

    name: KernelKey.name() on a GPU, KernelKey.signature() on a CPU: what a program's launch asks for.
    contract: hash of the op contract it implements.
    layouts: operand -> storage layout, where it is not row-major (atlas/weights/layouts.py).
    source: of host code, the file, relative to the kernel tree.
    variants: device code, by phase and ascending bound; a launch takes the first that holds its step's rows.
    """

    name: str
    op: str
    contract: str
    layouts: dict[str, str]
    source: str = ""
    variants: tuple[KernelVariant, ...] = ()

    def sources(self) -> tuple[str, ...]:
        """Files that it comes from."""
        return tuple(dict.fromkeys(variant.source for variant in self.variants)) or (self.source,)


@dataclasses.dataclass(frozen=True)
class KernelSet:
    """A compiled target. shape_hash is "*" where kernels take run-time dims; arch is empty on a CPU."""

    hardware: str
    kind: str
    model: str
    quant: str
    shape_hash: str
    arch: str
    compute_capability: tuple[int, int]
    kernels: tuple[KernelEntry, ...]

    @property
    def name(self) -> str:
        return f"{self.hardware}/{self.model}/{self.quant}"


@dataclasses.dataclass(frozen=True)
class Image:
    """A device image: where it lies in the blob of images, and its hash."""

    offset: int
    size: int
    sha256: str


@dataclasses.dataclass(frozen=True)
class Manifest:
    """All kernel sets of one build.

    flags: compiler options.  selection: the ATLAS_TARGET_* variables as they were given, and under
    "targets" the names of the targets that they gave, separated by commas.
    """

    sets: tuple[KernelSet, ...]
    images: tuple[Image, ...]
    compiler: str
    format: int = FORMAT
    core_abi: int = CORE_ABI
    flags: tuple[str, ...] = ()
    selection: dict[str, str] = dataclasses.field(default_factory=dict)

    def to_json(self) -> str:
        """The document. It holds nothing that differs between two builds of the same input."""
        document = dataclasses.asdict(self)
        for kernel_set in document["sets"]:
            for kernel in kernel_set["kernels"]:
                for variant in kernel["variants"]:
                    del variant["seconds"]
        return json.dumps(document, indent=1, sort_keys=True)


_NAME = text(r"[A-Za-z0-9_][A-Za-z0-9_.\-]*", "letters, digits, '_', '.' and '-'")
_MODEL = text(r"\*|[A-Za-z0-9_][A-Za-z0-9_.\-]*", "'*', or letters, digits, '_', '.' and '-'")
_SYMBOL = text(r"([A-Za-z_][A-Za-z0-9_]*)?", "a C identifier")
_SOURCE = text(r"(?:[A-Za-z0-9_*][A-Za-z0-9_.*\-]*(?:/(?!$)|$))*", "a path inside the kernel tree")
_PRINTABLE = text(r"[ -~]*", "printable ASCII", 1 << 10)
_LONG = text(r"[ -~\s]*", "ASCII text", 1 << 16)
_SHA256 = text(r"[0-9a-f]{64}", "64 hex digits")
_BYTES = integer(0, 1 << 31)
_SHARED = integer(0, 1 << 20)
_INDEX = integer(-1, 1 << 16)
_INT32 = (1 << 31) - 1

_VARIANT = record(
    KernelVariant,
    {
        "phase": integer(0, 2),
        "max_rows": integer(0, _INT32),
        "source": _SOURCE,
        "image": _INDEX,
        "symbol": _SYMBOL,
        "grid": sequence(
            # (dim, divisor, multiplier); the core divides by the divisor.
            strict_json.fixed(integer(-1, 64), integer(1, _INT32), integer(0, _INT32)),
            0,
            3,
        ),
        "block": integer(1, 1024),
        "shared": _SHARED,
        "cluster": integer(1, 16),
        "pdl": strict_json.boolean,
        "cooperative": strict_json.boolean,
        "arguments": sequence(_NAME, 0, 16),
        "scratch": integer(0, 1 << 32),
        "registers": integer(0, 1024),
        "spills": _BYTES,
        "stack": _BYTES,
        "static_shared": _SHARED,
        "source_hash": text(r"([0-9a-f]{64})?", "64 hex digits"),
        "ptx": _INDEX,
        "knobs": mapping(_SYMBOL, integer(-_INT32, _INT32), 64),
        "knobs_from": _PRINTABLE,
    },
    unwritten=("seconds",),
)
_KERNEL = record(
    KernelEntry,
    {
        "name": _NAME,
        "op": _NAME,
        "contract": text(r"[0-9a-f]{16}", "16 hex digits"),
        "layouts": mapping(_NAME, _NAME, 64),
        "source": _SOURCE,
        "variants": sequence(_VARIANT, 0, 256),
    },
)
_SET = record(
    KernelSet,
    {
        "hardware": _NAME,
        "kind": text(r"cpu|cuda", "'cpu' or 'cuda'"),
        "model": _MODEL,
        "quant": _NAME,
        "shape_hash": text(r"\*|[0-9a-f]{16}", "'*' or 16 hex digits"),
        "arch": text(r"([a-z0-9_]+)?", "a ptxas target such as sm_90a", 16),
        "compute_capability": sequence(integer(0, 99), 2, 2),
        "kernels": sequence(_KERNEL, 0, 4096),
    },
)
_MANIFEST = record(
    Manifest,
    {
        "format": integer(FORMAT, FORMAT),
        "core_abi": integer(CORE_ABI, CORE_ABI),
        "sets": sequence(_SET, 0, 4096),
        "images": sequence(
            record(Image, {"offset": integer(0, 1 << 40), "size": integer(1, 1 << 31), "sha256": _SHA256}), 0, 1 << 16
        ),
        "compiler": _PRINTABLE,
        "flags": sequence(_PRINTABLE, 0, 256),
        "selection": mapping(_NAME, _LONG, 16),
    },
)
_MAX_DEPTH = 10
"""Levels of brackets; a grid's axis is the ninth."""

REBUILD = "rebuild the kernels with this version of Atlas"


def from_json(
    document: str, blob: bytes | memoryview, where: str, fix: str = REBUILD
) -> tuple[Manifest, list[memoryview]]:
    """A manifest and its images, checked against `blob`. Nothing of the document is trusted.

    Raises:
        BuildError: another format or ABI, a field that is missing, unknown or not what it may be, or an
            image whose place or hash is wrong; names `where` and the field, and says `fix`.
    """
    try:
        parsed = strict_json.parse(document, _MAX_DEPTH)
        _check_version(parsed, where, fix)
        manifest: Manifest = _MANIFEST(parsed, "")
        for s, kernel_set in enumerate(manifest.sets):
            _check_set(kernel_set, len(manifest.images), f"sets[{s}]")
        return manifest, _images(manifest.images, memoryview(blob))
    except Malformed as error:
        field = f"{error.field}: " if error.field else ""
        raise BuildError(where, f"the manifest is damaged: {field}{error.found}", error.accepted, fix) from None


def _check_version(document: Any, where: str, fix: str) -> None:
    """Before anything else: another version may have other fields."""
    if not isinstance(document, dict):
        raise Malformed("", f"is {strict_json.shown(document)}", "an object")
    found = tuple(document.get(name) for name in ("format", "core_abi"))
    if found != (FORMAT, CORE_ABI):
        raise BuildError(
            where,
            f"manifest format {strict_json.shown(found[0])}, core ABI {strict_json.shown(found[1])}",
            f"format {FORMAT}, core ABI {CORE_ABI}",
            fix,
        )


def _check_set(kernel_set: KernelSet, n_images: int, field: str) -> None:
    """What no single field shows: every device kernel has an image, host kernels have none, names are unique."""
    names: set[str] = set()
    for k, kernel in enumerate(kernel_set.kernels):
        place = f"{field}.kernels[{k}]"
        if kernel.name in names:
            raise Malformed(f"{place}.name", f"{kernel.name!r} stands twice in the set")
        names.add(kernel.name)
        if bool(kernel.variants) != (kernel_set.kind == "cuda"):
            wanted = "1 or more of a device kernel" if kernel_set.kind == "cuda" else "none of host code"
            raise Malformed(f"{place}.variants", f"has {len(kernel.variants)} items", wanted)
        order = [(variant.phase, variant.max_rows or _INT32) for variant in kernel.variants]
        if order != sorted(set(order)):
            raise Malformed(f"{place}.variants", f"are of (phase, rows) {order}", "each once, in ascending order")
        for v, variant in enumerate(kernel.variants):
            where = f"{place}.variants[{v}]"
            for attribute in ("image", "ptx"):
                index = getattr(variant, attribute)
                if index >= n_images:
                    raise Malformed(f"{where}.{attribute}", f"is {index}", f"-1..{n_images - 1}")
            if max(variant.image, variant.ptx) < 0 or not variant.symbol or not variant.grid:
                raise Malformed(where, "a device kernel without image, symbol or grid")


def _images(images: tuple[Image, ...], blob: memoryview) -> list[memoryview]:
    end = 0
    for offset, index in sorted((image.offset, index) for index, image in enumerate(images)):
        if offset < end:
            raise Malformed(f"images[{index}]", f"begins at byte {offset} inside another image", f"{end} or more")
        end = offset + images[index].size
        if end > len(blob):
            raise Malformed(f"images[{index}]", f"ends at byte {end}", f"at most {len(blob)}")
    views = []
    for index, image in enumerate(images):
        view = blob[image.offset : image.offset + image.size]
        found = hashlib.sha256(view).hexdigest()
        if found != image.sha256:
            raise Malformed(f"images[{index}]", f"has sha256 {found[:16]}...", f"{image.sha256[:16]}...")
        views.append(view)
    return views

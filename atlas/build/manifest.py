"""The manifest of kernel sets: what was compiled, from what, for what, and what it needs to run.

Written by the build, embedded beside the device images, read at load. Everything a load must check
before it runs a kernel stands here: core ABI, op contracts, shape, architecture, image hashes.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
from typing import Any

from atlas.errors import BuildError

FORMAT = 1
"""Version of this document."""

CORE_ABI = 1
"""kCoreAbi of csrc/core/program.h that the kernels were built for; a test holds the two together."""


@dataclasses.dataclass(frozen=True)
class KernelEntry:
    """One kernel of a set.

    name: KernelKey.name() on a GPU, KernelKey.signature() on a CPU: what a program's launch asks for.
    contract: hash of the op contract it implements.
    layouts: operand -> storage layout, where it is not row-major (atlas/weights/layouts.py).
    image: index into Manifest.images, -1 for host code.  symbol: its entry in the image.
    grid: (dim index or -1, divisor, multiplier) per axis; block: threads; shared: dynamic bytes.
    registers, spills, stack, static_shared: as ptxas reports them.
    source: the file, relative to the kernel tree.  source_hash: of everything it was compiled from.
    ptx: index into Manifest.images of the same kernel as PTX, -1 where only the cubin is embedded.
    knobs: the tuning values it was compiled with; knobs_from: where they come from ("declared", ...).
    seconds: what compiling took, for reports; never written to a manifest: two builds give the same bytes.
    """

    name: str
    op: str
    contract: str
    source: str
    layouts: dict[str, str]
    image: int = -1
    symbol: str = ""
    grid: tuple[tuple[int, int, int], ...] = ()
    block: int = 1
    shared: int = 0
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
                del kernel["seconds"]
        return json.dumps(document, indent=1, sort_keys=True)


def from_json(text: str, blob: bytes | memoryview, where: str) -> tuple[Manifest, list[memoryview]]:
    """A manifest and its images, checked against `blob`.

    Raises:
        BuildError: another format or ABI, a missing field, or an image whose place or hash is wrong.
    """
    try:
        document: dict[str, Any] = json.loads(text)
        if document["format"] != FORMAT or document["core_abi"] != CORE_ABI:
            raise BuildError(
                where,
                f"manifest format {document['format']}, core ABI {document['core_abi']}",
                f"format {FORMAT}, core ABI {CORE_ABI}",
                "rebuild the kernels with this version of Atlas",
            )
        images = tuple(Image(**image) for image in document["images"])
        sets = tuple(
            KernelSet(
                **{**entry, "compute_capability": tuple(entry["compute_capability"])},
            )
            for entry in document["sets"]
        )
        sets = tuple(dataclasses.replace(s, kernels=tuple(KernelEntry(**_tuples(k)) for k in s.kernels)) for s in sets)
        flags, selection = tuple(document.get("flags", ())), dict(document.get("selection", {}))
        manifest = Manifest(sets, images, document["compiler"], flags=flags, selection=selection)
    except (KeyError, TypeError, ValueError) as error:
        raise BuildError(where, f"the manifest is damaged ({type(error).__name__}: {error})") from None
    views = []
    for index, image in enumerate(images):
        view = memoryview(blob)[image.offset : image.offset + image.size]
        if len(view) != image.size or hashlib.sha256(view).hexdigest() != image.sha256:
            raise BuildError(where, f"image {index} does not match its hash", "", "rebuild or reinstall")
        views.append(view)
    return manifest, views


def _tuples(kernel: Any) -> dict[str, Any]:
    return {**kernel, "grid": tuple(tuple(axis) for axis in kernel["grid"])}

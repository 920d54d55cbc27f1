"""Where kernel sets come from, in search order: `--kernel-pack`, the extension, data wheels, the cache."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from atlas.build import pack
from atlas.build.architecture import runs_on
from atlas.build.manifest import Manifest
from atlas.cache import cache_root, private_folder
from atlas.errors import AtlasError, BuildError
from atlas.runtime import core
from atlas.targets.hardware import walk
from atlas.targets.tree import kernels_root

_log = logging.getLogger(__name__)

EMBEDDED = "embedded"

CACHE_FOLDER = "packs"


@dataclasses.dataclass(frozen=True)
class Source:
    """One place with kernel sets.

    label: the place, for people.  images: of the manifest, by index.
    error: why nothing of it can be used; the manifest is then None.
    asked_for: named by the user, so nothing may silently take its place.
    """

    label: str
    manifest: Manifest | None
    images: Sequence[memoryview] = ()
    error: AtlasError | None = None
    asked_for: bool = False


def find(
    shape_hash: str | None = None, quant: str | None = None, kernel_packs: Sequence[str] = (), fix: str = ""
) -> Iterator[Source]:
    """Every source that may have kernels for a shape and quant, in search order, each opened when its turn comes.

    shape_hash, quant: None for any.
    kernel_packs: files named with --kernel-pack.  fix: what to do about a pack that is refused.
    A source that cannot be used is among them, with its error.
    """
    for path in kernel_packs:
        yield _from_pack(f"--kernel-pack {path}", Path(path), fix, asked_for=True)
    yield embedded()
    yield from _data_wheels(fix)
    for file in _cached(shape_hash, quant):
        yield _from_pack(f"cache {file}", file, fix)


def embedded() -> Source:
    """The kernel sets in the extension."""
    try:
        manifest, images = core.embedded()
    except AtlasError as error:
        return Source(EMBEDDED, None, error=error)
    return Source(EMBEDDED, manifest, images)


def rebuild_fix(model: str, quant: str, devices: Sequence[dict[str, Any]]) -> str:
    """How to make a pack of `quant` for `model` and the first device, as the last part of an error."""
    return pack.rebuild(model, _hardware_name(devices), quant)


def _hardware_name(devices: Sequence[dict[str, Any]]) -> str:
    """The hardware directory that fits a device best; HW where the kernel tree or the device is unknown."""
    try:
        known = [hardware for hardware in walk(kernels_root()).values() if hardware.kind == "cuda" and hardware.arch]
    except AtlasError:
        return "HW"
    for device in devices:
        capability = tuple(device["compute_capability"])
        for hardware in sorted(known, key=lambda h: h.compute_capability != capability):
            if runs_on(hardware.arch, capability) is None:
                return hardware.name
    return "HW"


def _from_pack(label: str, path: Path, fix: str, asked_for: bool = False) -> Source:
    try:
        opened = pack.read(path, fix)
    except BuildError as error:
        return Source(label, None, error=error, asked_for=asked_for)
    return Source(label, opened.manifest, opened.images, asked_for=asked_for)


def _data_wheels(fix: str) -> Iterator[Source]:
    """Packs of installed `atlas-infer-kernels-<target>` wheels, by name."""
    # These bring half the standard library, and most processes find kernels before they look here.
    import importlib.metadata

    from atlas.build.wheel import ENTRY_POINTS, PACK_FILE

    points = importlib.metadata.entry_points(group=ENTRY_POINTS)
    for point in sorted(points, key=lambda p: (p.name, p.value)):
        label = f"entry point {point.name}"
        distribution = point.dist
        if distribution is None or not point.value.isidentifier():
            found = f"names the folder {point.value!r}" if distribution else "belongs to no installed wheel"
            error = BuildError(label, found, "a data wheel made by `python -m atlas.build --wheel`", "uninstall it")
            yield Source(label, None, error=error)
            continue
        label = f"wheel {distribution.name} {distribution.version}"
        yield _from_pack(label, Path(str(distribution.locate_file(point.value))) / PACK_FILE, fix)


def _cached(shape_hash: str | None, quant: str | None) -> list[Path]:
    """Packs in the cache for a shape and quant, the newest first: what has just been built goes before one of the same
    model by an older Atlas, whose kernels may be others. Whatever core ABI their names say: an old one is worth a
    message."""
    if not (cache_root() / CACHE_FOLDER).exists():
        return []
    folder = cache_folder()
    if folder is None:
        return []
    wanted = [f"-{part}-" for part in (shape_hash, quant) if part is not None]
    found = [f for f in folder.iterdir() if f.suffix == pack.SUFFIX and all(part in f.name for part in wanted)]
    return sorted(found, key=lambda file: (-_written(file), file.name))


def _written(file: Path) -> int:
    """When, in ns; 0 for one that is gone, which opening it says better."""
    try:
        return file.lstat().st_mtime_ns
    except OSError:
        return 0


def cache_folder() -> Path | None:
    """The folder of cached packs, made if need be; None, with a warning, unless it is the user's alone."""
    folder = private_folder(CACHE_FOLDER)
    if folder is None:
        return None
    mode = folder.stat().st_mode & 0o777
    if mode & 0o077:
        _log.warning("the cache %s has mode %04o: not used, accepted is 0700 (chmod 700 it)", folder, mode)
        return None
    return folder

"""Data wheels: a kernel pack that pip installs. `atlas-infer-kernels-<target>`, for any Python and platform.

A data wheel holds one pack and metadata, no code. Its entry point in the group `atlas.kernels` names the
folder that the pack lies in; Atlas opens the file and imports nothing.
"""

from __future__ import annotations

import base64
import hashlib
import re
import stat
import zipfile
from pathlib import Path

from atlas import __version__
from atlas.build.manifest import KernelSet
from atlas.build.pack import SUFFIX
from atlas.errors import BuildError

ENTRY_POINTS = "atlas.kernels"
"""Entry-point group of data wheels. The value names the wheel's data folder; nothing of it is imported."""

PACK_FILE = "kernels" + SUFFIX
"""The pack in a data wheel's folder."""

_EPOCH = (1980, 1, 1, 0, 0, 0)
"""The earliest time a zip file can hold: a wheel must not depend on when it was made."""


def distribution_name(kernel_set: KernelSet) -> str:
    """Name of the data wheel of a target, as package indexes normalise names."""
    target = "-".join((kernel_set.hardware, kernel_set.model, kernel_set.quant))
    return "atlas-infer-kernels-" + re.sub(r"[-_.]+", "-", target).strip("-").lower()


def write(folder: Path, pack: bytes, kernel_set: KernelSet) -> Path:
    """Write the data wheel of a pack into `folder`; returns its path. The same pack gives the same bytes.

    Raises:
        BuildError: `folder` cannot be written.
    """
    name = distribution_name(kernel_set)
    package = name.replace("-", "_")
    info = f"{package}-{__version__}.dist-info"
    metadata = (
        f"Metadata-Version: 2.1\nName: {name}\nVersion: {__version__}\n"
        f"Summary: Kernels of Atlas for {kernel_set.name}, shape {kernel_set.shape_hash}, {kernel_set.arch}\n"
        "License: Apache-2.0\n"
    )
    files: dict[str, bytes] = {
        f"{package}/{PACK_FILE}": pack,
        f"{info}/METADATA": metadata.encode(),
        f"{info}/WHEEL": b"Wheel-Version: 1.0\nGenerator: atlas\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
        f"{info}/entry_points.txt": f"[{ENTRY_POINTS}]\n{name} = {package}\n".encode(),
    }
    record = "".join(f"{path},sha256={_digest(data)},{len(data)}\n" for path, data in files.items())
    files[f"{info}/RECORD"] = f"{record}{info}/RECORD,,\n".encode()
    path = folder / f"{package}-{__version__}-py3-none-any.whl"
    temporary = path.with_name(f".{path.name}.part")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with zipfile.ZipFile(temporary, "w") as archive:
            for member, data in files.items():
                entry = zipfile.ZipInfo(member, _EPOCH)
                entry.create_system = 3  # Unix, whatever this machine is: it gives the mode its meaning
                entry.external_attr = (stat.S_IFREG | 0o644) << 16
                # Stored: what a compressor makes of the same bytes depends on its version.
                archive.writestr(entry, data, zipfile.ZIP_STORED)
        temporary.replace(path)
    except OSError as error:
        raise BuildError(f"--wheel {folder}", f"cannot be written ({error.strerror})", "a writable folder") from None
    return path


def _digest(data: bytes) -> str:
    return base64.urlsafe_b64encode(hashlib.sha256(data).digest()).rstrip(b"=").decode()

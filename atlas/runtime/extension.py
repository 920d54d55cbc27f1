"""The compiled module. This imports next to nothing, so that a process can let the NVIDIA driver start first of all."""

from __future__ import annotations

import contextlib
import importlib.util
import sys
import threading
from importlib.machinery import EXTENSION_SUFFIXES
from pathlib import Path
from typing import Any

from atlas.errors import AtlasError

_importing = threading.Lock()
"""An extension that Python does not find by itself must not be loaded twice."""


def extension() -> Any:
    """The compiled module. Raises AtlasError when this install has none or an older one."""
    from atlas.build import manifest
    from atlas.runtime.step import STEP_VERSION

    found = _module()
    if (found.CORE_ABI, found.STEP_VERSION) != (manifest.CORE_ABI, STEP_VERSION):
        raise AtlasError(
            "atlas._core",
            f"core ABI {found.CORE_ABI}, step version {found.STEP_VERSION}",
            f"core ABI {manifest.CORE_ABI}, step version {STEP_VERSION}",
            "reinstall Atlas: Python and the extension are from different versions",
        )
    return found


def start_driver(backend: str) -> None:
    """Let the NVIDIA driver start beside what follows: it takes about as long as all imports do (0.2 s).

    Nothing is done for a backend without a GPU. An error is not lost: whoever needs the driver gets the same.
    """

    def start() -> None:
        with contextlib.suppress(AtlasError):
            _module().cuda_devices()

    if backend in ("auto", "cuda"):
        # No daemon: a process that ends at once must not do so while the driver starts.
        threading.Thread(target=start, name="atlas-driver").start()


def _module() -> Any:
    with _importing:
        try:
            from atlas import _core  # type: ignore[attr-defined, unused-ignore]
        except ImportError as error:
            return _installed_extension(error)
        return _core


def _installed_extension(error: ImportError) -> Any:
    """The extension of the installation that comes first on the path, for Python run from a source checkout, where
    `atlas` is the checkout's folder and holds no extension."""
    files = (Path(folder, "atlas", f"_core{end}") for folder in sys.path for end in EXTENSION_SUFFIXES)
    try:
        spec = importlib.util.spec_from_file_location("atlas._core", next(file for file in files if file.is_file()))
        assert spec is not None and spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
    except (StopIteration, ImportError) as second:
        reason = second if isinstance(second, ImportError) and str(second) else error
        raise AtlasError(
            "atlas._core", f"the compiled extension is missing or does not load ({reason})", "", "run `pip install .`"
        ) from None
    sys.modules["atlas._core"] = module
    return module

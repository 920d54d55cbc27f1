"""NumPy, imported at its first use: contracts must import in a build environment that has none."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import numpy as np
else:

    class _Lazy:
        def __getattr__(self, name: str) -> Any:
            return getattr(importlib.import_module("numpy"), name)

    np = _Lazy()

__all__ = ["np"]

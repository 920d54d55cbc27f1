"""Atlas: ahead-of-time compiled kernels for one (hardware, model, quantisation) target, served by a thin runtime.

This module imports only the standard library, so `import atlas` works in a build environment,
on a machine without a GPU, a driver or a compiler, and before the extension is built. `atlas.LLM` and
`atlas.SamplingParams`, for use without a server, are loaded when they are first asked for.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from atlas.llm import LLM as LLM
    from atlas.llm import SamplingParams as SamplingParams

__version__ = "0.1.0"

_LAZY = ("LLM", "SamplingParams")


def __getattr__(name: str) -> Any:
    if name not in _LAZY:
        raise AttributeError(f"module 'atlas' has no attribute {name!r}")
    # Not `import atlas.llm`, whose attribute on this package is the module, never one of these names.
    import importlib

    value = globals()[name] = getattr(importlib.import_module("atlas.llm"), name)
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_LAZY})

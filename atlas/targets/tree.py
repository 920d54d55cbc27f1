"""Where the kernel tree is: in a source checkout `kernels/`, in an installed package `atlas/_kernels/`."""

from __future__ import annotations

from pathlib import Path

from atlas.errors import BuildError

_PACKAGE = Path(__file__).resolve().parents[1]


def kernels_root(package: Path = _PACKAGE) -> Path:
    """The kernel tree that belongs to this `atlas` package.

    A checkout's own tree comes first: there, an edit to a kernel is what one wants to compile.

    Raises:
        BuildError: neither is there, with what to do.
    """
    checkout, installed = package.parent / "kernels", package / "_kernels"
    # In site-packages a folder called "kernels" may be anybody's: only a checkout has the build backend beside it.
    if (package.parent / "build_targets.py").is_file() and _is_tree(checkout):
        return checkout
    if _is_tree(installed):
        return installed
    raise BuildError(
        "kernel tree",
        f"neither {checkout} of a source checkout nor {installed} of an installation is there",
        "a folder with <hardware>/HARDWARE.toml and models/*.json",
        "run: pip install --force-reinstall 'atlas-infer[build]', or work in a source checkout",
    )


def _is_tree(folder: Path) -> bool:
    return (folder / "models").is_dir() and any(folder.glob("*/HARDWARE.toml"))

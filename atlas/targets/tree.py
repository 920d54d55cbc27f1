"""Where the kernel tree is: in a source checkout `kernels/`, in an installed package `atlas/_kernels/`."""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from pathlib import Path

from atlas.build.kernel_file import named
from atlas.errors import BuildError
from atlas.ops import OPS
from atlas.targets.quant import QUANTS

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


def check_tree(root: Path, hardware: Iterable[str], models: Iterable[str]) -> None:
    """Refuse what would be ignored in silence: a kernel or tuning file that is named for no op, or lies in a
    folder for no model or quant. Other files and folders (caches, notes) are nobody's business.

    Raises:
        BuildError: naming the file, and the nearest name.
    """
    known = [("model", list(models)), ("quant", list(QUANTS))]
    for name in hardware:
        for file in (root / name).rglob("*"):
            folders = file.relative_to(root / name).parts[:-1]
            is_kernel = file.suffix in (".cu", ".cpp")
            if "include" in folders or not (is_kernel or file.name == "tuning.toml"):
                continue
            for folder, (what, names) in zip(folders, known, strict=False):
                _known(file, folder, names, what)
            if is_kernel:
                _known(file, named(file)[0], list(OPS), "op")


def _known(path: Path, name: str, known: list[str], what: str) -> None:
    if name not in known:
        near = difflib.get_close_matches(name, known)
        fix = f"nearest: {near[0]}" if near else ""
        raise BuildError(str(path), f"no {what} is called {name!r}", ", ".join(known), fix)

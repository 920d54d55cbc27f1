"""Which tensors of a checkpoint are quantised, and which of them must share a scale."""

from __future__ import annotations

import fnmatch
import functools
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from atlas.weights import Checkpoint
from atlas.weights.checkpoint import TensorInfo

_LAYER = re.compile(r"(^|\.)(layers|h|blocks)\.\d+\.")

_KEPT_PARTS = re.compile(
    r"(^|\.)(visual|vision_tower|vision_model|multi_modal_projector|mtp)\.|norm|embed|conv1d"
    r"|(^|\.)(gate|router|shared_expert_gate|in_proj_a|in_proj_b|in_proj_ba)$"
)
"""Modules inside layers that stay as they are: routers and small gates decide, and errors there reach everything."""

FUSED = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"), ("w1", "w3"), ("in_proj_qkv", "in_proj_z"))
"""Modules of one parent that engines join into one matrix: quantised all or none, under one scale per tensor."""

PLAIN_DTYPES = ("F64", "F32", "F16", "BF16")


@dataclass(frozen=True)
class Linear:
    """A matrix to quantise. module: its tensor's name without ".weight"; shape [n, k]."""

    module: str
    shape: tuple[int, int]

    @property
    def tensor(self) -> str:
        return f"{self.module}.weight"


@dataclass(frozen=True)
class Selection:
    """linears: what is quantised, in the checkpoint's order.
    kept: modules that are linear layers (or look like it) but stay as they are -> why; the ignore lists of layouts.
    """

    linears: tuple[Linear, ...]
    kept: Mapping[str, str]

    @functools.cached_property
    def modules(self) -> frozenset[str]:
        """The linears' names."""
        return frozenset(linear.module for linear in self.linears)


def select(checkpoint: Checkpoint, refuse: Mapping[str, str], ignore: Iterable[str] = ()) -> Selection:
    """Sort a checkpoint's matrices.

    refuse: modules that the layout cannot hold -> why.
    ignore: patterns (as in the shell) of modules that the user keeps.
    """
    patterns = tuple(ignore)
    candidates: list[Linear] = []
    kept: dict[str, str] = {}
    for info in checkpoint.tensors.values():
        module = info.name.removesuffix(".weight")
        reason = _why_kept(info, module)
        if reason is None and any(fnmatch.fnmatchcase(module, pattern) for pattern in patterns):
            reason = "asked for"
        if reason is None and module in refuse:
            reason = refuse[module]
        if reason is None:
            candidates.append(Linear(module, (info.shape[0], info.shape[1])))
        elif reason:
            kept[module] = reason
    names = {linear.module for linear in candidates}
    # Of modules that an engine joins, one kept keeps all.
    for module in sorted(names):
        if any(sibling in kept for sibling in fused_with(module)):
            names.discard(module)
            kept[module] = "stands in one matrix with a module that is kept"
    if "lm_head" not in kept:
        kept["lm_head"] = "the head"  # tied heads have no tensor, but layouts list them all the same
    linears = tuple(linear for linear in candidates if linear.module in names)
    return Selection(linears, kept)


def _why_kept(info: TensorInfo, module: str) -> str | None:
    """Why a tensor is no candidate: "" where no ignore list would name it, None where it is one."""
    if module == info.name or len(info.shape) != 2:
        return "" if len(info.shape) < 3 else "no matrix"
    if module.endswith("lm_head"):
        return "the head"
    if "embed" in module:
        return ""
    if _KEPT_PARTS.search(module):
        return "a router, gate, norm or another modality"
    return None if _LAYER.search(module) else "outside the layers"


def fused_with(module: str) -> tuple[str, ...]:
    """All modules, itself included, that engines join with this one; itself alone where there are none."""
    parent, _, leaf = module.rpartition(".")
    for names in FUSED:
        if leaf in names:
            return tuple(f"{parent}.{name}" for name in names)
    return (module,)

"""Quant recipes: role -> format.

A recipe's name is what users select (`ATLAS_TARGET_QUANT`, `--quant`). Which kernels a target needs
follows from the program recorded under the recipe, its *closure*; nothing lists kernels by hand.
"""

from __future__ import annotations

import dataclasses
import difflib

from atlas.errors import ConfigError

DTYPE_BYTES = {"f32": 4, "bf16": 2, "i32": 4, "u32": 4, "i64": 8}
"""Element types of buffers and their size in bytes."""


@dataclasses.dataclass(frozen=True)
class Recipe:
    """Formats by role.

    projections: attention and MLP weights.       experts: MoE expert weights.
    lm_head: the output head.                     router: MoE router.
    embedding: the token table (tied heads share it, so it equals lm_head here).
    activations: between ops; residual: the residual stream; kv: the KV cache.

    The residual stream stays f32 in every recipe: at one row it is a few KB, and rounding it to bf16
    after each of a model's 2 x layers additions is the largest single error of a bf16 decoder.
    Norm weights are always f32: they are tiny and enter every activation.
    """

    name: str
    projections: str
    experts: str
    lm_head: str
    router: str
    embedding: str
    activations: str
    kv: str
    residual: str = "f32"
    norms: str = "f32"
    logits: str = "f32"


RECIPES = {
    "f32": Recipe("f32", "f32", "f32", "f32", "f32", "f32", "f32", "f32"),
    "bf16": Recipe("bf16", "bf16", "bf16", "bf16", "bf16", "bf16", "bf16", "bf16"),
}


def recipe(name: str) -> Recipe:
    """The recipe called `name`. Raises ConfigError naming the nearest ones."""
    if name not in RECIPES:
        near = difflib.get_close_matches(name, RECIPES) or sorted(RECIPES)
        raise ConfigError("quant", f"unknown quant {name!r}", ", ".join(sorted(RECIPES)), f"nearest: {near[0]}")
    return RECIPES[name]

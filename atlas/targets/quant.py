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
    activations: what enters a matrix product or attention; kv: the KV cache.
    products: what a matrix product leaves; residual: the residual stream.

    Products and residual stay f32 in every recipe: a value is rounded only where it enters a product or
    the cache. A fused kernel never stores a product anyway, so fusing changes no result, and the
    residual alone, rounded at each of a model's 2 x layers additions, would be a bf16 decoder's
    largest error.
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
    products: str = "f32"
    residual: str = "f32"
    norms: str = "f32"
    logits: str = "f32"


def _weights(name: str, format: str) -> Recipe:
    """A recipe that stores projections and experts in `format`, and the rest as `bf16` does.

    The head, the embedding and the router stay bf16 (formats.md): each is read once per step, and errors in
    them reach every token's logits or choice of experts.
    """
    return Recipe(name, format, format, "bf16", "bf16", "bf16", "bf16", "bf16")


QUANTS = {
    recipe.name: recipe
    for recipe in (
        Recipe("f32", "f32", "f32", "f32", "f32", "f32", "f32", "f32"),
        Recipe("bf16", "bf16", "bf16", "bf16", "bf16", "bf16", "bf16", "bf16"),
        _weights("fp8", "fp8"),
        _weights("nvfp4", "nvfp4"),
        _weights("int4", "int4"),
        _weights("int8", "int8"),
    )
}
"""Every recipe, by name."""

RECIPES = {
    name: recipe
    for name, recipe in QUANTS.items()
    if {recipe.projections, recipe.experts, recipe.lm_head, recipe.embedding, recipe.kv} <= set(DTYPE_BYTES)
}
"""Recipes whose formats are plain element types: what the ops' contracts can express so far."""


def recipe(name: str) -> Recipe:
    """The recipe called `name`. Raises ConfigError naming the nearest ones."""
    if name not in QUANTS:
        near = difflib.get_close_matches(name, QUANTS)
        raise ConfigError(
            "quant", f"unknown quant {name!r}", ", ".join(sorted(QUANTS)), f"nearest: {near[0]}" if near else ""
        )
    return QUANTS[name]

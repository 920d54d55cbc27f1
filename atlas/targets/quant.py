"""Quant recipes: role -> format.

A recipe's name is what users select (`ATLAS_TARGET_QUANT`, `--quant`). Which kernels a target needs
follows from the program recorded under the recipe, its *closure*; nothing lists kernels by hand.

A weight role's format is an element type, or a word for what depends on the checkpoint's tensor (decided
per tensor by atlas/runtime/weight_formats.py):

    int4, int4m, int8   the checkpoint's own integer blocks, never requantised; from plain floats made at load,
                        int4 symmetric and int4m with a minimum in each group
    fp8, nvfp4          the checkpoint's own codes and scales; from plain floats made at load
    stored              the checkpoint's own integer blocks, else bf16

atlas/targets/formats.py says which formats a buffer of such a role may get, and which one is made at load.
"""

from __future__ import annotations

import dataclasses
import difflib

from atlas.errors import ConfigError

DTYPE_BYTES = {"f32": 4, "bf16": 2, "i32": 4, "u32": 4, "i64": 8}
"""Element types of buffers and their size in bytes."""


E4M3_WEIGHTS = ("f8", "f8g128")
"""Formats of weights that multiply rows in f8g128."""


@dataclasses.dataclass(frozen=True)
class Recipe:
    """Formats by role.

    projections: attention and MLP weights.       experts: MoE expert weights.
    lm_head: the output head.                     router: MoE router.
    embedding: the token table (tied heads share it, so it equals lm_head here).
    activations: what norms and gates leave for a matrix product; kv: the KV cache.
    attention: queries, and what attention leaves for a matrix product; the kv cache's own type, so that the
        two multiply without a conversion.
    products: what a matrix product leaves for rope or the residual stream; residual: the residual stream.

    The residual stays f32 in every recipe: rounded at each of a model's 2 x layers additions, it would be a
    bf16 decoder's largest error. Products are bf16 on a GPU, which would spend an eighth of a prompt's bytes on
    their other halves, and f32 on a CPU.
    Norm weights are always f32: they are tiny and enter every activation.

    activations may be f8g128: rows are rounded to E4M3 before a product with weights of E4M3 (`entering`).
    integer_activations: products with integer weights round their input to int8 in groups of 32 (op linear_a8).
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
    attention: str = "bf16"
    integer_activations: bool = False

    def entering(self, weight: str) -> str:
        """The dtype in which rows enter a product with a weight of dtype or format `weight`.

        A weight that the checkpoint keeps in floats among quantised ones takes rows that are not rounded either.
        """
        return self.activations if self.activations in DTYPE_BYTES or weight in E4M3_WEIGHTS else "bf16"


def _weights(name: str, format: str, activations: str = "bf16") -> Recipe:
    """A recipe that stores projections and experts in `format`, and the rest as `bf16` does.

    The head, the embedding and the router stay bf16: each is read once per step, and errors in
    them reach every token's logits or choice of experts.
    """
    return Recipe(name, format, format, "bf16", "bf16", "bf16", activations, "bf16", products="bf16")


QUANTS = {
    recipe.name: recipe
    for recipe in (
        Recipe("f32", "f32", "f32", "f32", "f32", "f32", "f32", "f32", attention="f32"),
        Recipe("bf16", "bf16", "bf16", "bf16", "bf16", "bf16", "bf16", "bf16", products="bf16"),
        _weights("fp8", "fp8", activations="f8g128"),
        _weights("nvfp4", "nvfp4"),
        _weights("int4", "int4"),
        _weights("int8", "int8"),
    )
}
"""Every recipe, by name."""

_CPU_QUANTS = {name: dataclasses.replace(given, products="f32") for name, given in QUANTS.items()} | {
    # Activations of norms and gates stay f32 where a GPU has bf16: they are rounded to int8 right before a
    # product, and one rounding is better than two. The head keeps the file's own format.
    name: Recipe(name, role, "bf16", "stored", "f32", "stored", "f32", "bf16", integer_activations=True)
    for name, role in (("int4", "int4m"), ("int8", "int8"))
}
"""What a recipe means on CPUs, where that differs: their integer dot products take int8 activations."""

RECIPES = {
    name: recipe
    for name, recipe in QUANTS.items()
    if {recipe.projections, recipe.experts, recipe.lm_head, recipe.embedding, recipe.kv} <= set(DTYPE_BYTES)
}
"""Recipes whose formats are plain element types: what the ops' contracts can express so far."""


def recipe(name: str, hardware_kind: str = "cuda") -> Recipe:
    """The recipe called `name` on hardware of a kind, "cuda" or "cpu" (HARDWARE.toml; `reference` follows "cpu").

    Raises ConfigError naming the nearest ones.
    """
    if name not in QUANTS:
        near = difflib.get_close_matches(name, QUANTS)
        raise ConfigError(
            "quant", f"unknown quant {name!r}", ", ".join(sorted(QUANTS)), f"nearest: {near[0]}" if near else ""
        )
    return (_CPU_QUANTS if hardware_kind == "cpu" else QUANTS)[name]

"""Opens what a model will run on: the backend, its kernel set and the recipe of formats."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from atlas.build.manifest import KernelEntry
from atlas.errors import ConfigError, DeviceError
from atlas.runtime import core, kernel_set, kernel_sources
from atlas.runtime.backend import Backend
from atlas.runtime.kernel_set import Choice
from atlas.runtime.options import RunnerOptions
from atlas.runtime.reference import ReferenceBackend
from atlas.targets.quant import Recipe, recipe
from atlas.targets.shape import Shape


def kind(choice: Choice, options: RunnerOptions) -> str:
    """The kind of hardware whose programs run."""
    return "cuda" if choice.backend == "cuda" or options.programs == "cuda" else "cpu"


def recipe_of(choice: Choice, options: RunnerOptions) -> Recipe:
    """The quant's recipe. Kernels are compiled for a recipe's own KV format, so no other can run yet."""
    quant, kv_dtype = choice.quant, options.kv_dtype
    roles = recipe(quant, kind(choice, options))
    if kv_dtype is not None and {"fp32": "f32"}.get(kv_dtype, kv_dtype) != roles.kv:
        raise ConfigError("kv_dtype", f"{kv_dtype!r} with quant {quant}", f"{roles.kv}, the quant's own")
    return roles


def open_backend(
    shape: Shape,
    options: RunnerOptions,
    model: str,
    natural: Mapping[str, str] = kernel_set.NO_PREFERENCE,
    lacks: kernel_set.Lacks = kernel_set.lacks_nothing,
) -> tuple[Backend, Choice, dict[str, KernelEntry]]:
    """The backend, its kernel set and that set's kernels by name. natural, lacks: as `kernel_set.choose` takes them."""
    if options.kernel_packs and options.backend in ("cpu", "reference"):
        raise ConfigError(
            "kernel_pack", f"given with backend {options.backend}", "backend auto or cuda", "leave one of the two out"
        )
    if options.backend == "reference":
        choice = kernel_set.choose("reference", options.quant, shape, (), (), natural=natural)
        return ReferenceBackend(), choice, {}
    devices, no_device = _cuda_devices(options.backend)
    fix = kernel_sources.rebuild_fix(model, options.quant or natural["cuda"], devices)
    if devices or options.kernel_packs:
        sources = kernel_sources.find(shape.hash(), options.quant, options.kernel_packs, fix)
    else:
        sources = iter([kernel_sources.embedded()])  # nothing else has kernels for a CPU
    choice = kernel_set.choose(options.backend, options.quant, shape, sources, devices, no_device, fix, natural, lacks)
    assert choice.kernel_set is not None
    if choice.backend == "cuda":
        kernels, images = kernel_set.device_images(choice)
        return core.cuda_backend(images, choice.device), choice, kernels
    kernels = {kernel.name: kernel for kernel in choice.kernel_set.kernels}
    return core.cpu_backend(options.threads, options.level), choice, kernels


def _cuda_devices(backend: str) -> tuple[list[dict[str, Any]], str]:
    """The GPUs, and why there are none. Where a GPU was asked for, a missing driver is an error."""
    if backend not in ("auto", "cuda"):
        return [], ""
    try:
        devices = core.extension().cuda_devices()
    except DeviceError as error:
        if backend == "cuda":
            raise
        return [], error.found
    return devices, "" if devices else "the NVIDIA driver reports no device"

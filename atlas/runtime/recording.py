"""A checkpoint's programs, as they are recorded for the kernels of a set."""

from __future__ import annotations

from collections.abc import Collection

from atlas.build.manifest import KernelSet
from atlas.models import ModelConfig, fusion
from atlas.models.family import Family
from atlas.runtime import weight_formats
from atlas.runtime.program import StepPrograms
from atlas.targets.formats import FORMATS
from atlas.targets.quant import Recipe, recipe
from atlas.weights import Checkpoint


class Recording:
    """Records programs, those of the same kernels once. sources: weight buffer -> tensors of the checkpoint."""

    def __init__(self, checkpoint: Checkpoint, family: Family, config: ModelConfig) -> None:
        self.sources = family.weights(config, checkpoint.tensors)
        self._checkpoint, self._family, self._config = checkpoint, family, config
        self._recorded: dict[tuple[str, str, frozenset[str] | None], StepPrograms] = {}

    def programs(self, roles: Recipe, kind: str, kernels: Collection[str] | None) -> StepPrograms:
        """The programs on hardware of a kind, "cuda" or "cpu". kernels: names of those at hand; None: of all."""
        names = None if kernels is None else frozenset(kernels)
        known = (roles.name, kind, names)
        if known not in self._recorded:
            # A CPU's set has every instance of its ops.
            available = FORMATS if names is None or kind != "cuda" else weight_formats.of_kernels(names)
            formats = weight_formats.chooser(self._checkpoint, self.sources, available)
            self._recorded[known] = fusion.record(
                self._family, self._config, roles, kind, formats, lambda key: names is None or key.name() in names
            )
        return self._recorded[known]

    def lacks(self, kernel_set: KernelSet) -> str:
        """What a set for GPUs does not have of the kernels that the checkpoint needs; "" if it has them all."""
        names = frozenset(kernel.name for kernel in kernel_set.kernels)
        programs = self.programs(recipe(kernel_set.quant), "cuda", names)
        missing = [key for key in programs.closure() if key.name() not in names]
        stored = {dict(key.dtypes).get("weight", "") for key in missing} - weight_formats.of_kernels(names)
        if formats := sorted(stored & FORMATS.keys()):
            return f"has no kernels for weights in {', '.join(formats)}, as this checkpoint stores them"
        return f"has no kernel {missing[0].name()}, which this checkpoint needs" if missing else ""

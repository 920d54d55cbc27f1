"""The kernels of every target agree about the layout of each buffer between them, without compiling any."""

from __future__ import annotations

import pytest

from atlas.build import kernel_file
from atlas.build.manifest import KernelEntry
from atlas.models import family_of, fusion
from atlas.runtime import memory_plan
from atlas.targets import status
from atlas.targets import target as targets
from atlas.targets.quant import recipe
from atlas.targets.shape import Shard
from tests.contract.harness import KERNELS

READY = {t.name: t for t, found in targets.every(KERNELS).items() if found.ready and t.hardware.kind == "cuda"}


@pytest.mark.parametrize("name", [name for name in READY if name.split("/")[0] in ("h200", "gb10")])
def test_neighbours_agree(name: str) -> None:
    target = READY[name]
    family = family_of(target.facts)
    config = family.configure(target.facts, Shard())
    roles, has = recipe(target.quant, target.hardware.kind), status.has_kernel(target)
    programs = fusion.record(family, config, roles, target.hardware.kind, has=has)
    entries = {}
    for key, phases in programs.closure().items():
        dtypes = dict(key.dtypes)
        files = {targets.resolve(target, key.op, phase, dtypes, dict(key.constants)) for phase in phases}
        stated = [kernel_file.declaration(file).layouts_of(dtypes, target.hardware.layouts) for file in files]
        assert all(each == stated[0] for each in stated), f"{key.name()}: {stated}"
        entries[key.name()] = KernelEntry(key.name(), key.op, key.op, stated[0])
    memory_plan.buffer_layouts(programs, entries)  # raises where two kernels disagree

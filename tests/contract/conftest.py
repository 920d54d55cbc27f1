"""Which backend the contract tests run on.

By default every instruction-set level that this machine can run and that has kernels of the op. On a GPU:

    python -m tests.contract.pack --hw h200 --out PACK       # anywhere; needs the compiler wheels
    pytest tests/contract --contract-backend cuda --pack PACK

The pack holds what the tests ask for, found by running them on a backend that computes nothing. On a GPU every test
runs twice, in steps of each phase, where kernels differ.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from atlas.build import manifest
from atlas.build.kernel_file import PHASES, phase_number
from atlas.runtime import core
from atlas.runtime.backend import Backend
from atlas.runtime.program import KernelKey
from atlas.runtime.reference import ReferenceBackend
from atlas.runtime.step import PHASE_PREFILL
from atlas.weights.quantized import BlockArray
from tests.contract import harness
from tests.contract.harness import Case


class Device:
    """A kind of backend; each case gets a fresh one, since a backend allocates only once.

    make: a backend for a case's kernel.  phase: of the steps; a GPU's kernels may differ in it.
    """

    def __init__(
        self,
        name: str,
        make: Callable[[Case], Backend],
        kernels: dict[str, manifest.KernelEntry],
        phase: int = PHASE_PREFILL,
    ) -> None:
        self.name, self.make, self.kernels, self.phase = name, make, kernels, phase

    def check(self, case: Case, given: dict[str, Any]) -> float:
        self._skip_what_has_no_kernel(case)
        ratio = harness.check(self.make(case), self.kernels, case, given, self.phase)
        entry = _report.setdefault(self.name, {}).setdefault(case.op, {"cases": 0, "worst_error_over_tolerance": 0.0})
        entry["cases"] += 1
        entry["worst_error_over_tolerance"] = max(entry["worst_error_over_tolerance"], round(ratio, 4))
        return ratio

    def run(self, case: Case, given: dict[str, Any]) -> dict[str, Any]:
        """Operands after the run."""
        self._skip_what_has_no_kernel(case)
        return harness.run(self.make(case), self.kernels, case, given, self.phase)[1]

    def _skip_what_has_no_kernel(self, case: Case) -> None:
        if not self.name.startswith("cuda"):
            return
        entry, phase = self.kernels.get(case.key().name()), PHASES[self.phase]
        if entry is None:
            pytest.skip("the hardware has no kernel of this op and these formats")
        variants = [variant for variant in entry.variants if variant.phase == phase_number(phase)]
        if not variants and phase == "prefill":
            pytest.skip("one kernel serves both phases, and is tested as decode's")
        variants = variants or [variant for variant in entry.variants if variant.phase == 0]
        rows = dict(case.dims).get("logits", dict(case.dims).get("rows", 0))
        if not any(variant.max_rows == 0 or variant.max_rows >= rows for variant in variants):
            pytest.skip(f"no {phase} kernel takes {rows} rows")


class Collector(Device):
    """Runs nothing and notes what it is asked for: outputs are zeros, so that tests soon fail, which is no matter."""

    def __init__(self) -> None:
        super().__init__("collect", lambda case: ReferenceBackend(), {})

    def check(self, case: Case, given: dict[str, Any]) -> float:
        _keys.add(case.key())
        return 0.0

    def run(self, case: Case, given: dict[str, Any]) -> dict[str, Any]:
        _keys.add(case.key())
        result = {operand.name: harness.poisoned(case, operand.name) for operand in case.operands}
        for array in result.values():
            (array.raw if isinstance(array, BlockArray) else array.view(np.uint8))[...] = 0
        return result


def cpu_device(level: str) -> Device:
    sets, _ = core.embedded()
    kernels = {kernel.name: kernel for s in sets.sets if s.kind == "cpu" for kernel in s.kernels}
    return Device(f"cpu-{level}", lambda case: core.cpu_backend(2, level), kernels)


def cpu_levels(op: str) -> list[str]:
    """Levels usable here that have kernels of `op` of their own."""
    extension = core.extension()
    return [
        level
        for level in extension.cpu_levels()
        if any(signature.split(".")[0] == op for signature in extension.cpu_kernels(level))
    ]


def cuda_devices(pack: Path) -> dict[str, Device]:
    """The GPU in steps of each phase. A case gets its own kernel's images, as loading all of a pack would take longer
    than most cases."""
    document, images = manifest.from_json(
        (pack / "manifest.json").read_text(), (pack / "images.bin").read_bytes(), str(pack)
    )
    kernels = {kernel.name: kernel for s in document.sets for kernel in s.kernels}
    name = f"{document.sets[0].hardware} for {document.sets[0].arch}"
    global _anchor
    _anchor = core.cuda_backend([])  # keeps the driver's context, which takes longer to make than most cases to run

    def device(phase: int) -> Device:
        mine = dict(kernels)

        def make(case: Case) -> Backend:
            entry = kernels[case.key().name()]
            variants = [dataclasses.replace(variant, image=i) for i, variant in enumerate(entry.variants)]
            mine[entry.name] = dataclasses.replace(entry, variants=tuple(variants))
            return core.cuda_backend([images[variant.image] for variant in entry.variants])

        return Device(f"cuda {name} {PHASES[phase]}", make, mine, phase)

    return {f"cuda-{phase}": device(PHASES.index(phase)) for phase in PHASES}


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "device" in metafunc.fixturenames:
        backend = metafunc.config.getoption("--contract-backend")
        if backend == "cuda":
            names = [f"cuda-{phase}" for phase in PHASES]
        elif backend != "cpu":
            names = [backend]
        else:
            names = [f"cpu-{level}" for level in cpu_levels(metafunc.module.__name__.rpartition(".test_")[2])]
        metafunc.parametrize("device", names, indirect=True)


_anchor: Backend | None = None
_devices: dict[str, Device] = {}
_keys: set[KernelKey] = set()
_report: dict[str, dict[str, dict[str, float]]] = {}


def pytest_sessionfinish(session: pytest.Session) -> None:
    """Write what was checked, by device and op, where `--contract-report` says."""
    if path := session.config.getoption("--contract-keys"):
        Path(path).write_text("".join(json.dumps(dataclasses.astuple(key)) + "\n" for key in _keys))
    path = session.config.getoption("--contract-report")
    if path:
        Path(path).write_text(json.dumps(_report, indent=1, sort_keys=True))


@pytest.fixture
def device(request: pytest.FixtureRequest) -> Device:
    name: str = request.param
    if name not in _devices:
        if name == "reference":
            _devices[name] = Device(name, lambda case: ReferenceBackend(), {})
        elif name == "collect":
            _devices[name] = Collector()
        elif name.startswith("cuda"):
            _devices.update(cuda_devices(Path(request.config.getoption("--pack"))))
        else:
            _devices[name] = cpu_device(name.removeprefix("cpu-"))
    return _devices[name]


@pytest.fixture
def rng(request: pytest.FixtureRequest) -> Iterator[np.random.Generator]:
    """Fresh random inputs in every run; the seed is printed when a test fails."""
    seed = int(np.random.SeedSequence().generate_state(1)[0])
    print(f"seed {seed}")
    yield np.random.default_rng(seed)

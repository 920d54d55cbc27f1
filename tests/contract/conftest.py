"""Which backend the contract tests run on.

By default every instruction-set level that this machine can run and that has kernels of the op. On a GPU:

    python -m tests.contract.pack --hw h200 --out PACK       # anywhere; needs the compiler wheels
    pytest tests/contract --contract-backend cuda --pack PACK

The pack holds what the tests ask for when they run on `reference`.
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
from atlas.runtime import core
from atlas.runtime.backend import Backend
from atlas.runtime.program import KernelKey
from atlas.runtime.reference import ReferenceBackend
from tests.contract import harness
from tests.contract.harness import Case


class Device:
    """A kind of backend; each case gets a fresh one, since a backend allocates only once."""

    def __init__(self, name: str, make: Callable[[], Backend], kernels: dict[str, manifest.KernelEntry]) -> None:
        self.name, self.make, self.kernels = name, make, kernels

    def check(self, case: Case, given: dict[str, np.ndarray[Any, Any]]) -> float:
        self._skip_what_has_no_kernel(case)
        _keys.add(case.key())
        ratio = harness.check(self.make(), self.kernels, case, given)
        entry = _report.setdefault(self.name, {}).setdefault(case.op, {"cases": 0, "worst_error_over_tolerance": 0.0})
        entry["cases"] += 1
        entry["worst_error_over_tolerance"] = max(entry["worst_error_over_tolerance"], round(ratio, 4))
        return ratio

    def run(self, case: Case, given: dict[str, np.ndarray[Any, Any]]) -> dict[str, np.ndarray[Any, Any]]:
        """Operands after the run."""
        self._skip_what_has_no_kernel(case)
        _keys.add(case.key())
        return harness.run(self.make(), self.kernels, case, given)[1]

    def _skip_what_has_no_kernel(self, case: Case) -> None:
        if not self.name.startswith("cpu") and not harness.has_cuda_kernel(case):
            pytest.skip("CUDA has no kernels of this op and these formats")


def cpu_device(level: str) -> Device:
    sets, _ = core.embedded()
    kernels = {kernel.name: kernel for s in sets.sets if s.kind == "cpu" for kernel in s.kernels}
    return Device(f"cpu-{level}", lambda: core.cpu_backend(2, level), kernels)


def cpu_levels(op: str) -> list[str]:
    """Levels usable here that have kernels of `op` of their own."""
    extension = core.extension()
    return [
        level
        for level in extension.cpu_levels()
        if any(signature.split(".")[0] == op for signature in extension.cpu_kernels(level))
    ]


def cuda_device(pack: Path) -> Device:
    document, images = manifest.from_json(
        (pack / "manifest.json").read_text(), (pack / "images.bin").read_bytes(), str(pack)
    )
    kernels = {kernel.name: kernel for s in document.sets for kernel in s.kernels}
    name = f"{document.sets[0].hardware} for {document.sets[0].arch}"
    return Device(name, lambda: core.cuda_backend(images), kernels)


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "device" in metafunc.fixturenames:
        backend = metafunc.config.getoption("--contract-backend")
        if backend != "cpu":
            names = [backend]
        else:
            names = [f"cpu-{level}" for level in cpu_levels(metafunc.module.__name__.rpartition(".test_")[2])]
        metafunc.parametrize("device", names, indirect=True)


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
            _devices[name] = Device(name, ReferenceBackend, {})
        elif name == "cuda":
            _devices[name] = cuda_device(Path(request.config.getoption("--pack")))
        else:
            _devices[name] = cpu_device(name.removeprefix("cpu-"))
    return _devices[name]


@pytest.fixture
def rng(request: pytest.FixtureRequest) -> Iterator[np.random.Generator]:
    """Fresh random inputs in every run; the seed is printed when a test fails."""
    seed = int(np.random.SeedSequence().generate_state(1)[0])
    print(f"seed {seed}")
    yield np.random.default_rng(seed)

"""The C++ core through its Python face."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from atlas.build import manifest
from atlas.errors import AtlasError, BuildError, DeviceError
from atlas.runtime import core
from atlas.runtime.program import KernelKey, Launch
from atlas.runtime.step import HEADER_WORDS, PHASE_DECODE, PHASE_PREFILL, PHASE_WORD, STEP_VERSION

ROOT = Path(__file__).resolve().parents[2]
ARENA = 1 << 16


@pytest.fixture
def backend() -> core.CoreBackend:
    result = core.cpu_backend(2)
    result.allocate(ARENA)
    return result


def launch(**changes: object) -> dict[str, object]:
    """residual_add of one row of 4: x at 0, residual at 256."""
    variant: dict[str, object] = {
        "phase": 0,
        "max_rows": 0,
        "kernel": "residual_add.x_f32",
        "image": -1,
        "grid": [],
        "block": 1,
        "shared": 0,
        "cluster": 1,
        "pdl": False,
        "cooperative": False,
        "arguments": [],
        "scratch": None,
    }
    spec: dict[str, object] = {
        "name": "layers.0.add",
        "op": "residual_add",
        "phase": 0,
        "operands": [0, 256],
        "dims": [1],
        "constants": [4, 1.0],
        "row_dim": 0,
    }
    variants = [{**variant, **{name: value for name, value in changes.items() if name in variant}}]
    return {**spec, "variants": variants, **{name: value for name, value in changes.items() if name in spec}}


def header(version: int = STEP_VERSION, phase: int = PHASE_PREFILL) -> np.ndarray:
    result = np.zeros(HEADER_WORDS, np.int32)
    result[:2] = version, 1
    result[PHASE_WORD] = phase
    return result


def test_a_launch_runs_on_the_arena(backend: core.CoreBackend) -> None:
    x, residual = np.arange(4, dtype=np.float32), np.full(4, 10, np.float32)
    backend.write(0, x)
    backend.write(256, residual)
    handle = backend._core.load([launch()])
    backend.begin_step(1024, memoryview(header()), 64)
    backend.run(handle, 0, 1)
    backend.read(256, residual)
    assert residual.tolist() == [10, 11, 12, 13]


@pytest.mark.parametrize(("phase", "sums"), [(PHASE_PREFILL, [101, 1]), (PHASE_DECODE, [1, 101])])
def test_a_launch_of_one_phase_is_left_out_of_the_other(
    backend: core.CoreBackend, phase: int, sums: list[float]
) -> None:
    """One launch for each phase, and one for both, which comes last or first: the workers wait for one another."""
    backend.write(0, np.full(4, 100, np.float32))
    backend.write(128, np.full(4, 1, np.float32))
    for both_last in (True, False):
        each = [launch(phase=1 + p, operands=[0, 256 + 256 * p]) for p in (PHASE_PREFILL, PHASE_DECODE)]
        both = [launch(operands=[128, 256 + 256 * p]) for p in (PHASE_PREFILL, PHASE_DECODE)]
        handle = backend._core.load([*each, *both] if both_last else [*both, *each])
        backend.fill(256, 0, 512)
        backend.begin_step(1024, memoryview(header(phase=phase)), 64)
        seconds = backend.run_timed(handle, 0, 4)
        found = np.empty(128, np.float32)
        backend.read(256, found)
        assert found[[0, 64]].tolist() == sums
        assert len(seconds) == 4 and min(seconds) >= 0


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"kernel": "residual_add.x_f64"}, "layers.0.add.*residual_add.x_f64"),
        ({"operands": [0, ARENA]}, "layers.0.add"),
        ({"operands": [0, 1 << 60]}, "layers.0.add"),
        ({"operands": [None, ARENA]}, "layers.0.add"),
    ],
)
def test_a_launch_that_cannot_run_is_refused_at_load(
    backend: core.CoreBackend, change: dict[str, object], message: str
) -> None:
    with pytest.raises(DeviceError, match=message):
        backend._core.load([launch(**change)])


def test_a_kernel_gets_its_arguments_as_the_words_of_their_types() -> None:
    """In the order in which it declares them, not in the contract's."""
    key = KernelKey("residual_add", (), (("hidden", 576), ("scale", 0.1)))
    launched = Launch("layers.0.add", key, (), (("rows", "n_rows"),))
    plan = SimpleNamespace(offsets={})

    def words(*names: str) -> list[int]:
        kernel = manifest.KernelVariant(arguments=names)
        entry = manifest.KernelEntry("residual_add", "residual_add", "", {}, variants=(kernel,))
        (variant,) = core._variants(launched, entry, plan)  # type: ignore[arg-type]
        return list(variant["arguments"])

    assert words() == [] and words("hidden") == [576]
    assert words("scale", "hidden") == [0x3DCCCCCD, 576]  # 0.1 rounded to fp32
    with pytest.raises(BuildError, match="kernel residual_add: takes a constant 'eps'; accepted: hidden, scale"):
        words("eps")
    for name, value in (("hidden", 1 << 31), ("hidden", 0.5), ("scale", 1e39)):
        wide = dict(key.constants) | {name: value}
        launched = Launch("layers.0.add", KernelKey("residual_add", (), tuple(wide.items())), (), (("rows", "n_rows"),))
        with pytest.raises(
            BuildError, match=re.escape(f"takes a constant {name} of {value}; accepted: a number of 32 bits")
        ):
            words(name)


def test_another_step_version_is_refused(backend: core.CoreBackend) -> None:
    with pytest.raises(DeviceError, match=f"version {STEP_VERSION + 1}, accepted: {STEP_VERSION}"):
        backend.begin_step(1024, memoryview(header(STEP_VERSION + 1)), 64)


@pytest.mark.parametrize("offset", [ARENA - 8, ARENA, (1 << 64) - 8])
def test_access_outside_the_arena_is_refused(backend: core.CoreBackend, offset: int) -> None:
    with pytest.raises(DeviceError, match="outside the arena"):
        backend.write(offset, np.zeros(4, np.float32))
    with pytest.raises(DeviceError, match="outside the arena"):
        backend.read(offset, np.zeros(4, np.float32))


def test_an_unknown_level_names_those_there_are() -> None:
    with pytest.raises(DeviceError, match="avx1024.*portable"):
        core.cpu_backend(1, "avx1024")


def test_the_manifest_names_the_abi_of_the_core() -> None:
    sets, images = core.embedded()
    assert sets.core_abi == manifest.CORE_ABI == core.extension().CORE_ABI
    assert core.extension().STEP_VERSION == STEP_VERSION
    assert {"cpu/*/f32", "cpu/*/bf16"} <= {s.name for s in sets.sets} and len(images) == len(sets.images)


def test_every_cpu_kernel_of_the_manifest_is_compiled_in() -> None:
    sets, _ = core.embedded()
    listed = {kernel.name for s in sets.sets if s.kind == "cpu" for kernel in s.kernels}
    assert listed <= set(core.extension().cpu_kernels())


@pytest.mark.parametrize("change", [f'"core_abi": {manifest.CORE_ABI}', f'"format": {manifest.FORMAT}'])
def test_a_manifest_of_another_version_is_refused(change: str) -> None:
    text = core.extension().embedded_manifest().decode()
    assert change in text
    with pytest.raises(BuildError, match="rebuild the kernels with this version of Atlas"):
        manifest.from_json(text.replace(change, change[:-1] + "9"), b"", "test")


def test_a_damaged_image_is_refused() -> None:
    image = manifest.Image(0, 4, "00" * 32)
    text = manifest.Manifest((), (image,), "test").to_json()
    with pytest.raises(BuildError, match=r"test: the manifest is damaged: images\[0\]: has sha256 3bdbb4fe8397cd2b"):
        manifest.from_json(text, b"\x7fELF", "test")
    with pytest.raises(BuildError, match="has an unknown field 'imagse'; accepted: format, core_abi, sets, images"):
        manifest.from_json(text.replace('"images"', '"imagse"'), b"\x7fELF", "test")


def test_a_forked_child_gets_an_error_and_no_hang(backend: core.CoreBackend) -> None:
    """Known failure: a pool's threads do not exist in a forked child, which then waits for ever."""
    handle = backend._core.load([launch()])
    backend.begin_step(1024, memoryview(header()), 64)
    backend.run(handle, 0, 1)
    child = os.fork()
    if child == 0:
        try:
            backend.run(handle, 0, 1)
        except AtlasError as error:
            os._exit(0 if "fork" in str(error) else 3)
        os._exit(4)
    deadline = time.monotonic() + 20
    while time.monotonic() < deadline:
        pid, status = os.waitpid(child, os.WNOHANG)
        if pid:
            assert os.waitstatus_to_exitcode(status) == 0
            break
        time.sleep(0.05)
    else:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        pytest.fail("the child hangs")


def test_a_checkout_takes_the_extension_of_the_installation_that_comes_first_on_the_path(tmp_path: Path) -> None:
    """`atlas` is then the checkout's folder, where Python does not look for it."""
    code = (
        "import sys; sys.path.insert(0, sys.argv[1])\n"
        "from atlas.runtime.extension import extension\n"
        "try: print(extension())\n"
        "except Exception as error: print(type(error).__name__, error)\n"
        "sys.path.append(sys.argv[2])\n"
        "print(extension().__file__)\n"
    )
    here = Path(core.extension().__file__)
    (tmp_path / "atlas").mkdir()
    for part in ("__init__.py", "errors.py", "build", "ops", "runtime", "targets"):
        (tmp_path / "atlas" / part).symlink_to(ROOT / "atlas" / part)
    command = [sys.executable, "-S", "-c", code, str(tmp_path), str(here.parents[1])]
    missing, found = subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()
    assert missing.startswith("AtlasError atlas._core: the compiled extension is missing or does not load (")
    assert found == str(here)
